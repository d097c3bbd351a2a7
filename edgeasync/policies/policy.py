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

    updates: Annotated[int | None, Meta(examples=[100])] = None
    """The warm-up ends when the hub has applied this number of updates."""
    epochs: float | None = None
    """The warm-up ends after this number of passes over the fleet's data. Passes are the examples trained on,
    divided by the examples that the live devices report. In each step a device counts with at most the voters'
    median of examples, once three voters are known. If no device reports a number, the warm-up ends with the first
    version.
    """
    aggregate: Aggregator = SynchronousAggregator()
    """In force during the warm-up."""
    frequency: FrequencyController = FixedFrequency(local_steps=8)
    """In force during the warm-up."""

    def __post_init__(self) -> None:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("warm_up ends after updates or epochs: give one of the two")
        until = self.epochs if self.updates is None else self.updates
        if until is None or not 0 < until < math.inf:
            raise ValueError("warm_up takes updates, or epochs, over 0")


class Plateau(Section, frozen=True):
    """Multiply the hub's learning rate by `factor` when evaluations stop improving."""

    paper: ClassVar[str] = ""

    factor: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5
    """Multiplies the learning rate at each plateau."""
    patience: Annotated[int, Meta(ge=1, le=10_000)] = 5
    """Evaluations in a row without a better loss that make a plateau."""
    improvement: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.01
    """A loss is better only if it is this share under the lowest loss."""
    factor_min: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01
    """The learning rate never falls below this share of your rate."""


class Policy(Section, frozen=True):
    """How much an update counts, when the hub makes a version, and how long a device trains.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies.staleness import ConstantStaleness
    >>> policy = Policy(staleness=ConstantStaleness(staleness_max=10))
    """

    trust: FleetTrust | None = None
    """Whom the hub expects. `admitted`: it bounds each update, and warns of odd devices. `open`: it also combines
    updates robustly (`combine` and `optimizer`, unless you set them, are `centred_clip` and `sgd`), and a device
    with an alarm is on probation. If it is left out: `open` for a hub that is `insecure` beyond loopback without
    keys, `admitted` for every other hub. [Devices that lie](/train/policies.md#devices-that-lie).
    """
    staleness: StalenessPolicy = PolynomialStaleness()
    """The weight of an update by its staleness."""
    take: Take = "all"
    """Whose updates count. A device's score is the loss of its parameters if it measures that
    ([validation](/train/evaluation.md#scores-of-devices)), else the loss of the model it trained from, or its
    training loss. `all`: all. `better`: updates with a score that is not over the fleet's. `best`: only the update
    with the best score of those folded together, with the weight of all. Under an aggregator that folds one by
    one: the updates of the device with the best score. From three voters on, a score is never the best if it is
    further below the voters' median than 8 times the median distance from it, which counts as 5 % of the median at
    least. The hub refuses the others as `behind`, or folds them with weight 0.
    """
    behind_max: Annotated[float | None, Meta(examples=[10.0])] = None
    """The hub refuses an update as `behind` if its score is over `behind_max` times the fleet's; must be over 1.
    Where scores are negative, the limit is the fleet's score plus `behind_max` - 1 times its absolute value.
    """
    preempt: bool = False
    """A device whose update is refused as `not_finite`, as `quarantined` (an operator has excluded it), or as
    `behind` by `behind_max`, starts over: it drops the steps it has taken since, its residual and its optimizer's
    state, and begins again from the hub's model. Needs `behind_max`.
    [More](/train/evaluation.md#devices-that-start-over).
    """
    aggregate: Aggregator = QuorumAggregator()
    """When updates become the next version, and whether devices wait for it."""
    combine: Combiner = _MEAN
    """How updates that are folded together become one."""
    optimizer: Annotated[tuple[Transform, ...], Meta(min_length=1)] = _OPTIMIZER
    """The stages, in order, that the combined update goes through before it moves the model."""
    frequency: FrequencyController = AdaptiveFrequency()
    """How many local steps a device takes before its next exchange."""
    overlap_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """The most local steps that a device takes while it waits for its next assignment; 0: none.
    [Policies](/train/policies.md#which-for-which-fleet) says when it helps.
    """
    delay_steps: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """A device uses the answer to an update exactly this many local steps after it has sent the update, and trains
    meanwhile; if the answer is not there by then, the device waits for it. 0: it waits at once. It needs
    `frequency = { kind = "fixed" }` of at least as many steps, and no `overlap_steps_max`. A device that was
    started again, or whose training diverged, uses the next answer at once.
    """
    warm_up: WarmUp | None = None
    """Train in another way at first; `[policy.warm_up]`."""
    plateau: Plateau | None = None
    """Lower the learning rate when evaluations stop improving; `[policy.plateau]`."""
    monitor: Monitor = Monitor()
    """Signs of divergence to watch for, and the remedies; `[policy.monitor]`."""

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
