"""Real `edgeasync` processes for tests: started, followed by the event lines they print, and always ended."""

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from edgeasync.net.status import fetch_status
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.command_line import run_command
from tests.support.programs.fork_server import ForkedCommand, forkable
from tests.support.programs.outputs import check_lines

PATIENCE_S = 60.0
"""How long anything may take on a busy machine; no test waits that long for something that goes well."""

MODEL = SoftmaxModel(inputs=8, classes=3)
MODEL_TABLE = 'kind = "softmax"\ninputs = 8\nclasses = 3'
LIVELINESS = "[liveness]\nheartbeat_s = 0.3\nlease_s = 3.0\n"


def without_onnx(commands):
    """Return the program of a command that finds no package `onnx`, nor does any process that it starts."""
    folder = commands.folder / "without-onnx"
    folder.mkdir()
    (folder / "onnx.py").write_text('raise ModuleNotFoundError("No module named \'onnx\'", name="onnx")\n')
    return "import sys; sys.path.insert(0, 'without-onnx'); from edgeasync.cli.main import main; main()"


EDGEASYNC = ("-m", "edgeasync")


class Command:
    """One `edgeasync` command that runs: its events as they come, its standard error, its end.

    It may be run `under` another command, such as `strace`. With `forks` it is forked, which is fast, unless it
    needs an interpreter of its own.
    """

    def __init__(self, arguments, folder, *, program=EDGEASYNC, under=(), python=sys.executable, forks=False):
        self.arguments = arguments
        self.events = []
        self.lines = []
        self.stderr = ""
        self._news = threading.Condition()
        variables = environment(folder)
        usual = (program, under, python) == (EDGEASYNC, (), sys.executable)
        if forks and usual and forkable(variables):
            self._process = ForkedCommand(arguments, folder, variables)
        else:
            self._process = subprocess.Popen(
                [*map(str, under), str(python), *program, *map(str, arguments)],
                cwd=folder,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.pid = self._process.pid
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_err)]
        self._open = len(self._readers)
        for reader in self._readers:
            reader.start()

    def wait_for(self, event, *, count=1, since=0, **details):
        """Return the `count`th event of that name, and with those details, from number `since` on."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                found = [
                    candidate
                    for candidate in self.events[since:]
                    if candidate["event"] == event and details.items() <= candidate.items()
                ]
                if len(found) >= count:
                    return found[count - 1]
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no event {event!r} {details} in time: {self}"
                assert self._open, f"ended without an event {event!r} {details}: {self}"
                self._news.wait(left_s)

    def names(self, since=0):
        """Return the names of the events so far."""
        return [event["event"] for event in self.events[since:]]

    def tell(self, line):
        """Write a line to its standard input."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number):
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self):
        """End the process as a power cut would."""
        self._process.kill()
        self.wait()

    @property
    def ended(self):
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, limit_s=PATIENCE_S):
        """Wait for the end; return the exit code. All output has been read then."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s:g} s: {self}") from None
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    def close(self):
        """Make sure the process and what it started have ended, and let go of its pipes."""
        if self._process.poll() is None:
            family = psutil.Process(self.pid).children(recursive=True)
            self._process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.stderr.close()
        check_lines(self.arguments, "\n".join(self.lines))

    def __str__(self):
        arguments = " ".join(map(str, self.arguments))
        return "\n".join(["edgeasync " + arguments, *self.lines[-40:], "on standard error:", self.stderr[-4000:]])

    def _read_out(self):
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                with contextlib.suppress(ValueError):
                    value = json.loads(line)
                    if isinstance(value, dict) and "event" in value:
                        self.events.append(value)
                self._news.notify_all()
        self._end_of_stream()

    def _read_err(self):
        for line in self._process.stderr:
            self.stderr += line
        self._end_of_stream()

    def _end_of_stream(self):
        with self._news:
            self._open -= 1
            self._news.notify_all()


class Commands:
    """Starts commands in a folder of their own; on leaving, every one that still runs is killed."""

    def __init__(self, folder, *, forks=False):
        self.folder = Path(folder)
        self._forks = forks
        self._running = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.ExitStack() as stack:
            for command in self._running:
                stack.callback(command.close)

    def start(self, *arguments, **options):
        """Start `edgeasync` with these arguments."""
        command = Command(arguments, self.folder, forks=self._forks, **options)
        self._running.append(command)
        return command

    def hub(self, settings, *flags, **options):
        """Start a hub and wait until it listens; return it and its address."""
        hub = self.start("hub", settings, "--json", *flags, **options)
        return hub, hub.wait_for("listening")["detail"]

    def data(self, name, **shape):
        """Write examples to a file of that name; return its path."""
        return write_data(self.folder / name, **shape)

    def agent(self, address, name, *flags, data=None, step_s=0.002, **options):
        """Start an agent with a state folder of its own, on the given data or on data of its own."""
        data = data or self.data(f"{name}.npz")
        return self.start(
            "agent", "--hub", address, "--data", data, "--device-id", name, "--state", self.folder / name,
            "--step-s-min", step_s, "--json", *flags, **options,
        )  # fmt: skip

    def run(self, *arguments):
        """Run a command to its end, without a process of its own; return what it said."""
        return run_command(self.folder, *arguments)

    def settings(self, *, bind="tcp://127.0.0.1:*", model=MODEL_TABLE, hub="", more=LIVELINESS, name="hub"):
        """Write a hub's settings file, with a run folder of the same name; return its path."""
        path = self.folder / f"{name}.toml"
        path.write_text(f'[hub]\nbind = "{bind}"\nrun = "run-{name}"\n{hub}\n[model]\n{model}\n{more}')
        return path


def environment(folder):
    """Return the environment of a command: nothing is read from or written to the real home."""
    return os.environ | {"HOME": str(folder), "PYTHONUNBUFFERED": "1"}


def write_data(path, *, examples=60, inputs=8, classes=3):
    """Write examples that a linear model can tell apart; return the path."""
    generator = np.random.default_rng(7)
    y = np.arange(examples) % classes
    centres = generator.normal(size=(classes, inputs))
    x = centres[y] + 0.1 * generator.normal(size=(examples, inputs))
    np.savez(path, x=x.astype(np.float32), y=y)
    return path


def without_rights():
    """Return the command under which even root may not do what modes forbid."""
    return ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@functools.cache
def own_ports():
    """Return this process's ports in an endless cycle, so that a test that asks several times gets different ones.

    Each worker of pytest-xdist has a hundred ports of its own, below those that systems give to others.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = [20_000 + 100 * (worker % 100) + place for place in range(100)]
    random.SystemRandom().shuffle(ports)  # other test runs on this machine draw from the same ports
    return itertools.cycle(ports)


def free_address():
    """Return an address at which no program listens; no two of a hundred calls return the same."""
    for port in itertools.islice(own_ports(), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
    raise AssertionError("none of this process's hundred ports is free")


def until(condition, what):
    """Ask until `condition` returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)
    return value


def wait_for_threads(count):
    """Wait until no more threads than these are left: one that was told to end may need a moment for that."""
    until(lambda: threading.active_count() <= count, "the end of threads")


def status_when(address, condition, what="the status"):
    """Ask the hub for its status until it is as wanted."""

    def ask():
        status = fetch_status(address, PATIENCE_S)
        return status if condition(status) else None

    return until(ask, what)


def trained(address, more=10, device=None):
    """Wait until the hub, or one device there, has `more` updates applied than now; return the status."""

    def updates(status):
        devices = {member["id"]: member for member in status["devices"]}
        return (status if device is None else devices.get(device, {"updates_applied": 0}))["updates_applied"]

    goal = updates(fetch_status(address, PATIENCE_S)) + more
    return status_when(
        address, lambda status: updates(status) >= goal, f"{more} more updates of {device or 'all'}"
    )


ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
