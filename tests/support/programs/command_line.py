"""The `edgeasync` command run in this process: its exit code, what it printed, and how it answers a mistake."""

import contextlib
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
from typing import NamedTuple

import pytest

from edgeasync.cli import main
from tests.support.programs.outputs import check_lines

CONFIG, DATA, PROTOCOL, MISMATCH, NO_HUB, ADDRESS, FILES, GRAPH, ACCESS = 2, 3, 4, 5, 6, 8, 9, 10, 11
CAPACITY, UNFIT = 12, 13

LIMIT_S = 60.0
"""How long a command may take on a busy machine; one that is started by mistake would serve for ever."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class Told(NamedTuple):
    """What a command that has ended said."""

    returncode: int
    stdout: str
    stderr: str


def run_command(folder, *arguments):
    """Run a command to its end as the console script does, that folder its home too; return what it said."""
    streams = {}
    with (
        _process_state(),
        _captured(1, "stdout", streams),
        _captured(2, "stderr", streams),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(sys, "argv", ["edgeasync", *map(str, arguments)])
        patch.setattr(logging.getLogger(), "handlers", [])  # pytest's would keep warnings from standard error
        returncode = main.run_command()
    check_lines(arguments, streams["stdout"])
    return Told(returncode, **streams)


def assert_told(told, wanted, *hint):
    """One line on standard error, by name, with a hint; no traceback anywhere; the documented exit code."""
    assert "Traceback" not in told.stdout + told.stderr
    (line,) = told.stderr.splitlines()
    assert line.startswith("edgeasync: ")
    for words in hint:
        assert words in line
    assert told.returncode == wanted


def mistake(commands, wanted, *hint, arguments):
    """Make a mistake on the command line; it is answered with that exit code and one line that has the hints."""
    assert_told(commands.run(*arguments), wanted, *hint)


@contextlib.contextmanager
def _process_state():
    """Put back what a command changes for its whole process; one that does not end, or leaves a thread, fails."""

    def stop(*_):
        raise AssertionError(f"the command still runs after {LIMIT_S:g} s")

    def expire(*_):
        nonlocal expired
        expired = True
        os.kill(os.getpid(), signal.SIGTERM)  # what is raised here would not end an event loop; this does

    expired = False
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = set(threading.enumerate())
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
        if expired:
            stop()
        for thread in set(threading.enumerate()) - threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"the command has left the thread {thread.name!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)


@contextlib.contextmanager
def _captured(descriptor, name, streams):
    """Collect what Python, and what libraries in other languages, write to a standard stream."""
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile("w+") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, name, file)
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            file.seek(0)
            streams[name] = file.read()
