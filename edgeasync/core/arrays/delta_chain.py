"""Differences of models, and how the published model follows them, to the same bits at the hub and on devices."""

from collections.abc import Iterable

import numpy as np

from edgeasync.parameters import CHUNK, Vector
from edgeasync.protocol.codecs import Codec, Source, copy_range


class Difference:
    """A `Source`: the first `differences` values are `values - base`, the rest are `values` as they are."""

    def __init__(self, values: Vector, base: Vector, differences: int) -> None:
        self._values = values
        self._base = base
        self._differences = differences
        self.length = values.size

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Return values `start` to `stop`, a view or the front of `scratch`."""
        middle = min(max(start, self._differences), stop)
        if middle == start:
            return self._values[start:stop]
        read = scratch[: stop - start]
        # Parameters that diverged are the hub's to refuse, with a count it keeps.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(self._values[start:middle], self._base[start:middle], out=read[: middle - start])
        read[middle - start :] = self._values[middle:stop]
        return read


def follow(base: Vector, steps: Iterable[Source], rounding: Codec, trained: int, out: Vector) -> None:
    """Write to `out`, which may be `base`, where the published chain leads from there: the same bits everywhere.

    Each of the `steps` is a coded difference of the `trained` values; statistics are values. They are added one
    after the other, so that no more than one need be decoded at a time.
    """
    scratch = np.empty(min(CHUNK, trained), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for step in steps:
            for start in range(0, trained, CHUNK):
                stop = min(start + CHUNK, trained)
                np.add(base[start:stop], step.read(start, stop, scratch), out=out[start:stop])
                rounding.round_in_place(out[start:stop])
            copy_range(out[trained:], step, trained)
            base = out


def is_finite(source: Source) -> bool:
    """Return whether all values of a source are numbers."""
    length = source.length
    scratch = np.empty(min(CHUNK, length), np.float32)
    chunks = (source.read(start, min(start + CHUNK, length), scratch) for start in range(0, length, CHUNK))
    return all(np.isfinite(chunk).all() for chunk in chunks)
