"""Finds how many examples of a batch fit into free memory, by trial runs before training."""

import logging
from collections.abc import Callable

from edgeasync.errors import NoMemoryError
from edgeasync.training.micro_batches import ROWS_FIRST, Machine

PLENTY_BYTES = 4 << 30
"""With at least this much free memory, no trial runs are made. The first step then shows whether
the memory suffices.
"""

SHARE_MAX = 0.9
"""Largest fraction of the free memory that a step may use."""

FAR = 4.0
"""Safety factor for extrapolating to more than twice the number of examples. Measurements with few
examples underestimate the memory per example.
"""

_log = logging.getLogger(__name__)


def fitting_rows(run: Callable[[int], object], rows: int, machine: Machine) -> int:
    """Return how many of `rows` examples can be computed at once, at least 1.

    `run` computes a given number of examples. The process does not release memory after a run, so
    the memory that the run needed can still be measured. The first run computes a few examples, and
    each further run twice as many. Before each run, the memory that it needs is extrapolated.
    """
    allowed_bytes = SHARE_MAX * machine.free_bytes()
    if machine.free_bytes() >= PLENTY_BYTES or not allowed_bytes:
        return rows
    resident_bytes = machine.resident_bytes()
    tried = min(ROWS_FIRST, rows)
    while True:
        try:
            run(tried)
        except (MemoryError, NoMemoryError):
            return max(1, tried // 2)
        needed_bytes = machine.resident_bytes() - resident_bytes
        slack = 1.0 if rows <= 2 * tried else FAR
        if slack * rows * needed_bytes <= tried * allowed_bytes:
            return rows
        following = min(2 * tried, rows)
        if following * needed_bytes > tried * allowed_bytes:
            _log.warning(
                "a step on %d examples needs about %d MB, but %d MB are free: computing %d at a time",
                rows, needed_bytes * rows // tried // 10**6, allowed_bytes / SHARE_MAX // 10**6, tried,
            )  # fmt: skip
            return tried
        tried = following
