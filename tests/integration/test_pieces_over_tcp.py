"""Models larger than a piece, both ways over real TCP, and the limits that keep a hub's memory bounded.

The trainers add a fixed pattern of small powers of two, which every codec here carries without loss, and the
policies here sum updates, so what a run must come to is known to the bit.
"""

import asyncio
from collections import Counter

import numpy as np
import pytest

from edgeasync import Policy
from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import CodecSettings, Limits, Liveness, StopCondition
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.graphs.model_file import load_model
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, QuorumAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.staleness import ConstantStaleness
from edgeasync.protocol import wire
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from tests.support.parts.agents import agent_parts
from tests.support.parts.hubs import run_settings, zeros
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
    """A hub that notes, at every message in and out, how much it holds and what it says."""

    def __init__(self, *arguments, **options):
        self.sent = Counter()
        self.peaks = Counter()
        self.enough = lambda core: False
        super().__init__(*arguments, **options)

    def send(self, peer, header, payload):
        message = wire.decode(header)
        self.sent[getattr(message, "code", type(message).__name__)] += 1
        self._note()
        super().send(peer, header, payload)

    def receive(self, peer, header, payload, sender):
        super().receive(peer, header, payload, sender)
        self._note()
        if self.enough(self.core):
            self.request_stop()

    def _note(self):
        engine = self._engine
        held = {
            "snapshots": engine.model.snapshots_alive,
            "updates": len(engine._intake.incoming) + engine._capacity.measuring + engine.model.updates_waiting,
        }
        for name, count in held.items():
            self.peaks[name] = max(self.peaks[name], count)


async def train(run, spec, *, aggregate, agents, limits, codec="identity", updates=None, enough=None):
    """Train over TCP until `updates` are applied, or until `enough` holds of the core; return the hub."""
    events = Counter()
    listening = asyncio.Event()
    devices = []

    def on_report(report):
        events[report.event] += 1
        if report.event == "listening":
            listening.set()
        if report.event == "stopping":  # which an agent outlives, waiting for its hub to come back
            for device in devices:
                device.request_stop()

    hub = WatchedHub(
        run_settings(
            run,
            "tcp://127.0.0.1:*",
            policy=Policy(
                staleness=ConstantStaleness(),
                aggregate=aggregate,
                optimizer=(SGD(),),
                frequency=FixedFrequency(local_steps=1),
            ),
            stop=StopCondition(updates=updates),
            liveness=Liveness(heartbeat_s=0.5, lease_s=PATIENCE_S),
            limits=limits,
            codec=CodecSettings(push=codec, model=codec, delta="off"),
        ),
        zeros(spec),
        on_report=on_report,
    )
    hub.enough = enough or hub.enough

    async def run_agents():
        await listening.wait()
        devices.extend(
            AgentRuntime(
                *agent_parts(
                    lambda _: Adder(spec),
                    identity=DeviceIdentity(f"device-{number}", f"{number:032x}", 1),
                    hub=hub.address,
                )
            )
            for number in range(agents)
        )
        return await asyncio.gather(*(device.run() for device in devices))

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        hub_task = group.create_task(hub.run())
        agents_task = group.create_task(run_agents())
    reason = "stopping" if updates is None else "finished"
    assert hub_task.result() == reason
    assert set(agents_task.result()) == {"stopped" if updates is None else "the hub has finished training"}
    assert events.pop("left", 0) <= agents
    events.pop("evaluated", None)  # which the devices' losses are, after a hundred updates
    assert events == {"listening": 1, "joined": agents, reason: 1}
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


@pytest.mark.asyncio
@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "bounds",
    [
        {"snapshots_max": 2},
        {"updates_held_max": 1},
        {"updates_held_max": 3},
        {"snapshots_max": 2, "updates_held_max": 1},
    ],
    ids=lambda bounds: " ".join(f"{name} {limit}" for name, limit in bounds.items()),
)
@both_answers
async def test_limits_hold_and_training_goes_on(tmp_path, aggregate, spec, bounds):
    def everyone_gave_twice(core):
        members = core.members.members.values()
        return len(members) == agents and all(member.updates_applied >= 2 for member in members)

    agents = 6
    limits = Limits(piece_bytes=ByteCount(64 * KIB), retry_after_s=0.05, **bounds)
    hub = await train(
        tmp_path, spec, aggregate=aggregate, agents=agents, limits=limits, enough=everyone_gave_twice
    )
    assert_exact(hub)
    assert hub.peaks["snapshots"] <= limits.snapshots_max + 2  # the current one, and one that is being folded
    assert hub.peaks["updates"] <= limits.updates_held_max
    if limits.updates_held_max == 1:
        assert hub.sent["busy"] > 0
