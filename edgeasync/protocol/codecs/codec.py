"""A codec turns the vectors of one spec into payloads and back; its dense stage codes any number of values."""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.source import Bytes, Source
from edgeasync.protocol.wire import Buffer


class VectorCodec(ABC):
    """Codes the vectors of one spec, without any state; all that follows from the spec is computed in advance.

    Its stages code the trained values; the statistics always follow as plain float32. All numbers are
    little-endian. If a value of a vector is not finite, at least one of the decoded values is not finite either.
    """

    def __init__(
        self,
        name: str,
        payload_bytes_min: int,
        payload_bytes_max: int,
        *,
        elementwise: bool = False,
        needs_feedback: bool,
    ) -> None:
        self.name = name
        """The canonical name, such as `top_k(0.01)+int8`."""
        self.payload_bytes_min = payload_bytes_min
        """No valid payload is shorter."""
        self.payload_bytes_max = payload_bytes_max
        """No valid payload is longer."""
        self.elementwise = elementwise
        """Whether each value is rounded by itself, and a second rounding changes nothing: fit for whole models."""
        self.needs_feedback = needs_feedback
        """Whether the codec drops so much that a device must add the dropped part to its next update."""

    @abstractmethod
    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the payload; it may be a view of a `VectorSource`, which must not change while it is sent.

        Raises `ValueError` if the codec rounds stochastically and `random` is missing.
        """

    @abstractmethod
    def open(self, payload: Buffer) -> Source:
        """Check a payload, and return a source of its values; the payload must not change from then on.

        Raises only `ProtocolError`, whatever the bytes are. Any range of the source can be read. The source keeps
        the payload alive.
        """

    def round_in_place(self, values: Vector) -> None:  # noqa: ARG002
        """Round any number of trained values as coding them would; raises `TypeError` unless `elementwise`."""
        raise TypeError(f"{self.name} does not round values one by one")

    def check_length(self, payload_bytes: int) -> None:
        """Raise `ProtocolError` if no payload has this many bytes."""
        least, most = self.payload_bytes_min, self.payload_bytes_max
        if not least <= payload_bytes <= most:
            bounds = f"{most}" if least == most else f"{least} to {most}"
            raise ProtocolError(f"a payload in {self.name} has {bounds} bytes for this model, not {payload_bytes}")

    def _checked(self, payload: Buffer) -> Bytes:
        """Return a payload as a read-only array; raises `ProtocolError` for a length that no payload has."""
        coded = np.frombuffer(payload, np.uint8)
        coded.flags.writeable = False
        self.check_length(coded.size)
        return coded


class Dense(Protocol):
    """A stage that codes any number of values; the number of bytes depends on the number of values alone.

    Give `encode` and `open` exactly `nbytes(length)` bytes, and `open` the same `length` as `encode`. The bytes
    must not change while the source is in use. Any bytes can be opened: check what they decode to.
    """

    @property
    def elementwise(self) -> bool:
        """As `VectorCodec.elementwise`."""

    @property
    def needs_feedback(self) -> bool:
        """As `VectorCodec.needs_feedback`."""

    def nbytes(self, length: int) -> int:
        """Return how many bytes `length` values take; never fewer for more values."""

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:
        """Write the first `length` values of the source to `out`; a stochastic stage needs `random`."""

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source of `length` values that reads `coded`."""
