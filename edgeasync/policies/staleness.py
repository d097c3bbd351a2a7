"""Staleness policies compute the weight of an update from its staleness.

The weight is from 0 to 1, and does not increase with staleness.
"""

from typing import Annotated, ClassVar, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section

FEDASYNC = "FedAsync, Xie et al. 2019 (arXiv:1903.03934)"

Limit = Annotated[float, Meta(ge=0.0)] | None


class Staleness(msgspec.Struct, frozen=True, gc=False):
    """The staleness of an update, and the number of live devices.

    `versions` is the number of versions that were created since the update's base version.
    `devices_live` is the number of devices with a valid lease.

    >>> from edgeasync.policies import Staleness
    >>> Staleness(versions=3).versions
    3
    """

    versions: int
    devices_live: int = 1


@runtime_checkable
class StalenessPolicy(Protocol):
    """Weighs an update by its staleness.

    The hub calls the policy once for every update, and multiplies the update by the weight that it
    returns. If it returns `None`, the hub rejects the update as stale. The result must depend only
    on the argument, so that a replay makes the same decisions.

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
        """Return the weight, from 0 to 1, of an update with this staleness, or `None` to reject it."""


def is_stale(staleness: Staleness, limit: float | None) -> bool:
    """Return whether an update's staleness exceeds the limit."""
    return limit is not None and staleness.versions > limit


class ConstantStaleness(Section, frozen=True, tag_field="kind", tag="constant"):
    """Every update has weight 1, up to an optional maximum staleness.

    This is the constant weighting of FedAsync, section 5. With a limit, it is the lag tolerance of
    SAFA (arXiv:1910.01355).
    """

    paper: ClassVar[str] = FEDASYNC

    staleness_max: Limit = None
    """The hub rejects an update as `stale` if its staleness exceeds this value."""

    def __call__(self, staleness: Staleness) -> float | None:
        """Return 1, or `None` if the staleness exceeds the limit."""
        return None if is_stale(staleness, self.staleness_max) else 1.0


class AdaptiveLearningRate(Section, frozen=True, tag_field="kind", tag="adaptive_lr"):
    """Weight `factor ** staleness`, which decays exponentially with the update's staleness."""

    paper: ClassVar[str] = ""

    factor: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    """The weight of an update with staleness 1, and the factor for each further version."""
    staleness_max: Limit = None
    """The hub rejects an update as `stale` if its staleness exceeds this value."""

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` if the staleness exceeds the limit."""
        return None if is_stale(staleness, self.staleness_max) else float(self.factor**staleness.versions)


class PolynomialStaleness(Section, frozen=True, tag_field="kind", tag="polynomial"):
    """Weight `(1 + staleness) ** -exponent`.

    This is the polynomial weighting of FedAsync, section 5.
    """

    paper: ClassVar[str] = FEDASYNC

    exponent: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.5
    """Exponent of the decay; if it is 0, every update has weight 1."""
    staleness_max: Limit = None
    """The hub rejects an update as `stale` if its staleness exceeds this value."""

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` if the staleness exceeds the limit."""
        if is_stale(staleness, self.staleness_max):
            return None
        return float((1.0 + staleness.versions) ** -self.exponent)
