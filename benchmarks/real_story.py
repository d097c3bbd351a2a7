"""The story of a run on real processes, as its hub's journal tells it."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeasync.durable.run_events import Line, ReplayedUpdate, RunEvent
from edgeasync.durable.run_replay import RunReplay
from edgeasync.parameters import Vector

LAST = 8
"""The accuracy at the end is the mean over this many models, a second apart."""


@dataclass(frozen=True)
class Story:
    """A run that has ended.

    `models` are of its last seconds, `devices` are the devices' parts of the status, and `steps` counts all local
    steps. `alarms` are in their order. `warned` says after how many of its own updates a device was first warned
    of, in the order of the warnings.
    """

    models: Sequence[Vector]
    devices: Sequence[Mapping[str, Any]]
    steps: int
    alarms: Sequence[RunEvent]
    warned: Mapping[str, int]
    rollbacks: int


def read_story(run: Path) -> Story:
    """Replay the journal of a run; raises `RuntimeError` if it no longer begins with the run."""
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
        return Story(models, replay.devices(), steps, alarms, warned, replay.summary()["rollbacks"])
    finally:
        replay.close()
