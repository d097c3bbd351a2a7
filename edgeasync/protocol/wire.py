"""Frames: a message consists of one msgpack header frame and at most one payload frame.

The header is the array `[protocol version, kind, fields, padding]`. `fields` is an array with the
values of the message's fields.
"""

from collections.abc import Mapping

import msgpack
import msgspec
import xxhash

from edgeasync.errors import ProtocolError
from edgeasync.protocol.messages import MESSAGES, PROTOCOL_VERSION, Message, Refuse

HEADER_BYTES_MIN = 64
"""Shorter headers are padded to this length.

A small unaligned frame before a large frame halves libzmq's throughput.
"""

HEADER_BYTES_MAX = 1 << 20
"""Longer headers are rejected without parsing."""

ERROR_LENGTH_MAX = 240

Buffer = bytes | bytearray | memoryview

_PADDING = [b"\xc4" + bytes((length,)) + bytes(length) for length in range(HEADER_BYTES_MIN)]
_pack = msgpack.Packer(autoreset=True).pack


class UnsupportedVersionError(ProtocolError):
    """The header has a protocol version that differs from `PROTOCOL_VERSION`."""

    def to_refuse(self) -> Refuse:
        """Return the refusal that ends the handshake on both sides."""
        return Refuse("protocol_version", f"{self}; install the same version of edgeasync on both sides")


def encode(message: Message) -> bytes:
    """Return the header frame of `message`, padded to 64 bytes."""
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    header: bytes = _pack((PROTOCOL_VERSION, message.kind, fields, b""))
    missing = HEADER_BYTES_MIN - len(header)
    return header if missing <= 0 else header[:-2] + _PADDING[missing]


def decode(
    header: bytes, bytes_max: int = HEADER_BYTES_MAX, kinds: Mapping[int, type[Message]] = MESSAGES
) -> Message:
    """Parse and validate a header frame of up to `bytes_max` bytes.

    For invalid bytes, it raises `ProtocolError` and no other exception. If the header has another
    protocol version, it raises the subclass `UnsupportedVersionError`.
    """
    if len(header) > bytes_max:
        raise ProtocolError(f"header of {len(header)} bytes exceeds the limit of {bytes_max}")
    try:
        frame = msgpack.unpackb(header, ext_hook=_refuse_extension)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"header is not msgpack: {_brief(error)}") from error
    if type(frame) is not list or len(frame) != 4 or type(frame[0]) is not int:
        raise ProtocolError("header is not an array of version, kind, fields and padding")
    version, kind, fields, _ = frame
    if version != PROTOCOL_VERSION:
        raise UnsupportedVersionError(f"got protocol version {version}, expected {PROTOCOL_VERSION}")
    message = kinds.get(kind) if type(kind) is int else None
    if message is None:
        raise ProtocolError("unknown message kind")
    try:
        return msgspec.convert(
            fields, message, builtin_types=(bytes,)
        )  # otherwise base64 text would be accepted as bytes
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{message.__name__}: {_brief(error)}") from error


def checksum(*payload: Buffer) -> int:
    """Return the XXH3-64 of a payload frame, which detects corruption but not forgery."""
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0])
    digest = xxhash.xxh3_64()
    for part in payload:
        digest.update(part)
    return digest.intdigest()


def _refuse_extension(code: int, data: bytes) -> object:  # noqa: ARG001
    raise ValueError(f"extension type {code} is not part of the protocol")


def _brief(error: Exception) -> str:
    """Shorten an error message, because it may quote a peer's whole header."""
    sentence = str(error) or type(error).__name__
    return sentence if len(sentence) <= ERROR_LENGTH_MAX else f"{sentence[:ERROR_LENGTH_MAX]}..."
