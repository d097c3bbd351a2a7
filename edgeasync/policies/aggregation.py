"""Aggregators: when accepted contributions become the next version, and with which weights."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from edgeasync.config import Section


class Contribution(msgspec.Struct, frozen=True, gc=False):
    """An accepted update that waits to be folded: scalars only; `handle` names its payload."""

    handle: int
    device_id: str
    weight: float
    norm: float
    examples: int
    staleness: int
    arrived_s: float


class Aggregator(Protocol):
    """Decides from the buffered contributions alone, so that the same buffer always gives the same answer."""

    @property
    def answer(self) -> Literal["now", "at_flush"]:
        """Whether a device gets its next assignment at once, or when its update is folded."""

    def flush_at_s(self, buffered: Sequence[Contribution], devices_live: int) -> float | None:
        """Return the core time at which `buffered` (never empty) is due to be folded, if it is known."""

    def weights(self, buffered: Sequence[Contribution]) -> tuple[float, ...]:
        """Return the factor of each contribution in the sum that becomes the pseudo-gradient."""


class ImmediateAggregator(Section, frozen=True, tag_field="kind", tag="immediate"):
    """Fold every update as it comes: asynchronous SGD, with the staleness weight as its factor."""

    @property
    def answer(self) -> Literal["now", "at_flush"]:
        """The model moves at once, so the answer does too."""
        return "now"

    def flush_at_s(self, buffered: Sequence[Contribution], devices_live: int) -> float | None:  # noqa: ARG002
        """Return the arrival of the oldest: always due."""
        return buffered[0].arrived_s

    def weights(self, buffered: Sequence[Contribution]) -> tuple[float, ...]:
        """Return the staleness weights unchanged."""
        return tuple([contribution.weight for contribution in buffered])
