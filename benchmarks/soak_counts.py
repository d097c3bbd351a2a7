"""Compare the outcomes that a soak's devices received with the hub's own counts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgeasync.durable.run_events import Line, ReplayedUpdate
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.durable.run_replay import RunReplay
from edgeasync.graphs.model_file import load_model

_PUSHED = re.compile(r"edgeasync\.frames out - Push\(session=\.\.\., seq=(\d+),")
_TOLD = re.compile(
    r"edgeasync\.frames in - (?:Assignment\(.*?ack=)?Ack\(seq=(\d+), outcome=(?:Duplicate\(first=)?(\w+)\("
)
REJECTED = "Rejected"


@dataclass
class Answers:
    """What one device's log reports: its update numbers, and the outcome of each answered one.

    With `keeps`, it keeps an unanswered update across a kill, and pushes it again.
    """

    keeps: bool
    outcomes: dict[int, str] = field(default_factory=dict)
    duplicates: int = 0
    cut_off: set[int] = field(default_factory=set)
    """Updates without an answer when a life of the device ended."""

    _pushed: int = 0

    def begin(self) -> None:
        """Record that the device starts, and may forget its last update."""
        if self._pushed and self._pushed not in self.outcomes:
            self.cut_off.add(self._pushed)
        self._pushed = 0

    def read(self, line: str) -> None:
        """Read a line of the device's log."""
        if found := _PUSHED.search(line):
            self._pushed = int(found[1])
        elif found := _TOLD.search(line):
            self.duplicates += "outcome=Duplicate" in line
            self.outcomes.setdefault(int(found[1]), found[2])

    def unanswered(self, last: int) -> list[int]:
        """Return the updates up to `last` that were never answered."""
        return [number for number in range(1, last + 1) if number not in self.outcomes]


@dataclass(frozen=True)
class Counted:
    """A hub's counts: for each device its last number and applied updates, and the sums.

    - `outcomes`: the final outcome of each update in the journal.
    - `twice`: updates with a second final outcome.
    - `same_model`: whether the journal reproduces the model that the hub left.
    """

    devices: Mapping[str, tuple[int, int]]
    applied: int
    rejected: int
    waiting: int
    duplicates: int
    outcomes: Mapping[tuple[str, int], str] = field(default_factory=dict)
    twice: tuple[tuple[str, int], ...] = ()
    same_model: bool = True


def read_run(run: Path) -> Counted:
    """Replay what remains of an ended hub's journal."""
    outcomes: dict[tuple[str, int], str] = {}
    twice = []

    def on_line(line: Line) -> bool:
        if isinstance(line, ReplayedUpdate) and line.outcome in ("applied", "buffered", "rejected"):
            if (key := (line.device, line.seq)) in outcomes:
                twice.append(key)
            outcomes[key] = line.outcome.capitalize()
        return True

    replay = RunReplay(run)
    try:
        replay.tell(on_line)
        summary = replay.summary()
        vector, _ = load_model(run / MODEL_FILE, replay.spec)
        same_model = np.array_equal(vector, replay.snapshot.vector)
    finally:
        replay.close()
    return Counted(
        {one.id: (one.seq_last, one.updates_applied) for one in summary.devices},
        summary.updates_applied,
        summary.updates_rejected,
        summary.updates_buffered,
        summary.duplicates,
        outcomes,
        tuple(twice),
        same_model,
    )


def find_miscounts(answers: Mapping[str, Answers], counted: Counted) -> list[str]:
    """Return a sentence for every count that contradicts exactly-once counting.

    A hub numbers a device's updates without gaps. So the sums must equal the last numbers. A device
    must know the outcome of every number, except for one that a kill cut off before the answer.
    """
    found = [f"{device}: update {number} ended twice" for device, number in counted.twice]
    if not counted.same_model:
        found.append("the journal leads to another model than the one that the hub has left")
    numbered = sum(last for last, _ in counted.devices.values())
    ended = counted.applied + counted.rejected + counted.waiting
    if ended != numbered:
        found.append(f"the hub has counted {ended} updates, and the devices' last numbers make {numbered}")
    if (applied := sum(each for _, each in counted.devices.values())) != counted.applied:
        found.append(f"the hub has applied {counted.applied} updates, and its devices have {applied} applied")
    for device, told in answers.items():
        last, applied = counted.devices.get(device, (0, 0))
        found += [f"{device}: {sentence}" for sentence in _miscounts_of(told, last, last - applied)]
    for (device, number), outcome in counted.outcomes.items():
        heard = answers[device].outcomes.get(number)
        if heard is not None and (heard == REJECTED) != (outcome == REJECTED):
            found.append(f"{device}: update {number} was answered {heard}, and the journal says {outcome}")
    return found


def _miscounts_of(told: Answers, last: int, rejected: int) -> list[str]:
    unanswered = told.unanswered(last)
    found = [
        f"update {number} was answered, and the hub knows only {last}" for number in told.outcomes if number > last
    ]
    forgotten = set() if told.keeps else told.cut_off
    found += [
        f"update {number} counts, and its answer never came"
        for number in unanswered
        if number not in forgotten and number != last
    ]
    heard = sum(outcome == REJECTED for outcome in told.outcomes.values())
    if not heard <= rejected <= heard + len(unanswered):
        found.append(f"{heard} updates were answered as rejected, and {rejected} of {last} are not in the model")
    return found
