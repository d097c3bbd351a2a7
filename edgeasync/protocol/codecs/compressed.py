"""`zstd` behind any other codec: its payload in one Zstandard frame (RFC 8878). Needs the `zstandard` package."""

from dataclasses import dataclass

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.codec import Codec
from edgeasync.protocol.codecs.dense import wrong_length
from edgeasync.protocol.codecs.source import Source
from edgeasync.protocol.wire import Buffer

try:
    import zstandard
except ImportError:  # the package is optional
    HAS_ZSTD = False
else:
    HAS_ZSTD = True

_LEVEL = 1
_FRAME_BYTES_MIN = 6


def compressed_bytes_max(plain_bytes: int) -> int:
    """Return how long a frame can be: blocks that do not shrink are kept as they are."""
    return plain_bytes + plain_bytes // 1024 + 64


@dataclass(frozen=True)
class Compressed:
    """Another codec's payloads, compressed."""

    inner: Codec

    @property
    def name(self) -> str:
        """The other codec's name, and `+zstd`."""
        return f"{self.inner.name}+zstd"

    @property
    def elementwise(self) -> bool:
        """As the other codec."""
        return self.inner.elementwise

    @property
    def needs_feedback(self) -> bool:
        """As the other codec."""
        return self.inner.needs_feedback

    @property
    def payload_bytes_min(self) -> int:
        """A frame's own bytes."""
        return _FRAME_BYTES_MIN

    @property
    def payload_bytes_max(self) -> int:
        """A frame of the longest payload, if it does not shrink."""
        return compressed_bytes_max(self.inner.payload_bytes_max)

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the payload, which other versions of zstd may write otherwise."""
        return zstandard.ZstdCompressor(level=_LEVEL).compress(self.inner.encode(source, random))

    def open(self, payload: Buffer) -> Source:
        """Decompress a frame whose announced size the other codec can have, then check what is in it."""
        if not self.payload_bytes_min <= len(payload) <= self.payload_bytes_max:
            raise wrong_length(self, len(payload))
        try:
            size = zstandard.get_frame_parameters(payload).content_size
            if not self.inner.payload_bytes_min <= size <= self.inner.payload_bytes_max:
                raise wrong_length(self.inner, size)
            plain = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise ProtocolError(f"not a frame of zstd: {error}") from error
        return self.inner.open(plain)

    def snap(self, values: Vector) -> None:
        """Round as the other codec does."""
        self.inner.snap(values)
