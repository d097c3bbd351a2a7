"""Durable state as bytes: encoded with a checksum, and checked field by field when it is decoded. No I/O."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.errors import StorageError
from edgeasync.parameters import Vector
from edgeasync.protocol import wire
from edgeasync.structs import ready

FORMAT = 11
"""The number of this format. Increase it when a field of a state changes: older versions then refuse the state."""

FORMATS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, FORMAT)
"""The formats that can be read. A field that an older format lacks gets its default."""

Upgrade = Callable[[dict[str, Any], int], dict[str, Any]]
"""A function that converts the fields of a state to this format, given the number of their older format."""

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint8]

State = TypeVar("State", bound=msgspec.Struct)

_FORMAT_BYTES, _CHECKSUM_BYTES = 2, 8
_FRONT_BYTES = _FORMAT_BYTES + _CHECKSUM_BYTES


def encode_state(state: msgspec.Struct) -> bytes:
    """Return a format number, a checksum, and the state in msgpack: the same bytes for the same state."""
    body = msgspec.msgpack.encode(state)
    checksum = wire.checksum(body).to_bytes(_CHECKSUM_BYTES, "big")
    return FORMAT.to_bytes(_FORMAT_BYTES, "big") + checksum + body


def decode_state(sealed: bytes, kind: type[State], upgrade: Upgrade | None = None) -> State:
    """Decode a state of that kind; raises `StorageError` if even one bit is wrong.

    With `upgrade`, convert the fields of an older format before they are checked.
    """
    made_by = int.from_bytes(sealed[:_FORMAT_BYTES], "big")
    body = memoryview(sealed)[_FRONT_BYTES:]
    if not body or wire.checksum(body) != int.from_bytes(sealed[_FORMAT_BYTES:_FRONT_BYTES], "big"):
        raise StorageError("the hub's state is damaged; choose an older checkpoint")
    if made_by not in FORMATS:
        raise StorageError(
            f"the hub's state has format {made_by}, not one of {', '.join(map(str, FORMATS))}: "
            "start the version of edgeasync that wrote it, or a newer one"
        )
    try:
        if upgrade is None or made_by == FORMAT:
            return msgspec.msgpack.decode(body, type=ready(kind))
        return msgspec.convert(upgrade(msgspec.msgpack.decode(body), made_by), ready(kind), builtin_types=(bytes,))
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise StorageError(f"not the state of a hub: {error}") from error


def take_values(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Vector:
    """Return an array of float32; raises `StorageError` if it is missing or has another shape."""
    array = arrays.get(name)
    if array is None or array.dtype != np.float32 or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise StorageError(f"array {name!r} of the hub's state is {found}, not float32 {shape}")
    return array.view(np.float32)


def take_payload(arrays: Mapping[str, Array], name: str) -> memoryview:
    """Return a copy of an array of bytes; raises `StorageError` if it is missing or has another type."""
    array = arrays.get(name)
    if array is None or array.dtype != np.uint8 or array.ndim != 1:
        raise StorageError(f"array {name!r} of the hub's state is missing, or is not an array of bytes")
    return array.copy().data
