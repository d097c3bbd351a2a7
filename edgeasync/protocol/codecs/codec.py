"""Interfaces of codecs: `VectorCodec` for the vectors of a spec, `Dense` for one stage.

A codec converts vectors to payloads and back. Its dense stage encodes the values.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from edgeasync.errors import ProtocolError
from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.source import Bytes, Source
from edgeasync.protocol.wire import Buffer


class VectorCodec(ABC):
    """Encodes and decodes the vectors of one spec, without state.

    The codec's stages encode the trained values. The statistics always follow as plain float32. All
    numbers are little-endian. If any value of a vector is not finite, at least one of the decoded
    values is not finite either.
    """

    def __init__(
        self,
        name: str,
        payload_bytes_min: int,
        payload_bytes_max: int,
        *,
        elementwise: bool = False,
        needs_feedback: bool,
        stochastic: bool = False,
    ) -> None:
        self.name = name
        """The canonical name, such as `top_k(0.01)+int8`."""
        self.payload_bytes_min = payload_bytes_min
        """Minimum length of a valid payload."""
        self.payload_bytes_max = payload_bytes_max
        """Maximum length of a valid payload."""
        self.elementwise = elementwise
        """Whether each value is rounded independently and idempotently, which whole models require.
        """
        self.needs_feedback = needs_feedback
        """Whether the codec drops so much that a device must add the dropped part to its next
        update.
        """
        self.stochastic = stochastic
        """Whether `encode` draws from its random generator."""

    @abstractmethod
    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the encoded payload.

        The payload may be a view of a `VectorSource`, which must not change while the payload is
        sent. Raises `ValueError` if the codec rounds stochastically and `random` is missing.
        """

    @abstractmethod
    def open(self, payload: Buffer) -> Source:
        """Validate a payload, and return a source of its decoded values.

        The payload must not change afterwards, and the source keeps a reference to it. Any range of
        the source can be read. For invalid bytes, it raises `ProtocolError` and no other exception.
        """

    def round_in_place(self, values: Vector) -> None:  # noqa: ARG002
        """Round trained values to the values that decoding would return.

        Raises `TypeError` unless `elementwise`.
        """
        raise TypeError(f"codec {self.name} cannot round single values; use an elementwise codec")

    def check_length(self, payload_bytes: int) -> None:
        """Raise `ProtocolError` if no valid payload has this number of bytes."""
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
    """A stage that encodes any number of values.

    The encoded size depends only on the number of values. `encode` writes exactly `nbytes(length)`
    bytes, and `open` receives as many bytes and the same `length`. The bytes must not change while
    the source is in use. `open` accepts any bytes, so the caller must validate the decoded values.
    """

    @property
    def elementwise(self) -> bool:
        """See `VectorCodec.elementwise`."""

    @property
    def needs_feedback(self) -> bool:
        """See `VectorCodec.needs_feedback`."""

    @property
    def stochastic(self) -> bool:
        """See `VectorCodec.stochastic`."""

    def nbytes(self, length: int) -> int:
        """Return the encoded size of `length` values in bytes. It does not decrease with `length`."""

    def encode(self, source: Source, length: int, out: Bytes, random: np.random.Generator | None) -> None:
        """Encode the first `length` values of the source into `out`.

        A stochastic stage needs `random`.
        """

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source of the `length` values that are decoded from `coded`."""
