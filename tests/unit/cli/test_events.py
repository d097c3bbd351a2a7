"""`edgeasync events`: every event once, also across restarts of the hub and while it is away."""

import json

import pytest

from edgeasync.cli.events import FOLLOW_S, EventsPrinter
from edgeasync.cli.output import Printer
from edgeasync.errors import HubUnreachableError
from edgeasync.protocol.status import RecentEvent, RecentEventList
from tests.support.programs.outputs import check_lines


class StoppedError(Exception):
    """Ends the endless following."""


class FakeHub:
    """Answers requests for events; `turns` change it, one before each request but the first."""

    def __init__(self, *turns):
        self.lineage, self.names, self.away, self.kept = "a" * 16, [], False, 100
        self.asked = []
        self._turns = list(turns)

    def sleep(self, seconds):
        assert seconds == FOLLOW_S
        if not self._turns:
            raise StoppedError
        self._turns.pop(0)(self)

    def fetch(self, after):
        self.asked.append(after)
        if self.away:
            raise HubUnreachableError("no hub answers")
        numbered = list(enumerate(self.names, start=1))[-self.kept :]
        first = numbered[0][0] if numbered else 1
        events = [
            RecentEvent(number=number, event=name, time=0.0, device="", detail="")
            for number, name in numbered
            if number > after
        ]
        missed = max(0, first - after - 1)
        return RecentEventList(lineage=self.lineage, last=len(self.names), missed=missed, events=events)


def say(*names):
    def turn(hub):
        hub.names.extend(names)

    return turn


def leave(hub):
    hub.away = True


def restart(hub):
    hub.away, hub.lineage, hub.names = False, "b" * 16, ["listening", "resumed"]


def followed(hub, capsys, *, as_json=False):
    with pytest.raises(StoppedError):
        EventsPrinter(hub.fetch, Printer(json=as_json)).follow(sleep=hub.sleep)
    return capsys.readouterr().out


def test_every_event_is_printed_once_also_across_a_restart(capsys):
    hub = FakeHub(say("lost"), say(), leave, restart, say("joined"))
    hub.names = ["listening", "joined"]
    said = followed(hub, capsys, as_json=True)
    check_lines(("events", "--json"), said)
    names = [json.loads(line)["event"] for line in said.splitlines()]
    assert names == ["listening", "joined", "lost", "listening", "resumed", "joined"]
    assert hub.asked == [0, 2, 3, 3, 3, 0, 2]


def test_events_that_the_hub_no_longer_has_are_counted(capsys):
    hub = FakeHub(say(*"abcdef"))
    hub.kept, hub.names = 2, ["listening"]
    lines = followed(hub, capsys).splitlines()
    assert lines[1] == "4 events are missing: the hub keeps only the latest"
    assert [line.split()[1] for line in lines if "missing" not in line] == ["listening", "e", "f"]


def test_a_hub_that_does_not_answer_at_first_is_an_error():
    hub = FakeHub()
    leave(hub)
    with pytest.raises(HubUnreachableError):
        EventsPrinter(hub.fetch, Printer(json=False)).follow(sleep=hub.sleep)
