"""The divergence monitor: its detectors, their alarms, and the remedies.

A detector watches either single devices or the whole fleet. It raises an alarm when `count_max`
consecutive updates exceed its bound. The alarm ends after `calm_updates` consecutive updates within
the bound. For an alarm about a device, only the updates of that device count. Such an alarm only
warns the operator, and never changes the device's weight. While an alarm about the fleet lasts, the
hub applies the detector's remedy. All decisions depend only on reported scalars, so that a replay
makes the same decisions.
"""

import math
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.measurements.medians import WINDOW, factor
from edgeasync.measurements.votes import DEVICES_MIN

Remedy = Literal["alert", "increase_frequency", "reduce_lr", "reduce_local_lr", "rollback"]
Scope = Literal["device", "fleet"]

LOST = 0.5
"""A rising loss does not cause an alarm while it is below this share of the first losses.

Below this share, most of the training progress remains.
"""

STEPS_FACTOR = 0.5
"""Factor that the remedy `increase_frequency` multiplies the number of local steps by."""

REDUCTION = 0.5
"""Factor that `reduce_lr`, `reduce_local_lr` and `rollback` multiply the learning rate by."""

RatioMax = Annotated[float, Meta(gt=1.0, le=1e9)]
CountMax = Annotated[int, Meta(ge=1, le=100_000)]


class Observation(msgspec.Struct, frozen=True, gc=False):
    """What the monitor knows about an update.

    `norm` and `loss` may be infinite or NaN, and `loss` may be `None`. `finite` is true if the
    values and the loss are finite. It may be true even if `norm` is NaN, because the hub also sets
    `norm` to NaN if no detector should compare it. `known` is true if the update's base version
    exists in this run. `base_loss` is the loss of the fleet's model on the device's data, as the
    median over the device's last few updates. It is NaN while there are too few updates. `slowness`
    is a factor from 1 to 4. It is over 1 if the device's updates are stale or have few local steps,
    so that the model needs more of them than usual to learn the device's data. `voter` is the
    device's key or, without keys, its id.

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
    """What a detector found: a human-readable sentence, and the figures that it is based on.

    >>> from edgeasync.policies import Evidence
    >>> Evidence("its loss is 1.77, the fleet's 0.002", {"loss": 1.77, "fleet_loss": 0.002}).figures["loss"]
    1.77
    """

    words: str
    figures: dict[str, float] = {}


@runtime_checkable
class Detector(Protocol):
    """Watches for one sign of divergence.

    The hub calls `cause` for every update. If `scope` is "device", this happens before the hub
    records the update in `fleet`. If `scope` is "fleet", it happens afterwards. An alarm starts
    when `cause` has returned evidence for `count_max` consecutive updates. While the alarm lasts,
    the hub applies `remedy`, which must be "alert" if `scope` is "device". The result of `cause`
    must depend only on the arguments, so that a replay makes the same decisions.

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
        """Number of consecutive updates with evidence that starts an alarm."""

    patient: ClassVar[bool]
    """Whether `count_max` is multiplied by the update's `slowness`."""

    @property
    def remedy(self) -> Remedy:
        """What the hub does while an alarm of this detector lasts."""

    scope: ClassVar[Scope]
    """Whether the detector's alarms are about a device or about the fleet."""

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

    Both the norm of an update, and the norm divided by the square root of the number of local
    steps, must be far larger than usual. The square root is used because the norm of random steps
    grows with it, and the norm of directed steps does not grow much faster.
    """

    ratio_max: RatioMax = 4.0
    """An update is suspicious if its norm is over this multiple of the usual norm."""
    count_max: CountMax = 3
    """Consecutive suspicious updates that start an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Compare the norm, and the norm divided by the square root of the steps, with the usual ones."""
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
            f"its updates are {factor(times)} times as long as usual: check the scale of its inputs and its "
            "learning rate",
            {"times_usual": times},
        )


class NotFiniteDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="not_finite"):
    """Find a device whose updates or losses are repeatedly NaN or infinite.

    The hub rejects such updates even without this detector.
    """

    count_max: CountMax = 3
    """Consecutive updates of this kind that start an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Check whether the values and the loss are finite."""
        if update.finite:
            return None
        return Evidence("its updates or their losses are not finite: check its data for missing or huge values")


class RefusedDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="refused"):
    """Find a device whose updates are repeatedly based on versions that never existed in this run."""

    count_max: CountMax = 5
    """Consecutive updates of this kind that start an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Check whether the update's base version is known."""
        return None if update.known else Evidence("its updates are from versions that this run never had")


class DataMismatchDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="data_mismatch"):
    """Find a device whose data contradict the data of the other devices.

    The model fits the data of the other devices sooner, so the device's loss is higher. Possible
    reasons are wrong labels, a broken sensor or inputs of a different scale. The device's updates
    still count, so that the model slowly learns part of its data, and the difference in loss
    shrinks.
    """

    patient: ClassVar[bool] = True

    ratio_max: RatioMax = 2.0
    """A loss is suspicious only if it is over this multiple of the fleet's median loss."""
    peak_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """A loss is suspicious only if it is over this share of the fleet's highest median loss so far."""
    count_max: CountMax = 8
    """Consecutive suspicious updates that start an alarm. The number is up to four times as high
    for updates that are staler or have fewer local steps than usual, because the model learns a
    slow device's data later.
    """

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Compare the median loss of the fleet's model on the device's data with that of other devices."""
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
    """Detect when the loss of the whole fleet rises well above its median.

    The loss must also rise for more than half of the voters.
    """

    ratio_max: RatioMax = 3.0
    """A loss over this multiple of the median of the last 64 losses starts an alarm."""
    remedy: Remedy = "rollback"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the median of the latest losses with the usual loss.

        There is no evidence of divergence while most of the training progress remains.
        """
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
    """Detect when the losses of the whole fleet vary far more than before."""

    ratio_max: RatioMax = 8.0
    """A variance over this multiple of the median of the last 64 variances starts an alarm."""
    remedy: Remedy = "increase_frequency"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the median of the latest variances with the usual one, unless losses are small."""
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
    """Detect when the updates of devices point in opposite directions.

    In that case, the mean cosine between the updates of a fold is negative.
    """

    cosine_min: Annotated[float, Meta(ge=-1.0, le=1.0)] = -0.05
    """A mean cosine below this value starts an alarm."""
    remedy: Remedy = "reduce_lr"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the moving average of the mean cosine with the bound, unless losses are small."""
        if fleet.agreement < self.cosine_min and not fleet.settled:
            words = f"updates pull apart: their mean cosine is {fleet.agreement:.2f}"
            return Evidence(words, {"cosine": fleet.agreement})
        return None


class ThresholdDetector(_FleetDetector, frozen=True, tag_field="kind", tag="threshold"):
    """Detect when the median of a metric over all voters exceeds a fixed threshold."""

    metric: Literal["loss", "loss_variance", "gradient_norm"] = "loss_variance"
    """The metric. `gradient_norm` is the norm of an update divided by its number of local steps, so
    it is proportional to the learning rate.
    """
    threshold: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.5
    """A median over this value starts an alarm."""
    remedy: Remedy = "increase_frequency"
    """The hub's remedy while the alarm lasts."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the median of the metric with the threshold."""
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
    """The active detectors."""
    calm_updates: Annotated[int, Meta(ge=1, le=100_000)] = 10
    """Number of consecutive updates without evidence after which an alarm ends."""

    clip: Annotated[float, Meta(ge=0.0, le=1e9)] = 1.0
    """The hub clips an update to at most this multiple of the usual norm; 0 disables clipping."""

    probation: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.25
    """The hub clips an update of a device on probation to at most this multiple of the usual norm.
    Devices are on probation only if `trust` is `open`.
    """

    def norm_max(self, fleet: FleetMeasurements, slack: float = 0.0) -> float:
        """Return the maximum norm, to which the hub clips longer updates.

        It is infinite while too few voters are known.
        """
        return self.clip * fleet.lengths.usual(slack) if self.clip else math.inf

    @property
    def rolls_back(self) -> bool:
        """Whether a detector may roll the hub back to an earlier version."""
        return any(detector.remedy == "rollback" for detector in self.detectors)
