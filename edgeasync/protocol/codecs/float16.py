"""Convert float32 to 16-bit formats and back by integer arithmetic.

This is several times faster than numpy's casts and produces the same bits. It avoids subnormal
floats, which are up to a hundred times slower on some machines. Small deltas in half precision
contain many subnormal values.
"""

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import Vector

Halves = npt.NDArray[np.uint16]

_SIGN = 0x8000_0000
_MAGNITUDE = 0x7FFF_FFFF
_INFINITY = 0x7F80_0000
_LARGE = 142 << 23
"""The bits of 32768. Magnitudes below it do not round to infinity in half precision."""
_TO_INFINITY = 0x477F_F000
"""The bits of 65520. Magnitudes from 65520 upward round to infinity in half precision."""


def narrow_float16(values: Vector, out: Halves) -> None:
    """Round to IEEE 754 half precision, ties to even; a NaN keeps the high bits of its payload."""
    bits = values.view(np.uint32)
    rounded = np.bitwise_and(bits, _MAGNITUDE)
    largest = rounded.max(initial=0)
    # Take the value's power of two, at least 2**-14. Adding 2**13 times that power makes the hardware round to ten
    # bits behind the point. Those bits and the power's exponent then add up to the half, modulo 2**16.
    power = np.maximum(rounded, 113 << 23)
    np.bitwise_and(power, _INFINITY, out=power)
    np.add(power, 13 << 23, out=power)
    if largest >= _TO_INFINITY:
        special = rounded >= _TO_INFINITY
        coded = _special_halves(bits[special])
        rounded[special] = 0
        power[special] = 0
    np.add(rounded.view(np.float32), power.view(np.float32), out=rounded.view(np.float32))
    np.right_shift(power, 13, out=power)
    np.add(rounded, power, out=rounded)
    np.bitwise_and(bits, _SIGN, out=power)
    np.right_shift(power, 16, out=power)
    np.add(rounded, power, out=rounded)
    np.add(rounded, 0x800, out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    if largest >= _TO_INFINITY:
        out[special] = coded


def _special_halves(bits: npt.NDArray[np.uint32]) -> Halves:
    """Return the half-precision bits of values that are NaN or infinite, or that round to infinity."""
    mantissa = bits >> 13 & 0x3FF
    nan = (bits & _MAGNITUDE) > _INFINITY
    mantissa = np.where(nan, np.maximum(mantissa, 1), 0)
    return (bits >> 16 & 0x8000 | 0x7C00 | mantissa).astype(np.uint16)


def widen_float16(halves: Halves, out: Vector) -> None:
    """Convert half precision to float32, exactly."""
    special = halves.view(np.int16).max(initial=0) >= 0x7C00 or halves.max(initial=0) >= 0xFC00
    sign = np.empty(halves.size, np.int32)
    np.copyto(sign, halves.view(np.int16))
    np.left_shift(sign, 13, out=sign)
    bits = out.view(np.int32)
    np.bitwise_and(sign, 0x0FFF_E000, out=bits)
    np.bitwise_and(sign, np.int32(-(1 << 31)), out=sign)
    np.add(bits, 112 << 23, out=bits)
    # For a normal half `out` now has the value y. For a subnormal half the value is 2 y - 2**-14, which for normal
    # halves is not less than y: so the minimum is right for both.
    doubled = np.add(bits, 1 << 23).view(np.float32)
    np.subtract(doubled, np.float32(2.0**-14), out=doubled)
    np.minimum(out, doubled, out=out)
    np.bitwise_or(bits, sign, out=bits)
    if special:
        at = np.flatnonzero((halves & 0x7C00) == 0x7C00)
        wide = halves[at].astype(np.uint32)
        out.view(np.uint32)[at] = (wide & 0x8000) << 16 | _INFINITY | (wide & 0x3FF) << 13


def round_float16(values: Vector) -> None:
    """Round to half precision in place, as `narrow_float16` and `widen_float16` do."""
    bits = values.view(np.uint32)
    power = np.bitwise_and(bits, _INFINITY)
    if power.max(initial=0) >= _LARGE:
        halves = np.empty(values.size, np.uint16)
        narrow_float16(values, halves)
        widen_float16(halves, values)
        return
    # Adding 1.5 times 2**13 times the value's power of two, at least 2**-14, makes the hardware round to ten bits
    # behind the point. Subtracting it again is exact, but loses the sign of a zero.
    np.maximum(power, 113 << 23, out=power)
    np.add(power, 13 << 23 | 1 << 22, out=power)
    sign = np.bitwise_and(bits, _SIGN)
    np.add(values, power.view(np.float32), out=values)
    np.subtract(values, power.view(np.float32), out=values)
    np.bitwise_or(bits, sign, out=bits)


def narrow_bfloat16(values: Vector, out: Halves) -> None:
    """Round to the upper half of a float32, ties to even; a NaN stays a NaN."""
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    signed = values.view(np.int32)
    if signed.max(initial=0) > _INFINITY or bits.max(initial=0) > _SIGN + _INFINITY:
        nan = (bits & _MAGNITUDE) > _INFINITY
        out[nan] = (bits[nan] >> 16 | 0x40).astype(np.uint16)


def widen_bfloat16(halves: Halves, out: Vector) -> None:
    """Convert bfloat16 to float32, exactly."""
    bits = out.view(np.uint32)
    np.copyto(bits, halves)
    np.left_shift(bits, 16, out=bits)


def round_bfloat16(values: Vector) -> None:
    """Round to bfloat16 in place, as `narrow_bfloat16` and `widen_bfloat16` do."""
    bits = values.view(np.uint32)
    if values.view(np.int32).max(initial=0) > _INFINITY or bits.max(initial=0) > _SIGN + _INFINITY:
        halves = np.empty(values.size, np.uint16)
        narrow_bfloat16(values, halves)
        widen_bfloat16(halves, values)
        return
    up = np.right_shift(bits, 16)
    np.bitwise_and(up, 1, out=up)
    np.add(up, 0x7FFF, out=up)
    np.add(bits, up, out=bits)
    np.bitwise_and(bits, 0xFFFF_0000, out=bits)
