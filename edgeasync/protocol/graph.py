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


class ShippedBase:
    """A base and its content. All transfers of the base share this immutable object.

    `content` is a mapped file, so no transfer uses memory for it.
    """

    __slots__ = ("checksum", "content", "file")

    def __init__(self, file: Base, content: wire.Buffer) -> None:
        self.file = file
        self.content = content
        self.checksum = wire.checksum(content)


class ShippedGraph:
    """A serialized ONNX training graph. All transfers of the graph share this immutable object."""

    __slots__ = ("base", "checksum", "fingerprint", "payload")

    def __init__(self, payload: wire.Buffer, base: ShippedBase | None = None) -> None:
        self.payload = payload
        self.base = base
        self.fingerprint = fingerprint_of(payload)
        self.checksum = wire.checksum(payload)
