"""Where float32 values come from, read in ranges, so that nobody needs all of them at once in memory."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import CHUNK, Vector

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional array of coded bytes."""


class Source(Protocol):
    """float32 values, to be read in ranges, in any order: a vector, a difference of two, a decoded payload."""

    @property
    def length(self) -> int:
        """How many values there are."""

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Return values `start` to `stop`: a read-only view, or the front of `scratch`, which has room."""


class VectorSource:
    """A vector as a source: reads return views of it."""

    __slots__ = ("_shown", "length", "vector")

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self.length = vector.size
        self._shown = vector.view()
        self._shown.flags.writeable = False

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:  # noqa: ARG002
        """Return a view."""
        return self._shown[start:stop]


class Joined:
    """One source after another."""

    __slots__ = ("_first", "_second", "_split", "length")

    def __init__(self, first: Source, second: Source) -> None:
        self._first = first
        self._second = second
        self._split = first.length
        self.length = first.length + second.length

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Read from either, or from both into `scratch`."""
        split = self._split
        if stop <= split:
            return self._first.read(start, stop, scratch)
        if start >= split:
            return self._second.read(start - split, stop - split, scratch)
        copy_range(scratch[: split - start], self._first, start)
        copy_range(scratch[split - start : stop - start], self._second, 0)
        return scratch[: stop - start]


def join_statistics(trained: Source, statistics: Bytes) -> Source:
    """Return decoded trained values with the coded statistics, if there are any, behind them."""
    return Joined(trained, VectorSource(statistics.view("<f4"))) if statistics.size else trained


def copy_range(target: Vector, source: Source, start: int = 0) -> None:
    """Fill `target` with the source's values from `start` on, a chunk at a time."""
    for first in range(0, target.size, CHUNK):
        chunk = target[first : first + CHUNK]
        values = source.read(start + first, start + first + chunk.size, chunk)
        if not np.may_share_memory(values, chunk):
            chunk[:] = values
