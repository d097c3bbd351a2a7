"""A codec converts the vectors of a spec to payloads and back; its dense stage encodes values."""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.source import Bytes, Source
from edgeasync.protocol.wire import Buffer


class VectorCodec(ABC):
    """Encodes and decodes the vectors of one spec, without state.

    Its stages encode the trained values; the statistics always follow as plain float32. All numbers
    are little-endian. If a value of a vector is not finite, at least one decoded value is not
    finite either.
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
        """Minimum length of a valid payload."""
        self.payload_bytes_max = payload_bytes_max
        """Maximum length of a valid payload."""
        self.elementwise = elementwise
        """Whether each value is rounded independently and idempotently, as whole models need it."""
        self.needs_feedback = needs_feedback
        """Whether the codec drops so much that a device must add the dropped part to its next
        update.
        """

    @abstractmethod
    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the payload.

        It may be a view of a `VectorSource`, which must not change while it is sent. Raises
        `ValueError` if the codec rounds stochastically and `random` is missing.
        """

    @abstractmethod
    def open(self, payload: Buffer) -> Source:
        """Validate a payload, and return a source of its values.

        The payload must not change afterwards. Raises only `ProtocolError`, for any bytes. Any
        range of the source can be read. The source keeps the payload alive.
        """

    def round_in_place(self, values: Vector) -> None:  # noqa: ARG002
        """Round trained values as encoding would; raises `TypeError` unless `elementwise`."""
        raise TypeError(f"codec {self.name} cannot round single values; use an elementwise codec")

    def check_length(self, payload_bytes: int) -> None:
        """Raise `ProtocolError` if no payload has this number of bytes."""
        least, most = self.payload_bytes_min, self.payload_bytes_max
        if not least <= payload_bytes <= most:
            bounds = f"{most}" if least == most else f"{least} to {most}"
            raise ProtocolError(
                f"invalid payload of {payload_bytes} bytes: {self.name} needs {bounds} bytes for this model"
            )

    def _checked(self, payload: Buffer) -> Bytes:
        """Return a payload as a read-only array; raises `ProtocolError` for an invalid length."""
        coded = np.frombuffer(payload, np.uint8)
        coded.flags.writeable = False
        self.check_length(coded.size)
        return coded


class Dense(Protocol):
    """A stage that encodes any number of values; their number alone determines the number of bytes.

    `encode` and `open` get exactly `nbytes(length)` bytes, and the same `length`. The bytes must
    not change while the source is in use. Any bytes can be opened, so the caller must validate the
    decoded values.
    """

    @property
    def elementwise(self) -> bool:
        """As `VectorCodec.elementwise`."""

    @property
    def needs_feedback(self) -> bool:
        """As `VectorCodec.needs_feedback`."""

    def nbytes(self, length: int) -> int:
        """Return the size of `length` values in bytes; never smaller for more values."""

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:
        """Write the first `length` values of the source; a stochastic stage needs `random`."""

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source of `length` values that decodes `coded`."""
