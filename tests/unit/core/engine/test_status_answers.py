"""Status replies: sliced for the whole fleet, immediate for one device."""

import msgspec

from edgeasync.core.engine.sender import Sender
from edgeasync.core.engine.status_answers import DEVICES_AT_A_TIME
from edgeasync.core.hub.effects import HubReport
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Status, StatusRequest
from edgeasync.protocol.status import RecentEventList
from tests.support.parts.garbage import no_garbage
from tests.support.parts.turns import Bench


def test_the_status_of_many_devices_is_made_in_slices():
    bench = Bench(2 * DEVICES_AT_A_TIME + 1)
    described = []
    describe = bench.engine.core.describe_devices

    def watched(members, *arguments):
        members = list(members)
        described.append(len(members))
        return describe(members, *arguments)

    bench.engine.core.describe_devices = watched
    bench.say(b"operator", StatusRequest())
    turns = 0
    while bench.shell.later:
        described.append("turn")
        turns += 1
        bench.shell.later.pop(0)()
    assert turns >= 2
    assert [count for count in described if count != "turn"] == [DEVICES_AT_A_TIME] * 2 + [1]
    ((peer, message, payload),) = bench.shell.sent
    assert (peer, message) == (b"operator", Status())
    status = msgspec.json.decode(payload)
    assert [device["id"] for device in status["devices"]] == [f"device-{peer.hex()}" for peer in bench.peers]
    assert status["pid"] == 1
    assert set(status) == {*bench.engine.core.status(0.0), "pid"}


def test_a_status_is_freed_at_once():
    """Of 10,000 devices it has megabytes, and the garbage collector runs rarely."""
    bench = Bench(2 * DEVICES_AT_A_TIME + 1)
    with no_garbage():
        bench.say(b"operator", StatusRequest())
        while bench.shell.later:
            bench.shell.later.pop(0)()


def test_a_device_hears_of_its_own_at_once():
    bench = Bench(2)
    sender = Sender(b"k" * 32, "device-000000", "device")
    bench.engine.on_message(b"asks", wire.encode(StatusRequest()), None, 0.0, sender)
    assert bench.to(Status) == [b"asks"]


def test_all_that_watch_share_one_status_a_second():
    bench = Bench(DEVICES_AT_A_TIME + 1)
    described = []
    describe = bench.engine.core.describe_devices

    def counted(members, *arguments):
        described.extend(members)
        return describe(members, *arguments)

    bench.engine.core.describe_devices = counted
    watch = wire.encode(StatusRequest(watches=True))
    for viewer in (b"one", b"two", b"three"):
        bench.engine.on_message(viewer, watch, None, 10.0)
    while bench.shell.later:
        bench.shell.later.pop(0)()
    bench.engine.on_message(b"four", watch, None, 10.9)
    sent = [(peer, payload) for peer, message, payload in bench.shell.sent if message == Status()]
    assert [peer for peer, _ in sent] == [b"one", b"two", b"three", b"four"]
    assert len({id(payload) for _, payload in sent}) == 1, "encoded once"
    assert len(described) == len(bench.peers)
    bench.engine.on_message(b"one", watch, None, 11.2)
    assert len(described) == len(bench.peers), "in a fleet of 257 it lasts for a quarter of a second longer"
    bench.engine.on_message(b"one", watch, None, 11.3)
    assert len(described) > len(bench.peers)


def test_events_are_sent_in_place_of_the_status():
    bench = Bench(2)
    bench.engine.status_answers.events.note(HubReport("lost", "device-1", "silent"), 5.0)
    bench.engine.on_message(b"asks", wire.encode(StatusRequest(events_after=0)), None, 0.0)
    ((_, _, payload),) = [one for one in bench.shell.sent if one[0] == b"asks"]
    found = msgspec.json.decode(payload, type=RecentEventList)
    assert (found.lineage, found.events[0].event) == (bench.engine.core.lineage, "lost")
