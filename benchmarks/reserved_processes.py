"""The processes of the benchmark of a reserved share: a hub, and an agent that notes its steps."""

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from benchmarks.link_processes import Adder, spec_of
from edgeasync.config import FilePath
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.settings import FLOAT32, CheckpointSettings
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from tests.support.parts.agents import agent_parts

SHARE = 0.2
LENGTH = 1 << 18
STEP_S = 0.02
LOOK_S = 0.05


def run_hub(steps: int, run: str, pipe: "Connection[str, None]") -> None:
    """Run a hub; send its address."""

    def on_report(report: HubReport) -> None:
        if report.event == "listening":
            pipe.send(hub.address)

    hub = HubRuntime(
        RunSettings(
            hub=HubSection(bind="tcp://127.0.0.1:*", run=FilePath(run)),
            policy=Policy(
                aggregate=ImmediateAggregator(),
                optimizer=(SGD(),),
                frequency=FixedFrequency(local_steps=steps),
                delay_steps=steps,
                monitor=Monitor(detectors=()),
            ),
            codec=FLOAT32,
            checkpoint=CheckpointSettings(every="1000 hours"),
        ),
        HostedModel(spec=spec_of(LENGTH), initial=lambda: np.zeros(LENGTH, np.float32)),
        on_report=on_report,
    )
    uvloop.run(hub.run())


def run_agent(address: str, seconds: float, pipe: "Connection[Any, None]") -> None:
    """Train for some seconds; send the steps with their times, and the link's rate as it was measured."""
    agent = AgentRuntime(
        *agent_parts(
            lambda _: Adder(spec_of(LENGTH)),
            identity=DeviceIdentity("device", f"{7:032x}", 1),
            hub=address,
            step_s_min=STEP_S,
            link_share=SHARE,
        )
    )
    steps: list[tuple[float, int]] = []

    async def watch() -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            steps.append((time.monotonic(), agent.training.gate.steps_total))
            await asyncio.sleep(LOOK_S)
        agent.request_stop()

    async def train() -> None:
        await asyncio.gather(agent.run(), watch())

    uvloop.run(train())
    pipe.send((steps, None if agent.engine.transfers.share is None else agent.engine.transfers.share.bytes_per_s))
