"""Write a run's history. Rows are collected on the event loop and written in another thread.

A row is written after its journal entry is durable, and before any checkpoint that covers the
entry. After a crash, the file therefore contains all rows up to the checkpoint. Replaying the
journal adds each later row exactly once.

If the history cannot be written, training continues without it.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from edgeasync.core.hub.effects import Discard, Fold, HubEffect, HubReport
from edgeasync.core.hub.events import Evaluated, HubEvent, PushArrived
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.outcomes import BUFFERED, first_outcome, is_weighed, outcome_name, why_dropped
from edgeasync.core.recovery.log import Log
from edgeasync.durable.disk import Disk
from edgeasync.durable.history import Correction, EvaluationRow, Row, UpdateRow, correct
from edgeasync.durable.history_file import HistoryFile
from edgeasync.errors import StorageError
from edgeasync.policies.aggregation import Contribution
from edgeasync.protocol.messages import Applied, Push

FLUSH_S = 2.0
"""Maximum time that a row waits to be written together with later rows."""

WAITING_MAX = 16_384
"""Maximum number of unwritten rows. If the disk fails for long, the oldest rows are dropped."""

METRICS_MAX, METRIC_NAME_MAX = 16, 64
"""Maximum number of metrics per row, and maximum length of a metric's name."""

REPLAYED_ROWS = 4_096
"""Number of rows that a replay writes at once."""

Result = TypeVar("Result")

Noted = tuple[int, tuple[Any, ...] | EvaluationRow | Correction]
"""The number of a journal entry, and a row.

An update is stored as a tuple of fields, because creating an object takes longer on the event loop.
"""


class HistoryWriter:
    """The history of a run.

    `note` must be called from one thread only. `resume` and `flush` must also be called from one
    thread only, which may be a different one.
    """

    def __init__(self, disk: Disk, rows_max: int) -> None:
        self.trouble = ""
        """The current reason why the history cannot be written, or empty."""
        self.lost = 0
        """Number of rows that were dropped while the disk failed."""
        self._file = HistoryFile(disk, rows_max)
        self._off = False
        self._waiting: deque[Noted] = deque(maxlen=WAITING_MAX)
        self._unwritten: list[Row] = []
        self._updates = self._evaluations = 0
        self._buffered: dict[int, int] = {}
        """Maps the payload handles of buffered updates to their row numbers."""

    def begin(self) -> list[str]:
        """Begin the history of a new run; return warnings."""
        return self._start(lambda: ([], self._file.begin()))

    def resume(self, entry: int, now_s: float, waiting: Sequence[Contribution] = ()) -> list[str]:
        """Continue a history after journal entry `entry` or, without a journal, time `now_s`.

        `waiting` contains the updates that are still buffered. They are matched with the last rows
        of their devices that have no final outcome. Returns warnings.
        """
        remarks = self._start(partial(self._file.resume, entry, now_s))
        for one in reversed(waiting):
            if rows := self._file.buffered.get(one.device_id):
                self._buffered[one.handle] = rows.pop()
        return remarks

    def note_folded(self, entry: int, now_s: float) -> None:
        """Record that all buffered updates were folded, if no event reported the fold."""
        for handle in tuple(self._buffered):
            self._correct(handle, "applied", entry, now_s)

    def _start(self, start: Callable[[], tuple[list[Row], str]]) -> list[str]:
        try:
            self._unwritten, remark = start()
        except OSError as error:
            self._off = True
            remark = f"cannot read the history, so this start adds no rows to it: {error.strerror or error}"
        self._updates, self._evaluations = self._file.updates, self._file.evaluations
        return [remark] if remark else []

    def note(self, core: HubCore, entry: int, event: object, effects: Sequence[HubEffect], now_s: float) -> bool:
        """Collect rows for an event that the core has processed; return whether there are any."""
        noted = False
        if type(event) is PushArrived:
            outcome, member = first_outcome(effects), core.members.by_peer(event.peer)
            if outcome is not None and member is not None:
                push, state = event.push, core.policy_engine.state
                name = "applied"
                staleness: int | None = member.measurements.staleness
                if type(outcome) is not Applied:  # avoids two calls on the event loop
                    name, staleness = outcome_name(outcome), staleness if is_weighed(outcome) else None
                self._updates = number = self._updates + 1
                row = (
                    number,
                    entry,
                    now_s,
                    state.version,
                    state.updates_applied,
                    member.device_id,
                    push.seq,
                    name,
                    push.loss_mean,
                    staleness,
                    push.local_steps,
                    push.examples,
                    push.payload_bytes,
                    metrics_of(push),
                )
                self._gather((entry, row))
                if name == BUFFERED:
                    self._buffered[event.handle] = number
                noted = True
        for effect in effects:
            kind = type(effect)
            if kind is Fold:
                for handle in effect.handles:  # type: ignore[union-attr]
                    self._correct(handle, "applied", entry, now_s)
                noted = True
            elif kind is Discard and effect.handle in self._buffered:  # type: ignore[union-attr]
                self._correct(effect.handle, why_dropped(effects), entry, now_s)  # type: ignore[union-attr]
                noted = True
            elif kind is HubReport and effect.event == "evaluated":  # type: ignore[union-attr]
                last = core.policy_engine.state.evaluations.last
                assert last is not None
                self._add_evaluation(entry, now_s, last)
                noted = True
        return noted

    def _correct(self, handle: int, outcome: str, entry: int, now_s: float) -> None:
        """Collect the final outcome of an update if it was buffered; otherwise do nothing."""
        row = self._buffered.pop(handle, None)
        if row is not None:
            self._gather((entry, Correction(row, entry, now_s, outcome)))

    def _add_evaluation(self, entry: int, now_s: float, found: Evaluated) -> None:
        self._evaluations += 1
        row = EvaluationRow(self._evaluations, entry, now_s, found.number, found.loss, found.accuracy)
        self._gather((entry, row))

    def _gather(self, noted: Noted) -> None:
        waiting = self._waiting
        if len(waiting) == WAITING_MAX:
            self.lost += 1
        waiting.append(noted)

    @property
    def waits(self) -> bool:
        """Whether any rows have not been written yet."""
        return bool(self._waiting or self._unwritten)

    @property
    def waiting(self) -> int:
        """Number of collected rows that the hub has not tried to write yet."""
        return len(self._waiting)

    def flush(self, through: float = math.inf, *, sync: bool = False) -> None:
        """Write the rows of all entries up to `through`. If `sync`, also sync the file.

        If this fails, set `trouble`.
        """
        waiting, rows = self._waiting, self._unwritten
        count = len(waiting)
        while count and waiting[count - 1][0] > through:
            count -= 1
        rows += [row_of(waiting.popleft()) for _ in range(count)]
        rows = self._unwritten = _corrected(rows)
        if self._off:
            rows.clear()
        try:
            if rows:
                self._file.append(rows)
                rows = self._unwritten = []
            if sync and not self._off:
                self._file.sync()
            self.trouble = ""
        except (OSError, StorageError) as error:
            self.trouble = getattr(error, "strerror", None) or str(error)
            self.lost += max(0, len(rows) - WAITING_MAX)
            self._unwritten = rows[-WAITING_MAX:]


def _corrected(rows: list[Row]) -> list[Row]:
    """Apply the corrections of rows in this list; keep the corrections of all other rows."""
    corrected = {row.row: row.outcome for row in rows if isinstance(row, Correction)}
    if not corrected:
        return rows
    here = {row.row for row in rows if isinstance(row, UpdateRow)}
    return [
        correct(row, corrected) if isinstance(row, UpdateRow) else row
        for row in rows
        if not (isinstance(row, Correction) and row.row in here)
    ]


def metrics_of(push: Push) -> dict[str, float] | None:
    """Return the metrics of an update, limited to the number and name length that a row allows."""
    if not push.metrics:
        return None
    told = islice(push.metrics.items(), METRICS_MAX)
    return {name: value for name, value in told if len(name) <= METRIC_NAME_MAX}


def row_of(noted: Noted) -> Row:
    """Convert a collected tuple or object to a row."""
    row = noted[1]
    return UpdateRow(*row) if isinstance(row, tuple) else row


class HistoryShell(Protocol):
    """The callbacks that a history needs from its shell."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` on the event loop after `delay_s` seconds."""

    def save_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the save thread, in order, then call `then` on the event loop."""

    def report(self, report: HubReport) -> None:
        """Report an event."""


class HistoryLog:
    """Observes every event of a hub's core on the event loop, and schedules writes of the history."""

    def __init__(self, writer: HistoryWriter, core: HubCore, log: Log | None, shell: HistoryShell) -> None:
        self._writer = writer
        self._core = core
        self._log = log
        self._shell = shell
        self._due = False
        self._told = ""

    def __call__(self, event: HubEvent, effects: list[HubEffect], now_s: float) -> None:
        """Observe an event and its effects."""
        entry = 0 if self._log is None else self._log.last
        if self._writer.note(self._core, entry, event, effects, now_s) and not self._due:
            self._due = True
            self._shell.after(FLUSH_S, self._flush)

    def _flush(self) -> None:
        through = math.inf if self._log is None else self._log.durable
        self._shell.save_in_background(partial(self._writer.flush, through), self._flushed)

    def _flushed(self, _: None) -> None:
        trouble = self._writer.trouble
        if trouble and not self._told:
            detail = f"cannot write the history: {trouble}; training continues without it"
            self._shell.report(HubReport("warning", detail=detail))
        self._told = trouble
        self._due = self._writer.waits
        if self._due:
            self._shell.after(FLUSH_S, self._flush)


Observe = Callable[[HubEvent, list[HubEffect], float], None]


def observing(
    writer: HistoryWriter | None, core: HubCore, log: Log | None, shell: HistoryShell, other: Observe | None
) -> Observe | None:
    """Return an observer that writes the history, if there is one, and then calls `other`, if it is set."""
    if writer is None:
        return other
    history = HistoryLog(writer, core, log, shell)
    if other is None:
        return history

    def both(event: HubEvent, effects: list[HubEffect], now_s: float) -> None:
        history(event, effects, now_s)
        other(event, effects, now_s)

    return both
