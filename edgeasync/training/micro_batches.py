"""Chooses how many examples of a batch to compute at once, from measured speed and memory.

A batch's gradient is the weighted mean of its parts' gradients. Therefore, apart from rounding,
results do not depend on the size of the parts. The size depends only on the measurements of
`Machine`.
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
"""Largest number of examples to compute at once, or `auto` to choose it automatically."""

AccumulationSteps = Annotated[int, Meta(ge=1, le=10_000)]
"""Number of batches per local step."""

ROWS_FIRST = 8
"""Number of examples in the first parts. It is small enough for any device."""

LOOKS = 3
"""Number of parts measured per size. Only the fastest part counts, because other programs may slow
down the rest.
"""

GAIN_MIN = 0.05
"""Minimum relative speedup per example that justifies the additional memory for a doubled size."""

SECONDS_MAX = 1.0
"""Maximum duration of a part. Larger parts would delay the agent's shutdown, which waits for the
running part. The size is not doubled if a part takes more than half of this.
"""

FREE_SHARE_MAX = 0.5
"""Fraction of the free memory that parts of doubled size may use. The rest is left to other
programs.
"""


class Machine:
    """Measures time, and the memory of this process as reported by Linux's /proc."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock in seconds."""
        return time.perf_counter()

    def free_bytes(self) -> int:
        """Return the number of bytes that this process can still allocate."""
        return free_bytes()

    def resident_bytes(self) -> int:
        """Return the number of bytes that this process uses now."""
        return field_bytes(Path("/proc/self/status"), "VmRSS:")

    def peak_bytes(self) -> int:
        """Return the peak memory of this process so far, in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class MicroBatchSize:
    """Finds the best size of parts, by doubling while that is faster and fits into memory.

    If `rows` is set, the size is `rows`. It is then reduced only if memory is exhausted. Call
    `begin` before each part. Afterwards, call `done`, or `failed` if memory was exhausted.
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
        """Record the time and the memory use before a part."""
        if not self._settled:
            self._resident_bytes = self._machine.resident_bytes()
            self._began_s = self._machine.now_s()

    def done(self, rows: int, of: int) -> None:
        """Record that a part of `rows` examples has been computed. Its batch has `of` examples.

        Parts with fewer examples than requested, such as the last one of a batch, are not measured.
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
        """Set the size to half of `rows`, which exhausted memory.

        Return False if the new size is less than 1.
        """
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
    """Raise `ConfigError` if a step is computed in parts although this changes its result.

    The result changes if the model has batch norms, because these use the mean and variance of the
    examples that are computed at once.
    """
    if (accumulation_steps > 1 or micro_batch_size is not None) and spec.trained_length < spec.length:
        name = next(parameter.name for parameter in spec.parameters if parameter.role == "statistic")
        raise ConfigError(
            f"batch norm {name!r} computes different statistics on parts of a batch; remove accumulation_steps "
            "and micro_batch_size, freeze the batch norms, or use layer norms"
        )


def worth_splitting(micro_batch_size: MicroBatch | None, batch_size: int) -> MicroBatch | None:
    """Return `micro_batch_size`, or `None` if batches of this size need not be split."""
    whole = micro_batch_size not in (None, "auto") and int(micro_batch_size or 0) >= batch_size
    return None if whole else micro_batch_size
