"""Sources of float32 values. They are read in ranges, so not all values need be in memory at once."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import CHUNK, Vector

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional array of encoded bytes."""


class Source(Protocol):
    """float32 values that are read in ranges.

    A source is a vector, a difference between two vectors, or a decoded payload. Ranges may be read
    in any order. `scratch` must be at least as long as the range. Use the result of `read` before
    you pass the same `scratch` again. Do not write to the result unless it is a view of `scratch`.
    """

    @property
    def length(self) -> int:
        """The number of values."""

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Return the values from `start` to `stop`.

        They are a view of the source, or are copied to the first part of `scratch`.
        """


class VectorSource:
    """A vector as a source. Reading a range returns a view of the vector."""

    __slots__ = ("_shown", "length", "vector")

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self.length = vector.size
        self._shown = vector.view()
        self._shown.flags.writeable = False

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:  # noqa: ARG002
        """Return a read-only view."""
        return self._shown[start:stop]


class JoinedSources:
    """A source that consists of two sources, one after the other."""

    __slots__ = ("_first", "_second", "_split", "length")

    def __init__(self, first: Source, second: Source) -> None:
        self._first = first
        self._second = second
        self._split = first.length
        self.length = first.length + second.length

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Read from one source, or from both into `scratch`."""
        split = self._split
        if stop <= split:
            return self._first.read(start, stop, scratch)
        if start >= split:
            return self._second.read(start - split, stop - split, scratch)
        copy_range(scratch[: split - start], self._first, start)
        copy_range(scratch[split - start : stop - start], self._second, 0)
        return scratch[: stop - start]


def join_statistics(trained: Source, statistics: Bytes) -> Source:
    """Return decoded trained values, followed by the encoded statistics, if there are any."""
    return JoinedSources(trained, VectorSource(statistics.view("<f4"))) if statistics.size else trained


def chunks(source: Source, length: int) -> Iterator[tuple[int, Vector]]:
    """Yield the first `length` values of a source in chunks, each with its start index.

    Use each chunk before you request the next one, because they may share memory.
    """
    scratch = np.empty(min(CHUNK, length), np.float32)
    for start in range(0, length, CHUNK):
        yield start, source.read(start, min(start + CHUNK, length), scratch)


def copy_range(target: Vector, source: Source, start: int = 0) -> None:
    """Fill `target` with the values of the source that begin at index `start`, in chunks."""
    for first in range(0, target.size, CHUNK):
        chunk = target[first : first + CHUNK]
        values = source.read(start + first, start + first + chunk.size, chunk)
        if not np.may_share_memory(values, chunk):
            chunk[:] = values
