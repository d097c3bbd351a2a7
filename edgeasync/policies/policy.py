"""The hub's whole judgement in one value: the `[policy]` table of its settings."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from msgspec import Meta

from edgeasync.config import Section
from edgeasync.policies.aggregation import Aggregator, ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency, FrequencyController
from edgeasync.policies.staleness import PolynomialStaleness, StalenessPolicy
from edgeasync.policies.transforms import SGD, Adam, Transform

# The one table of kinds: a new kind joins its union here and needs no other change.
StalenessKind = PolynomialStaleness
AggregatorKind = ImmediateAggregator
TransformKind = SGD | Adam
FrequencyKind = FixedFrequency


class Policy(Section, frozen=True):
    """Staleness, aggregation, server optimizer and frequency."""

    staleness: StalenessKind = PolynomialStaleness()
    aggregate: AggregatorKind = ImmediateAggregator()
    optimizer: Annotated[tuple[TransformKind, ...], Meta(min_length=1)] = (SGD(),)
    frequency: FrequencyKind = FixedFrequency()


class Judgement(Protocol):
    """What the hub asks of its policies: `Policy` is one; any value with these four parts serves."""

    @property
    def staleness(self) -> StalenessPolicy:
        """How much an update counts."""

    @property
    def aggregate(self) -> Aggregator:
        """When contributions become a version."""

    @property
    def optimizer(self) -> Sequence[Transform]:
        """How a pseudo-gradient becomes a step of the model."""

    @property
    def frequency(self) -> FrequencyController:
        """How many local steps a device takes next."""
