"""How many examples of a batch fit into the memory that is free, tried before training with ever more of them."""

import logging
from collections.abc import Callable

from edgeasync.errors import NoMemoryError
from edgeasync.training.micro_batches import ROWS_FIRST, Machine

PLENTY_BYTES = 4 << 30
"""Where this much is free, nothing is tried: the first step shows whether it is enough."""

SHARE_MAX = 0.9
"""The share of the free memory that a step may need."""

FAR = 4.0
"""The need of more than twice the examples must fit four times: a few examples may need hardly any memory."""

_log = logging.getLogger(__name__)


def fitting_rows(run: Callable[[int], object], rows: int, machine: Machine) -> int:
    """Return how many examples to compute at once: `rows`, or as many as there is the memory for, 1 or more.

    `run` computes that many, and the process keeps the memory for it. What twice as many need is foreseen.
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
                "a step on %d examples needs some %d MB, and %d MB are free: computing %d at a time",
                rows, needed_bytes * rows // tried // 10**6, allowed_bytes / SHARE_MAX // 10**6, tried,
            )  # fmt: skip
            return tried
        tried = following
