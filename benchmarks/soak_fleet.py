"""The processes of the soak benchmark: a default hub and agents.

They are killed, restarted and sampled.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.processes import Used, used_by
from benchmarks.soak_counts import Answers
from benchmarks.virtual_fleet import DIGITS, split_digits
from edgeasync.data.partition import iid
from tests.support.programs.processes import free_address

SETTINGS = """
[hub]
bind = "{address}"
run = "run"
quiet = false
[model]
kind = "mlp"
inputs = {model.inputs}
hidden = {hidden}
classes = {model.classes}
"""
"""Defaults, except for `quiet`: a trained fleet would be idle for most of the hour."""

STEP_S = 0.05
"""Step time, at which eight agents leave part of the processor free."""

READY = ('"event":"listening"', '"event":"joined"')
"""Event of a ready hub or agent, after which it can handle a signal to stop."""

READY_S_MAX = 60.0
ENDED_S_MAX = 30.0
LINES_KEPT = 20


class Process:
    """A command that is restarted after each kill.

    `lives` has the samples of every start.
    """

    def __init__(self, name: str, arguments: list[str], folder: Path, on_line: Callable[[str], None]) -> None:
        self.name = name
        self.lives: list[list[Used]] = []
        self._command = [sys.executable, "-m", "edgeasync", *arguments]
        self._folder = folder
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._ready = threading.Event()

    def start(self) -> None:
        """Start the command."""
        self.lives.append([])
        self._ready.clear()
        self._process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=os.environ | {"HOME": str(self._folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def look(self) -> None:
        """Sample the process unless it is killed; raises `RuntimeError` if it has ended by itself."""
        if self._process is None:
            return
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended: {' | '.join(self._lines)}")
        self.lives[-1].append(used_by(self._process.pid))

    def kill(self) -> None:
        """Take a last sample, then kill the process as a power cut would."""
        self.look()
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Take a last sample, then ask the process to stop once it is ready.

        Raises `RuntimeError` unless its exit code is 0.
        """
        if not self._ready.wait(READY_S_MAX):
            raise RuntimeError(f"{self.name} does not become ready: {' | '.join(self._lines)}")
        self.look()
        if code := self._end(signal.SIGTERM):
            raise RuntimeError(f"{self.name} has ended with exit code {code}: {' | '.join(self._lines)}")

    def close(self) -> None:
        """Kill the process in any state."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    @property
    def written_bytes(self) -> int:
        """Bytes that all starts have written to disks, until the last sample of each."""
        return sum(life[-1].written_bytes for life in self.lives if life)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(ENDED_S_MAX)
        self._reader.join(ENDED_S_MAX)
        self._process = None
        return code

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._lines = [*self._lines[1 - LINES_KEPT :], line.rstrip()]
                self._on_line(line)
                if line.startswith("{") and any(event in line for event in READY):
                    self._ready.set()


class Fleet:
    """A hub and its agents `device-1` and so on.

    Every second agent saves its unanswered update.
    """

    def __init__(self, folder: Path, agents: int) -> None:
        address = free_address()
        text = SETTINGS.format(address=address, model=DIGITS, hidden=list(DIGITS.hidden))
        (folder / "hub.toml").write_text(text, encoding="utf-8")
        self.run = folder / "run"
        self.most_journal_bytes = 0
        self.hub = Process("hub", ["hub", "hub.toml", "--json"], folder, lambda _: None)
        self.agents: list[Process] = []
        self.answers: dict[str, Answers] = {}
        for number, part in enumerate(iid(split_digits()[0], agents, 0), start=1):
            name = f"device-{number}"
            np.savez(folder / f"{name}.npz", x=part.x, y=part.y)
            answers = self.answers[name] = Answers(keeps=number % 2 == 1)
            arguments = ["agent", "--hub", address, "--data", f"{name}.npz", "--device-id", name, "--state", name]
            arguments += ["--step-s-min", f"{STEP_S}", "--spool", "full" if answers.keeps else "identity"]
            arguments += ["--json", "--log-level", "debug"]  # so that it logs every update and every answer
            self.agents.append(Process(name, arguments, folder, answers.read))

    @property
    def processes(self) -> list[Process]:
        """The hub, then the agents."""
        return [self.hub, *self.agents]

    def start(self, process: Process) -> None:
        """Start the hub or an agent."""
        if process.name in self.answers:
            self.answers[process.name].begin()
        process.start()

    def look(self) -> None:
        """Sample every process and the journal's length."""
        for process in self.processes:
            process.look()
        self.most_journal_bytes = max(self.most_journal_bytes, self.journal_bytes())

    def journal_bytes(self) -> int:
        """Return the journal's current length."""
        found = 0
        for path in self.run.glob("journal-*"):
            with suppress(FileNotFoundError):  # the hub drops what its checkpoints cover
                found += path.stat().st_size
        return found

    def stop(self) -> None:
        """Ask the agents to stop, then the hub."""
        for process in (*self.agents, self.hub):
            process.stop()


@contextmanager
def run_fleet(folder: Path, agents: int) -> Iterator[Fleet]:
    """Start a fleet; at the end kill what remains of it."""
    fleet = Fleet(folder, agents)
    try:
        for process in fleet.processes:
            fleet.start(process)
        yield fleet
    finally:
        for process in fleet.processes:
            process.close()


def sleep_until(moment_s: float) -> None:
    """Sleep until a time of the monotonic clock, unless it has passed."""
    time.sleep(max(0.0, moment_s - time.monotonic()))
