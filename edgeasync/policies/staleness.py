"""Staleness policies: how much an update counts when the model has moved on since the device fetched it.

A weight is from 0 to 1 and never rises with staleness: no old update counts more than a new one.
"""

from typing import Annotated, ClassVar, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section

FEDASYNC = "FedAsync, Xie et al. 2019 (arXiv:1903.03934)"

Limit = Annotated[float, Meta(ge=0.0)] | None


class Staleness(msgspec.Struct, frozen=True, gc=False):
    """How old an update is, and for how many devices.

    `versions` counts the versions made since the update's base. `devices_live` counts the devices that hold their
    lease.

    >>> from edgeasync.policies import Staleness
    >>> Staleness(versions=3).versions
    3
    """

    versions: int
    devices_live: int = 1


@runtime_checkable
class StalenessPolicy(Protocol):
    """Weighs an update by its staleness.

    Call it once for every update. Multiply the update by the weight, from 0 to 1; reject it as stale if there is
    `None`. The weight depends on nothing but the staleness, so that a replay decides the same.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Plugin
    >>> class Ringmaster(Plugin, frozen=True):
    ...     per_device: float = 1.0
    ...     def __call__(self, staleness):
    ...         threshold = max(1.0, self.per_device * staleness.devices_live)
    ...         return 1.0 if staleness.versions < threshold else None
    >>> policy = Policy(staleness=Ringmaster(per_device=2.0))
    """

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight of an update with this staleness, or `None` to reject it."""


def is_stale(staleness: Staleness, limit: float | None) -> bool:
    """Return whether an update is staler than the limit allows."""
    return limit is not None and staleness.versions > limit


class ConstantStaleness(Section, frozen=True, tag_field="kind", tag="constant"):
    """Every update counts fully, at any age or up to a limit.

    The constant form of FedAsync, section 5; with a limit, the lag tolerance of SAFA (arXiv:1910.01355).
    """

    paper: ClassVar[str] = FEDASYNC

    staleness_max: Limit = None
    """The hub refuses an update with a larger `s` as `stale`."""

    def __call__(self, staleness: Staleness) -> float | None:
        """Return 1, or `None` beyond the limit."""
        return None if is_stale(staleness, self.staleness_max) else 1.0


class AdaptiveLearningRate(Section, frozen=True, tag_field="kind", tag="adaptive_lr"):
    """Weight `factor ** staleness`: the weight decays exponentially with the update's age."""

    paper: ClassVar[str] = ""

    factor: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    """The weight after one version, and the factor for each further one."""
    staleness_max: Limit = None
    """The hub refuses an update with a larger `s` as `stale`."""

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` beyond the limit."""
        return None if is_stale(staleness, self.staleness_max) else float(self.factor**staleness.versions)


class PolynomialStaleness(Section, frozen=True, tag_field="kind", tag="polynomial"):
    """Weight `(1 + staleness) ** -exponent`.

    The polynomial form of FedAsync, section 5.
    """

    paper: ClassVar[str] = FEDASYNC

    exponent: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.5
    """0: every update counts fully."""
    staleness_max: Limit = None
    """The hub refuses an update with a larger `s` as `stale`."""

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` beyond the limit."""
        if is_stale(staleness, self.staleness_max):
            return None
        return float((1.0 + staleness.versions) ** -self.exponent)
