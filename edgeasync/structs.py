"""Thread-safe use of msgspec types, and parsing of untrusted JSON."""

import threading
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

_LOOKING = threading.RLock()


def resolve_type(kind: type[Kind]) -> type[Kind]:
    """Return `kind` after msgspec has inspected its fields.

    msgspec inspects a type at its first use, and crashes if another thread uses the type meanwhile
    (seen with version 0.22). So code that several threads call must pass `resolve_type(Struct)`.
    """
    with _LOOKING:
        msgspec.json.Decoder(kind)
    return kind


def parse_json(content: bytes | bytearray | memoryview | str, kind: type[Kind]) -> Kind:
    """Parse JSON as `kind`; raises only `ValueError`, for any content."""
    try:
        return msgspec.json.decode(content, type=resolve_type(kind))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
