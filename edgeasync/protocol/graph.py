"""The training graph that a hub sends, and the fingerprint that identifies it."""

import hashlib

from edgeasync.protocol import wire


def fingerprint_of(graph: wire.Buffer) -> str:
    """Return the SHA-256 of a serialized graph, as 64 hexadecimal digits."""
    return hashlib.sha256(graph).hexdigest()


class ShippedGraph:
    """A serialized ONNX training graph. All transfers of the graph share this immutable object."""

    __slots__ = ("checksum", "fingerprint", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.fingerprint = fingerprint_of(payload)
        self.checksum = wire.checksum(payload)
