"""A fleet of real processes on one machine: a hub with its defaults, and agents whose steps take a given time."""

import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_double
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.frequency_processes import PacedTrainer
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.net.status import fetch_status
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.plan import read_plan
from edgeasync.training.trainer import Trainer
from tests.support.parts.agents import agent_parts

SETTINGS = """
[hub]
bind = "tcp://127.0.0.1:*"
run = "{run}"
quiet = {quiet}
[model]
kind = "mlp"
inputs = {model.inputs}
hidden = {hidden}
classes = {model.classes}
[local]
optimizer = [{{ kind = "sgd", learning_rate = {learning_rate} }}]
"""

ANSWER_S = 30.0


class Member(NamedTuple):
    """A device: its data, and the seconds of a local step."""

    data: Dataset
    step_s: float


class RealFleet:
    """A hub and its agents, while they run."""

    def __init__(self, events: Path, hub: "subprocess.Popen[bytes]") -> None:
        self._events = events
        self._hub = hub
        self.address = self._wait_for_address()

    @property
    def status(self) -> Mapping[str, Any]:
        """The hub's status now."""
        return fetch_status(self.address, ANSWER_S)

    @property
    def devices(self) -> Sequence[Mapping[str, Any]]:
        """The devices' parts of the hub's status now."""
        return list(self.status["devices"])

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """The hub's events so far."""
        return [json.loads(line) for line in self._events.read_text(encoding="utf-8").splitlines()]

    def _wait_for_address(self) -> str:
        until_s = time.monotonic() + ANSWER_S
        while time.monotonic() < until_s and self._hub.poll() is None:
            for event in self.events:
                if event["event"] == "listening":
                    return str(event["detail"])
            time.sleep(0.05)
        raise RuntimeError("the hub did not begin")


@contextmanager
def run_fleet(
    model: MlpModel, learning_rate: float, members: Sequence[Member], *, quiet: bool = True
) -> Iterator[RealFleet]:
    """Let a hub and its agents train until the block ends; agents are called `device-1` and so on."""
    processes: list[BaseProcess] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.real_fleet"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = SETTINGS.format(
            run=folder / "run",
            quiet=str(quiet).lower(),
            model=model,
            hidden=list(model.hidden),
            learning_rate=learning_rate,
        )
        (folder / "hub.toml").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "edgeasync", "hub", str(folder / "hub.toml"), "--json"]
        with (folder / "events").open("wb") as events:
            hub = subprocess.Popen(command, stdout=events, cwd=folder)
        try:
            fleet = RealFleet(folder / "events", hub)
            for number, member in enumerate(members):
                process = context.Process(target=run_agent, args=(fleet.address, number, *member), daemon=True)
                process.start()
                processes.append(process)
            yield fleet
        finally:
            for each in processes:
                each.kill()
            for each in processes:
                each.join()
            hub.terminate()
            hub.wait()


def run_agent(address: str, number: int, data: Dataset, step_s: float) -> None:
    """Train for the hub until killed, with steps of this time."""

    def make_trainer(welcome: Welcome) -> Trainer:
        return PacedTrainer(read_plan(welcome.settings).make_trainer(data, number), c_double(step_s))

    threadpool_limits(1)  # a small device has few cores, and here many share them
    identity = DeviceIdentity(f"device-{number + 1}", f"{number:032x}", 1)
    agent = AgentRuntime(*agent_parts(make_trainer, identity=identity, hub=address, examples=len(data)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(agent.run())
