"""`low_rank(r)`: each matrix as a product of two thin ones, as in PowerSGD (Vogels et al. 2019), densely coded.

The codec keeps no state between updates: two subspace iterations begin with the same signs every time. It uses no
BLAS: products are elementwise and sums are numpy's reductions, so that all machines compute the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.protocol.codecs.blocks import Rows
from edgeasync.protocol.codecs.codec import Dense, VectorCodec
from edgeasync.protocol.codecs.source import Source, VectorSource, copy_range, join_statistics
from edgeasync.protocol.wire import Buffer

RANK_MAX = 64
_ITERATIONS = 2
_NOISE = 1e-5
"""A vector of which less than this share is left, when the earlier ones are projected out, is rounding noise."""


@dataclass(frozen=True)
class ArrayLayout:
    """The place of an array in the vector, and the place of its coded values among all coded values."""

    start: int
    rows: int
    columns: int
    coded_start: int
    rank: int
    """The rank of the two factors; with 0 the array is sent as it is."""

    @property
    def size(self) -> int:
        """How many values the array has."""
        return self.rows * self.columns

    @property
    def coded_size(self) -> int:
        """How many values are sent: `rank` vectors as long as a column, then `rank` as long as a row."""
        return self.rank * (self.rows + self.columns) or self.size


def lay_out(spec: ParameterSpec, rank: int) -> tuple[ArrayLayout, ...]:
    """Return the layout of the trained arrays: as matrices, first axis by all others, if that saves anything."""
    layouts: list[ArrayLayout] = []
    start = coded_start = 0
    for parameter in spec.parameters:
        if parameter.role != "trained":
            break
        rows = parameter.shape[0] if parameter.shape else 1
        columns = parameter.size // rows
        saves = rank * (rows + columns) < rows * columns
        layouts.append(ArrayLayout(start, rows, columns, coded_start, rank if saves else 0))
        start += layouts[-1].size
        coded_start += layouts[-1].coded_size
    return tuple(layouts)


class LowRank(VectorCodec):
    """Codes the factors of matrices, and the other trained arrays, by one dense stage; the statistics follow."""

    def __init__(self, name: str, spec: ParameterSpec, layouts: tuple[ArrayLayout, ...], stage: Dense) -> None:
        self._stage = stage
        self._trained = spec.trained_length
        self._layouts = layouts
        self._coded_length = layouts[-1].coded_start + layouts[-1].coded_size if layouts else 0
        self._coded_bytes = stage.nbytes(self._coded_length)
        payload_bytes = self._coded_bytes + 4 * (spec.length - self._trained)
        super().__init__(name, payload_bytes, payload_bytes, needs_feedback=True)

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the payload; unless the source is a vector, this needs memory for the largest matrix."""
        coded = np.empty(self._coded_length, np.float32)
        for layout in self._layouts:
            target = coded[layout.coded_start : layout.coded_start + layout.coded_size]
            if layout.rank:
                split = layout.rank * layout.rows
                left = target[:split].reshape(layout.rank, layout.rows)
                right = target[split:].reshape(layout.rank, layout.columns)
                _factorize(_matrix(source, layout), left, right)
            else:
                copy_range(target, source, layout.start)
        out = np.empty(self.payload_bytes_max, np.uint8)
        self._stage.encode(VectorSource(coded), coded.size, out[: self._coded_bytes], random)
        copy_range(out[self._coded_bytes :].view("<f4"), source, self._trained)
        return out.data

    def open(self, payload: Buffer) -> Source:
        """Decode the factors; only the length of the payload can be wrong."""
        coded = self._checked(payload)
        factors = self._stage.open(coded[: self._coded_bytes], self._coded_length)
        return join_statistics(_LowRankSource(self._trained, self._layouts, factors), coded[self._coded_bytes :])


def _matrix(source: Source, layout: ArrayLayout) -> Rows:
    """Return a matrix of the source; if the source is a vector, a view of it."""
    if isinstance(source, VectorSource):
        values = source.vector[layout.start : layout.start + layout.size]
    else:
        values = np.empty(layout.size, np.float32)
        copy_range(values, source, layout.start)
    return values.reshape(layout.rows, layout.columns)


def _factorize(matrix: Rows, left: Rows, right: Rows) -> None:
    """Write `left` (rank x rows, orthonormal rows or zeros) and `right` (rank x columns): matrix ~ left' right."""
    with np.errstate(over="ignore", invalid="ignore"):
        right[:] = _signs(*right.shape)
        for iteration in range(_ITERATIONS):
            if iteration:
                _orthonormalize(right)
            _times(matrix, right, left)
            finite = np.isfinite(left).all()
            _orthonormalize(left)
            _transposed_times(matrix, left, right)
            if not (finite and np.isfinite(right).all()):
                # Results that are not finite differ between machines, down to a NaN's sign: write one NaN.
                left.fill(np.nan)
                right.fill(np.nan)
                return


def _signs(rank: int, length: int) -> Rows:
    """Return 1 and -1 in an order that looks random: the top bits of Weyl sequences, mixed."""
    places = np.arange(rank * length, dtype=np.uint32).reshape(rank, length) + np.uint32(1)
    mixed = places * np.uint32(0x9E37_79B9)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x85EB_CA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2_AE35)
    return np.where(mixed >> np.uint32(31), np.float32(-1.0), np.float32(1.0))


def _rows_at_a_time(matrix: Rows) -> Iterator[slice]:
    step = max(1, CHUNK // matrix.shape[1])
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


def _times(matrix: Rows, right: Rows, left: Rows) -> None:
    """Write matrix right' to `left`, transposed."""
    for at in _rows_at_a_time(matrix):
        work = np.empty_like(matrix[at])
        for row, out in zip(right, left, strict=True):
            np.add.reduce(np.multiply(matrix[at], row, out=work), axis=1, out=out[at])


def _transposed_times(matrix: Rows, left: Rows, right: Rows) -> None:
    """Write left matrix to `right`."""
    right.fill(0.0)
    for at in _rows_at_a_time(matrix):
        work = np.empty_like(matrix[at])
        for row, out in zip(left, right, strict=True):
            np.add(out, np.add.reduce(np.multiply(matrix[at], row[at, np.newaxis], out=work), axis=0), out=out)


def _orthonormalize(rows: Rows) -> None:
    """Orthonormalize by Gram-Schmidt, applied twice, in float64; rows that depend on earlier ones become zero."""
    done: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    for row in rows:
        wide = row.astype(np.float64)
        before = np.sqrt(np.add.reduce(wide * wide))
        for _ in range(2):
            for other in done:
                wide -= np.add.reduce(wide * other) * other
        after = np.sqrt(np.add.reduce(wide * wide))
        if after > _NOISE * before:
            wide /= after
            done.append(wide)
        else:
            wide.fill(0.0)
        row[:] = wide


class _LowRankSource:
    """Products of factors, which are multiplied when they are read."""

    __slots__ = ("_coded", "_factors", "_layouts", "_starts", "length")

    def __init__(self, length: int, layouts: tuple[ArrayLayout, ...], coded: Source) -> None:
        self.length = length
        self._layouts = layouts
        self._starts = np.array([layout.start for layout in layouts], np.int64)
        self._coded = coded
        self._factors: dict[int, Vector] = {}
        for layout in layouts:
            if layout.rank:
                factors = np.empty(layout.coded_size, np.float32)
                copy_range(factors, coded, layout.coded_start)
                self._factors[layout.start] = factors

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for layout in self._layouts[first:]:
            if layout.start >= stop:
                break
            begin, end = max(start, layout.start), min(stop, layout.start + layout.size)
            out = scratch[begin - start : end - start]
            if layout.rank:
                self._multiply(layout, begin - layout.start, out)
            else:
                copy_range(out, self._coded, begin - layout.start + layout.coded_start)
        return scratch[: stop - start]

    def _multiply(self, layout: ArrayLayout, start: int, out: Vector) -> None:
        """Write a matrix's values from place `start` on: the rest of a row, whole rows, the beginning of a row."""
        columns = layout.columns
        row, column = divmod(start, columns)
        head = min(columns - column, out.size) if column else 0
        if head:
            self._multiply_block(layout, slice(row, row + 1), slice(column, column + head), out[:head])
            row += 1
        whole = (out.size - head) // columns
        middle = head + whole * columns
        self._multiply_block(layout, slice(row, row + whole), slice(0, columns), out[head:middle])
        if middle < out.size:
            columns_left = slice(0, out.size - middle)
            self._multiply_block(layout, slice(row + whole, row + whole + 1), columns_left, out[middle:])

    def _multiply_block(self, layout: ArrayLayout, rows: slice, columns: slice, out: Vector) -> None:
        """Write a block of the product, one rank after another."""
        factors = self._factors[layout.start]
        split = layout.rank * layout.rows
        left = factors[:split].reshape(layout.rank, layout.rows)[:, rows, np.newaxis]
        right = factors[split:].reshape(layout.rank, layout.columns)[:, columns]
        block = out.reshape(left.shape[1], right.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):  # a peer's values must not cause a warning
            np.multiply(left[0], right[0], out=block)
            for number in range(1, layout.rank):
                block += left[number] * right[number]
