"""Real agents in their own processes, with a set step time and recorded events."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from ctypes import c_double
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.hub_process import make_spec
from benchmarks.processes import peak_resident_bytes
from edgeasync.core.device.events import DeviceEvent, ModelInstalled
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Fetch, Pong, Push, Welcome
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.training.plan import read_plan
from edgeasync.training.trainer import StepResult, Trainer
from tests.support.parts.agents import agent_parts

LOOK_S = 0.05


class Waits:
    """A trainer without vectors of its own; each step waits, then adds to every parameter."""

    def __init__(self, spec: ParameterSpec, step_s: float = 0.0, change: float = 0.0) -> None:
        self.spec = spec
        self._step_s, self._change = step_s, change

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Take a step, without a core."""
        time.sleep(self._step_s)
        if self._change:
            self._parameters += self._change
        return StepResult(loss=1.0, examples=1)


class PacedTrainer:
    """Stretch every local step of another trainer to a given time, which may be shared."""

    def __init__(self, trainer: Trainer, step_s: c_double) -> None:
        self._trainer = trainer
        self._step_s = step_s

    @property
    def spec(self) -> ParameterSpec:
        """The wrapped trainer's spec."""
        return self._trainer.spec

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._trainer.begin(parameters)

    def step(self) -> StepResult:
        """Take a step, then wait until the step time has passed."""
        started_s = time.perf_counter()
        result = self._trainer.step()
        time.sleep(max(0.0, self._step_s.value - (time.perf_counter() - started_s)))
        return result


@dataclass(frozen=True)
class Assigned:
    """An assignment as the device received it."""

    at_s: float
    local_steps: int


@dataclass(frozen=True)
class Member:
    """A device: its data, its step time in seconds, a wrapper of its trainer, and settings.

    Without `hub` in `keys`, it connects to its fleet's hub.
    """

    data: Dataset
    step_s: float | c_double
    wrap: Callable[[Trainer], Trainer] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)


def run_agent(address: str, number: int, member: Member, pipe: "Connection[Assigned, None]") -> None:
    """Train as `device-NUMBER` until killed; report every assignment."""
    step_s = member.step_s if isinstance(member.step_s, c_double) else c_double(member.step_s)

    def make_trainer(welcome: Welcome) -> Trainer:
        trainer = read_plan(welcome.settings).make_trainer(member.data, number)
        return PacedTrainer(member.wrap(trainer) if member.wrap else trainer, step_s)

    threadpool_limits(1)  # a small device has few cores, and here many share them
    identity = DeviceIdentity(f"device-{number}", f"{number:032x}", 1)
    keys = {"hub": address, **member.keys}

    def note(event: DeviceEvent) -> None:
        if isinstance(event, ModelInstalled):
            pipe.send(Assigned(time.monotonic(), event.assignment.local_steps))

    agent = AgentRuntime(
        *agent_parts(make_trainer, identity=identity, examples=len(member.data), **keys), observe=note
    )
    uvloop.run(agent.run())


@dataclass(frozen=True)
class Noted:
    """An agent's measurements.

    They are ping round trips, resumed transfers, memory, steps with their times, and the link's
    rate.
    """

    round_trips_s: list[float]
    fetches_on: int
    pushes: int
    peak_bytes: int
    before_bytes: int
    steps: list[tuple[float, int]]
    rate: float


class NotingAgent(AgentRuntime):
    """An agent that records ping round trips, pushes, and fetches that resume a transfer."""

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


def run_noting_agent(
    length: int, keys: Mapping[str, Any], seconds: float | None, pipe: "Connection[Noted, None]"
) -> None:
    """Run an agent for some seconds, or until the hub ends; send its measurements."""
    round_trips_s: list[float] = []
    steps: list[tuple[float, int]] = []
    identity = DeviceIdentity("device", f"{7:032x}", 1)
    agent = NotingAgent(*agent_parts(lambda _: Waits(make_spec(length), change=0.5), identity=identity, **keys))
    agent.note(round_trips_s)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # so that the peak counts from now
    before_bytes = peak_resident_bytes(os.getpid())

    async def watch() -> None:
        until_s = time.monotonic() + (seconds or float("inf"))
        while time.monotonic() < until_s:
            steps.append((time.monotonic(), agent.training.gate.steps_total))
            await asyncio.sleep(LOOK_S)
        agent.request_stop()

    async def train() -> None:
        watching = asyncio.create_task(watch())
        await agent.run()
        watching.cancel()

    uvloop.run(train())
    share = agent.engine.transfers.share
    peak_bytes, rate = peak_resident_bytes(os.getpid()), (share and share.bytes_per_s) or 0.0
    pipe.send(Noted(round_trips_s, agent.noted_fetches, agent.noted_pushes, peak_bytes, before_bytes, steps, rate))
