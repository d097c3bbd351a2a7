"""`edgeasync status --watch`: what it prints, with a hub that answers, falls silent and comes back."""

import json

import pytest

from edgeasync.cli.output import Printer
from edgeasync.cli.status import print_status
from edgeasync.cli.watching import WATCH_S, watch_status
from edgeasync.errors import HubUnreachableError
from tests.support.parts.statuses import empty_core, plain

ADDRESS = "tcp://127.0.0.1:5555"


class StoppedError(Exception):
    """Ends the endless watch."""


def watched(answers, *, as_json=False):
    """Watch a hub that answers with these versions; None is no answer."""
    left, slept = list(answers), []

    def fetch():
        if not left:
            raise StoppedError
        version = left.pop(0)
        if version is None:
            raise HubUnreachableError("no hub answers")
        return plain(empty_core()) | {"version": version}

    printer = Printer(json=as_json)

    def show(told):
        print_status(told, ADDRESS, printer)

    with pytest.raises(StoppedError):
        watch_status(fetch, show, ADDRESS, printer, sleep=slept.append)
    assert slept == [WATCH_S] * len(answers)


def test_a_hub_that_is_restarted_is_shown_again(capsys):
    watched([1, None, 2])
    said = capsys.readouterr().out
    first, silence, second = (said.index(words) for words in ("version 1", "does not answer; trying", "version 2"))
    assert first < silence < second
    assert "\x1b" not in said, "only a terminal is cleared"


def test_as_json_each_status_is_a_line(capsys):
    watched([1, None, 2], as_json=True)
    assert [json.loads(line)["version"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_a_hub_that_never_answered_is_an_error():
    def fetch():
        raise HubUnreachableError("no hub answers")

    with pytest.raises(HubUnreachableError):
        watch_status(fetch, pytest.fail, ADDRESS, Printer(json=False), sleep=pytest.fail)
