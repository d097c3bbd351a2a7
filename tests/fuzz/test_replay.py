"""Whatever peers send, what was written down of it leads to the same state again: no journal can be poisoned."""

import copy
import math
from random import Random

import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import CheckpointSettings, HubCoreSettings, Limits, Liveness
from edgeasync.core.recovery.state import dump_state
from edgeasync.durable.recovery import Rules, recover
from edgeasync.durable.run_folder import RunFolder
from edgeasync.policies.aggregation import BufferedAggregator, ImmediateAggregator
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    DeviceProfile,
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    ModelVersion,
    Piece,
    Ping,
    Push,
    StatusRequest,
    Wake,
    Welcome,
)
from edgeasync.training.numpy_models import SoftmaxModel
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from tests.support.simulation.hubs import simulated_hub

SPEC = SoftmaxModel(inputs=4, classes=2).spec
POLICIES = (Policy(), Policy(aggregate=ImmediateAggregator()), Policy(aggregate=BufferedAggregator(count=2)))
EVERY = ("1 updates", "1000 hours", "2 seconds")
ODD = (0.0, -1.0, 1e308, 1e-308, math.nan, math.inf, -math.inf)
COUNTS = (0, 1, 5, 2**31, 2**53)
CODECS = ("identity", "identity", "int8", "float16", "top_k(0.5)+int8", "sign")


class Crowd:
    """Peers that know the sessions the hub gave out, on whatever connection, and a hub on a disk."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.disk = SimulatedDisk(seed)
        settings = HubCoreSettings(
            liveness=Liveness(heartbeat_s=0.5, lease_s=2.0),
            limits=Limits(
                devices_max=4,
                updates_held_max=6,
                strikes_max=5,
                quarantine_s=3.0,
                bytes_per_day_max=ByteCount(400 << 20) if seed % 5 == 0 else None,
                device_bytes_per_day_max=ByteCount(60 << 20) if seed % 5 == 1 else None,
            ),
            quiet=seed % 2 == 0,
            checkpoint=CheckpointSettings(every=EVERY[seed % 3], journal_bytes_max=20_000),
        )
        policy = POLICIES[seed // 3 % 3]
        self.rules = Rules(SPEC, policy, settings)
        self.hub = simulated_hub(self.clock, SPEC, policy, settings=settings, seed=seed, disk=self.disk)
        self.peers = [bytes([number]) * 5 for number in range(6)]
        self.answered = {bytes(16): 0}
        self.versions = [ModelVersion("0" * 16, 0)]
        self.written = {}
        self.watch()

    def watch(self):
        """Note the state after every entry, and what the hub says; connections are new after a start."""
        log, core = self.hub.log, self.hub.core
        append = log.append

        def noted(entry, payload, checksum=None):
            append(entry, payload, checksum)
            self.written[log.last] = dump_state(core)

        log.append = noted
        for peer in self.peers:
            self.hub.connect(peer, self.hear)

    def hear(self, header, _):
        message = wire.decode(header)
        if isinstance(message, Welcome):
            self.answered[message.session] = message.seq_last
        elif isinstance(message, Assignment):
            self.versions = [*self.versions[-3:], message.version]

    def number(self, *usual):
        return self.random.choice(usual if self.random.random() < 0.8 else COUNTS)

    def value(self):
        return self.random.random() if self.random.random() < 0.8 else self.random.choice(ODD)

    def push(self, session):
        random = self.random
        codec = make_codec(random.choice(CODECS), SPEC)
        values = np.random.default_rng(random.getrandbits(32)).normal(size=SPEC.length).astype(np.float32)
        if random.random() < 0.05:
            values[0] = random.choice((math.nan, math.inf, 1e38, 0.0))
        payload = bytes(codec.encode(VectorSource(values * np.float32(0.01))))
        self.answered[session] = seq = max(1, self.answered[session] + random.choice((1, 1, 1, 1, 0, 2)))
        push = Push(
            session, seq, random.choice(self.versions), self.number(1, 4) or 1, self.number(8, 32), self.value(),
            self.value(), abs(self.number(0.01, 0.02)), codec.name, wire.checksum(payload), len(payload),
            random.choice((0, 0, 0, 1)), random.choice((None, self.value())),
        )  # fmt: skip
        return push, None if push.transfer else payload

    def message(self):
        """Return some message, valid or nearly, and its payload."""
        random, session = self.random, self.random.choice(list(self.answered)[-6:])
        profile = DeviceProfile(examples=self.number(0, 50), local_steps_max=self.number(0, 3) % 2**31)
        hello = Hello(
            f"device-{random.randrange(6)}", bytes([random.randrange(2)]) * 16,
            random.randrange(1, 4), random.choice((None, session)), self.number(0, 1), profile,
            random.choice((("identity",), ("identity", "int8", "float16"))),
        )  # fmt: skip
        plain = (
            hello, Ping(session, self.value(), self.number(1, 2), 0.1),
            Fetch(session, random.choice(self.versions)),
            FetchGraph(session), Goodbye("stopping", session), StatusRequest(), Credit(1, 0), Fetch(session),
            Wake(),
        )  # fmt: skip
        if random.random() < 0.5:
            return self.push(session)
        if random.random() < 0.1:
            return Piece(1, 0, 0), random.randbytes(9)
        return random.choice(plain), None

    def step(self):
        random = self.random
        if random.random() < 0.1:
            self.peers[random.randrange(len(self.peers))] = fresh = random.randbytes(5)
            self.hub.connect(fresh, self.hear)
        peer = random.choice(self.peers)
        if random.random() < 0.1:
            for _ in range(random.choice((1, 1, 6))):
                self.hub.receive(peer, random.randbytes(random.randrange(40)), None)
        else:
            try:
                message, payload = self.message()
                header = wire.encode(message)
            except (OverflowError, ValueError):
                return  # not even a hostile encoder can say that
            self.hub.receive(peer, header, payload)
        self.clock.run(lambda: False, self.clock.now_s + random.choice((0.0, 0.0, 0.003, 0.05, 0.3, 3.0)))

    def check(self):
        """Replay a copy of the disk, and hold every state on the way against what it was."""
        cores, entries = [], []

        def make_core(*parts):
            cores.append(self.hub._make_core(*parts))
            return cores[0]

        def compare(number, entry, _):
            assert dump_state(cores[0]) == self.written[number], (number, entry)
            entries.append(number)
            return True

        disk = copy.deepcopy(self.disk)
        recover(RunFolder(disk=disk), self.rules, make_core, lambda: bytes(16), on_entry=compare)
        return len(entries)


@pytest.mark.parametrize("seed", range(36))
def test_a_replay_of_what_peers_sent_leads_to_the_same_states(seed):
    crowd = Crowd(seed)
    entries = 0
    for _ in range(3):
        for _ in range(120):
            crowd.step()
        crowd.hub.core.check()
        entries += crowd.check()
        crowd.hub.crash()
        if crowd.random.random() < 0.5:
            crowd.disk.crash(crowd.random)
        crowd.hub.start()
        crowd.watch()
    assert entries > 5 or EVERY[seed % 3] == "1 updates"
