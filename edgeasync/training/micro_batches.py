"""Chooses how many examples of a batch to compute at once, by measured speed and memory.

The gradient of a batch is the weighted mean of the gradients of its parts, so the choice changes
results only by rounding. It depends only on measurements of `Machine`: the same measurements give
the same sizes.
"""

import resource
import time
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from edgeasync.errors import ConfigError
from edgeasync.parameters import ParameterSpec
from edgeasync.training.free_memory import field_bytes, free_bytes

MicroBatch = Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["auto"]
"""The largest number of examples to compute at once; `auto` chooses it."""

AccumulationSteps = Annotated[int, Meta(ge=1, le=10_000)]
"""Number of batches per local step."""

ROWS_FIRST = 8
"""Examples in the first parts, few enough for any device."""

LOOKS = 3
"""Number of parts measured per size. The fastest counts, because other programs slow down some."""

GAIN_MIN = 0.05
"""Smallest relative speedup per example for which doubling the size is worth the memory."""

SECONDS_MAX = 1.0
"""Parts that take half of this are not doubled, because stopping an agent waits for the running
part.
"""

FREE_SHARE_MAX = 0.5
"""Share of the free memory that doubled parts may need. The rest is for other programs."""


class Machine:
    """Measurements of this machine: its clock, and its memory from Linux's /proc."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock."""
        return time.perf_counter()

    def free_bytes(self) -> int:
        """Return the memory that this process can still allocate."""
        return free_bytes()

    def resident_bytes(self) -> int:
        """Return the memory that this process uses now."""
        return field_bytes(Path("/proc/self/status"), "VmRSS:")

    def peak_bytes(self) -> int:
        """Return the peak memory of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class MicroBatchSize:
    """Finds a size: starts small, and doubles while that is faster and fits into memory.

    With `rows`, starts with that size and never exceeds it. Call `begin` before a part, then
    `done`, or `failed` if memory was exhausted.
    """

    def __init__(self, machine: Machine, rows: int | None = None) -> None:
        self.rows = rows or ROWS_FIRST
        """Number of examples in the next part."""
        self._machine = machine
        self._settled = rows is not None
        self._batch = 0
        self._seconds: list[float] = []
        self._needed_bytes = 0
        self._row_s_before = float("inf")
        self._began_s = 0.0
        self._resident_bytes = 0

    def begin(self) -> None:
        """Record time and memory before a part."""
        if not self._settled:
            self._resident_bytes = self._machine.resident_bytes()
            self._began_s = self._machine.now_s()

    def done(self, rows: int, of: int) -> None:
        """Record a part of a batch of `of` examples.

        A batch's last part may be too short to measure.
        """
        self._batch = max(self._batch, of)
        if self._settled or rows != self.rows:
            return
        self._seconds.append(self._machine.now_s() - self._began_s)
        # An upper bound, because the peak may be older than this part.
        self._needed_bytes = max(self._needed_bytes, self._machine.peak_bytes() - self._resident_bytes)
        if len(self._seconds) >= LOOKS:
            self._choose()

    def failed(self, rows: int) -> bool:
        """Halve the size that exhausted memory. Return whether it is still at least 1."""
        self._settled = True
        self.rows = rows // 2
        return self.rows > 0

    def _choose(self) -> None:
        seconds = min(self._seconds)
        row_s = seconds / self.rows
        needed_bytes = 2 * self._needed_bytes
        self._seconds, self._needed_bytes = [], 0
        if row_s > (1.0 - GAIN_MIN) * self._row_s_before:
            self.rows //= 2
            self._settled = True
        elif (
            2 * self.rows > self._batch
            or 2.0 * seconds > SECONDS_MAX
            or needed_bytes > FREE_SHARE_MAX * self._machine.free_bytes()
        ):
            self._settled = True
        else:
            self.rows *= 2
            self._row_s_before = row_s


def check_accumulation(spec: ParameterSpec, accumulation_steps: int, micro_batch_size: MicroBatch | None) -> None:
    """Raise `ConfigError` if steps would be computed in parts although the result differs.

    A batch norm uses mean and variance of the examples that are computed at once.
    """
    if (accumulation_steps > 1 or micro_batch_size is not None) and spec.trained_length < spec.length:
        name = next(parameter.name for parameter in spec.parameters if parameter.role == "statistic")
        raise ConfigError(
            f"batch norm {name!r} computes different statistics on parts of a batch; remove accumulation_steps "
            "and micro_batch_size, freeze the batch norms, or use layer norms"
        )


def worth_splitting(micro_batch_size: MicroBatch | None, batch_size: int) -> MicroBatch | None:
    """Return the size of parts for batches of this size, or `None` if a batch is one part."""
    whole = micro_batch_size not in (None, "auto") and int(micro_batch_size or 0) >= batch_size
    return None if whole else micro_batch_size
