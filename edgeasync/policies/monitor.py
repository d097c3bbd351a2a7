"""The divergence monitor: its detectors, their alarms, and the remedies.

A detector watches either single devices or the whole fleet. An alarm starts when a number of
consecutive updates, set by the detector, exceed its bound. It ends after `calm_updates` consecutive
updates, of that device or of the fleet, that do not. An alarm about a device is a warning for
people and never changes the device's weight. The remedy of a fleet detector applies while its alarm
lasts. All decisions follow from reported scalars, so that a replay decides the same.
"""

import math
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.measurements.medians import WINDOW
from edgeasync.measurements.votes import DEVICES_MIN

Remedy = Literal["alert", "increase_frequency", "reduce_lr", "reduce_local_lr", "rollback"]
Scope = Literal["device", "fleet"]

LOST = 0.5
"""Share of the first losses below which a rising loss causes no alarm: most progress remains."""

STEPS_FACTOR = 0.5
"""Factor of the local steps under the remedy `increase_frequency`."""

REDUCTION = 0.5
"""Factor of the learning rate under the remedies `reduce_lr`, `reduce_local_lr` and `rollback`."""

RatioMax = Annotated[float, Meta(gt=1.0, le=1e9)]
CountMax = Annotated[int, Meta(ge=1, le=100_000)]


class Observation(msgspec.Struct, frozen=True, gc=False):
    """An update as seen by the monitor.

    `norm` and `loss` may be infinite or NaN, and `loss` may be `None`. `finite` tells whether the
    values and the loss are finite, even if the norm is NaN because it is not compared. `known`
    tells whether this run has had the update's base version. `base_loss` is the device's usual loss
    of the fleet's model in its last updates, NaN while there are too few. `slowness`, from 1 to 4,
    is how many times more updates than usual the model needs to learn the device's data, because
    they are late or of few steps. `voter` is the device's key or, without keys, its id.

    >>> from edgeasync.policies import Observation
    >>> Observation("pi", norm=1.2, local_steps=16, loss=0.3).finite
    True
    """

    device_id: str
    norm: float
    local_steps: int
    loss: float | None
    voter: str = ""
    finite: bool = True
    known: bool = True
    base_loss: float = math.nan
    slowness: float = 1.0


class Evidence(msgspec.Struct, frozen=True):
    """What a detector found: a human-readable sentence, and the figures behind it by name.

    >>> from edgeasync.policies import Evidence
    >>> Evidence("its loss is 1.77, the fleet's 0.002", {"loss": 1.77, "fleet_loss": 0.002}).figures["loss"]
    1.77
    """

    words: str
    figures: dict[str, float] = {}


@runtime_checkable
class Detector(Protocol):
    """Watches for one sign of divergence.

    The hub passes every update to `cause`. With scope "device", this happens before `fleet` records
    the update, with scope "fleet" afterwards. An alarm starts when `count_max` consecutive updates
    have a cause, and `remedy` applies while it lasts. The remedy of a device's detector is "alert".
    The result must depend on the arguments only, so that a replay decides the same.

    >>> from typing import ClassVar
    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Evidence, Plugin
    >>> from edgeasync.policies.monitor import Monitor
    >>> class Silent(Plugin, frozen=True):
    ...     count_max: ClassVar[int] = 10
    ...     patient: ClassVar[bool] = False
    ...     scope: ClassVar[str] = "device"
    ...     remedy: ClassVar[str] = "alert"
    ...     def cause(self, update, fleet):
    ...         return Evidence("it tells no loss") if update.loss is None else None
    >>> policy = Policy(monitor=Monitor(detectors=(Silent(),)))
    """

    @property
    def count_max(self) -> int:
        """The number of consecutive updates with a cause that start an alarm."""

    patient: ClassVar[bool]
    """Whether `count_max` is multiplied by the update's `slowness`."""

    @property
    def remedy(self) -> Remedy:
        """The remedy of its alarms."""

    scope: ClassVar[Scope]
    """Whether its alarms are about a device or about the fleet."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Return evidence that the update or the fleet diverges, or `None`."""


class _DeviceDetector(Section, frozen=True):
    paper: ClassVar[str] = ""
    scope: ClassVar[Scope] = "device"
    patient: ClassVar[bool] = False
    remedy: ClassVar[Remedy] = "alert"


class _FleetDetector(Section, frozen=True):
    paper: ClassVar[str] = ""
    scope: ClassVar[Scope] = "fleet"
    count_max: ClassVar[int] = 1
    patient: ClassVar[bool] = False


class UpdateNormDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="update_norm"):
    """Find a device whose updates are far longer than usual.

    They must be longer both overall and for their number of steps. For the latter, the norm is
    divided by the square root of the steps: random steps grow with the root, and directed ones not
    much faster.
    """

    ratio_max: RatioMax = 4.0
    """An update over this multiple of the usual norm is suspicious."""
    count_max: CountMax = 3
    """Consecutive suspicious updates that start an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Compare the norm, and the norm per square root of the steps."""
        lengths = fleet.lengths
        if not update.norm > self.ratio_max * lengths.median:  # first, since it runs with every update
            return None
        if not update.norm > self.ratio_max * lengths.usual():
            return None
        by_root, usual = update.norm / math.sqrt(update.local_steps), fleet.norms.usual()
        if not usual * self.ratio_max < by_root < math.inf:
            return None
        times = by_root / usual
        return Evidence(
            f"its updates are {times:.3g} times as long as is usual in the fleet: check the scale of its inputs "
            "and its local learning rate",
            {"times_usual": times},
        )


class NotFiniteDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="not_finite"):
    """Find a device whose updates or losses are repeatedly NaN or infinite.

    Such updates are rejected in any case.
    """

    count_max: CountMax = 3
    """Consecutive updates of this kind that start an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Check whether the values and the loss are finite."""
        if update.finite:
            return None
        return Evidence("its updates or their losses are not finite: check its data for missing or huge values")


class RefusedDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="refused"):
    """Find a device whose updates are repeatedly based on versions that this run never had."""

    count_max: CountMax = 5
    """Consecutive updates of this kind that start an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Check whether the update's base version is known."""
        return None if update.known else Evidence("its updates are from versions that this run never had")


class DataMismatchDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="data_mismatch"):
    """Find a device whose data contradict the others', so that the model fits theirs sooner.

    Possible reasons are wrong labels, a broken sensor or inputs of another scale. The updates of
    such a device still count. So the model slowly learns part of its data, and the difference
    shrinks.
    """

    patient: ClassVar[bool] = True

    ratio_max: RatioMax = 2.0
    """A loss over this multiple of the fleet's median may be suspicious."""
    peak_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """A loss is not suspicious up to this share of the highest median loss of the fleet so far."""
    count_max: CountMax = 8
    """Consecutive suspicious updates that start an alarm. If they are staler than usual, or of
    fewer steps, the number is up to four times higher, because the model learns a slow device's
    data later.
    """

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Compare the device's median loss of the fleet's model with the others'."""
        own, votes = update.base_loss, fleet.base_losses
        if not own > self.peak_share * votes.peak:  # first, since it runs with every update
            return None
        usual = votes.median
        if own <= self.ratio_max * usual or len(votes) < DEVICES_MIN:
            return None
        return Evidence(
            f"the model does not fit its data (loss {own:.3g}, the fleet's {usual:.3g}): check labels and inputs",
            {"loss": own, "fleet_loss": usual},
        )


class LossDetector(_FleetDetector, frozen=True, tag_field="kind", tag="loss"):
    """Find when the loss of the whole fleet rises well above its median.

    It must rise for more than half of the voters, too.
    """

    ratio_max: RatioMax = 3.0
    """A loss over this multiple of the median of the last 64 starts an alarm."""
    remedy: Remedy = "rollback"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the last quarter of the losses with their median, unless most progress remains."""
        loss, usual = fleet.loss, fleet.past_losses.usual
        bound = self.ratio_max * usual
        if not loss > bound > 0.0:  # first, since it runs with every update
            return None
        if len(fleet.losses) < WINDOW // 2 or loss <= LOST * fleet.loss_unlearnt:
            return None
        if not fleet.newest_losses.reached_by_most > bound:
            return None
        figures = {"loss": loss, "usual": usual}
        return Evidence(f"the loss is {loss:.3g}, {loss / usual:.1f} times its median", figures)


class LossVarianceDetector(_FleetDetector, frozen=True, tag_field="kind", tag="loss_variance"):
    """Find when the losses of the whole fleet vary far more than before."""

    ratio_max: RatioMax = 8.0
    """A variance over this multiple of the median of the last 64 starts an alarm."""
    remedy: Remedy = "increase_frequency"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the last quarter of the variances with their median, unless losses are small."""
        variance, usual = fleet.loss_variance, fleet.past_variances.usual
        bound = self.ratio_max * usual
        if not variance > bound > 0.0:  # first, since it runs with every update
            return None
        if len(fleet.loss_variances) < WINDOW // 2 or fleet.settled:
            return None
        if self.remedy == "rollback" and not fleet.newest_variances.reached_by_most > bound:
            return None
        words = f"the variance of the losses is {variance:.3g}, {variance / usual:.1f} times its median"
        return Evidence(words, {"loss_variance": variance, "usual": usual})


class DisagreementDetector(_FleetDetector, frozen=True, tag_field="kind", tag="disagreement"):
    """Find when devices pull in opposite directions.

    Then the mean cosine between updates of one fold is negative.
    """

    cosine_min: Annotated[float, Meta(ge=-1.0, le=1.0)] = -0.05
    """A mean cosine below this starts an alarm."""
    remedy: Remedy = "reduce_lr"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the moving average of the cosine with the bound, unless losses are already small."""
        if fleet.agreement < self.cosine_min and not fleet.settled:
            words = f"updates pull apart: their mean cosine is {fleet.agreement:.2f}"
            return Evidence(words, {"cosine": fleet.agreement})
        return None


class ThresholdDetector(_FleetDetector, frozen=True, tag_field="kind", tag="threshold"):
    """Find when a figure of the whole fleet, the voters' median, exceeds a fixed bound."""

    metric: Literal["loss", "loss_variance", "gradient_norm"] = "loss_variance"
    """The figure. `gradient_norm` is the norm of an update divided by its local steps, including
    the effect of the learning rate.
    """
    threshold: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.5
    """A figure over this starts an alarm."""
    remedy: Remedy = "increase_frequency"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the figure with the bound."""
        found = fleet.gradients.median if self.metric == "gradient_norm" else getattr(fleet, self.metric)
        if not found > self.threshold:  # also false before the first figure
            return None
        words = f"the {self.metric} is {found:.3g}, and the threshold {self.threshold:g}"
        return Evidence(words, {self.metric: found})


DetectorKind = (
    UpdateNormDetector
    | NotFiniteDetector
    | RefusedDetector
    | DataMismatchDetector
    | LossDetector
    | LossVarianceDetector
    | DisagreementDetector
    | ThresholdDetector
)


class Monitor(Section, frozen=True):
    """Watch for divergence. An empty list of detectors disables the monitor."""

    detectors: tuple[Detector, ...] = (
        NotFiniteDetector(),
        RefusedDetector(),
        UpdateNormDetector(),
        DataMismatchDetector(),
        LossDetector(),
        LossVarianceDetector(),
        DisagreementDetector(),
    )
    """The detectors."""
    calm_updates: Annotated[int, Meta(ge=1, le=100_000)] = 10
    """Consecutive updates without a cause that end an alarm."""

    clip: Annotated[float, Meta(ge=0.0, le=1e9)] = 1.0
    """The hub clips an update to at most this multiple of the usual norm; 0 disables clipping."""

    probation: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.25
    """The hub clips an update of a device on probation to at most this multiple of the usual norm.
    It applies only under `trust = "open"`.
    """

    def norm_max(self, fleet: FleetMeasurements, slack: float = 0.0) -> float:
        """Return the norm to which longer updates are clipped.

        It is infinite while too few voters are known.
        """
        return self.clip * fleet.lengths.usual(slack) if self.clip else math.inf

    @property
    def rolls_back(self) -> bool:
        """Whether a detector may roll the hub back to an earlier version."""
        return any(detector.remedy == "rollback" for detector in self.detectors)
