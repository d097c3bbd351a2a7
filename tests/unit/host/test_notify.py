"""What systemd is told, and what it does not have to be told."""

import os
import socket

import pytest

from edgeasync.cli.under_systemd import find_notifier, goes_to_journal
from edgeasync.host.notify import Notifier


@pytest.fixture(params=["abstract", "path"])
def heard(request, tmp_path):
    """Listen as systemd does; yield the address and what was heard."""
    name = f"edgeasync-test-notify-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name if request.param == "abstract" else name)
        listening.setblocking(False)
        yield ("@" + name if request.param == "abstract" else name), lambda: listening.recv(4096).decode()


def test_each_message_is_a_datagram(heard):
    address, read = heard
    notifier = Notifier(address, 2.0)
    for tell, wanted in (
        (notifier.ready, "READY=1"),
        (lambda: notifier.status("joined\ntcp://hub:5555"), "STATUS=joined tcp://hub:5555"),
        (notifier.alive, "WATCHDOG=1"),
        (notifier.stopping, "STOPPING=1"),
    ):
        tell()
        assert read() == wanted
    notifier.status("joined\ntcp://hub:5555")
    with pytest.raises(BlockingIOError):
        read()  # nothing new was said


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "@nobody-listens-here"])
def test_that_nobody_listens_is_no_error(address):
    Notifier(address, 1.0).ready()


@pytest.mark.parametrize(
    ("told", "watchdog_s"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "@x"}, None),
        ({"WATCHDOG_USEC": "3000000"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000"}, 3.0),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "0"}, None),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_for_this_process_alone(monkeypatch, told, watchdog_s):
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert find_notifier().watchdog_s == watchdog_s


def test_only_the_journals_own_stream_is_the_journal(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as stream, (tmp_path / "other").open("w") as other:
        assert not goes_to_journal(stream)
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert goes_to_journal(stream)
        assert not goes_to_journal(other)
        assert not goes_to_journal(None)
