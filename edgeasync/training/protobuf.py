"""Protobuf's wire format, read without a copy: fields, integers of variable length, and lists of them."""

from collections.abc import Iterator

from edgeasync.errors import GraphError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
"""Wire types."""


def fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of every field of a message that was screened before."""
    at = 0
    while at < len(view):
        tag, at = varint(view, at)
        value, at = field(view, at, tag & 7)
        yield tag >> 3, value


def field(view: memoryview, at: int, wire_type: int) -> tuple[int | memoryview, int]:
    """Read a field's value; return it and where it ends, which may be beyond what there is."""
    if wire_type == VARINT:
        return varint(view, at)
    length = 8 if wire_type == EIGHT else 4
    if wire_type == BYTES:
        length, at = varint(view, at)
    return view[at : at + length], at + length


def varint(view: memoryview, at: int) -> tuple[int, int]:
    """Read an integer of up to 64 bits; return it and where it ends. Raises `GraphError` if it does not end."""
    value = shift = 0
    while at < len(view) and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise GraphError("the graph ends in the middle of a number, or a number is too long: it is damaged")


def packed(value: int | memoryview, count_max: int) -> list[int]:
    """Return the integers of a field that may hold one or, packed, several; of too many the first."""
    if isinstance(value, int):
        return [value]
    values: list[int] = []
    at = 0
    while at < len(value) and len(values) <= count_max:
        number, at = varint(value, at)
        values.append(number)
    return values


def signed(number: int) -> int:
    """Return the signed integer that 64 bits stand for."""
    return number - (1 << 64) if number >> 63 else number
