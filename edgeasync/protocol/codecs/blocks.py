"""Codecs with one scale for all values of a block: `int8`, `int4` and `sign`.

`int8` and `int4` are QSGD (Alistarh et al. 2017) with the largest magnitude of a block as its
scale. `sign` is signSGD (Bernstein et al. 2018) with the mean magnitude, as in EF-signSGD
(Karimireddy et al. 2019). A block with a non-finite value has the scale NaN. All scales come first
in the payload. Encoding uses only elementwise arithmetic and sums of whole rows, so it produces the
same bits on every machine.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import CHUNK, Vector
from edgeasync.protocol.codecs.source import Bytes, Source, chunks

BLOCK = 256
"""Number of values that share a scale. `CHUNK` is a multiple of `BLOCK`."""

SCALE_MIN = np.float32(2.0**-126)
"""Blocks with a smaller scale are sent as zeros, because subnormal scales are coarse and slow."""

_MAGNITUDE = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_ROUNDING = np.float32(1.5 * 2**23)
"""Adding this constant to a small number rounds it to the nearest integer, ties to even.

The low bits of the sum contain that integer.
"""

Rows = npt.NDArray[np.float32]


def _scale_bytes(length: int) -> int:
    """Return the size in bytes of all scales for `length` values. The last block may be shorter."""
    return 4 * -(-length // BLOCK)


def _split(coded: Bytes, length: int) -> tuple[Vector, Bytes]:
    """Return two views of `coded`: the scales, and the levels or signs of its `length` values."""
    split = _scale_bytes(length)
    return coded[:split].view("<f4"), coded[split:]


class _Chunk(NamedTuple):
    start: int
    stop: int
    rows: Rows
    """Whole blocks, the last one padded with zeros; read-only."""
    scales: Vector
    """A writable view with one element for the scale of each row."""


def _chunks(source: Source, length: int, scales: Vector) -> Iterator[_Chunk]:
    """Yield the first `length` values of a source as chunks of whole blocks."""
    for start, read in chunks(source, length):
        values, stop = read, start + read.size
        if read.size % BLOCK:
            values = np.zeros(read.size + -read.size % BLOCK, np.float32)
            values[: read.size] = read
        rows = values.reshape(-1, BLOCK)
        yield _Chunk(start, stop, rows, scales[start // BLOCK :][: len(rows)])


def _scale_blocks(values: Vector, start: int, scales: Vector) -> None:
    """Multiply values by the scales of their blocks.

    The first value has index `start` in the vector.
    """
    head = min(-start % BLOCK, values.size)
    block = (start + head) // BLOCK
    whole = (values.size - head) // BLOCK
    body = values[head : head + whole * BLOCK].reshape(whole, BLOCK)
    tail = values[head + whole * BLOCK :]
    with np.errstate(over="ignore", invalid="ignore"):  # a peer's values must not cause a warning or an exception
        if head:
            np.multiply(values[:head], scales[start // BLOCK], out=values[:head])
        np.multiply(body, scales[block : block + whole, np.newaxis], out=body)
        if tail.size:
            np.multiply(tail, scales[block + whole], out=tail)


def _peaks(values: Vector, starts: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
    """Return the bits of the largest magnitude of each block; `starts` are the first indices of the blocks.

    Magnitudes sort in the same order as floats and as integers, and non-finite ones are the
    largest. If a block has values of both signs, its largest signed integer is its largest positive
    value, and its largest unsigned integer is its negative value with the largest magnitude.
    Otherwise, both integers are the value with the largest magnitude.
    """
    positive = np.maximum.reduceat(values.view(np.int32), starts)
    negative = np.maximum.reduceat(values.view(np.uint32), starts) & np.uint32(_MAGNITUDE)
    peaks: npt.NDArray[np.int32] = np.maximum(positive, negative.view(np.int32))
    return peaks


class _Quantizer:
    """Rounds blocks to integer levels. It reuses its buffers."""

    def __init__(self, steps: int, unit: int, blocks: int, random: np.random.Generator | None) -> None:
        room = min(CHUNK, BLOCK * blocks)
        self._steps = np.float32(steps)
        self._span = np.float32(steps * unit)
        self._random = random
        self._work = np.empty(room, np.float32)
        self._noise = np.empty(room if random is not None else 0, np.float32)
        self._starts = np.arange(0, room, BLOCK)

    def quantize(self, rows: Rows, scales: Vector) -> npt.NDArray[np.int32]:
        """Return integers whose low bytes are the levels. Write the scale of each row to `scales`."""
        work = self._work[: rows.size].reshape(rows.shape)
        peaks = _peaks(rows.reshape(-1), self._starts[: len(rows)])
        broken = peaks >= _INFINITY
        peaks[broken] = 0
        largest = peaks.view(np.float32)
        np.divide(largest, self._span, out=scales)
        scales[scales < SCALE_MIN] = 0.0
        factors = np.zeros_like(largest)
        np.divide(self._steps, largest, out=factors, where=scales > 0.0)
        with np.errstate(invalid="ignore"):
            np.multiply(rows, factors[:, np.newaxis], out=work)
        if broken.any():
            scales[broken] = np.nan
            work[broken] = 0.0
        flat = work.reshape(-1)
        if self._random is not None:
            np.add(flat, self._draw_noise(self._random, flat.size), out=flat)
            np.clip(flat, -self._steps, self._steps, out=flat)
        np.add(flat, _ROUNDING, out=flat)
        return flat.view(np.int32)

    def _draw_noise(self, random: np.random.Generator, count: int) -> Vector:
        """Return random numbers between -0.5 and 0.5, each made from 16 random bits.

        This takes a quarter of the time that random floats would take.
        """
        noise = self._noise[:count]
        drawn = random.integers(0, 2**64 - 1, count // 4, np.uint64, endpoint=True)
        np.copyto(noise, drawn.astype("<u8", copy=False).view("<u2"))
        np.subtract(noise, np.float32(2.0**15 - 0.5), out=noise)
        np.multiply(noise, np.float32(2.0**-16), out=noise)
        return noise


@dataclass(frozen=True)
class _Levels:
    """A stage that rounds values to integer levels.

    It rounds to the nearest level, and ties to even. If it is stochastic, it rounds to one of the
    two adjacent levels at random, so that the expected value is exact.
    """

    stochastic: bool = False

    elementwise: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False

    def _quantizer(self, steps: int, unit: int, blocks: int, random: np.random.Generator | None) -> _Quantizer:
        if self.stochastic and random is None:
            raise ValueError("stochastic rounding needs a random generator; pass random to encode")
        return _Quantizer(steps, unit, blocks, random if self.stochastic else None)


class _BlockSource(ABC):
    """A source that multiplies levels or signs by the scales of their blocks."""

    __slots__ = ("_coded", "_scales", "length")

    def __init__(self, scales: Vector, coded: Bytes, length: int) -> None:
        self._scales = scales
        self._coded = coded
        self.length = length

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        values = scratch[: stop - start]
        self._unpack(start, stop, values)
        _scale_blocks(values, start, self._scales)
        return values

    @abstractmethod
    def _unpack(self, start: int, stop: int, values: Vector) -> None:
        """Write levels or signs to `values`."""


@dataclass(frozen=True)
class Int8(_Levels):
    """The stage `int8`: a decoded value is its level, from -127 to 127, times the block's scale.

    The scale is the largest magnitude in the block divided by 127.
    """

    def nbytes(self, length: int) -> int:
        """Return one byte per value and four per block."""
        return _scale_bytes(length) + length

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:
        """Write the scales and the levels."""
        scales, coded = _split(out, length)
        quantizer = self._quantizer(127, 1, scales.size, random)
        for start, stop, rows, row_scales in _chunks(source, length, scales):
            levels = quantizer.quantize(rows, row_scales)
            np.copyto(coded[start:stop].view(np.int8), levels[: stop - start], casting="unsafe")

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source that multiplies levels by their scales. It also accepts the level -128."""
        return _Int8Source(*_split(coded, length), length)


class _Int8Source(_BlockSource):
    __slots__ = ()

    def _unpack(self, start: int, stop: int, values: Vector) -> None:
        np.copyto(values, self._coded[start:stop].view(np.int8))


@dataclass(frozen=True)
class Int4(_Levels):
    """The stage `int4`: a decoded value is 16 times its level times the block's scale.

    Levels range from -7 to 7. The scale is the largest magnitude in the block divided by 112. The
    lower halves of the bytes contain the levels of the first half of all values, and the upper
    halves contain the remaining levels. So any range of values is in at most two contiguous ranges
    of bytes, which are fast to decode. The upper half of a signed byte represents 16 times the
    level, so decoding needs no sign extension.
    """

    def nbytes(self, length: int) -> int:
        """Return half a byte per value and four bytes per block."""
        return _scale_bytes(length) + (length + 1) // 2

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:
        """Write the scales, and two levels per byte."""
        scales, coded = _split(out, length)
        half = coded.size
        if length % 2:
            coded[-1:] = 0
        quantizer = self._quantizer(7, 16, scales.size, random)
        for start, stop, rows, row_scales in _chunks(source, length, scales):
            levels = quantizer.quantize(rows, row_scales).astype(np.uint8)
            middle = min(max(start, half), stop)
            np.bitwise_and(levels[: middle - start], 15, out=coded[start:middle])
            if middle < stop:
                upper = coded[middle - half : stop - half]
                np.bitwise_or(upper, levels[middle - start : stop - start] << 4, out=upper)

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source that unpacks levels and multiplies them by scales.

        It also accepts the level -8.
        """
        return _Int4Source(*_split(coded, length), length)


class _Int4Source(_BlockSource):
    __slots__ = ()

    def _unpack(self, start: int, stop: int, values: Vector) -> None:
        half = self._coded.size
        middle = min(max(start, half), stop)
        if start < middle:
            lower = self._coded[start:middle] * np.uint8(16)
            np.copyto(values[: middle - start], lower.view(np.int8))
        if middle < stop:
            upper = self._coded[middle - half : stop - half] & np.uint8(0xF0)
            np.copyto(values[middle - start :], upper.view(np.int8))


@dataclass(frozen=True)
class Sign:
    """The stage `sign`: a decoded value is its sign times the mean magnitude of its block."""

    elementwise: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = True
    stochastic: ClassVar[bool] = False

    def nbytes(self, length: int) -> int:
        """Return one bit per value and four bytes per block."""
        return _scale_bytes(length) + -(-length // 8)

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:  # noqa: ARG002
        """Write the scales and the signs."""
        scales, coded = _split(out, length)
        for start, stop, rows, row_scales in _chunks(source, length, scales):
            counts = np.full(len(rows), BLOCK, np.float32)
            counts[-1] -= rows.size - (stop - start)
            with np.errstate(over="ignore", invalid="ignore"):
                means = np.add.reduce(np.abs(rows), axis=1) / counts
            means[~np.isfinite(means)] = np.nan
            row_scales[:] = means
            negative = np.less(rows.reshape(-1)[: stop - start].view(np.int32), 0)
            coded[start // 8 : -(-stop // 8)] = np.packbits(negative, bitorder="little")

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source that unpacks signs and multiplies them."""
        return _SignSource(*_split(coded, length), length)


class _SignSource(_BlockSource):
    __slots__ = ()

    def _unpack(self, start: int, stop: int, values: Vector) -> None:
        first = start // 8
        signs = np.unpackbits(self._coded[first : -(-stop // 8)], bitorder="little").view(np.int8)
        np.multiply(signs, np.int8(-2), out=signs)
        np.add(signs, np.int8(1), out=signs)
        np.copyto(values, signs[start - 8 * first : stop - 8 * first])
