"""What the devices of a soak were told of their updates, held against what their hub has counted."""

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
    """What one device tells in its log: the numbers of its updates, and the outcome of each that was answered.

    With `keeps` it keeps an unanswered update over a kill, and pushes it again.
    """

    keeps: bool
    outcomes: dict[int, str] = field(default_factory=dict)
    duplicates: int = 0
    cut_off: set[int] = field(default_factory=set)
    """Updates that had no answer when a start of the device ended."""

    _pushed: int = 0

    def begin(self) -> None:
        """Note that the device starts: it may forget its last update."""
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
    """What a hub has counted: for each device the last number and how many were applied; and the whole run's sums.

    `outcomes` has how an update ended of which the journal still tells; a second one of the same number is in
    `twice`. With `same_model` the journal leads to the model that the hub has left.
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
    """Replay what the journal of an ended hub still tells."""
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
        {one["id"]: (one["seq_last"], one["updates_applied"]) for one in summary["devices"]},
        summary["updates_applied"],
        summary["updates_rejected"],
        summary["updates_buffered"],
        summary["duplicates"],
        outcomes,
        tuple(twice),
        same_model,
    )


def find_miscounts(answers: Mapping[str, Answers], counted: Counted) -> list[str]:
    """Return a sentence for everything that does not fit if each update counts exactly once.

    A hub numbers the updates of a device without a gap. So the sums must be the last numbers, and a device must
    know the outcome of every number, but for one that a kill cut off before the answer came.
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
