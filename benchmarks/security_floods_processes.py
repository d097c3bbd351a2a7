"""The processes of the floods benchmark: a hub with keys and a probe in its loop, and honest devices."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.exchange_servers import make_spec
from benchmarks.idle_processes import Looked, allow_many_files, run_probed
from edgeasync.config import FilePath
from edgeasync.core.device.effects import DeviceReport
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.settings import Limits, Liveness
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.training.trainer import StepResult
from tests.support.parts.agents import agent_parts

POLICY = Policy(aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=FixedFrequency(local_steps=1))
LENGTH = 250_000
"""A model of 1 MB."""

DEVICES_MAX = 1_000
STEP_S = 0.98
"""One exchange a second, and a little for the exchange."""


@dataclass(frozen=True)
class Seen:
    """What the hub's process has seen since the last question."""

    lag_p99_ms: float
    lag_max_ms: float
    lost: int
    live: int
    denied: dict[str, int]


def run_hub(run: str, keys: str, pipe: "Connection[Any, None]") -> None:
    """Run a hub with keys; send its address and the most memory it may need, then what it has seen when asked."""
    allow_many_files()
    lost: Counter[str] = Counter()

    def on_report(report: HubReport) -> None:
        if report.event == "listening":
            pipe.send((report.detail, most_bytes))
        lost[report.device_id] += report.event == "lost" and report.device_id.startswith("honest")

    hub = HubRuntime(
        RunSettings(
            hub=HubSection(bind="tcp://127.0.0.1:*", run=FilePath(run), keys=FilePath(keys)),
            policy=POLICY,
            limits=Limits(devices_max=DEVICES_MAX),
            liveness=Liveness(heartbeat_s=2.0, lease_s=6.0),
        ),
        HostedModel(spec=make_spec(LENGTH), initial=lambda: np.zeros(LENGTH, np.float32)),
        on_report=on_report,
    )
    most_bytes = sum(part.nbytes for part in hub.most_memory())

    def describe(looked: Looked) -> Seen:
        members = hub.core.members.members
        live = sum(member.live and name.startswith("honest") for name, member in members.items())
        seen = Seen(looked.lag_p99_ms, looked.lag_max_ms, lost.total(), live, hub.describe()["denied"])
        lost.clear()
        return seen

    run_probed(hub.run, pipe, describe)


class Patient:
    """A trainer whose step takes a second, and no processor."""

    def __init__(self, spec: ParameterSpec) -> None:
        self.spec = spec

    def begin(self, parameters: Vector) -> None:
        """Take the model."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Change the model a little."""
        time.sleep(STEP_S)
        self._parameters[::1000] += 0.001
        return StepResult(loss=1.0, examples=1)


def run_devices(folder: str, names: tuple[str, ...], pipe: "Connection[Any, Any]") -> None:
    """Run agents with keys; tell when all have had an answer, and then how many answers there were when asked."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        answered: Counter[str] = Counter()
        everybody = asyncio.Event()

        def note(name: str, report: DeviceReport) -> None:
            answered[name] += report.event == "answered"
            if len(+answered) == len(names) and not everybody.is_set():
                everybody.set()
                pipe.send(None)

        def answer() -> None:
            pipe.recv()
            pipe.send(answered.total())

        loop.add_reader(pipe.fileno(), answer)
        spec = make_spec(LENGTH)
        agents = [
            AgentRuntime(
                *agent_parts(
                    lambda _: Patient(spec),
                    identity=DeviceIdentity(name, f"{number + 1:032x}", 1),
                    keys=DeviceKeys(Path(folder) / name),
                ),
                on_report=lambda report, name=name: note(name, report),  # type: ignore[misc]
            )
            for number, name in enumerate(names)
        ]
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run())
                await asyncio.sleep(1.0 / len(agents))  # so that they exchange evenly over the second

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
