"""What an event costs the core does not grow with the number of devices: counted in calls, which are exact."""

import itertools
import sys

import pytest

from edgeasync.core.hub.effects import Assign, Fold, SendToDevice
from edgeasync.core.hub.events import Folded, HubReceived, PushArrived, Ticked
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.membership import SAMPLE
from edgeasync.core.hub.settings import HubCoreSettings, Limits
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import Fetch, Hello, ModelVersion, Ping, Push, Welcome
from tests.support.parts.hub_bench import LINEAGE, SPEC


class Fleet:
    """Devices that exchange in turn, and the calls that each of their events took."""

    def __init__(self, devices, policy=None, name_of="device-{}".format, **limits):
        self.core = HubCore(
            spec=SPEC,
            training={},
            policy=policy or Policy(),
            settings=HubCoreSettings(limits=Limits(devices_max=devices, **limits), quiet=True),
            version=ModelVersion(LINEAGE, 0),
            make_session=(number.to_bytes(16, "big") for number in itertools.count(1)).__next__,
            now_s=0.0,
        )
        self.now_s = 0.0
        self.handles = itertools.count()
        self.sessions, self.keys, self.bases, self.calls = [], [], {}, {}
        for number in range(devices):
            peer = number.to_bytes(4, "big")
            device_id = name_of(number)
            key = b"" if "/" not in device_id else device_id.partition("/")[0].encode().ljust(32, b".")
            self.keys.append(key)
            hello = Hello(device_id, number.to_bytes(16, "big"), 1)
            self.give("join", HubReceived(peer, hello, key=key))
            self.give("fetch", HubReceived(peer, Fetch(self.sessions[number]), key=key))

    def give(self, kind, event):
        made = 0

        def count(frame, what, _):
            nonlocal made
            made += what == "call"

        sys.setprofile(count)
        try:
            effects = self.core.handle(event, self.now_s)
            self.core.next_deadline_s()
        finally:
            sys.setprofile(None)
        self.calls.setdefault(kind, []).append(made)
        for effect in effects:
            if isinstance(effect, Assign):
                self.bases[effect.peer] = effect.version
            elif isinstance(effect, SendToDevice) and isinstance(effect.message, Welcome):
                self.sessions.append(effect.message.session)
            elif isinstance(effect, Fold) and effect.measure:
                self.core.handle(Folded(effect.number, 1.0), self.now_s)

    def push(self, number, seq=1, norm=1.0):
        peer, session, handle = number.to_bytes(4, "big"), self.sessions[number], next(self.handles)
        push = Push(session, seq, self.bases[peer], 8, 256, 0.5, 0.25, 0.01, "identity", 0, 12, 0)
        self.give("push", PushArrived(peer, push, handle, norm, can_answer=True, key=self.keys[number]))

    def exchange(self, rounds, devices):
        self.calls.clear()
        for seq in range(1, rounds + 1):
            for number in range(devices):
                self.now_s += 1.0 / devices
                peer, session = number.to_bytes(4, "big"), self.sessions[number]
                self.give("ping", HubReceived(peer, Ping(session, self.now_s, 8 * seq)))
                self.push(number, seq)
                if self.core.next_deadline_s() <= self.now_s:
                    self.give("tick", Ticked())


def test_no_event_costs_more_in_a_large_fleet():
    calls = {}
    for devices, rounds in ((SAMPLE, 3), (8 * SAMPLE, 2)):
        fleet = Fleet(devices)
        fleet.exchange(rounds, devices)
        fleet.core.check()
        calls[devices] = fleet.calls
    few, many = calls[SAMPLE], calls[8 * SAMPLE]
    for kind in ("ping", "push"):
        assert sum(many[kind]) / len(many[kind]) <= 1.1 * sum(few[kind]) / len(few[kind])
        assert max(many[kind]) <= 1.5 * max(few[kind])


@pytest.mark.parametrize("devices", [1, SAMPLE, SAMPLE + 1, 1000])
def test_samples_take_turns_until_every_device_was_in_one(devices):
    members = Fleet(devices).core.members
    samples = [members.sample(turn) for turn in range(7, 7 + members.stride)]
    assert all(len(sample) <= SAMPLE for sample in samples)
    assert sorted(member.device_id for sample in samples for member in sample) == sorted(members.members)
