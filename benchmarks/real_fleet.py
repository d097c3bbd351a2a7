"""A fleet of real processes on one machine: a hub with its defaults, and agents whose steps take a given time."""

import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_double
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.frequency_processes import PacedTrainer
from benchmarks.real_story import Story, read_story
from benchmarks.report import Form
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

ANSWER_S = 60.0


class Effort(NamedTuple):
    """How many runs, for how many seconds each, beside how many busy loops."""

    runs: int
    seconds: float
    loops: tuple[int, ...]


EFFORTS = {
    Form.FULL: Effort(3, 30.0, (0, 2)),
    Form.SHORT: Effort(1, 15.0, (0, 2)),
    Form.QUICK: Effort(1, 1.0, (2,)),
}
"""Of benchmarks that repeat a virtual run on processes."""


class Member(NamedTuple):
    """A device: its data, the seconds of a local step, and what wraps its trainer, if anything does."""

    data: Dataset
    step_s: float
    wrap: Callable[[Trainer], Trainer] | None = None


class RealFleet:
    """A hub and its agents, while they run; `run_fleet` makes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._agents: list[BaseProcess] = []
        command = [sys.executable, "-m", "edgeasync", "hub", str(folder / "hub.toml"), "--json"]
        with (folder / "events").open("wb") as events:
            self._hub = subprocess.Popen(command, stdout=events, cwd=folder)

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
        lines = (self._folder / "events").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def start(self, members: Sequence[Member]) -> None:
        """Start the agents once the hub listens."""
        self.address = self._wait_for_address()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.real_fleet"])
        for number, member in enumerate(members):
            process = context.Process(target=run_agent, args=(self.address, number, *member), daemon=True)
            process.start()
            self._agents.append(process)

    def train(self, seconds: float) -> Story:
        """Let the agents train for this time since each has had an answer, end them, and read the run."""
        until_s = time.monotonic() + ANSWER_S
        while sum(device["pushes_answered"] > 0 for device in self.devices) < len(self._agents):
            if time.monotonic() > until_s:
                raise RuntimeError("not all devices train")
            time.sleep(0.2)
        time.sleep(seconds)
        self.end()
        return read_story(self._folder / "run")

    def end(self) -> None:
        """End the agents, then the hub."""
        for each in self._agents:
            each.kill()
        for each in self._agents:
            each.join()
        self._hub.terminate()
        self._hub.wait()

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
        fleet = RealFleet(folder)
        try:
            fleet.start(members)
            yield fleet
        finally:
            fleet.end()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many cores busy until the block ends."""
    with ExitStack() as stack:
        for _ in range(count):
            process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
            process.start()
            stack.callback(process.kill)
        yield


def _spin() -> None:
    while True:
        pass


def run_agent(
    address: str, number: int, data: Dataset, step_s: float, wrap: Callable[[Trainer], Trainer] | None
) -> None:
    """Train for the hub until killed, with steps of this time."""

    def make_trainer(welcome: Welcome) -> Trainer:
        trainer = read_plan(welcome.settings).make_trainer(data, number)
        return PacedTrainer(wrap(trainer) if wrap else trainer, c_double(step_s))

    threadpool_limits(1)  # a small device has few cores, and here many share them
    identity = DeviceIdentity(f"device-{number + 1}", f"{number:032x}", 1)
    agent = AgentRuntime(*agent_parts(make_trainer, identity=identity, hub=address, examples=len(data)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(agent.run())
