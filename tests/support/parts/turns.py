"""A hub engine whose event loop the test advances step by step."""

import itertools

import numpy as np

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits
from edgeasync.core.recovery.replay import Sessions
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import SynchronousAggregator
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Fetch, Hello, ModelVersion, Push

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

    def address_of(self, peer):
        return f"10.0.0.{peer[-1]}"

    def wall_s(self):
        return 1e9

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
        model = HubModel(spec, np.zeros(length, np.float32), 0, policy)
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
        self.push(self.peers)

    def push(self, peers):
        """Let these devices push for the first time."""
        length = self.engine.model.spec.length
        payload = bytes(4 * length)
        checksum = wire.checksum(payload)
        for peer in peers:
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
