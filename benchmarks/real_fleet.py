"""A fleet of real processes on one machine: a default hub, and agents with set step times."""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agent_process import Member, run_agent
from benchmarks.processes import Child, Children
from benchmarks.report import Form
from edgeasync.durable.run_events import Line, ReplayedUpdate, RunEvent
from edgeasync.durable.run_replay import RunReplay
from edgeasync.net.status import fetch_status
from edgeasync.parameters import Vector
from edgeasync.training.numpy_models import MlpModel

LAST = 8
"""The final accuracy is the mean over this many models, one second apart."""


@dataclass(frozen=True)
class Story:
    """A run that has ended.

    - `models`: the models of its last seconds.
    - `devices`: the devices' entries in the status.
    - `steps`: all local steps.
    - `alarms`: in order of time.
    - `warned`: after how many of its own updates each device had its first alarm, in order of the
      alarms.
    """

    models: Sequence[Vector]
    devices: Sequence[Mapping[str, Any]]
    steps: int
    alarms: Sequence[RunEvent]
    warned: Mapping[str, int]
    rollbacks: int


def read_story(run: Path) -> Story:
    """Replay a run's journal.

    Raises `RuntimeError` if the journal no longer starts with the run.
    """
    models: deque[Vector] = deque(maxlen=LAST)
    updates: Counter[str] = Counter()
    alarms: list[RunEvent] = []
    warned: dict[str, int] = {}
    steps, next_s = 0, 0.0
    replay = RunReplay(run)

    def note(line: Line) -> bool:
        nonlocal steps, next_s
        if isinstance(line, ReplayedUpdate) and line.outcome != "duplicate":
            updates[line.device] += 1
            steps += line.local_steps
        elif isinstance(line, RunEvent) and line.event == "alarm":
            alarms.append(line)
            if line.device:
                warned.setdefault(line.device, updates[line.device])
        if line.hub_s >= next_s:
            models.append(replay.snapshot.vector)
            next_s = line.hub_s + 1.0
        return True

    try:
        if replay.beginning.version:
            raise RuntimeError(f"{run}: the journal begins at version {replay.beginning.version}; run it shorter")
        replay.tell(note)
        models.append(replay.snapshot.vector)
        return Story(models, replay.devices(), steps, alarms, warned, replay.summary().rollbacks)
    finally:
        replay.close()


SETTINGS = """
[hub]
bind = "tcp://127.0.0.1:*"
run = "run"
quiet = {quiet}
[model]
kind = "mlp"
inputs = {model.inputs}
hidden = {hidden}
classes = {model.classes}
[local]
optimizer = [{{ kind = "sgd", learning_rate = {learning_rate} }}]
{more}
"""

ANSWER_S = 60.0


class Effort(NamedTuple):
    """How many runs, of how many seconds, beside how many busy loops."""

    runs: int
    seconds: float
    loops: tuple[int, ...]


EFFORTS = {
    Form.FULL: Effort(3, 30.0, (0, 2)),
    Form.SHORT: Effort(1, 15.0, (0, 2)),
    Form.QUICK: Effort(1, 1.0, (2,)),
}
"""Efforts of benchmarks that repeat a virtual run with processes."""


class RealFleet:
    """A hub, and its agents `device-1` and so on in their own processes.

    `run_fleet` creates it.
    """

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder, self._children = folder, children
        self.agents: list[Child] = []
        command = [sys.executable, "-m", "edgeasync", "hub", "hub.toml", "--json"]
        with (folder / "events").open("wb") as events:
            self._hub = subprocess.Popen(command, stdout=events, cwd=folder)

    @property
    def status(self) -> Mapping[str, Any]:
        """The hub's current status."""
        return fetch_status(self.address, ANSWER_S)

    @property
    def devices(self) -> Sequence[Mapping[str, Any]]:
        """The devices' entries in the hub's current status."""
        return list(self.status["devices"])

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """The hub's events so far."""
        lines = (self._folder / "events").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def updates_of(self, name: str) -> int:
        """Return how many of a device's updates are applied."""
        return sum(device["updates_applied"] for device in self.devices if device["id"] == name)

    def wait_until_listens(self) -> None:
        """Wait for the hub's address."""
        until_s = time.monotonic() + ANSWER_S
        while time.monotonic() < until_s and self._hub.poll() is None:
            for event in self.events:
                if event["event"] == "listening":
                    self.address = str(event["detail"])
                    return
            time.sleep(0.05)
        raise RuntimeError("the hub did not start")

    def start(self, member: Member) -> None:
        """Start an agent."""
        self.agents.append(self._children.start(run_agent, self.address, len(self.agents) + 1, member))

    def wait_until_trains(self) -> None:
        """Wait until each agent has received an answer."""
        until_s = time.monotonic() + ANSWER_S
        while sum(device["pushes_answered"] > 0 for device in self.devices) < len(self.agents):
            if time.monotonic() > until_s:
                raise RuntimeError("not all devices train")
            time.sleep(0.2)

    def train(self, seconds: float) -> Story:
        """Train for this time after each agent has an answer, then stop all and read the run."""
        self.wait_until_trains()
        time.sleep(seconds)
        self.end()
        return read_story(self._folder / "run")

    def end(self) -> None:
        """Stop the agents, then the hub."""
        for each in self.agents:
            each.kill()
        self._hub.terminate()
        self._hub.wait()


@contextmanager
def run_fleet(
    model: MlpModel, learning_rate: float, members: Sequence[Member], *, quiet: bool = True, more: str = ""
) -> Iterator[RealFleet]:
    """Train a hub and its agents until the block ends; `more` is added to the hub's settings."""
    with tempfile.TemporaryDirectory() as name, Children("benchmarks.agent_process") as children:
        text = SETTINGS.format(
            quiet=str(quiet).lower(),
            model=model,
            hidden=list(model.hidden),
            learning_rate=learning_rate,
            more=more,
        )
        Path(name, "hub.toml").write_text(text, encoding="utf-8")
        fleet = RealFleet(Path(name), children)
        try:
            fleet.wait_until_listens()
            for member in members:
                fleet.start(member)
            yield fleet
        finally:
            fleet.end()
