"""The training graph that a hub sends, its base, and the fingerprints that identify both."""

import hashlib
from typing import NamedTuple

from edgeasync.protocol import wire


def fingerprint_of(graph: wire.Buffer) -> str:
    """Return the SHA-256 of a serialized graph, as 64 hexadecimal digits."""
    return hashlib.sha256(graph).hexdigest()


class Base(NamedTuple):
    """The frozen values of a training graph in a file of their own.

    `fingerprint` is the SHA-256 of the file's content, and `nbytes` its length.
    """

    fingerprint: str
    nbytes: int

    @property
    def file_name(self) -> str:
        """The name by which the graph refers to the file, in the folder that contains it."""
        return f"{self.fingerprint}.base"


class ShippedGraph:
    """A serialized ONNX training graph. All transfers of the graph share this immutable object."""

    __slots__ = ("checksum", "fingerprint", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.fingerprint = fingerprint_of(payload)
        self.checksum = wire.checksum(payload)
