"""The hub's latest events: numbered, bounded, and only one's own for the key of a device."""

import math

import msgspec

from edgeasync.core.engine.recent_events import EVENTS_MAX, RecentEvents
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.effects import HubReport
from edgeasync.protocol.status import RecentEventList

LINEAGE = "00c0ffee00c0ffee"


def after(events, number, sender=ANYBODY):
    return msgspec.json.decode(events.after(number, LINEAGE, sender), type=RecentEventList)


def noted(count):
    events = RecentEvents()
    for number in range(1, count + 1):
        events.note(HubReport("joined", f"pi-{number}", "start 1"), 1000.0 + number)
    return events


def test_events_after_a_number_are_those_that_a_client_has_not_seen():
    events = noted(3)
    found = after(events, 1)
    assert (found.lineage, found.last, found.missed) == (LINEAGE, 3, 0)
    assert [(one.number, one.device, one.time) for one in found.events] == [
        (2, "pi-2", 1002.0),
        (3, "pi-3", 1003.0),
    ]
    assert after(events, 3).events == after(events, 9).events == []
    assert after(RecentEvents(), 0) == RecentEventList(lineage=LINEAGE, last=0, missed=0, events=[])


def test_old_events_are_dropped_and_counted_as_missed():
    events = noted(EVENTS_MAX + 10)
    found = after(events, 4)
    assert (len(found.events), found.missed, found.events[0].number) == (EVENTS_MAX, 6, 11)
    assert after(events, 10).missed == 0


def test_the_key_of_a_device_gets_its_own_events_and_those_of_the_hub():
    events = noted(2)
    events.note(HubReport("alarm", "", "the loss is 9", {"loss": math.inf}), 1.0)
    own = after(events, 0, Sender(b"k" * 32, "pi-2", "device"))
    assert [one.device for one in own.events] == ["pi-2", ""]
    assert own.events[1].figures == {"loss": None}
    assert len(after(events, 0, Sender(b"o" * 32, "owner", "operator")).events) == 3
