"""Runs the commands and the Python of a page, block after block, in one folder, as a reader would.

Above each block of `sh` or `python` stands what is to be done with it:

    <!-- run -->                   run it; it must succeed, and print what the `text` below it shows
    <!-- run: WORDS -->            likewise, with words from `How`, divided by commas
    <!-- save: NAME -->            write it to that file
    <!-- not run: REASON -->       leave it

A page may begin with `<!-- setup`, shell commands and `-->`: what a reader has done before. A block of
`toml` may be saved, too.

In what is shown a word with a digit in it stands for any word with a digit. Lines may be left out.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from edgeasync.errors import HubUnreachableError
from edgeasync.net.status import fetch_status
from tests.support.programs.processes import PATIENCE_S, environment, free_address, until

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ADDRESS = "tcp://127.0.0.1:5555"

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:run|save|not run)\b[^>]*?) -->\n)?^```(?P<language>sh|python|toml)\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


SETUP = re.compile(r"^<!-- setup\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class How:
    """What a mark says.

    The commands run in the background, in the clone itself, after the hub was killed, after a number of updates,
    or if a package is here; they end with an exit code. What they print may differ from what is shown.
    """

    background: bool = False
    kill_hub: bool = False
    may_differ: bool = False
    from_the_clone: bool = False
    needs: str = ""
    after_updates: int = 0
    code: int = 0

    @classmethod
    def read(cls, mark):
        """Read the words behind `run:`."""
        found = {}
        for word in filter(None, [word.strip() for word in mark.removeprefix("run").removeprefix(":").split(",")]):
            if word in {"background", "kill hub", "may differ", "from the clone"}:
                found[word.replace(" ", "_")] = True
            elif match := re.fullmatch(r"needs (\w+)", word):
                found["needs"] = match[1]
            elif match := re.fullmatch(r"after (\d+) updates", word):
                found["after_updates"] = int(match[1])
            elif match := re.fullmatch(r"exit code (\d+)", word):
                found["code"] = int(match[1])
            else:
                raise AssertionError(f"no such way to run a block: {word!r}")
        return cls(**found)


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    mark: str
    language: str
    code: str
    shown: str

    @property
    def how(self):
        """How it is run."""
        return How.read(self.mark)


def blocks(page):
    """Return the blocks of a page, in order."""
    return [
        Block(*(found[name] or "" for name in ("mark", "language", "code", "shown")))
        for found in BLOCK.finditer(page.read_text("utf-8"))
    ]


def runs(page):
    """Return whether anything of a page is run."""
    return any(block.mark.startswith("run") for block in blocks(page))


def missing(page):
    """Return the packages that a page needs and that are not here."""
    needed = {block.how.needs for block in blocks(page) if block.mark.startswith("run")} - {""}
    return {name for name in needed if importlib.util.find_spec(name) is None}


class Reader:
    """Follows a page in a folder; on leaving, what it started has ended."""

    def __init__(self, folder):
        self.folder = folder
        self.address = free_address()
        self._started = []
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, command in (("edgeasync", "-m edgeasync"), ("python", "")):
            script = bin_folder / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            script.chmod(0o755)
        self._environment = environment(folder) | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "COLUMNS": "120",
        }
        for name in ("examples", "devices"):
            shutil.copytree(ROOT / name, folder / name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for _, process in reversed(self._started):
            process.send_signal(signal.SIGINT)
        for _, process in self._started:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def follow(self, page):
        """Do what a page says."""
        for setup in SETUP.findall(page.read_text("utf-8")):
            self._run(Block("run", "sh", setup, ""))
        for block in blocks(page):
            if block.mark.startswith("save: "):
                (self.folder / block.mark.removeprefix("save: ")).write_text(self._here(block.code))
            elif block.mark.startswith("run"):
                self._run(block)

    def _here(self, code):
        return code.replace(ADDRESS, self.address).replace(ADDRESS.rpartition("/")[2], self.address[6:])

    def _run(self, block):
        how, code = block.how, self._here(block.code)
        if how.kill_hub:
            for line, process in self._started:
                if line.startswith("edgeasync hub") and process.poll() is None:
                    process.kill()
                    process.wait()
        if how.after_updates:
            try:
                until(lambda: self._updates() >= how.after_updates, f"{how.after_updates} updates for {code}")
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._said_in_background()}") from None
        if how.background or code.rstrip().endswith("&"):
            for line in code.splitlines():
                self._start(line.rstrip("& "))
            return
        folder = ROOT if how.from_the_clone else self.folder
        command = ["sh", "-e", "-c", code] if block.language == "sh" else [sys.executable, "-c", code]
        ended = subprocess.run(
            command, cwd=folder, env=self._environment, capture_output=True, text=True, check=False,
            timeout=4 * PATIENCE_S,
        )  # fmt: skip
        said = ended.stdout + ended.stderr
        assert ended.returncode == how.code, f"{code}\n{said}"
        if not how.may_differ:
            compare(block.shown, said, code)

    def _start(self, line):
        if line.startswith("edgeasync hub") and ".toml" not in line:
            line += f" --bind {self.address}"  # else it takes the usual port, as other tests' pages would
        with (self.folder / "background.txt").open("a") as out:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {line}"], cwd=self.folder, env=self._environment, stdout=out, stderr=out
            )
        self._started.append((line, process))

    def _said_in_background(self):
        return (self.folder / "background.txt").read_text()

    def _updates(self):
        for line, process in self._started:
            assert process.poll() is None or "hub" in line, self._said_in_background()
        try:
            return fetch_status(self.address, 5.0)["updates_applied"]
        except HubUnreachableError:
            time.sleep(0.1)
            return -1


def compare(shown, said, code):
    """Fail unless everything shown was said, in this order."""
    lines = iter([masked(line) for line in said.splitlines()])
    for line in shown.splitlines():
        if line.strip() not in {"", "..."}:
            assert masked(line) in lines, f"{code}\ndid not say: {line}\nbut:\n{said}"


def masked(line):
    """Return a line with every word that has a digit replaced, and spaces made alike."""
    words = re.sub(r"[^\s\[\](),;]*\d[^\s\[\](),;]*", "#", line)
    return re.sub(r"(?<=\[) | (?=\])", "", " ".join(words.split()))
