"""The lines that commands print: for people with date and time, and whatever becomes of who reads them."""

import errno
import json
import os
import sys
import time
from datetime import datetime

import pytest

from edgeasync.cli.output import Printer


@pytest.fixture(params=["UTC0", "ABC-05:30", "DEF+03"])
def offset(request, monkeypatch):
    """Live in a time zone; return how its offset is written."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield {"UTC0": "+00:00", "ABC-05:30": "+05:30", "DEF+03": "-03:00"}[request.param]
    monkeypatch.undo()
    time.tzset()


def test_a_line_for_people_begins_with_the_date_and_the_time(offset, capsys):
    before = int(time.time())
    Printer(json=False).event("joined", device="pi-1", detail="as pi-1", nothing="")
    stamp, words = capsys.readouterr().out.split(" ", 1)
    assert words == "joined       pi-1 as pi-1\n"
    assert stamp[10] == "T"
    assert stamp.endswith(offset)
    assert before <= datetime.fromisoformat(stamp).timestamp() <= time.time()


def test_a_script_is_told_seconds(capsys):
    Printer(json=True).event("joined", device="pi-1")
    event = json.loads(capsys.readouterr().out)
    assert abs(event.pop("time") - time.time()) < 60
    assert event == {"event": "joined", "device": "pi-1"}


def test_a_path_that_is_no_text_is_escaped_in_json_too(capsys):
    """Python has such a byte of a path as half of a character, which no encoder takes."""
    value = {"model": "\udcff.onnx", "wanted": [("\udcfe", 1, None)], "text": "é→"}
    Printer(json=True).object(value)
    told = json.loads(capsys.readouterr().out)
    assert told == {"model": "\\udcff.onnx", "wanted": [["\\udcfe", 1, None]], "text": "é→"}


class Gone:
    """A stream whose other end is gone, as a pipe or as a terminal that was closed."""

    def __init__(self, number):
        self.error = OSError(number, os.strerror(number))

    def write(self, text):
        return len(text)

    def flush(self):
        raise self.error


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_reader_that_is_gone_is_no_error(monkeypatch, number):
    monkeypatch.setattr(sys, "stdout", Gone(number))
    monkeypatch.setattr(sys, "stderr", Gone(number))
    printer = Printer(json=False)
    printer.line("the reader goes away")
    printer.line("and so does standard error's")
    assert printer.unread


def test_what_cannot_be_written_to_a_full_disk_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        Printer(json=False).line("a log on a full disk")


def test_an_event_that_cannot_be_written_is_counted_and_told_once(monkeypatch, capsys):
    """The log of a hub may lie on a full disk; the hub must not end by it."""
    printer, stream = Printer(json=True), sys.stdout
    monkeypatch.setattr(sys, "stdout", Gone(errno.ENOSPC))
    for _ in range(3):
        printer.event("joined", device="pi-1")
    monkeypatch.setattr(sys, "stdout", stream)
    printer.event("joined", device="pi-2")
    out, err = capsys.readouterr()
    warning, joined = map(json.loads, out.splitlines())
    assert (warning["event"], warning["detail"]) == ("warning", "3 earlier events were delayed or lost")
    assert joined["device"] == "pi-2"
    assert err == "edgeasync: cannot print events: No space left on device; check the disk that stores the log\n"
