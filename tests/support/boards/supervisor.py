"""What systemd does with a unit of `Type=notify`, for tests: it starts, watches, ends and starts again."""

import configparser
import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

from tests.support.programs.processes import PATIENCE_S, environment

HANGING = """
import time
from pathlib import Path

import numpy as np

from edgeasync import StepResult


class Hanging:
    "Hangs in its fifth step, at the first start alone."

    def __init__(self, spec):
        self.spec, self.steps = spec, 0

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        self.steps += 1
        if self.steps == 5 and not Path("hung").exists():
            Path("hung").touch()
            time.sleep(3600)
        self.parameters += np.float32(1e-6)
        time.sleep(0.01)
        return StepResult(1.0, 1)


def make_trainer(welcome, dataset):
    return Hanging(welcome.spec)
"""
"""A module `hanging` of a trainer that hangs once; lies in the folder of the service."""


class Supervisor:
    """Runs the service of a unit's text in a folder, its program replaced by this Python's edgeasync.

    `over` are lines that replace the unit's, as a drop-in does. `lines` are what the service printed, `news` what
    it told by its socket, each with the time and the number of the start.
    """

    def __init__(self, text, folder, **over):
        self.unit = _service(text) | over
        self.folder = folder
        self.lines, self.news, self.ends = [], [], []
        self.starts = 0
        self.begun_s = []
        self._told = threading.Condition()
        self._over = threading.Event()
        address = f"\0edgeasync-test-{os.getpid()}-{id(self)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._notify = "@" + address[1:]
        self.process = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        with contextlib.suppress(ProcessLookupError, AttributeError):
            self.process.send_signal(signal.SIGTERM)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join(PATIENCE_S)
        self._socket.close()

    def wait_for(self, words, *, start=1, what="news"):
        """Return the time at which the service, at this start or a later one, told or printed these words."""
        until_s = time.monotonic() + PATIENCE_S
        with self._told:
            while True:
                for time_s, number, line in getattr(self, what):
                    if number >= start and words in line:
                        return time_s
                assert self._told.wait(until_s - time.monotonic()), f"not in time: {words}: {self}"

    def __str__(self):
        return "\n".join(
            f"{number} {time_s:.2f} {line}" for time_s, number, line in (self.news + self.lines)[-60:]
        )

    def _run(self):
        prevented = self.unit.get("RestartPreventExitStatus", "").split()
        while not self._over.is_set():
            status = self._run_once()
            with self._told:
                self.ends.append((time.monotonic(), self.starts, str(status)))
                self._told.notify_all()
            clean = status in (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
            if str(status) in prevented or (clean and self.unit["Restart"] != "always"):
                return
            self._over.wait(float(self.unit["RestartSec"]))

    def _run_once(self):
        """Run the service to its end, and return its exit status; one that does not feed its watchdog is ended."""
        self.starts += 1
        self.begun_s.append(time.monotonic())
        watchdog_s = float(self.unit["WatchdogSec"])
        program, *arguments = shlex.split(self.unit["ExecStart"])
        assert program.endswith("/bin/edgeasync")
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        told = {"PYTHONPATH": path, "NOTIFY_SOCKET": self._notify, "WATCHDOG_USEC": str(int(1e6 * watchdog_s))}
        reading, writing = os.pipe()
        found = os.fstat(writing)
        told["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgeasync", *arguments],
            cwd=self.folder, env=environment(self.folder) | told, stdout=writing, stderr=writing,
        )  # fmt: skip
        os.close(writing)
        reader = threading.Thread(target=self._read, args=(reading, self.starts), daemon=True)
        reader.start()
        fed_s = None
        while self.process.poll() is None:
            ready, _, _ = select.select([self._socket], [], [], 0.05)
            if ready:
                line = self._socket.recv(65536).decode()
                self._add(self.news, self.starts, line)
                if line in ("READY=1", "WATCHDOG=1"):
                    fed_s = time.monotonic()
            elif fed_s is not None and time.monotonic() - fed_s > watchdog_s:
                self.process.send_signal(signal.SIGABRT)
                self.process.wait(PATIENCE_S)
        reader.join(PATIENCE_S)
        return self.process.returncode

    def _read(self, descriptor, number):
        with os.fdopen(descriptor, errors="replace") as stream:
            for line in stream:
                self._add(self.lines, number, line.rstrip("\n"))

    def _add(self, kept, number, line):
        with self._told:
            kept.append((time.monotonic(), number, line))
            self._told.notify_all()


def _service(text):
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(text)
    return dict(parser["Service"])
