"""Types that msgspec reads into, used by several threads, and JSON that somebody else may have written."""

import threading
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

_LOOKING = threading.RLock()


def resolve_type(kind: type[Kind]) -> type[Kind]:
    """Return a type once msgspec knows its fields.

    msgspec looks at them when it first reads the type, and crashes if a second thread reads the type meanwhile
    (seen with 0.22). So a function that threads share reads `resolve_type(Struct)`.
    """
    with _LOOKING:
        msgspec.json.Decoder(kind)
    return kind


def parse_json(content: bytes | bytearray | memoryview | str, kind: type[Kind]) -> Kind:
    """Parse JSON into a type; raises `ValueError`, whatever the content is."""
    try:
        return msgspec.json.decode(content, type=resolve_type(kind))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
