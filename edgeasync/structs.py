"""Parses JSON from untrusted sources, and prepares msgspec types for use by several threads."""

import threading
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

_LOOKING = threading.RLock()


def resolve_type(kind: type[Kind]) -> type[Kind]:
    """Return a type after msgspec has inspected its fields.

    msgspec inspects a type on first use, and crashes if a second thread uses the type meanwhile
    (seen with 0.22). So functions shared by threads call `resolve_type(Struct)`.
    """
    with _LOOKING:
        msgspec.json.Decoder(kind)
    return kind


def parse_json(content: bytes | bytearray | memoryview | str, kind: type[Kind]) -> Kind:
    """Parse JSON into a type. Raises `ValueError` for any invalid content."""
    try:
        return msgspec.json.decode(content, type=resolve_type(kind))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
