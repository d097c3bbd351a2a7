"""Transfers over real TCP through a proxy that breaks the connection: they resume where they were."""

import asyncio

import numpy as np
import pytest

from edgeasync import Policy
from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import FLOAT32, Limits, Liveness, StopCondition
from edgeasync.graphs.model_file import load_model
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Credit, Fetch, Push
from edgeasync.protocol.transfers import CreditWindow
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from tests.support.parts.agents import agent_parts
from tests.support.parts.hubs import run_settings, zeros
from tests.support.programs.processes import PATIENCE_S
from tests.support.programs.proxy import CuttingProxy
from tests.support.simulation.adders import Adder, pattern

SPEC = ParameterSpec((Parameter("weight", (5_000_000,)),))
PIECE_BYTES = 1 << 16
CUTS = [part * SPEC.nbytes // 4 for part in (1, 2, 3)]
LOST_AT_A_CUT = CreditWindow(PIECE_BYTES).bytes_max + 2 * PIECE_BYTES


class ListeningHub(HubRuntime):
    """A hub that keeps the headers it sees."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.heard, self.said = [], []

    def receive(self, peer, header, payload, sender):
        self.heard.append(wire.decode(header))
        super().receive(peer, header, payload, sender)

    def send(self, peer, header, payload):
        self.said.append(wire.decode(header))
        super().send(peer, header, payload)


async def train_through_cuts(run, *, cuts_up=(), cuts_down=()):
    """Train for one update through the proxy; return hub, proxy and what the device was told."""
    listening, told = asyncio.Event(), []
    hub = ListeningHub(
        run_settings(
            run,
            "tcp://127.0.0.1:*",
            policy=Policy(
                aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency(local_steps=1)
            ),
            codec=FLOAT32,
            stop=StopCondition(updates=1),
            liveness=Liveness(heartbeat_s=0.5, lease_s=4 * PATIENCE_S),  # waiting for the lease is no way out
            limits=Limits(piece_bytes=ByteCount(PIECE_BYTES)),
        ),
        zeros(SPEC),
        on_report=lambda report: listening.set() if report.event == "listening" else None,
    )

    async def run_agent():
        await listening.wait()
        async with CuttingProxy(
            int(hub.address.rpartition(":")[2]), cuts_up=cuts_up, cuts_down=cuts_down
        ) as proxy:
            agent = AgentRuntime(
                *agent_parts(lambda _: Adder(SPEC), hub=f"tcp://127.0.0.1:{proxy.port}"),
                on_report=lambda report: told.append(report.event),
            )
            assert await agent.run() == "the hub has finished training"
        return proxy

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        hub_task = group.create_task(hub.run())
        agent_task = group.create_task(run_agent())
    assert hub_task.result() == "finished"
    vector, version = load_model(hub.model_file, SPEC)
    assert version == 1
    assert np.array_equal(vector, pattern(SPEC))
    assert hub.core.duplicates == 0
    return hub, agent_task.result(), told


def of_kind(messages, kind):
    return [message for message in messages if isinstance(message, kind)]


@pytest.mark.asyncio
async def test_a_model_goes_on_where_it_was_cut(tmp_path):
    hub, proxy, told = await train_through_cuts(tmp_path, cuts_down=CUTS)
    assert proxy.cuts == told.count("disconnected") == len(CUTS)
    fetches, assignments = of_kind(hub.heard, Fetch), of_kind(hub.said, Assignment)
    assert [fetch.partial for fetch in fetches] == [None] + [assignments[0].checksum] * len(CUTS)
    begun = [
        next(c.received_bytes for c in of_kind(hub.heard, Credit) if c.transfer == assignment.transfer)
        for assignment in assignments[: len(fetches)]
    ]
    assert begun[0] == 0
    for offset, cut in zip(begun[1:], CUTS, strict=True):
        assert cut - LOST_AT_A_CUT * len(CUTS) <= offset <= cut
    assert proxy.bytes_down <= SPEC.nbytes * 1.01 + len(CUTS) * LOST_AT_A_CUT


@pytest.mark.asyncio
async def test_a_push_goes_on_where_it_was_cut(tmp_path):
    hub, proxy, told = await train_through_cuts(tmp_path, cuts_up=CUTS)
    assert proxy.cuts == told.count("disconnected") == len(CUTS)
    pushes = of_kind(hub.heard, Push)
    assert {(push.seq, push.checksum) for push in pushes} == {(1, pushes[0].checksum)}
    begun = [
        next(c.received_bytes for c in of_kind(hub.said, Credit) if c.transfer == push.transfer) for push in pushes
    ]
    assert begun[0] == 0
    for offset, cut in zip(begun[1:], CUTS, strict=True):
        assert cut - LOST_AT_A_CUT * len(CUTS) <= offset <= cut
    assert proxy.bytes_up <= SPEC.nbytes * 1.01 + len(CUTS) * LOST_AT_A_CUT
