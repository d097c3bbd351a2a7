"""What a codec is: a way for the vectors of one spec to become bytes, and sources again."""

from typing import Protocol

import numpy as np

from edgeasync.parameters import Vector
from edgeasync.protocol.codecs.source import Bytes, Source
from edgeasync.protocol.wire import Buffer


class Codec(Protocol):
    """A frozen value without state, bound to a spec.

    Its stages code the trained values; the statistics always follow as plain float32. Little-endian everywhere.
    A value that is not finite never gets lost: what is decoded then has some that are not finite either.
    """

    @property
    def name(self) -> str:
        """The canonical name, such as `top_k(0.01)+int8`."""

    @property
    def elementwise(self) -> bool:
        """Whether each value is rounded by itself, and the same when rounded again: fit for whole models."""

    @property
    def needs_feedback(self) -> bool:
        """Whether so much is dropped that a device must carry it over to its next update."""

    @property
    def payload_bytes_min(self) -> int:
        """No valid payload is shorter."""

    @property
    def payload_bytes_max(self) -> int:
        """No valid payload is longer."""

    def encode(self, source: Source, random: np.random.Generator | None = None) -> Buffer:
        """Return the payload; it may be a view of a `VectorSource`, which must not change while it is sent.

        Raises `ValueError` if the codec rounds stochastically and `random` is missing.
        """

    def open(self, payload: Buffer) -> Source:
        """Check a payload, which must not change from then on.

        Raises only `ProtocolError`, whatever the bytes are.
        Any range of the source that is returned can be read; it keeps the payload alive.
        """

    def snap(self, values: Vector) -> None:
        """Round trained values, any number, in place, to what travels; `TypeError` unless `elementwise`."""


class Dense(Protocol):
    """A stage that codes any number of values in a number of bytes that depends on nothing else."""

    @property
    def elementwise(self) -> bool:
        """As of a codec."""

    @property
    def needs_feedback(self) -> bool:
        """As of a codec."""

    def nbytes(self, length: int) -> int:
        """Bytes that `length` values take; never fewer for more values."""

    def encode(self, source: Source, out: Bytes, random: np.random.Generator | None) -> None:
        """Write all values of the source to `out`, of as many bytes as they take."""

    def open(self, coded: Bytes, length: int) -> Source:
        """Return a source of `length` values that reads `coded`, of as many bytes as they take."""
