"""Encodes durable state with a checksum, which is verified when decoding. No I/O."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.errors import StorageError
from edgeasync.parameters import Vector
from edgeasync.protocol import wire
from edgeasync.structs import resolve_type

FORMAT = 1
"""The number of the format. Increase it when a field of a state changes, so that other versions
refuse the state.
"""

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint8]

State = TypeVar("State", bound=msgspec.Struct)

_WRONG = (
    msgspec.DecodeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions raised when decoding a state that has a valid checksum, but was forged."""

_FORMAT_BYTES, _CHECKSUM_BYTES = 2, 8
_FRONT_BYTES = _FORMAT_BYTES + _CHECKSUM_BYTES


def encode_state(state: msgspec.Struct) -> bytes:
    """Encode a format number, a checksum, and the state in msgpack. Deterministic."""
    body = msgspec.msgpack.encode(state)
    checksum = wire.checksum(body).to_bytes(_CHECKSUM_BYTES, "big")
    return FORMAT.to_bytes(_FORMAT_BYTES, "big") + checksum + body


def decode_state(sealed: bytes, kind: type[State]) -> State:
    """Decode a state; raises `StorageError` if it is damaged or has another format."""
    written = int.from_bytes(sealed[:_FORMAT_BYTES], "big")
    body = memoryview(sealed)[_FRONT_BYTES:]
    if not body or wire.checksum(body) != int.from_bytes(sealed[_FORMAT_BYTES:_FRONT_BYTES], "big"):
        raise StorageError("the hub's state is damaged; choose an older checkpoint")
    if written != FORMAT:
        raise StorageError(
            f"the hub's state has format {written}, but this edgeasync reads format {FORMAT}; "
            "use the version of edgeasync that wrote it, or choose another run folder"
        )
    try:
        return msgspec.msgpack.decode(body, type=resolve_type(kind))
    except _WRONG as error:
        raise StorageError(f"not a hub's state ({error}); choose an older checkpoint") from error


def take_values(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Vector:
    """Return a float32 array.

    Raises `StorageError` if the array is missing or has another shape.
    """
    array = arrays.get(name)
    if array is None or array.dtype != np.float32 or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise StorageError(
            f"array {name!r} of the hub's state is {found}, not float32 {shape}; choose an older checkpoint"
        )
    return array.view(np.float32)


def take_payload(arrays: Mapping[str, Array], name: str) -> memoryview:
    """Return a copy of a byte array.

    Raises `StorageError` if the array is missing or has another type.
    """
    array = arrays.get(name)
    if array is None or array.dtype != np.uint8 or array.ndim != 1:
        raise StorageError(
            f"array {name!r} of the hub's state is missing or not an array of bytes; choose an older checkpoint"
        )
    return array.copy().data
