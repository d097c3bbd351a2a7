"""The stage `zstd`: compress the payload of another codec into one Zstandard frame (RFC 8878).

It needs the `zstandard` package.
"""

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.codec import VectorCodec
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
    """Return the maximum size of the compressed payload in bytes.

    If zstd cannot compress a block, it stores the block unchanged.
    """
    return plain_bytes + plain_bytes // 1024 + 64


class Compressed(VectorCodec):
    """Compresses the payloads of another codec."""

    def __init__(self, inner: VectorCodec) -> None:
        super().__init__(
            f"{inner.name}+zstd",
            _FRAME_BYTES_MIN,
            compressed_bytes_max(inner.payload_bytes_max),
            elementwise=inner.elementwise,
            needs_feedback=inner.needs_feedback,
            stochastic=inner.stochastic,
        )
        self._inner = inner

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the compressed payload, whose bytes depend on the version of zstd."""
        return zstandard.ZstdCompressor(level=_LEVEL).compress(self._inner.encode(source, random))

    def open(self, payload: Buffer) -> Source:
        """Decompress a frame, and let the other codec validate the content.

        The frame must declare a size that is valid for the other codec.
        """
        self.check_length(len(payload))
        try:
            self._inner.check_length(zstandard.get_frame_parameters(payload).content_size)
            plain = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise ProtocolError(f"not a zstd frame: {error}") from error
        return self._inner.open(plain)

    def round_in_place(self, values: Vector) -> None:
        """Round values as the other codec does."""
        self._inner.round_in_place(values)
