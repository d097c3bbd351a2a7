"""Models larger than a piece, both ways over real TCP.

The trainers add a fixed pattern of small powers of two, which every codec here carries without loss, and the
policies here sum updates, so what a run must come to is known to the bit.
"""

import asyncio
from collections import Counter

import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import CodecSettings, Limits, Liveness, StopCondition
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.graphs.model_file import load_model
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, QuorumAggregator
from edgeasync.policies.staleness import ConstantStaleness
from edgeasync.protocol import wire
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from tests.support.parts.agents import agent_parts
from tests.support.parts.hubs import run_settings, zeros
from tests.support.parts.small_runs import plain
from tests.support.programs.processes import PATIENCE_S
from tests.support.simulation.adders import Adder, pattern

SMALL = ParameterSpec((Parameter("weight", (300, 1000)), Parameter("bias", (7,))))  # folded at once
LARGE = ParameterSpec((Parameter("weight", (1100, 1000)), Parameter("bias", (7,))))  # folded in the background
KIB = 1 << 10


@pytest.fixture(autouse=True)
def _sums(monkeypatch):
    """Let a quorum, for which the devices wait, add the updates up: a mean would hide one that is missing."""
    monkeypatch.setattr(
        QuorumAggregator, "weights", lambda _, buffered, fleet: tuple(one.weight for one in buffered)
    )


both_answers = pytest.mark.parametrize(
    "aggregate", [ImmediateAggregator(), QuorumAggregator()], ids=["at once", "at the flush"]
)


class WatchedHub(HubRuntime):
    """A hub that counts what it says."""

    def __init__(self, *arguments, **options):
        self.sent = Counter()
        super().__init__(*arguments, **options)

    def send(self, peer, header, payload):
        self.sent[type(wire.decode(header)).__name__] += 1
        super().send(peer, header, payload)


async def train(run, spec, *, aggregate, agents, limits, codec, updates):
    """Train over TCP until `updates` are applied; return the hub."""
    events = Counter()
    listening = asyncio.Event()

    def on_report(report):
        events[report.event] += 1
        if report.event == "listening":
            listening.set()

    hub = WatchedHub(
        run_settings(
            run,
            "tcp://127.0.0.1:*",
            policy=plain(1, aggregate, staleness=ConstantStaleness()),
            stop=StopCondition(updates=updates),
            liveness=Liveness(heartbeat_s=0.5, lease_s=PATIENCE_S),
            limits=limits,
            codec=CodecSettings(push=codec, model=codec, delta="off"),
        ),
        zeros(spec),
        on_report=on_report,
    )

    async def run_agents():
        await listening.wait()
        devices = [
            AgentRuntime(
                *agent_parts(
                    lambda _: Adder(spec),
                    identity=DeviceIdentity(f"device-{number}", f"{number:032x}", 1),
                    hub=hub.address,
                )
            )
            for number in range(agents)
        ]
        return await asyncio.gather(*(device.run() for device in devices))

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        hub_task = group.create_task(hub.run())
        agents_task = group.create_task(run_agents())
    assert hub_task.result() == "finished"
    assert set(agents_task.result()) == {"the hub has finished training"}
    assert events.pop("left", 0) <= agents
    events.pop("evaluated", None)  # which the devices' losses are, after a hundred updates
    assert events == {"listening": 1, "joined": agents, "finished": 1}
    return hub


def assert_exact(hub):
    """Nothing was lost, counted twice, or bent on its way; what still waited at the end was folded."""
    core = hub.core
    vector, version = load_model(hub.model_file, hub.spec)
    assert 0 < version == core.version <= core.updates_applied
    if core.policy_engine.policy.aggregate.answer == "now":
        assert version == core.updates_applied
    assert np.array_equal(vector, core.updates_applied * pattern(hub.spec))
    members = core.members.members.values()
    assert core.updates_applied == sum(member.seq_last for member in members)
    assert core.updates_applied == sum(member.updates_applied for member in members)
    assert (core.updates_rejected, core.duplicates) == (0, 0)
    core.check()


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["identity", "float16"])
@pytest.mark.parametrize(
    ("spec", "piece_bytes"),
    [(SMALL, 64 * KIB), (LARGE, 64 * KIB), (LARGE, 1024 * KIB), (SMALL, 4096 * KIB), (LARGE, 8192 * KIB)],
    ids=["small in 64 KiB", "large in 64 KiB", "large in 1 MiB", "small in one", "large in one"],
)
@both_answers
async def test_payloads_arrive_exactly_both_ways(tmp_path, aggregate, spec, piece_bytes, codec):
    updates, agents = 12, 2
    limits = Limits(piece_bytes=ByteCount(piece_bytes))
    hub = await train(
        tmp_path, spec, aggregate=aggregate, agents=agents, updates=updates, codec=codec, limits=limits
    )
    assert_exact(hub)
    folded_at_once = 1 if aggregate.answer == "now" else agents
    assert updates <= hub.core.updates_applied < updates + folded_at_once
    assert hub.core.messages_refused == 0
    payload_bytes = spec.nbytes // (1 if codec == "identity" else 2)
    pieces = -(-payload_bytes // piece_bytes)
    accepted = hub.core.messages_accepted
    if pieces > 1:  # else how many go in one message is a matter of how fast the link is found to be
        assert accepted["piece"] >= updates * pieces
        assert hub.sent["Piece"] >= updates * pieces
        assert hub.sent["Credit"] >= updates
        assert accepted["credit"] >= updates
