"""No call into the engine does more than a bounded part of long work: messages are read between the parts."""

import itertools

import msgspec
import numpy as np
import pytest

from edgeasync.core.arrays.hub_model import Model
from edgeasync.core.engine.fold_queue import BROADCAST_AT_A_TIME, INLINE_BYTES_MAX, SLICE_BYTES
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.engine.sender import Sender
from edgeasync.core.engine.status_answers import DEVICES_AT_A_TIME
from edgeasync.core.hub.machine import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits
from edgeasync.core.recovery.replay import Sessions
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import SynchronousAggregator
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Assignment,
    Fetch,
    Hello,
    Leave,
    ModelVersion,
    Push,
    Refuse,
    Status,
    StatusRequest,
    Wake,
)

LINEAGE = "0" * 16


class Shell:
    """Keeps what is sent, and does later what is to be done later."""

    def __init__(self):
        self.sent = []
        self.later = []
        self.in_background = 0
        self.stopped = ""

    def send(self, peer, header, payload):
        self.sent.append((peer, wire.decode(header), payload))

    def after(self, delay_s, action):
        assert delay_s == 0.0
        self.later.append(action)

    def run_in_background(self, work, then):
        self.in_background += 1
        self.later.append(lambda: then(work()))

    def report(self, report):
        pass

    def save(self, state):
        pass

    def describe(self):
        return {"pid": 1}

    def stop(self, reason):
        self.stopped = reason


class Bench:
    def __init__(self, devices, *, length=10, **options):
        self.shell = Shell()
        spec = ParameterSpec((Parameter("w", (length,)),))
        policy = Policy(aggregate=SynchronousAggregator())
        numbers = itertools.count(1)
        sessions = Sessions(lambda: next(numbers).to_bytes(16, "big"))
        core = HubCore(
            spec=spec,
            training={},
            policy=policy,
            settings=HubCoreSettings(codec=FLOAT32, limits=Limits(devices_max=devices), quiet=True, **options),
            version=ModelVersion(LINEAGE, 0),
            make_session=sessions,
            now_s=0.0,
        )
        model = Model(spec, np.zeros(length, np.float32), 0, policy)
        self.engine = HubEngine(core, model, self.shell, sessions=sessions)
        self.sessions, self.peers = {}, [number.to_bytes(3, "big") for number in range(devices)]
        for peer in self.peers:
            self.say(peer, Hello(f"device-{peer.hex()}", peer.rjust(16, b"-"), 1))
            self.sessions[peer] = self.shell.sent[-1][1].session
            self.say(peer, Fetch(self.sessions[peer]))
        self.shell.sent.clear()

    def say(self, peer, message, payload=None, at_s=0.0):
        self.engine.on_message(peer, wire.encode(message), payload, at_s)

    def push_all(self):
        """Let every device push: the last one makes a version, and all are answered."""
        length = self.engine.model.spec.length
        payload = bytes(4 * length)
        checksum = wire.checksum(payload)
        for peer in self.peers:
            base = ModelVersion(LINEAGE, 0)
            self.say(
                peer,
                Push(self.sessions[peer], 1, base, 8, 8, 0.5, 0.1, 0.1, "identity", checksum, 4 * length),
                payload,
            )

    def counts(self, kind):
        """Return how many messages of a kind were sent in each turn, to the end."""
        counted = [sum(isinstance(message, kind) for _, message, _ in self.shell.sent)]
        while self.shell.later:
            before = len(self.shell.sent)
            self.shell.later.pop(0)()
            counted.append(sum(isinstance(message, kind) for _, message, _ in self.shell.sent[before:]))
        return counted

    def to(self, kind):
        return [peer for peer, message, _ in self.shell.sent if isinstance(message, kind)]


@pytest.mark.parametrize(("length", "each"), [(10, 32), (SLICE_BYTES // 4, 1)])
def test_a_flush_is_answered_in_slices(length, each):
    bench = Bench(48, length=length)
    bench.push_all()
    counts = bench.counts(Assignment)
    assert sum(counts) == 48
    assert max(counts) <= each
    assert sorted(bench.to(Assignment)) == bench.peers


def test_many_updates_of_a_middling_model_are_folded_in_the_background():
    bench = Bench(8, length=INLINE_BYTES_MAX // 4)
    bench.push_all()
    assert bench.shell.in_background == 1
    bench.counts(Assignment)
    assert bench.engine.model.current.number == 1
    assert sorted(bench.to(Assignment)) == bench.peers


def test_a_fleet_is_woken_in_slices_and_in_order():
    devices = 3 * BROADCAST_AT_A_TIME + 1
    bench = Bench(devices)
    for member in bench.engine.core.members.members.values():
        member.rest_until_s = 100.0
    bench.engine.core.policy_engine.rest.state.resting = True
    bench.say(b"operator", Wake())
    assert bench.counts(Refuse) == [BROADCAST_AT_A_TIME] * 3 + [1]
    assert bench.to(Refuse) == bench.peers


def test_all_are_told_of_the_end_before_the_hub_ends():
    bench = Bench(2 * BROADCAST_AT_A_TIME)
    bench.engine.request_stop(0.0)
    assert not bench.shell.stopped
    assert max(bench.counts(Leave)) <= BROADCAST_AT_A_TIME
    assert bench.to(Leave) == bench.peers
    assert bench.shell.stopped == "stopping"


def test_the_status_of_many_devices_is_made_in_slices():
    bench = Bench(2 * DEVICES_AT_A_TIME + 1)
    described = []
    describe = bench.engine.core.members.describe

    def watched(members, *arguments):
        members = list(members)
        described.append(len(members))
        return describe(members, *arguments)

    bench.engine.core.members.describe = watched
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
