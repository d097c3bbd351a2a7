"""The processes of the link benchmark: a hub, and an agent that notes how long its pings take and its memory."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.processes import peak_resident_bytes
from edgeasync.config import FilePath
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.settings import FLOAT32, CheckpointSettings, Liveness, StopCondition
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Fetch, Pong, Push
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.training.trainer import StepResult
from tests.support.parts.agents import agent_parts

HEARTBEAT_S = 0.5
LEASE_S = 15.0


@dataclass(frozen=True)
class Noted:
    """The agent's measurements: seconds of its pings, how often it resumed a transfer, and bytes of memory."""

    round_trips_s: list[float]
    fetches_on: int
    pushes: int
    peak_bytes: int
    before_bytes: int


class Adder:
    """A trainer with no vectors of its own: it adds a little to every parameter."""

    def __init__(self, spec: ParameterSpec) -> None:
        self.spec = spec

    def begin(self, parameters: Vector) -> None:
        """Train these parameters."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Take a step."""
        self._parameters += np.float32(0.5)
        return StepResult(loss=0.0, examples=1)


class NotingAgent(AgentRuntime):
    """An agent that notes its pings' round trips, its pushes, and its fetches that resume a transfer."""

    noted_fetches = 0
    noted_pushes = 0

    def note(self, round_trips_s: list[float]) -> None:
        """Append round trips to this list from now on."""
        self._round_trips_s = round_trips_s

    def _on_message(self, header: bytes, payload: Buffer | None) -> None:
        super()._on_message(header, payload)
        round_trip_s = self.core.round_trip_s
        if isinstance(wire.decode(header), Pong) and round_trip_s is not None:
            self._round_trips_s.append(round_trip_s)

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send a message; count pushes, and fetches that resume a transfer."""
        message = wire.decode(header)
        self.noted_fetches += isinstance(message, Fetch) and message.partial is not None
        self.noted_pushes += isinstance(message, Push)
        super().send(header, payload)


def spec_of(length: int) -> ParameterSpec:
    """Return a layout of one array."""
    return ParameterSpec((Parameter("w", (length,)),))


def run_hub(length: int, updates: int | None, run: str, pipe: "Connection[str, None]") -> None:
    """Run a hub; send its address and, at the end, the reason."""
    told: list[str] = []

    def on_report(report: HubReport) -> None:
        if report.event == "listening":
            pipe.send(hub.address)
        told.append(report.event)

    hub = HubRuntime(
        RunSettings(
            hub=HubSection(bind="tcp://127.0.0.1:*", run=FilePath(run), stop=StopCondition(updates=updates)),
            policy=Policy(
                aggregate=ImmediateAggregator(),
                optimizer=(SGD(),),
                frequency=FixedFrequency(local_steps=1),
                monitor=Monitor(detectors=()),
            ),
            codec=FLOAT32,
            liveness=Liveness(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S),
            checkpoint=CheckpointSettings(every="1000 hours"),
        ),
        HostedModel(spec=spec_of(length), initial=lambda: np.zeros(length, np.float32)),
        on_report=on_report,
    )
    pipe.send(uvloop.run(hub.run()))


def run_agent(length: int, address: str, cap: int | None, pipe: "Connection[Noted, None]") -> None:
    """Run an agent until the hub has finished, or the parent sends a stop; send its measurements."""
    round_trips_s: list[float] = []
    agent = NotingAgent(
        *agent_parts(
            lambda _: Adder(spec_of(length)),
            identity=DeviceIdentity("device", f"{7:032x}", 1),
            hub=address,
            bandwidth_bytes_per_s_max=cap,
        )
    )
    agent.note(round_trips_s)
    before = _peak_bytes(reset=True)

    async def train() -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), _stop_once(agent, pipe))
        await agent.run()

    uvloop.run(train())
    pipe.send(Noted(round_trips_s, agent.noted_fetches, agent.noted_pushes, _peak_bytes(), before))


def _stop_once(agent: AgentRuntime, pipe: "Connection[Noted, None]") -> Callable[[], None]:
    def stop() -> None:
        pipe.recv()
        agent.request_stop()

    return stop


def _peak_bytes(*, reset: bool = False) -> int:
    """Return the most memory this process has had resident (Linux); with `reset`, since now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_resident_bytes(os.getpid())
