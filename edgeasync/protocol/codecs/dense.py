"""Stages that code every value by itself, `identity`, `float16`, `bfloat16`; and how a stage becomes a codec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, Vector
from edgeasync.protocol.codecs.codec import Codec, Dense
from edgeasync.protocol.codecs.float16 import (
    Halves,
    narrow_bfloat16,
    narrow_float16,
    widen_bfloat16,
    widen_float16,
)
from edgeasync.protocol.codecs.source import Bytes, Joined, Part, Source, VectorSource, copy_whole
from edgeasync.protocol.wire import Buffer


@dataclass(frozen=True)
class Identity:
    """`identity`: float32 as it is, four bytes a value."""

    elementwise: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = False

    def nbytes(self, length: int) -> int:
        """Four bytes a value."""
        return 4 * length

    def encode(self, source: Source, out: Bytes, random: np.random.Generator | None) -> None:  # noqa: ARG002
        """Copy."""
        copy_whole(out.view("<f4"), source)

    def open(self, coded: Bytes, length: int) -> Source:  # noqa: ARG002
        """Return a source whose reads are views."""
        return VectorSource(coded.view("<f4"))


@dataclass(frozen=True)
class SixteenBits:
    """`float16` or `bfloat16`: two bytes a value, each rounded by itself."""

    narrow: Callable[[Vector, Halves], None]
    widen: Callable[[Halves, Vector], None]

    elementwise: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = False

    def nbytes(self, length: int) -> int:
        """Two bytes a value."""
        return 2 * length

    def encode(self, source: Source, out: Bytes, random: np.random.Generator | None) -> None:  # noqa: ARG002
        """Round to nearest, ties to even."""
        halves = out.view("<u2")
        scratch = np.empty(min(CHUNK, source.length), np.float32)
        for start in range(0, source.length, CHUNK):
            stop = min(start + CHUNK, source.length)
            self.narrow(source.read(start, stop, scratch), halves[start:stop])

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source that widens what is read."""
        return _Widened(coded.view("<u2"), self.widen, length)


FLOAT16 = SixteenBits(narrow_float16, widen_float16)
BFLOAT16 = SixteenBits(narrow_bfloat16, widen_bfloat16)


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


@dataclass(frozen=True)
class DenseCodec:
    """Every trained value through one dense stage, then the statistics."""

    name: str
    length: int
    trained: int
    stage: Dense

    @property
    def elementwise(self) -> bool:
        """As the stage."""
        return self.stage.elementwise

    @property
    def needs_feedback(self) -> bool:
        """As the stage."""
        return self.stage.needs_feedback

    @property
    def payload_bytes_min(self) -> int:
        """All payloads are equally long."""
        return self.stage.nbytes(self.trained) + 4 * (self.length - self.trained)

    @property
    def payload_bytes_max(self) -> int:
        """All payloads are equally long."""
        return self.payload_bytes_min

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the payload: of a vector as `identity` its own memory."""
        if isinstance(self.stage, Identity) and isinstance(source, VectorSource):
            return np.ascontiguousarray(source.vector, "<f4").data.cast("B")
        return encode_whole(self.stage, Part(source, 0, self.trained), source, self.trained, random)

    def open(self, payload: Buffer) -> Source:
        """Check the length, which is all that can be wrong."""
        return with_statistics(*open_whole(self, self.stage, payload, self.trained))

    def snap(self, values: Vector) -> None:
        """Round each."""
        if not self.elementwise:
            raise TypeError(f"{self.name} does not round values one by one")
        if isinstance(self.stage, Identity):
            return
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            coded = np.empty(self.stage.nbytes(part.size), np.uint8)
            self.stage.encode(VectorSource(part), coded, None)
            self.stage.open(coded, part.size).read(0, part.size, part)


def encode_whole(
    stage: Dense, values: Source, source: Source, trained: int, random: np.random.Generator | None
) -> Buffer:
    """Return the payload: values through a stage, then the statistics of the source."""
    split = stage.nbytes(values.length)
    out = np.empty(split + 4 * (source.length - trained), np.uint8)
    stage.encode(values, out[:split], random)
    encode_statistics(source, trained, out[split:])
    return out.data


def open_whole(codec: Codec, stage: Dense, payload: Buffer, count: int) -> tuple[Source, Bytes]:
    """Return so many values that went through a stage, and the coded statistics behind them.

    Raises `ProtocolError` if the payload has another length than all of the codec's.
    """
    coded = as_bytes(payload)
    if coded.size != codec.payload_bytes_min:
        raise wrong_length(codec, coded.size)
    split = stage.nbytes(count)
    return stage.open(coded[:split], count), coded[split:]


def as_bytes(payload: Buffer) -> Bytes:
    """Return the payload as a read-only array."""
    coded = np.frombuffer(payload, np.uint8)
    coded.flags.writeable = False
    return coded


def wrong_length(codec: Codec, payload_bytes: int) -> ProtocolError:
    """Return the error for a payload that is too short or too long."""
    least, most = codec.payload_bytes_min, codec.payload_bytes_max
    bounds = f"{most}" if least == most else f"{least} to {most}"
    return ProtocolError(f"a payload in {codec.name} has {bounds} bytes for this model, not {payload_bytes}")


def encode_statistics(source: Source, trained: int, out: Bytes) -> None:
    """Write what stands behind the trained values, as it is."""
    copy_whole(out.view("<f4"), Part(source, trained, source.length))


def with_statistics(trained: Source, statistics: Bytes) -> Source:
    """Return the decoded trained values with the statistics behind them."""
    return Joined(trained, VectorSource(statistics.view("<f4"))) if statistics.size else trained
