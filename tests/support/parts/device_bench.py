"""A device core under test: set the clock, send it messages, and look at its effects."""

import re
from functools import cache
from random import Random

from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.effects import Connect, DeviceReport, SendPush, SendToHub, Train
from edgeasync.core.device.events import DeviceReceived, ModelInstalled, Trained
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.messages import (
    Assignment,
    DeviceProfile,
    Goodbye,
    GraphHeader,
    Hello,
    ModelVersion,
    Ping,
    Pong,
    Push,
    Welcome,
)

SPEC = ParameterSpec((Parameter("weights", (3,)),))
HEARTBEAT_S, LEASE_S = 5.0, 15.0
PROFILE = DeviceProfile(examples=100)
HELLO = Hello("pi-1", b"s" * 16, 3, profile=PROFILE)
CHECKSUM = 77
FINGERPRINT = "ab" * 32
OFFER = {"graph": FINGERPRINT, "graph_bytes": 1000}
GRAPH = GraphHeader(FINGERPRINT, 0, 1000)
KEPT = Push(bytes(16), 7, ModelVersion("0" * 16, 3), 8, 64, 0.5, 0.25, 0.125, "int8", 1, 12)
TRAINED = Trained(8, 64, 0.5, 0.25, 0.125, checksum=CHECKSUM)
WELCOME = Welcome(bytes(16), SPEC, {}, 0, "identity", HEARTBEAT_S, LEASE_S, 1 << 20)


class DeviceBench:
    """A device core, a clock, and the effects of the last event."""

    def __init__(self, seed=0, *, recall=None, hubs=1, trains_at_rest=False, **limits):
        self.core = DeviceCore(
            HELLO,
            DeviceLimits(**{"graph_bytes_max": 1000} | limits),
            Random(seed),
            hubs=hubs,
            trains_at_rest=trains_at_rest,
        )
        if recall is not None:
            self.core.work.recall(*recall)
        self.now_s = 100.0
        self.effects = self.core.begin(self.now_s)
        self.sessions = 0

    def give(self, event, at_s=None):
        self.now_s = self.now_s if at_s is None else at_s
        self.effects = self.core.handle(event, self.now_s)
        return self

    def hears(self, message, at_s=None):
        return self.give(DeviceReceived(message), at_s)

    def tick(self, at_s=None, steps=0):
        self.now_s = self.now_s if at_s is None else at_s
        self.effects = self.core.tick(self.now_s, steps)
        deadline_s = self.core.next_deadline_s()
        assert deadline_s is None or deadline_s > self.now_s
        return self

    def until(self, kind, limit_s=1000.0):
        """Tick from deadline to deadline, the hub answering pings, until an effect of `kind`; return it."""
        end_s = self.now_s + limit_s
        while True:
            self.tick(self.core.next_deadline_s())
            assert self.now_s <= end_s, f"no {kind.__name__} within {limit_s} s"
            for effect in self.effects:
                said = effect.message if isinstance(effect, SendToHub) else effect
                if isinstance(said, kind):
                    return said
                if isinstance(said, Ping):
                    assert self.core.handle(DeviceReceived(Pong(said.sent_s)), self.now_s) == []

    def welcome(self, seq_last=0, spec=SPEC, settings=None, at_s=None, **graph):
        self.sessions += 1
        message = Welcome(
            self.session, spec, settings or {}, seq_last, "identity", HEARTBEAT_S, LEASE_S, 1 << 20, **graph
        )  # fmt: skip
        return self.hears(message, at_s)

    @property
    def session(self):
        return self.sessions.to_bytes(16, "big")

    def assigned(self, number=0, ack=None, at_s=None):
        return self.hears(assignment(number, ack), at_s)

    def training(self, number=0, seq_last=0):
        """Go the happy way as far as training."""
        return self.welcome(seq_last).assigned(number).give(ModelInstalled(assignment(number)))

    def trained(self, at_s=None):
        return self.give(TRAINED, at_s)

    def reconnect(self, seq_last=0, **fields):
        """Lose the connection and be welcomed again."""
        self.hears(Goodbye("stopping"))
        self.until(Connect)
        return self.welcome(seq_last, **fields)

    @property
    def said(self):
        return [effect.message for effect in self.effects if isinstance(effect, SendToHub)]

    @property
    def pushed(self):
        """The seqs of the pushes in the last effects."""
        return [effect.push.seq for effect in self.effects if isinstance(effect, SendPush)]

    @property
    def told(self):
        return [effect.event for effect in self.effects if isinstance(effect, DeviceReport)]

    @property
    def ignored(self):
        """The kinds of event that the last effects, which do nothing, tell of as not fitting."""
        words = r"ignoring an unexpected message or result: (.+)"
        assert all(isinstance(effect, DeviceReport) and effect.event == "unexpected" for effect in self.effects)
        return [re.fullmatch(words, effect.detail)[1] for effect in self.effects]

    @property
    def kinds(self):
        return [type(effect) for effect in self.effects]


def assignment(number=0, ack=None):
    """Return the one object that stands for this assignment: the core knows it again by identity."""
    return one_assignment(number, ack)


@cache
def one_assignment(number, ack):
    return Assignment(ModelVersion("0" * 16, number), 8, "identity", 0, 12, 0, ack)


def offline_bench(steps, overlap=0):
    """A device that trains, and may train on without the hub."""
    device = DeviceBench(alone_steps_max=steps).welcome(overlap_steps_max=overlap)
    return device.assigned(0).give(ModelInstalled(assignment(0)))


def overlap_steps(device):
    """The overlap steps that the last effects ask for."""
    return [effect.local_steps for effect in device.effects if isinstance(effect, Train) and effect.overlap]
