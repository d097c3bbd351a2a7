"""Sources of float32 values that are read in ranges, so that they need not all be in memory."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import CHUNK, Vector

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional array of encoded bytes."""


class Source(Protocol):
    """float32 values that are read in ranges.

    A source is a vector, a difference of two vectors or a decoded payload. Ranges may be read in
    any order. `scratch` must have at least the range's length. Use the result of `read` before you
    reuse `scratch`, and do not write to it unless it is `scratch`.
    """

    @property
    def length(self) -> int:
        """The number of values."""

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        """Return values `start` to `stop`: a view, or the beginning of `scratch`."""


class VectorSource:
    """A vector as a source: reads return views of it."""

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
    """Two sources, one after the other."""

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
    """Yield the first `length` values of a source in chunks, each with its start.

    Use one chunk before reading the next.
    """
    scratch = np.empty(min(CHUNK, length), np.float32)
    for start in range(0, length, CHUNK):
        yield start, source.read(start, min(start + CHUNK, length), scratch)


def copy_range(target: Vector, source: Source, start: int = 0) -> None:
    """Fill `target` with the source's values from `start` on, in chunks."""
    for first in range(0, target.size, CHUNK):
        chunk = target[first : first + CHUNK]
        values = source.read(start + first, start + first + chunk.size, chunk)
        if not np.may_share_memory(values, chunk):
            chunk[:] = values
