"""Staleness policies: how much an update counts when the model has moved on since the device fetched it."""

from typing import Annotated, Protocol

from msgspec import Meta

from edgeasync.config import Section


class StalenessPolicy(Protocol):
    """A callable from staleness, in versions, to a weight from 0 to 1, or to `None`: refuse as too stale."""

    def __call__(self, staleness: int) -> float | None:
        """Return the weight of an update that is `staleness` versions old."""


class PolynomialStaleness(Section, frozen=True, tag_field="kind", tag="polynomial"):
    """Weight `(1 + staleness) ** -exponent`; beyond `staleness_max` versions an update is refused.

    FedAsync, Xie et al. 2019 (arXiv:1903.03934), section 5.
    """

    exponent: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.5
    staleness_max: Annotated[int, Meta(ge=0)] | None = None

    def __call__(self, staleness: int) -> float | None:
        """Return the weight, or `None` beyond the limit."""
        if self.staleness_max is not None and staleness > self.staleness_max:
            return None
        return float((1 + staleness) ** -self.exponent)
