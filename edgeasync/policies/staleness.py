"""Staleness policies: how much an update counts when the model has moved on since the device fetched it.

A weight is from 0 to 1 and never rises with staleness: no old update counts more than a new one.
"""

from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section

FEDASYNC = "FedAsync, Xie et al. 2019 (arXiv:1903.03934)"
SAFA = "SAFA, Wu et al. 2021 (arXiv:1910.01355)"
RINGMASTER = "Ringmaster ASGD, Maranjyan et al. 2025 (arXiv:2501.16168)"

Unit = Annotated[
    Literal["versions", "seconds"],
    Meta(
        description="what staleness is counted in: versions of the model since the update's base, or seconds "
        "since that base was the newest"
    ),
]
Limit = Annotated[float, Meta(ge=0.0)]
OptionalLimit = Annotated[
    Limit | None, Meta(description="an update staler than this, in `unit`, is refused as `stale`")
]


class Staleness(msgspec.Struct, frozen=True, gc=False):
    """How old an update is, and for how many devices.

    `versions` counts the versions made since the update's base. `seconds` is the time since that base stopped
    being the newest version, 0 if it still is the newest. `devices_live` counts the devices that hold their lease.

    >>> from edgeasync.policies import Staleness
    >>> Staleness(versions=3, seconds=1.5).versions
    3
    """

    versions: int
    seconds: float = 0.0
    devices_live: int = 1


@runtime_checkable
class StalenessPolicy(Protocol):
    """Weighs an update by its staleness.

    Call it once for every update. Multiply the update by the weight, from 0 to 1; reject it as stale if there is
    `None`. The weight depends on nothing but the staleness, so that a replay decides the same.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Plugin
    >>> class Fresh(Plugin, frozen=True):
    ...     seconds: float = 60.0
    ...     def __call__(self, staleness):
    ...         return None if staleness.seconds > self.seconds else 1.0
    >>> policy = Policy(staleness=Fresh(seconds=30.0))
    """

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight of an update with this staleness, or `None` to reject it."""


def amount(staleness: Staleness, unit: Literal["versions", "seconds"], limit: float | None) -> float | None:
    """Return the staleness in `unit`, or `None` if it is over the limit."""
    value = float(staleness.versions) if unit == "versions" else staleness.seconds
    return None if limit is not None and value > limit else value


class ConstantStaleness(Section, frozen=True, tag_field="kind", tag="constant"):
    """Every update counts fully, at any age.

    The constant form of FedAsync, section 5.
    """

    paper: ClassVar[str] = FEDASYNC

    unit: Unit = "versions"
    staleness_max: OptionalLimit = None

    def __call__(self, staleness: Staleness) -> float | None:
        """Return 1, or `None` beyond the limit."""
        return None if amount(staleness, self.unit, self.staleness_max) is None else 1.0


class AdaptiveLearningRate(Section, frozen=True, tag_field="kind", tag="adaptive_lr"):
    """Weight `factor ** staleness`: the weight decays exponentially with the update's age."""

    paper: ClassVar[str] = ""

    factor: Annotated[
        float, Meta(gt=0.0, le=1.0, description="share of the weight that is left after each unit of staleness")
    ] = 0.9
    unit: Unit = "versions"
    staleness_max: OptionalLimit = None

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` beyond the limit."""
        value = amount(staleness, self.unit, self.staleness_max)
        return None if value is None else float(self.factor**value)


class PolynomialStaleness(Section, frozen=True, tag_field="kind", tag="polynomial"):
    """Weight `(1 + staleness) ** -exponent`.

    The polynomial form of FedAsync, section 5.
    """

    paper: ClassVar[str] = FEDASYNC

    exponent: Annotated[
        float, Meta(ge=0.0, le=10.0, description="how fast the weight falls; at 0 every update counts fully")
    ] = 0.5
    unit: Unit = "versions"
    staleness_max: OptionalLimit = None

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` beyond the limit."""
        value = amount(staleness, self.unit, self.staleness_max)
        return None if value is None else float((1.0 + value) ** -self.exponent)


class HingeStaleness(Section, frozen=True, tag_field="kind", tag="hinge"):
    """Weight 1 while staleness is at most `free`, then `1 / (1 + slope (staleness - free))`.

    The hinge form of FedAsync, section 5; its `b` is `free`, its `a` is `slope`, and the defaults are its own.
    """

    paper: ClassVar[str] = FEDASYNC

    free: Annotated[float, Meta(ge=0.0, description="staleness up to which an update counts fully")] = 4.0
    slope: Annotated[float, Meta(ge=0.0, le=1e6, description="how fast the weight falls beyond `free`")] = 10.0
    unit: Unit = "versions"
    staleness_max: OptionalLimit = None

    def __call__(self, staleness: Staleness) -> float | None:
        """Return the weight, or `None` beyond the limit."""
        value = amount(staleness, self.unit, self.staleness_max)
        if value is None:
            return None
        return 1.0 / (1.0 + self.slope * (value - self.free)) if value > self.free else 1.0


class BoundedStaleness(Section, frozen=True, tag_field="kind", tag="bounded"):
    """A filter: an update counts fully up to `staleness_max`, and is rejected above it.

    It is like the lag tolerance of SAFA.
    """

    paper: ClassVar[str] = SAFA

    staleness_max: Annotated[
        Limit,
        Meta(
            description="the last staleness, in `unit`, that counts; a staler update is refused as `stale`",
            examples=[10.0],
        ),
    ]
    unit: Unit = "versions"

    def __call__(self, staleness: Staleness) -> float | None:
        """Return 1, or `None` beyond the limit."""
        return None if amount(staleness, self.unit, self.staleness_max) is None else 1.0


class RingmasterStaleness(Section, frozen=True, tag_field="kind", tag="ringmaster"):
    """An update counts fully below a threshold of staleness, which follows the number of live devices.

    Ringmaster ASGD ignores gradients whose delay is `R` or more. In the paper `R` is fixed. Here it is
    `per_device` times the number of live devices, and at least 1, so that a fleet that shrinks or grows needs no
    new setting.
    """

    paper: ClassVar[str] = RINGMASTER

    per_device: Annotated[
        float, Meta(gt=0.0, le=1e6, description="versions that each live device adds to the threshold")
    ] = 1.0

    def __call__(self, staleness: Staleness) -> float | None:
        """Return 1, or `None` at the threshold and beyond."""
        threshold = max(1.0, self.per_device * staleness.devices_live)
        return None if staleness.versions >= threshold else 1.0
