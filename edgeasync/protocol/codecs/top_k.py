"""The stage `top_k(fraction)`: send the largest values and their positions (Aji and Heafield 2017).

A dense stage encodes the values. The codec keeps exactly the `ceil(fraction n)` values with the
largest magnitudes. Among equal magnitudes, it keeps the first ones. It may omit zeros. Positions
are sent as the gaps between them, in symbols of 4, 8 or 16 bits, whichever needs the fewest bytes.
"""

import math

import numpy as np
import numpy.typing as npt

from edgeasync.errors import ProtocolError
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.protocol.codecs.codec import Dense, VectorCodec
from edgeasync.protocol.codecs.source import Bytes, Source, VectorSource, chunks, copy_range, join_statistics
from edgeasync.protocol.wire import Buffer

HEADER_BYTES = 8
WIDTHS = (4, 8, 16)
"""Possible sizes of a symbol in bits."""

SAMPLE = 1 << 14
"""Number of values that are sampled for the first guess of the threshold.

A source that is not longer than this needs no guess.
"""

_MAGNITUDE = 0x7FFF_FFFF

Indices = npt.NDArray[np.int32]
Magnitudes = npt.NDArray[np.int32]
"""The bits of floats without their signs, as integers.

They sort in the same order as the magnitudes, and those of non-finite values are the largest.
"""


class TopKCodec(VectorCodec):
    """Encodes the trained values with the largest magnitudes. The statistics follow."""

    def __init__(self, name: str, spec: ParameterSpec, fraction: float, stage: Dense) -> None:
        self._stage = stage
        self._trained = trained = spec.trained_length
        # No payload may have more values for any fraction, because a dense codec would need fewer bytes.
        self._count_max = count_max = (trained + 1) // 2
        # In integers, because 0.07 times 100 is more than 7 in floating point. A name has up to nine decimals.
        self._count = min(-(-round(fraction * 10**9) * trained // 10**9), count_max)
        # The shortest payload keeps no value. The longest keeps half of them, with the longest code of positions.
        least = HEADER_BYTES + 4 * (spec.length - trained)
        symbol_bytes = max(_symbol_bytes(count_max + trained // _escape(width), width) for width in WIDTHS)
        most = least + stage.nbytes(count_max) + symbol_bytes
        super().__init__(name, least, most, needs_feedback=True, stochastic=stage.stochastic)

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the encoded payload."""
        indices, values = _largest(source, self._trained, self._count)
        width, symbols = _code_indices(indices)
        value_bytes = self._stage.nbytes(indices.size)
        out = np.empty(self.payload_bytes_min + value_bytes + symbols.size, np.uint8)
        out[:HEADER_BYTES].view("<u4")[:] = indices.size, width
        rest = out[HEADER_BYTES:]
        self._stage.encode(VectorSource(values), values.size, rest[:value_bytes], random)
        rest[value_bytes : value_bytes + symbols.size] = symbols
        copy_range(rest[value_bytes + symbols.size :].view("<f4"), source, self._trained)
        return out.data

    def open(self, payload: Buffer) -> Source:
        """Decode and validate the positions; return a source of the values, with zeros elsewhere."""
        coded = self._checked(payload)
        count, width = coded[:HEADER_BYTES].view("<u4").tolist()
        if count > self._count_max or width not in WIDTHS:
            raise ProtocolError(f"invalid header: {count} of {self._trained} values in symbols of {width} bits")
        value_bytes = self._stage.nbytes(count)
        symbol_bytes = coded.size - self.payload_bytes_min - value_bytes
        if symbol_bytes < 0:
            raise ProtocolError(f"{count} values do not fit in a {self.name} payload of {coded.size} bytes")
        rest = coded[HEADER_BYTES:]
        symbols = rest[value_bytes : value_bytes + symbol_bytes]
        indices = _decode_indices(symbols, width, count, self._trained)
        kept = self._stage.open(rest[:value_bytes], count)
        sparse = _SparseSource(self._trained, indices, kept)
        return join_statistics(sparse, rest[value_bytes + symbol_bytes :])


class _SparseSource:
    """A source whose values are zero except at the positions of the kept values."""

    __slots__ = ("_indices", "_kept", "length")

    def __init__(self, length: int, indices: Indices, kept: Source) -> None:
        self.length = length
        self._indices = indices
        self._kept = np.empty(kept.length, np.float32)
        copy_range(self._kept, kept)

    def read(self, start: int, stop: int, scratch: Vector) -> Vector:
        values = scratch[: stop - start]
        values.fill(0.0)
        # With another dtype than that of `indices`, searchsorted would convert them all at every call.
        first, last = np.searchsorted(self._indices, np.array([start, stop], np.int32))
        values[self._indices[first:last] - np.int32(start)] = self._kept[first:last]
        return values


def _largest(source: Source, length: int, count: int) -> tuple[Indices, Vector]:
    """Return the sorted positions and the values of the `count` largest of `length` magnitudes."""
    least = _guess(source, length, count)
    indices, values = _at_least(source, length, least)
    if indices.size < count and least > 1:
        indices, values = _at_least(source, length, _lower_bound(source, length, count))
    if indices.size <= count:
        return indices, values
    magnitudes = _magnitudes(values)
    last = np.partition(magnitudes, -count)[-count]
    keep = magnitudes > last
    keep[np.flatnonzero(magnitudes == last)[: count - np.count_nonzero(keep)]] = True
    return indices[keep], values[keep]


def _guess(source: Source, length: int, count: int) -> int:
    """Estimate from a sample a magnitude that slightly more than `count` values reach or exceed.

    The result is at least 1, so that zeros are omitted.
    """
    if length <= SAMPLE:
        return 1
    # Sample in runs, since every read has a cost; a longer vector is sampled in more and shorter runs.
    run = 128 if length < 1 << 22 else 16
    sample, scratch = np.empty(SAMPLE, np.float32), np.empty(run, np.float32)
    for at in range(0, SAMPLE, run):
        start = at * (length - run) // (SAMPLE - run)
        sample[at : at + run] = source.read(start, start + run, scratch)
    expected = count / length * SAMPLE
    rank = math.ceil(expected + 4.0 * math.sqrt(expected)) + 4
    if rank >= SAMPLE:
        return 1
    magnitudes = _magnitudes(sample)
    return max(1, int(np.partition(magnitudes, -rank)[-rank]))


def _lower_bound(source: Source, length: int, count: int) -> int:
    """Return a magnitude that at least `count` values, but only a few more, reach or exceed.

    The result is 1 if fewer than `count` values differ from zero.
    """
    counts = np.zeros(1 << 16, np.int64)
    for _, values in chunks(source, length):
        counts += np.bincount(_magnitudes(values) >> 15, minlength=1 << 16)
    reached = np.flatnonzero(np.cumsum(counts[::-1])[::-1] >= count)
    return max(1, int(reached[-1]) << 15)


def _at_least(source: Source, length: int, least: int) -> tuple[Indices, Vector]:
    """Return the positions and the values whose magnitude is at least `least`."""
    room = min(CHUNK, length)
    work, reach = np.empty(room, np.int32), np.empty(room, np.bool_)
    found, kept = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for start, values in chunks(source, length):
        size = values.size
        np.bitwise_and(values.view(np.int32), _MAGNITUDE, out=work[:size])
        indices = np.flatnonzero(np.greater_equal(work[:size], least, out=reach[:size]))
        kept.append(values[indices])
        found.append((indices + start).astype(np.int32))
    return np.concatenate(found), np.concatenate(kept)


def _magnitudes(values: Vector) -> Magnitudes:
    return np.bitwise_and(values.view(np.int32), _MAGNITUDE)


def _escape(width: int) -> int:
    """Return M, the largest symbol.

    It stands for M positions, and the gap continues in the next symbol.
    """
    return (1 << width) - 1


def _symbol_bytes(symbols: int, width: int) -> int:
    return -(-symbols * width // 8)


def _code_indices(indices: Indices) -> tuple[int, Bytes]:
    """Return the symbol width that needs the fewest bytes, and the positions encoded with it.

    A gap is the number of positions between two kept values. It is encoded as floor(gap / M) times
    the symbol M, where M = 2**width - 1, followed by the symbol gap mod M. Of two 4-bit symbols in
    a byte, the first is stored in the lower half. If the number of 4-bit symbols is odd, M fills
    the last byte.
    """
    if not indices.size:
        return WIDTHS[0], np.empty(0, np.uint8)
    gaps = np.diff(indices, prepend=np.int32(-1)) - np.int32(1)
    sizes = {width: _symbol_bytes(gaps.size + int((gaps // _escape(width)).sum()), width) for width in WIDTHS}
    width = min(sizes, key=sizes.__getitem__)
    skips = gaps // _escape(width)
    at = np.cumsum(skips + 1, dtype=np.int64) - 1
    symbols = np.full(int(at[-1]) + 1 + (width == 4), _escape(width), np.dtype("<u2") if width == 16 else np.uint8)
    symbols[at] = gaps - skips * _escape(width)
    if width == 4:
        pairs = symbols[: symbols.size // 2 * 2]
        return width, pairs[0::2] | pairs[1::2] << 4
    return width, symbols[: int(at[-1]) + 1].view(np.uint8)


def _decode_indices(coded: Bytes, width: int, count: int, length: int) -> Indices:
    """Decode the positions and return them in ascending order, without duplicates.

    Raises `ProtocolError` unless they are `count` positions below `length`. A peer may send any
    symbols, so the number of symbols is checked before memory is allocated for the positions.
    """
    escape = _escape(width)
    if coded.size > _symbol_bytes(count + length // escape, width) or coded.size * 8 % width:
        raise ProtocolError(f"{coded.size} bytes cannot encode the positions of {count} values")
    if width == 4:
        symbols = np.empty(2 * coded.size, np.uint8)
        np.bitwise_and(coded, 15, out=symbols[0::2])
        np.right_shift(coded, 4, out=symbols[1::2])
        if symbols.size and symbols[-1] == escape:
            symbols = symbols[:-1]
    else:
        symbols = coded.view("<u2") if width == 16 else coded
    ends = symbols != escape
    if np.count_nonzero(ends) != count or (symbols.size and not ends[-1]):
        raise ProtocolError(f"the positions do not end with the last of {count} values")
    indices = np.cumsum(np.add(symbols, ends, dtype=np.int64))[ends] - 1
    if count and indices[-1] >= length:
        raise ProtocolError(f"position {indices[-1]} is outside the {length} values")
    narrow: Indices = indices.astype(np.int32)
    return narrow
