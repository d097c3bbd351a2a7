"""A hub core on a bench: a clock to turn, messages to hand in, and everything it was given counted."""

import itertools

from edgeasync.core.hub.effects import Assign, Discard, Fold, HubReport, Receive, SendToDevice, SuspendTransfers
from edgeasync.core.hub.events import HubReceived, HubStopRequested, PushArrived, Revoked, Ticked
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits, Liveness, StopCondition
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import ConstantStaleness
from edgeasync.protocol.messages import (
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    ModelVersion,
    Order,
    Ping,
    Push,
    Refuse,
    Welcome,
)
from tests.support.parts.small_runs import plain

SPEC = ParameterSpec((Parameter("weights", (3,)),))
LINEAGE = "00c0ffee00c0ffee"


def plain_policy(**parts):
    """Return a policy of parts that do nothing of their own, but for those given."""
    usual = {"staleness": ConstantStaleness(), "aggregate": ImmediateAggregator(), "frequency": FixedFrequency()}
    return Policy(**usual | {"optimizer": (SGD(),), "monitor": Monitor(detectors=())} | parts)


class HubBench:
    """Hands events to a `HubCore`; checks after each what must always hold."""

    lineage = LINEAGE

    def __init__(self, policy=None, *, liveness=None, limits=None, stop=None, graph=None, spec=SPEC, **settings):
        self.spec = spec
        self.core = HubCore(
            spec=spec,
            training={"learning_rate": 0.1},
            policy=policy or plain(16),
            settings=HubCoreSettings(
                liveness=Liveness(**(liveness or {})),
                limits=Limits(**(limits or {})),
                stop=StopCondition(**(stop or {})),
                **{"codec": FLOAT32} | settings,
            ),
            version=ModelVersion(LINEAGE, 0),
            graph=graph,
            make_session=(number.to_bytes(16, "big") for number in itertools.count(1)).__next__,
            now_s=0.0,
        )
        self.now_s = 0.0
        self.events = 0
        self.effects = []
        self.handles = itertools.count(100)
        self.held = set()
        self.sessions = {}
        self.peers = {}
        self.keys = {}
        """The keys of devices that have one, by device id."""

    def give(self, event, at_s=None):
        self.now_s = self.now_s if at_s is None else at_s
        stopped = self.core.stopped
        if isinstance(event, PushArrived):
            self.held.add(event.handle)
        self.effects = self.core.handle(event, self.now_s)
        self.events += not stopped and not isinstance(event, Revoked | HubStopRequested)
        return self._account()

    def tick(self, at_s=None, *, capacity=True):
        self.now_s = self.now_s if at_s is None else at_s
        self.effects = self.core.handle(Ticked(capacity), self.now_s)
        assert self.core.next_deadline_s() > self.now_s
        return self._account()

    def _account(self):
        for effect in self.effects:
            if isinstance(effect, Fold):
                assert len(effect.handles) == len(effect.weights)
                self.held.difference_update(effect.handles)
            elif isinstance(effect, Discard):
                self.held.remove(effect.handle)
            elif isinstance(effect, SendToDevice) and isinstance(effect.message, Welcome):
                session = effect.message.session
                (member,) = [m for m in self.core.members.members.values() if m.session == session]
                self.sessions[member.device_id] = effect.message.session
                self.peers[member.device_id] = effect.peer
        assert len(self.held) == self.core.status(self.now_s)["updates_buffered"]
        accepted = sum(self.core.messages_accepted.values())
        assert accepted + self.core.messages_refused == self.events
        self.core.check()
        return self.effects

    # -- what devices say ------------------------------------------------------------------------------------

    def hello(self, device_id="a", *, state=1, start=1, peer=None, at_s=None, **fields):
        hello = Hello(device_id, bytes((state,)) * 16, start, **fields)
        peer = peer or f"{device_id} {state}".encode()
        return self.give(HubReceived(peer, hello, key=self.keys.get(device_id, b"")), at_s)

    def join(self, device_id="a", **fields):
        """Join and fetch, as a device does first."""
        self.hello(device_id, **fields)
        return self.fetch(device_id)

    def fetch(self, device_id="a", *, at_s=None, capacity=True):
        fetch, key = Fetch(self.sessions[device_id]), self.keys.get(device_id, b"")
        return self.give(HubReceived(self.peers[device_id], fetch, capacity, key), at_s)

    def fetch_graph(self, device_id="a", *, capacity=True):
        return self.give(HubReceived(self.peers[device_id], FetchGraph(self.sessions[device_id]), capacity))

    def ping(self, device_id="a", *, steps=0, peer=None, session=None, at_s=None, **fields):
        ping = Ping(session or self.sessions[device_id], 123.0, steps, **fields)
        return self.give(HubReceived(peer or self.peers[device_id], ping), at_s)

    def leave(self, device_id="a", reason="stopping", *, at_s=None):
        leave, key = Goodbye(reason, self.sessions[device_id]), self.keys.get(device_id, b"")
        return self.give(HubReceived(self.peers[device_id], leave, key=key), at_s)

    def order(self, device_id="a", order="quarantine", *, at_s=None):
        """Give an operator's order; return the code of its refusal, if it is refused."""
        self.give(HubReceived(b"operator", Order(device_id, order), key=b"o" * 32 if self.keys else b""), at_s)
        return self.refused

    def make_push(
        self,
        device_id,
        seq,
        base=0,
        *,
        lineage=LINEAGE,
        transfer=0,
        step_s=0.25,
        examples=64,
        checksum=0,
        held_checksum=None,
    ):
        return Push(
            self.sessions[device_id], seq, ModelVersion(lineage, base), 8, examples, 0.5, 0.25, step_s,
            "identity", checksum, 12, transfer, held_checksum=held_checksum,
        )  # fmt: skip

    def push(
        self,
        device_id="a",
        seq=1,
        base=0,
        *,
        norm=1.0,
        capacity=True,
        peer=None,
        at_s=None,
        moved=(0, 0),
        **fields,
    ):
        push = self.make_push(device_id, seq, base, **fields)
        event = PushArrived(peer or self.peers[device_id], push, next(self.handles), norm, capacity, moved=moved)
        return self.give(event, at_s)

    def offer(self, device_id="a", seq=1, base=0, *, capacity=True):
        push = self.make_push(device_id, seq, base, transfer=seq)
        return self.give(HubReceived(self.peers[device_id], push, capacity))

    # -- what the hub did ------------------------------------------------------------------------------------

    def all_of(self, kind):
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def one(self, kind):
        (effect,) = self.all_of(kind)
        return effect

    @property
    def reports(self):
        return [effect.event for effect in self.all_of(HubReport)]

    @property
    def refused(self):
        """The code of the only refusal in the last effects, or `None`."""
        codes = [send.message.code for send in self.all_of(SendToDevice) if isinstance(send.message, Refuse)]
        assert len(codes) <= 1
        return codes[0] if codes else None

    @property
    def refusal(self):
        (message,) = [send.message for send in self.all_of(SendToDevice) if isinstance(send.message, Refuse)]
        return message

    @property
    def forgotten(self):
        return [effect.peer for effect in self.all_of(SuspendTransfers)]

    @property
    def granted(self):
        return [effect.push.seq for effect in self.all_of(Receive)]

    @property
    def ack(self):
        """The acknowledgement inside the only assignment of the last effects."""
        return self.one(Assign).ack

    def state_of(self, device_id="a"):
        return self.core.members.members[device_id].state
