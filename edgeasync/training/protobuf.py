"""Parses protobuf's wire format without copying: fields, varints and packed lists."""

from collections.abc import Iterator

from edgeasync.errors import GraphError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
"""Wire types."""


def fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of every field of a message that has been screened."""
    at = 0
    while at < len(view):
        tag, at = varint(view, at)
        value, at = field(view, at, tag & 7)
        yield tag >> 3, value


def field(view: memoryview, at: int, wire_type: int) -> tuple[int | memoryview, int]:
    """Read a field's value. Return it and its end, which may exceed the length of the view."""
    if wire_type == VARINT:
        return varint(view, at)
    length = 8 if wire_type == EIGHT else 4
    if wire_type == BYTES:
        length, at = varint(view, at)
    return view[at : at + length], at + length


def varint(view: memoryview, at: int) -> tuple[int, int]:
    """Read a varint of up to 64 bits.

    Return it and its end. Raises `GraphError` if it is incomplete.
    """
    value = shift = 0
    while at < len(view) and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise GraphError("the graph contains an incomplete or overlong number; it is damaged")


def packed(value: int | memoryview, count_max: int) -> list[int]:
    """Return the integers of a field, single or packed; reads at most one more than `count_max`."""
    if isinstance(value, int):
        return [value]
    values: list[int] = []
    at = 0
    while at < len(value) and len(values) <= count_max:
        number, at = varint(value, at)
        values.append(number)
    return values


def signed(number: int) -> int:
    """Convert a 64-bit pattern to a signed integer."""
    return number - (1 << 64) if number >> 63 else number
