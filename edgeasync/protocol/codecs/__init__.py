"""Codecs turn a model's flat float32 vector into payload bytes and back; a handshake agrees on them by name."""

from edgeasync.protocol.codecs.catalogue import (
    ELEMENTWISE,
    STAGES,
    check_codec_name,
    find_codec,
    known_stages,
    make_codec,
    payload_bytes_limit,
    plugin_parts,
    stages_of,
)
from edgeasync.protocol.codecs.codec import VectorCodec
from edgeasync.protocol.codecs.source import JoinedSources, Source, VectorSource, chunks, copy_range

__all__ = [
    "ELEMENTWISE",
    "STAGES",
    "JoinedSources",
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
