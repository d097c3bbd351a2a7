"""Parses and writes protobuf's wire format without copying: fields, varints and packed lists."""

from collections.abc import Iterator

from edgeasync.errors import GraphError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
"""Wire types of protobuf."""


def fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of every field of a message that has already been screened."""
    at = 0
    while at < len(view):
        tag, at = varint(view, at)
        value, at = field(view, at, tag & 7)
        yield tag >> 3, value


def raw_fields(view: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield the number, all bytes and the content of every field; integers have an empty content."""
    at = 0
    while at < len(view):
        start = at
        tag, at = varint(view, at)
        value, at = field(view, at, tag & 7)
        yield tag >> 3, view[start:at], view[:0] if isinstance(value, int) else value


def field(view: memoryview, at: int, wire_type: int) -> tuple[int | memoryview, int]:
    """Return the value of a field, and its end position, which may be beyond the end of `view`."""
    if wire_type == VARINT:
        return varint(view, at)
    length = 8 if wire_type == EIGHT else 4
    if wire_type == BYTES:
        length, at = varint(view, at)
    return view[at : at + length], at + length


def varint(view: memoryview, at: int) -> tuple[int, int]:
    """Read a varint of up to 64 bits.

    Return the value and the position after it. Raises `GraphError` if the varint is incomplete.
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
    """Return the integers of a field, which may be a single value or packed.

    Reads at most `count_max` + 1 integers.
    """
    if isinstance(value, int):
        return [value]
    values: list[int] = []
    at = 0
    while at < len(value) and len(values) <= count_max:
        number, at = varint(value, at)
        values.append(number)
    return values


def signed(number: int) -> int:
    """Convert an unsigned 64-bit integer to the signed integer with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def header(number: int, length: int) -> bytes:
    """Return the bytes that precede `length` bytes of content in a field with this number."""
    return written(number << 3 | BYTES) + written(length)


def message(number: int, content: bytes) -> bytes:
    """Return a field with this number and content."""
    return header(number, len(content)) + content


def written(value: int) -> bytes:
    """Return a nonnegative number as a varint."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
