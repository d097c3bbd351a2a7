"""The elementwise stages `identity`, `float16` and `bfloat16`, and a codec with one dense stage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.protocol.codecs.codec import Dense, VectorCodec
from edgeasync.protocol.codecs.float16 import (
    Halves,
    narrow_bfloat16,
    narrow_float16,
    round_bfloat16,
    round_float16,
    widen_bfloat16,
    widen_float16,
)
from edgeasync.protocol.codecs.source import Bytes, Source, VectorSource, chunks, copy_range, join_statistics
from edgeasync.protocol.wire import Buffer


@dataclass(frozen=True)
class Identity:
    """The stage `identity`: values are sent as float32, four bytes per value."""

    elementwise: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    def nbytes(self, length: int) -> int:
        """Return four bytes per value."""
        return 4 * length

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:  # noqa: ARG002
        """Copy the values."""
        copy_range(out.view("<f4"), source)

    def open(self, coded: Bytes, length: int) -> Source:  # noqa: ARG002
        """Return a source whose reads are views of the payload."""
        return VectorSource(coded.view("<f4"))

    def round_in_place(self, values: Vector) -> None:
        """Leave the values unchanged."""


@dataclass(frozen=True)
class SixteenBits:
    """The stages `float16` and `bfloat16`: two bytes per value, each value rounded independently."""

    narrow: Callable[[Vector, Halves], None]
    widen: Callable[[Halves, Vector], None]
    round: Callable[[Vector], None]
    """Does the same as `narrow` and `widen` in place."""

    elementwise: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    def nbytes(self, length: int) -> int:
        """Return two bytes per value."""
        return 2 * length

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:  # noqa: ARG002
        """Round to nearest, ties to even."""
        halves = out.view("<u2")
        for start, values in chunks(source, length):
            self.narrow(values, halves[start : start + values.size])

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source that converts the values to float32 when they are read."""
        return _Widened(coded.view("<u2"), self.widen, length)

    def round_in_place(self, values: Vector) -> None:
        """Round to nearest, ties to even, and convert back to float32."""
        for start in range(0, values.size, CHUNK):
            self.round(values[start : start + CHUNK])


FLOAT16 = SixteenBits(narrow_float16, widen_float16, round_float16)
BFLOAT16 = SixteenBits(narrow_bfloat16, widen_bfloat16, round_bfloat16)


class _Widened:
    __slots__ = ("_halves", "_widen", "length")

    def __init__(self, halves: Halves, widen: Callable[[Halves, Vector], None], length: int) -> None:
        self._halves = halves
        self._widen = widen
        self.length = length

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            self._widen(self._halves[first:last], scratch[first - start : last - start])
        return scratch[: stop - start]


class DenseCodec(VectorCodec):
    """A codec that encodes all trained values with one dense stage. The statistics follow."""

    def __init__(self, name: str, spec: ParameterSpec, stage: Dense) -> None:
        self._stage = stage
        self._trained = spec.trained_length
        self._trained_bytes = stage.nbytes(self._trained)
        payload_bytes = self._trained_bytes + 4 * (spec.length - self._trained)
        super().__init__(
            name,
            payload_bytes,
            payload_bytes,
            elementwise=stage.elementwise,
            needs_feedback=stage.needs_feedback,
            stochastic=stage.stochastic,
        )

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the encoded payload.

        With `identity`, the payload of a vector is the vector's own memory.
        """
        if isinstance(self._stage, Identity) and isinstance(source, VectorSource):
            return np.ascontiguousarray(source.vector, "<f4").data.cast("B")
        out = np.empty(self.payload_bytes_max, np.uint8)
        self._stage.encode(source, self._trained, out[: self._trained_bytes], random)
        copy_range(out[self._trained_bytes :].view("<f4"), source, self._trained)
        return out.data

    def open(self, payload: Buffer) -> Source:
        """Return a source of the decoded values. Only the length of the payload can be invalid."""
        coded = self._checked(payload)
        trained = self._stage.open(coded[: self._trained_bytes], self._trained)
        return join_statistics(trained, coded[self._trained_bytes :])

    def round_in_place(self, values: Vector) -> None:
        """Round each value as the stage does."""
        if isinstance(self._stage, Identity | SixteenBits):
            self._stage.round_in_place(values)
        else:
            super().round_in_place(values)
