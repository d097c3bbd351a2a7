"""Status replies: sliced for the whole fleet, immediate for one device."""

import msgspec

from edgeasync.core.engine.sender import Sender
from edgeasync.core.engine.status_answers import DEVICES_AT_A_TIME
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Status, StatusRequest
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


def test_a_device_hears_of_its_own_at_once():
    bench = Bench(2)
    sender = Sender(b"k" * 32, "device-000000", "device")
    bench.engine.on_message(b"asks", wire.encode(StatusRequest()), None, 0.0, sender)
    assert bench.to(Status) == [b"asks"]
