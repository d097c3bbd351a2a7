"""The learning curve of a run before the hub's start, from the run's history."""

import contextlib
import math
from itertools import chain

from edgeasync.durable.disk import ReadableDisk
from edgeasync.durable.history import (
    FILE_BYTES_MAX,
    HISTORY_FILE,
    ROWS_READ_MAX,
    EvaluationRow,
    UpdateRow,
    blocks,
    scan,
)
from edgeasync.errors import StorageError
from edgeasync.measurements.medians import median
from edgeasync.protocol.feed import HistoryPoint
from edgeasync.protocol.wire import Buffer

POINTS_MAX = 500
"""Maximum number of points with the losses of updates, and of points with evaluations."""


def read_past_curve(disk: ReadableDisk) -> list[HistoryPoint]:
    """Return points of a run's history, in order; their times are those of the core's clock.

    A point has the median loss of some consecutive updates, or an evaluation. Blocks are read one
    after the other, so a long history needs little memory. If the history is missing or damaged,
    points are missing.
    """
    with contextlib.suppress(OSError, StorageError):
        if disk.size(HISTORY_FILE) <= FILE_BYTES_MAX:
            return _points(disk.read(HISTORY_FILE))
    return []


def _points(content: Buffer) -> list[HistoryPoint]:
    places = scan(content).places
    rows = sum(place.rows for place in places)
    if rows > ROWS_READ_MAX:
        return []
    every = math.ceil(rows / POINTS_MAX) or 1
    points: list[HistoryPoint] = []
    evaluated: list[HistoryPoint] = []
    losses: list[float] = []
    count = 0
    for row in chain.from_iterable(blocks(content, places)):
        if isinstance(row, EvaluationRow):
            loss = row.loss if math.isfinite(row.loss) else None
            updates = points[-1].updates if points else 0
            evaluated.append(HistoryPoint(row.time_s, row.version, updates, None, loss, row.accuracy))
        elif isinstance(row, UpdateRow):
            count += 1
            if row.loss is not None and math.isfinite(row.loss):
                losses.append(row.loss)
            if count % every == 0:
                loss = median(losses) if losses else None
                points.append(HistoryPoint(row.time_s, row.version, row.updates, loss, None, None))
                losses = []
    evaluated = evaluated[:: -(-len(evaluated) // POINTS_MAX) or 1]
    return sorted([*points, *evaluated], key=lambda point: point.time)
