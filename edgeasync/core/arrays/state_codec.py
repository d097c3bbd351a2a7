"""Durable state as bytes: encoded with a checksum, and checked field by field when it is decoded. No I/O."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.errors import StorageError
from edgeasync.parameters import Vector
from edgeasync.protocol import wire

FORMAT = 3
"""Raised whenever a field of a state changes, so that an older version refuses it and does not misread it."""

FORMATS = (1, 2, FORMAT)
"""What is read. Of 1, the fields that it had not have their defaults; those of 1 and 2 are renamed."""

Renames = Mapping[str, tuple[str, "Renames"]]
"""Old names of fields, each with the new one and the names that changed inside it."""

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint8]

State = TypeVar("State", bound=msgspec.Struct)

_FORMAT_BYTES, _CHECKSUM_BYTES = 2, 8
_FRONT_BYTES = _FORMAT_BYTES + _CHECKSUM_BYTES


def encode_state(state: msgspec.Struct) -> bytes:
    """Return a format number, a checksum, and the state in msgpack: the same bytes for the same state."""
    body = msgspec.msgpack.encode(state)
    checksum = wire.checksum(body).to_bytes(_CHECKSUM_BYTES, "big")
    return FORMAT.to_bytes(_FORMAT_BYTES, "big") + checksum + body


def decode_state(sealed: bytes, kind: type[State], renamed_in_3: Renames | None = None) -> State:
    """Return a state of that kind; raises `StorageError` for bytes that are not one, to the last bit.

    Fields that an older format had under other names are given as `renamed_in_3`.
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
        if renamed_in_3 is not None and made_by < FORMAT:
            body = memoryview(msgspec.msgpack.encode(_renamed(msgspec.msgpack.decode(body), renamed_in_3)))
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise StorageError(f"not the state of a hub: {error}") from error


def _renamed(fields: Any, renames: Renames) -> Any:
    """Return a state's fields under their new names; what is no map of fields is left to the typed decoder."""
    if not isinstance(fields, dict):
        return fields
    found = {}
    for old, value in fields.items():
        new, inside = renames.get(old, (old, {}))
        found[new] = _renamed(value, inside) if inside else value
    return found


def take_values(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Vector:
    """Return an array of float32; raises `StorageError` unless it is there and has that shape."""
    array = arrays.get(name)
    if array is None or array.dtype != np.float32 or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise StorageError(f"array {name!r} of the hub's state is {found}, not float32 {shape}")
    return array.view(np.float32)


def take_payload(arrays: Mapping[str, Array], name: str) -> memoryview:
    """Return a copy of an array of bytes; raises `StorageError` unless it is there and is one."""
    array = arrays.get(name)
    if array is None or array.dtype != np.uint8 or array.ndim != 1:
        raise StorageError(f"array {name!r} of the hub's state is missing, or is not an array of bytes")
    return array.copy().data
