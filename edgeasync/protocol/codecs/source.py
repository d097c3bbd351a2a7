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
    """A vector as a source; what is read are views of it."""

    __slots__ = ("_shown", "vector")

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self._shown = vector.view()
        self._shown.flags.writeable = False

    @property
    def length(self) -> int:
        """Values of the vector."""
        return self.vector.size

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:  # noqa: ARG002
        """Return a view."""
        return self._shown[start:stop]


class Part:
    """Values `start` to `stop` of another source."""

    __slots__ = ("_source", "_start", "length")

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self._source = source
        self._start = start
        self.length = stop - start

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Read from the other source."""
        return self._source.read(self._start + start, self._start + stop, scratch)

    def view(self) -> Vector | None:
        """Return all values, if they are part of a vector."""
        if isinstance(self._source, VectorSource):
            return self._source.vector[self._start : self._start + self.length]
        return None


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
        copy_into(scratch[: split - start], self._first, start)
        copy_into(scratch[split - start : stop - start], self._second, 0)
        return scratch[: stop - start]


def copy_into(target: Vector, source: Source, start: int) -> None:
    """Fill `target`, of `CHUNK` values or fewer, with what stands in the source from `start` on."""
    values = source.read(start, start + target.size, target)
    if not np.may_share_memory(values, target):
        target[:] = values


def copy_whole(target: Vector, source: Source) -> None:
    """Fill `target` with all values of the source, a chunk at a time."""
    for start in range(0, source.length, CHUNK):
        copy_into(target[start : min(start + CHUNK, source.length)], source, start)
