"""How many examples of a batch go through the model at once, chosen by measured speed and memory.

The gradient of a batch is the weighted mean of the gradients of its parts, so the choice changes no result but by
rounding. It depends on nothing but what `Machine` measures: the same measurements give the same sizes.
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
"""The most examples that go through the model at once; `auto` chooses."""

AccumulationSteps = Annotated[int, Meta(ge=1, le=10_000)]
"""How many batches make one local step."""

ROWS_FIRST = 8
"""Examples of the first parts: few enough for any device."""

LOOKS = 3
"""Parts of one size that are measured; the fastest counts, since other programs slow the others."""

GAIN_MIN = 0.05
"""By this share an example must be faster in parts of twice the size, or they are not worth their memory."""

SECONDS_MAX = 1.0
"""Parts that take half of it are not doubled: an agent that is stopped waits for the running part."""

FREE_SHARE_MAX = 0.5
"""The share of the free memory that parts of twice the size may need; the rest is for other programs."""


class Machine:
    """What a choice is made by: this machine's clock, and its memory by Linux's /proc."""

    def now_s(self) -> float:
        """Return the time of a steady clock."""
        return time.perf_counter()

    def free_bytes(self) -> int:
        """Return the memory that this process could still get."""
        return free_bytes()

    def resident_bytes(self) -> int:
        """Return the memory that this process has now."""
        return field_bytes(Path("/proc/self/status"), "VmRSS:")

    def peak_bytes(self) -> int:
        """Return the most memory that this process has had so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class MicroBatchSize:
    """Finds a size: it begins small, and doubles while that is faster for each example and memory allows it.

    With `rows` it begins with these, and takes no more. Call `begin` before a part, then `done`, or `failed` if
    there was no memory for it.
    """

    def __init__(self, machine: Machine, rows: int | None = None) -> None:
        self.rows = rows or ROWS_FIRST
        """Examples of the next part."""
        self._machine = machine
        self._settled = rows is not None
        self._batch = 0
        self._seconds: list[float] = []
        self._needed_bytes = 0
        self._row_s_before = float("inf")
        self._began_s = 0.0
        self._resident_bytes = 0

    def begin(self) -> None:
        """Note what there is before a part."""
        if not self._settled:
            self._resident_bytes = self._machine.resident_bytes()
            self._began_s = self._machine.now_s()

    def done(self, rows: int, of: int) -> None:
        """Learn from a part of a batch of `of` examples; the last part of a batch may be too short to tell."""
        self._batch = max(self._batch, of)
        if self._settled or rows != self.rows:
            return
        self._seconds.append(self._machine.now_s() - self._began_s)
        # At most that: the peak may be of an earlier time.
        self._needed_bytes = max(self._needed_bytes, self._machine.peak_bytes() - self._resident_bytes)
        if len(self._seconds) >= LOOKS:
            self._choose()

    def failed(self, rows: int) -> bool:
        """Take half of what there was no memory for from now on; return whether that is one or more."""
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
    """Raise `ConfigError` where a step would be computed in parts, and parts are not the same as the whole.

    A batch norm takes the mean and the variance of what goes through it at once.
    """
    if (accumulation_steps > 1 or micro_batch_size is not None) and spec.trained_length < spec.length:
        name = next(parameter.name for parameter in spec.parameters if parameter.role == "statistic")
        raise ConfigError(
            f"the model has a batch norm ({name!r}), which is not the same for a batch in parts: leave out "
            "accumulation_steps and micro_batch_size, freeze the batch norms, or take layer norms"
        )


def worth_splitting(micro_batch_size: MicroBatch | None, batch_size: int) -> MicroBatch | None:
    """Return the size of the parts of batches of this size, `None` if each is one part."""
    whole = micro_batch_size not in (None, "auto") and int(micro_batch_size or 0) >= batch_size
    return None if whole else micro_batch_size
