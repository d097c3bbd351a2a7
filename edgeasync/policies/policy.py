"""Every policy of the hub in one value: the `[policy]` table of its settings."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from edgeasync.config import Section, convert, to_table
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import (
    Aggregator,
    ImmediateAggregator,
    MeanAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import CentredClipCombiner, Combiner, MeanCombiner
from edgeasync.policies.frequency import AdaptiveFrequency, FixedFrequency, FrequencyController
from edgeasync.policies.guards import plugin_name, try_plugins
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD, Nesterov, check_chain
from edgeasync.policies.staleness import PolynomialStaleness, StalenessPolicy
from edgeasync.policies.transforms import Transform

Take = Literal["all", "better", "best"]
FleetTrust = Literal["admitted", "open"]

_MEAN = MeanCombiner()
_OPTIMIZER = (
    Nesterov(learning_rate=1.25, learning_rate_max=1.75, momentum=0.85, staleness_max=0.5, devices_min=2),
)


class WarmUp(Section, frozen=True):
    """Train more synchronously at first, for a number of updates or of passes over the fleet's data."""

    paper: ClassVar[str] = ""

    updates: Annotated[int | None, Meta(description="updates applied until it ends", examples=[100])] = None
    epochs: Annotated[float | None, Meta(description="passes over the fleet's data until it ends")] = None
    aggregate: Aggregator = SynchronousAggregator()
    frequency: FrequencyController = FixedFrequency(local_steps=8)

    def __post_init__(self) -> None:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("warm_up ends after updates or epochs: give one of the two")
        until = self.epochs if self.updates is None else self.updates
        if until is None or not 0 < until < math.inf:
            raise ValueError("warm_up takes updates, or epochs, over 0")


class Plateau(Section, frozen=True):
    """Multiply the hub's learning rate by `factor` when evaluations stop improving."""

    paper: ClassVar[str] = ""

    factor: Annotated[float, Meta(gt=0.0, lt=1.0, description="of the learning rate, each time")] = 0.5
    patience: Annotated[int, Meta(ge=1, le=10_000, description="evaluations without a better loss")] = 5
    improvement: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="share by which a loss must be lower to be better")
    ] = 0.01
    factor_min: Annotated[float, Meta(gt=0.0, le=1.0, description="of the learning rate, never less")] = 0.01


class Policy(Section, frozen=True):
    """How much an update counts, when the hub makes a version, and how long a device trains.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies.staleness import ConstantStaleness
    >>> policy = Policy(staleness=ConstantStaleness(staleness_max=10))
    """

    trust: Annotated[
        FleetTrust | None,
        Meta(
            description="`admitted`: the operator knows the devices; each update is bounded, and odd devices are "
            "warned of. `open`: anybody may send; updates are combined robustly, odd devices are on probation. "
            "By default `open` for a hub that is `insecure` beyond loopback, and else `admitted`"
        ),
    ] = None
    staleness: StalenessPolicy = PolynomialStaleness()
    take: Annotated[
        Take,
        Meta(
            description="whose updates count: `all`, those `better` than the fleet's median score, or the `best` "
            "of one fold; under `immediate` and `model_average` the best of all live devices"
        ),
    ] = "all"
    behind_max: Annotated[
        float | None,
        Meta(
            description="reject an update as `behind` if its score is over this many times the fleet's median",
            examples=[10.0],
        ),
    ] = None
    preempt: Annotated[
        bool,
        Meta(
            description="a device that is too far behind, in quarantine, or not finite drops what training left "
            "it, and begins again from the hub's model; needs `behind_max`"
        ),
    ] = False
    aggregate: Aggregator = QuorumAggregator()
    combine: Combiner = _MEAN
    optimizer: Annotated[tuple[Transform, ...], Meta(min_length=1)] = _OPTIMIZER
    frequency: FrequencyController = AdaptiveFrequency()
    overlap_steps_max: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="most local steps that a device takes while it waits for the next assignment; 0: no steps",
        ),
    ] = 0
    delay_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="a device uses the answer to an update exactly this many local steps after it has sent "
            "it, and trains meanwhile; 0: it waits for the answer. Needs a `fixed` frequency of as many steps",
        ),
    ] = 0
    warm_up: WarmUp | None = None
    plateau: Plateau | None = None
    monitor: Monitor = Monitor()

    def __post_init__(self) -> None:
        if self.trust == "open":
            self._combine_robustly()
        try_plugins(self)
        check_chain(self.optimizer)
        if self.behind_max is not None and not 1.0 < self.behind_max < math.inf:
            raise ValueError(f"behind_max is {self.behind_max:g}: give a ratio over 1")
        if self.preempt and self.behind_max is None:
            raise ValueError("preempt needs behind_max: how far behind the others a device's score may be")
        _check_gathering(self, self.aggregate)
        _check_delay(self, self.frequency)
        if self.warm_up is not None:
            if self.warm_up.aggregate.update != self.aggregate.update:
                raise ValueError("warm_up and aggregate want different updates: both model_average, or neither")
            _check_gathering(self, self.warm_up.aggregate)
            _check_delay(self, self.warm_up.frequency)

    def _combine_robustly(self) -> None:
        """Replace parts that were left out, so that they are the defaults themselves, by what withstands lies."""
        if self.combine is _MEAN:
            msgspec.structs.force_setattr(self, "combine", CentredClipCombiner())
        if self.optimizer is _OPTIMIZER:
            msgspec.structs.force_setattr(self, "optimizer", (SGD(),))


def folds_one_by_one(aggregate: Aggregator) -> bool:
    """Return whether every update becomes a version of its own, so that no two are folded together."""
    return isinstance(aggregate, (ImmediateAggregator, ModelAverageAggregator))


def _check_gathering(policy: Policy, aggregate: Aggregator) -> None:
    """Raise `ValueError` if the combiner needs something that the aggregator does not do."""
    if not policy.combine.robust:
        return
    _check_shares(policy, aggregate)
    if not policy.combine.centred and folds_one_by_one(aggregate):
        raise ValueError(
            f"combine: {_kind(policy.combine)} needs updates that are folded together, and {_kind(aggregate)} "
            "folds them one by one"
        )


def _check_delay(policy: Policy, frequency: FrequencyController) -> None:
    """Raise `ValueError` if the answer to an update is to be used after the next update."""
    if not policy.delay_steps:
        return
    if policy.overlap_steps_max:
        raise ValueError("delay_steps says how many steps a device takes meanwhile: leave overlap_steps_max out")
    local_steps = frequency.local_steps if isinstance(frequency, FixedFrequency) else None
    if local_steps is None:
        raise ValueError(f"delay_steps needs a fixed number of steps between updates, not {_kind(frequency)}")
    if policy.delay_steps > local_steps:
        raise ValueError(
            f"delay_steps is {policy.delay_steps}, over the {local_steps} local steps of an update: a "
            "device has one unanswered update at a time, so that each counts exactly once; give at most as many"
        )


def _check_shares(policy: Policy, aggregate: Aggregator) -> None:
    """Raise `ValueError` for unequal shares, which a robust combiner cannot give to devices."""
    kind = _kind(policy.combine)
    if policy.trust == "open" and isinstance(policy.combine, CentredClipCombiner):
        kind += " (the default of trust = 'open')"
    if policy.take == "best":
        raise ValueError(f"take: of the best update alone there is no {kind}; combine = mean goes with it")
    if isinstance(aggregate, MeanAggregator) and aggregate.weigh_by == "examples":
        raise ValueError(f"combine: a {kind} gives all devices the same share; leave weigh_by out")


def _kind(value: object) -> str:
    return str(value.__struct_config__.tag) if isinstance(value, Section) else plugin_name(value)


class PolicySet(Protocol):
    """The parts of a policy that the hub uses: `Policy` has them, and any value with these parts will do.

    Use each part as its own protocol says. A policy does not change while a hub uses it; all state is the hub's.
    """

    @property
    def trust(self) -> FleetTrust | None:
        """Whether anybody may send updates."""

    @property
    def staleness(self) -> StalenessPolicy:
        """How much an update counts."""

    @property
    def take(self) -> Take:
        """Whose updates count."""

    @property
    def behind_max(self) -> float | None:
        """How far behind the fleet's median a device's score may be."""

    @property
    def preempt(self) -> bool:
        """Whether a device whose training has gone wrong begins again from the hub's model."""

    @property
    def aggregate(self) -> Aggregator:
        """When contributions become a version, and with which weights."""

    @property
    def combine(self) -> Combiner:
        """How updates that are folded together become one."""

    @property
    def optimizer(self) -> Sequence[Transform]:
        """How a pseudo-gradient becomes a step of the model."""

    @property
    def frequency(self) -> FrequencyController:
        """How many local steps a device takes next."""

    @property
    def overlap_steps_max(self) -> int:
        """How many local steps a device takes at most while it waits for its next assignment."""

    @property
    def delay_steps(self) -> int:
        """How many local steps after an update a device uses the answer."""

    @property
    def warm_up(self) -> WarmUp | None:
        """How the hub trains at first."""

    @property
    def plateau(self) -> Plateau | None:
        """How the learning rate falls when evaluations get no better."""

    @property
    def monitor(self) -> Monitor:
        """The detectors of divergence."""


def check_recordable(policy: PolicySet) -> None:
    """Raise `ConfigError` unless a run's folder can hold this policy: a `Policy` whose parts can be found by name.

    A part without a name could not be read, so nobody could open the run again.
    """
    remedy = (
        "a run's folder cannot name it, so nobody could open the run again; make it a class of "
        "edgeasync.policies.Plugin in a module that can be imported, or take one of 'edgeasync policies'"
    )
    if type(policy) is not Policy:
        raise ConfigError(f"policy: {type(policy).__name__} is not edgeasync's own Policy: {remedy}")
    for field in msgspec.structs.fields(Policy):
        part = getattr(policy, field.name)
        try:
            known = _is_same(convert(to_table(part), field.type, where=field.name), part)
        except (ConfigError, TypeError, ValueError) as error:
            ours = type(part).__module__.startswith("edgeasync.")
            if ours and not isinstance(part, Monitor | WarmUp):  # these may hold a class that has no name
                raise ConfigError(f"policy.{error}") from error
            known = False
        if not known:
            raise ConfigError(f"policy.{field.name}: {part!r:.200} has no name: {remedy}")


def is_recordable(policy: PolicySet) -> bool:
    """Return whether a run's folder can hold this policy."""
    try:
        check_recordable(policy)
    except ConfigError:
        return False
    return True


def _is_same(read: object, given: object) -> bool:
    """Return whether a part that was written and read again equals the given one; a list may be a tuple then."""
    if isinstance(read, tuple):
        if not isinstance(given, list | tuple) or len(read) != len(given):
            return False
        return all(map(_is_same, read, given))
    if isinstance(read, Section):
        names = read.__struct_fields__
        return type(read) is type(given) and all(_is_same(getattr(read, n), getattr(given, n)) for n in names)
    return read == given
