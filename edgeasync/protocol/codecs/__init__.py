"""Codecs convert a model's float32 vector to payload bytes and back.

Hub and device select codecs by name during the handshake.
"""

from edgeasync.protocol.codecs.catalogue import (
    ELEMENTWISE,
    STAGES,
    Codecs,
    check_codec_name,
    find_codec,
    known_stages,
    make_codec,
    payload_bytes_limit,
    plugin_parts,
    stages_of,
)
from edgeasync.protocol.codecs.codec import VectorCodec
from edgeasync.protocol.codecs.dense import FLOAT16, SixteenBits
from edgeasync.protocol.codecs.source import JoinedSources, Source, VectorSource, chunks, copy_range

__all__ = [
    "ELEMENTWISE",
    "FLOAT16",
    "STAGES",
    "Codecs",
    "JoinedSources",
    "SixteenBits",
    "Source",
    "VectorCodec",
    "VectorSource",
    "check_codec_name",
    "chunks",
    "copy_range",
    "find_codec",
    "known_stages",
    "make_codec",
    "payload_bytes_limit",
    "plugin_parts",
    "stages_of",
]
