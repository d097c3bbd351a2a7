"""The hub's policy as one value, which is the `[policy]` table of its settings."""

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
    """Use a different, usually more synchronous, policy at the start of training.

    The warm-up lasts for a number of updates, or for a number of passes over the fleet's data.
    """

    paper: ClassVar[str] = ""

    updates: Annotated[int | None, Meta(examples=[100])] = None
    """The warm-up ends when the hub has applied this number of updates."""
    epochs: float | None = None
    """The warm-up ends after this number of passes over the fleet's data. The number of passes is
    the number of examples trained on, divided by the number of examples that the live devices
    report. Once three voters are known, each local step counts for at most the voters' median batch
    size. If no device reports its number of examples, the warm-up ends with the first version.
    """
    aggregate: Aggregator = SynchronousAggregator()
    """The aggregator during the warm-up."""
    frequency: FrequencyController = FixedFrequency(local_steps=8)
    """The frequency controller during the warm-up."""

    def __post_init__(self) -> None:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("warm_up needs either updates or epochs; set exactly one of them")
        until = self.epochs if self.updates is None else self.updates
        if until is None or not 0 < until < math.inf:
            raise ValueError("warm_up.updates and warm_up.epochs must be over 0")


class Plateau(Section, frozen=True):
    """Multiply the hub's learning rate by `factor` when evaluations stop improving."""

    paper: ClassVar[str] = ""

    factor: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5
    """Factor that the learning rate is multiplied by at each plateau."""
    patience: Annotated[int, Meta(ge=1, le=10_000)] = 5
    """Number of consecutive evaluations without a better loss that counts as a plateau."""
    improvement: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.01
    """A loss is better only if it is lower than the lowest loss so far by at least this share."""
    factor_min: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01
    """Minimum learning rate, as a share of the configured learning rate."""


class Policy(Section, frozen=True):
    """How the hub weighs updates, when it creates a version, and how many steps devices take.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies.staleness import ConstantStaleness
    >>> policy = Policy(staleness=ConstantStaleness(staleness_max=10))
    """

    trust: FleetTrust | None = None
    """How far the hub trusts its devices: `admitted` or `open`. With `admitted`, the hub clips each
    update and warns about unusual devices. With `open`, it also combines updates robustly, and puts
    a device with an alarm on probation. With `open`, `combine` and `optimizer` default to
    `centred_clip` and `sgd`. The default is `open` for a hub that listens beyond loopback without
    keys (`insecure`), otherwise `admitted`: [Devices that
    lie](/train/policies.md#devices-that-lie).
    """
    staleness: StalenessPolicy = PolynomialStaleness()
    """How the staleness of an update determines its weight."""
    take: Take = "all"
    """Which updates count, by the devices' scores: `all`, `better` or `best`. `all` selects all
    updates, and `better` selects updates whose score does not exceed the fleet's score. `best`
    selects, from the updates folded together, only the one with the best score, and gives it the
    total weight of all these updates. If the aggregator folds updates one by one, `best` selects
    the updates of the device with the best score. Updates that are not selected are rejected as
    `behind`, or folded with weight 0. A device's score is the loss of its trained parameters if the
    device measures it ([validation](/train/evaluation.md#scores-of-devices)). Otherwise, it is the
    loss of the model that the device trained from, or its training loss. If there are at least
    three voters, a suspiciously low score is never the best. A score is suspicious if it is below
    the voters' median by more than 8 times the median distance of scores from this median. This
    distance is taken to be at least 5 % of the median.
    """
    behind_max: Annotated[float | None, Meta(examples=[10.0])] = None
    """The hub rejects an update as `behind` if its score exceeds `behind_max` times the fleet's
    score. It must be over 1. If the fleet's score is negative, the limit is this score plus
    (`behind_max` - 1) times its absolute value.
    """
    preempt: bool = False
    """Whether a device starts over from the hub's model after certain rejections. These rejections
    are `not_finite`, `quarantined` (an operator has excluded the device), and `behind` because of
    `behind_max`. The device discards the steps since the rejected update, its residual and its
    optimizer's state. Requires `behind_max`. [More](/train/evaluation.md#devices-that-start-over).
    """
    aggregate: Aggregator = QuorumAggregator()
    """When updates become the next version, and whether devices wait for this version."""
    combine: Combiner = _MEAN
    """How updates that are folded together are merged into one."""
    optimizer: Annotated[tuple[Transform, ...], Meta(min_length=1)] = _OPTIMIZER
    """The stages, in order, that convert the combined update to a step of the hub's model."""
    frequency: FrequencyController = AdaptiveFrequency()
    """How many local steps a device takes before its next exchange."""
    overlap_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Maximum local steps that a device takes while it waits for its next assignment; 0 for none.
    [Policies](/train/policies.md#which-for-which-fleet) explains when such steps help.
    """
    delay_steps: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Number of local steps that a device takes between sending an update and using the answer.
    If the answer has not arrived by then, the device waits. With 0, it waits directly after
    sending. A value over 0 requires `frequency = { kind = "fixed" }` with at least as many local
    steps, and cannot be combined with `overlap_steps_max`. A device that was restarted, or whose
    training diverged, uses the next answer at once.
    """
    warm_up: WarmUp | None = None
    """A different policy at the start of training: `[policy.warm_up]`."""
    plateau: Plateau | None = None
    """Lower the learning rate when evaluations stop improving: `[policy.plateau]`."""
    monitor: Monitor = Monitor()
    """Detectors of divergence and their remedies: `[policy.monitor]`."""

    def __post_init__(self) -> None:
        if self.trust == "open":
            self._combine_robustly()
        try_plugins(self)
        check_chain(self.optimizer)
        if self.behind_max is not None and not 1.0 < self.behind_max < math.inf:
            raise ValueError(f"behind_max is {self.behind_max:g}; set a ratio over 1")
        if self.preempt and self.behind_max is None:
            raise ValueError("preempt needs behind_max, the limit for a device's score; set behind_max")
        _check_gathering(self, self.aggregate)
        _check_delay(self, self.frequency)
        if self.warm_up is not None:
            if self.warm_up.aggregate.update != self.aggregate.update:
                raise ValueError(
                    "only one of warm_up.aggregate and aggregate is model_average; set both to it, or neither"
                )
            _check_gathering(self, self.warm_up.aggregate)
            _check_delay(self, self.warm_up.frequency)

    def _combine_robustly(self) -> None:
        """Replace each of `combine` and `optimizer` that was not set with its robust default."""
        if self.combine is _MEAN:
            msgspec.structs.force_setattr(self, "combine", CentredClipCombiner())
        if self.optimizer is _OPTIMIZER:
            msgspec.structs.force_setattr(self, "optimizer", (SGD(),))


def folds_one_by_one(aggregate: Aggregator) -> bool:
    """Return whether the aggregator makes a version of each single update."""
    return isinstance(aggregate, (ImmediateAggregator, ModelAverageAggregator))


def _check_gathering(policy: Policy, aggregate: Aggregator) -> None:
    """Raise `ValueError` if the combiner and the aggregator are incompatible."""
    if not policy.combine.robust:
        return
    _check_shares(policy, aggregate)
    if not policy.combine.centred and folds_one_by_one(aggregate):
        raise ValueError(
            f"combine: {_kind(policy.combine)} needs several updates per fold, but {_kind(aggregate)} folds them "
            "one by one; choose another aggregate.kind, or combine.kind = 'mean'"
        )


def _check_delay(policy: Policy, frequency: FrequencyController) -> None:
    """Raise `ValueError` if a device would send an update before it uses the last answer."""
    if not policy.delay_steps:
        return
    if policy.overlap_steps_max:
        raise ValueError("delay_steps and overlap_steps_max cannot be combined; remove overlap_steps_max")
    local_steps = frequency.local_steps if isinstance(frequency, FixedFrequency) else None
    if local_steps is None:
        raise ValueError(f"delay_steps needs frequency.kind = 'fixed', not {_kind(frequency)}")
    if policy.delay_steps > local_steps:
        raise ValueError(
            f"delay_steps ({policy.delay_steps}) must not exceed the {local_steps} local steps of an update, "
            "because a device has only one unanswered update at a time"
        )


def _check_shares(policy: Policy, aggregate: Aggregator) -> None:
    """Raise `ValueError` if a policy gives a robust combiner unequal shares of the updates."""
    kind = _kind(policy.combine)
    if policy.trust == "open" and isinstance(policy.combine, CentredClipCombiner):
        kind += " (the default of trust = 'open')"
    if policy.take == "best":
        raise ValueError(
            f"take = 'best' selects a single update, so {kind} has nothing to combine; set combine.kind = 'mean'"
        )
    if isinstance(aggregate, MeanAggregator) and aggregate.weigh_by == "examples":
        raise ValueError(f"combine: {kind} gives all devices the same share; remove aggregate.weigh_by")


def _kind(value: object) -> str:
    return str(value.__struct_config__.tag) if isinstance(value, Section) else plugin_name(value)


class PolicySet(Protocol):
    """The parts of a policy that the hub uses: a `Policy`, or any value with these parts.

    Each part implements its protocol. A policy must not change while a hub uses it. It has no state
    of its own, because the hub stores all state.
    """

    @property
    def trust(self) -> FleetTrust | None:
        """How far the hub trusts its devices."""

    @property
    def staleness(self) -> StalenessPolicy:
        """How the staleness of an update determines its weight."""

    @property
    def take(self) -> Take:
        """Which updates count, by the devices' scores."""

    @property
    def behind_max(self) -> float | None:
        """Maximum ratio of a device's score to the fleet's score."""

    @property
    def preempt(self) -> bool:
        """Whether a device starts over from the hub's model after certain rejections."""

    @property
    def aggregate(self) -> Aggregator:
        """When updates become a version, and how they are weighted."""

    @property
    def combine(self) -> Combiner:
        """How updates that are folded together are merged into one."""

    @property
    def optimizer(self) -> Sequence[Transform]:
        """How a pseudo-gradient becomes a step of the model."""

    @property
    def frequency(self) -> FrequencyController:
        """How many local steps a device takes before its next exchange."""

    @property
    def overlap_steps_max(self) -> int:
        """Maximum local steps that a device takes while it waits for its next assignment."""

    @property
    def delay_steps(self) -> int:
        """Number of local steps that a device takes between sending an update and using the answer."""

    @property
    def warm_up(self) -> WarmUp | None:
        """The policy at the start of training."""

    @property
    def plateau(self) -> Plateau | None:
        """How the hub lowers the learning rate when evaluations stop improving."""

    @property
    def monitor(self) -> Monitor:
        """The detectors of divergence and their remedies."""


def check_recordable(policy: PolicySet) -> None:
    """Raise `ConfigError` unless this policy can be recorded in a run's folder.

    A `Policy` can be recorded if all its parts are registered under a name. A part without a name
    could not be read back, so the run could not be reopened.
    """
    remedy = (
        "so the run could not be reopened; derive its class from edgeasync.policies.Plugin in an importable "
        "module, or use a policy that 'edgeasync policies' lists"
    )
    if type(policy) is not Policy:
        raise ConfigError(
            f"policy: {type(policy).__name__} is not an edgeasync.Policy and cannot be recorded, so the run could "
            "not be reopened; pass an edgeasync.Policy"
        )
    for field in msgspec.structs.fields(Policy):
        part = getattr(policy, field.name)
        try:
            known = _is_same(convert(to_table(part), field.type, where=field.name), part)
        except (ConfigError, TypeError, ValueError) as error:
            ours = type(part).__module__.startswith("edgeasync.")
            if ours and not isinstance(part, Monitor | WarmUp):  # these may contain a class without a name
                raise ConfigError(f"policy.{error}") from error
            known = False
        if not known:
            raise ConfigError(
                f"policy.{field.name}: {part!r:.200} is not registered and cannot be recorded, {remedy}"
            )


def is_recordable(policy: PolicySet) -> bool:
    """Return whether this policy can be recorded in a run's folder."""
    try:
        check_recordable(policy)
    except ConfigError:
        return False
    return True


def _is_same(read: object, given: object) -> bool:
    """Return whether the part read back equals the original. Lists may have become tuples."""
    if isinstance(read, tuple):
        if not isinstance(given, list | tuple) or len(read) != len(given):
            return False
        return all(map(_is_same, read, given))
    if isinstance(read, Section):
        names = read.__struct_fields__
        return type(read) is type(given) and all(_is_same(getattr(read, n), getattr(given, n)) for n in names)
    return read == given
