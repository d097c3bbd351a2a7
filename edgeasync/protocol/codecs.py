"""Tensor codecs: a flat float32 vector to payload bytes and back. Agreed by name when a device joins.

Bytes are little-endian on every machine. A codec is a small frozen value without state.
"""

from typing import Protocol

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Vector
from edgeasync.protocol.wire import Buffer


class Codec(Protocol):
    """How a vector travels. `read` decodes any range, so a fold can go through a payload in cached chunks."""

    @property
    def name(self) -> str:
        """The name both sides know the codec by."""

    def payload_bytes(self, length: int) -> int:
        """Bytes that `length` values take."""

    def encode(self, vector: Vector) -> Buffer:
        """Return the payload; it may be a view of `vector`, which must not change while it is sent."""

    def read(self, payload: Buffer, start: int, stop: int, scratch: Vector) -> Vector:
        """Decode values `start` to `stop`: a read-only view of the payload, or the front of `scratch`."""


class Identity:
    """`identity`: little-endian float32, four bytes a value."""

    name = "identity"

    def payload_bytes(self, length: int) -> int:
        """Four bytes a value."""
        return 4 * length

    def encode(self, vector: Vector) -> Buffer:
        """Return a view of the vector's own memory."""
        return np.ascontiguousarray(vector, "<f4").data.cast("B")

    def read(self, payload: Buffer, start: int, stop: int, scratch: Vector) -> Vector:  # noqa: ARG002
        """Return a view of the payload."""
        values = np.frombuffer(payload, "<f4", stop - start, 4 * start)
        values.flags.writeable = False
        return values


class Float16:
    """`float16`: little-endian IEEE 754 half precision; values beyond 65504 turn infinite and are refused."""

    name = "float16"

    def payload_bytes(self, length: int) -> int:
        """Two bytes a value."""
        return 2 * length

    def encode(self, vector: Vector) -> Buffer:
        """Round to nearest, ties to even."""
        with np.errstate(over="ignore"):
            return vector.astype("<f2").view(np.uint8).data

    def read(self, payload: Buffer, start: int, stop: int, scratch: Vector) -> Vector:
        """Widen into `scratch`."""
        values = scratch[: stop - start]
        with np.errstate(invalid="ignore"):  # a signalling NaN must not warn, let alone raise
            values[:] = np.frombuffer(payload, "<f2", stop - start, 2 * start)
        return values


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Identity(), Float16())}


def check_codec_name(name: str) -> None:
    """Raise `ValueError`, with the names there are, for a codec that settings cannot mean."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")


def find_codec(name: str, payload_bytes: int, length: int) -> Codec:
    """Return the codec named in a message; raises `ProtocolError` if unknown or if the length is wrong."""
    codec = CODECS.get(name)
    if codec is None:
        raise ProtocolError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
    if payload_bytes != codec.payload_bytes(length):
        raise ProtocolError(
            f"a {name} payload of {length} values has {codec.payload_bytes(length)} bytes, not {payload_bytes}"
        )
    return codec
