"""Differences between models, which the hub and the devices apply bit-identically."""

import math
from collections.abc import Iterable

import numpy as np

from edgeasync.parameters import CHUNK, Vector
from edgeasync.protocol.codecs import Source, VectorCodec, chunks, copy_range


class Difference:
    """A `Source` of differences and plain values.

    The first `differences` values are `values - base`, and the rest are `values`.
    """

    def __init__(self, values: Vector, base: Vector, differences: int) -> None:
        self._values = values
        self._base = base
        self._differences = differences
        self.length = values.size

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Return the values from `start` to `stop`, as a view or in the first part of `scratch`."""
        middle = min(max(start, self._differences), stop)
        if middle == start:
            return self._values[start:stop]
        read = scratch[: stop - start]
        # Diverged parameters may overflow here. The hub rejects and counts such an update.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(self._values[start:middle], self._base[start:middle], out=read[: middle - start])
        read[middle - start :] = self._values[middle:stop]
        return read


def follow(base: Vector, steps: Iterable[Source], rounding: VectorCodec, trained: int, out: Vector) -> None:
    """Apply the `steps` of the published chain to `base`; write the result to `out`.

    The result has the same bits on every machine. `out` may be `base`. Each step contains encoded
    differences of the `trained` values, and the statistics as plain values. Only one step is
    decoded at a time.
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
    """Return whether all values of a source are finite."""
    return all(all_finite(values) for _, values in chunks(source, source.length))


def all_finite(values: Vector) -> bool:
    """Return whether all values of a vector are finite."""
    # If the sum of the squares is finite, so is each value. The sum is faster to compute than the tests.
    return math.isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())


def generator_for(codec: VectorCodec, number: int) -> np.random.Generator | None:
    """Return the random generator with which a codec encodes the difference to a version.

    Return `None` if the codec needs no random numbers.
    """
    return np.random.Generator(np.random.PCG64(number)) if codec.stochastic else None
