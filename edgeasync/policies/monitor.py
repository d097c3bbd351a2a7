"""The divergence monitor: its detectors, their alarms, and the remedies.

A detector looks either at one device's updates or at the whole fleet. An alarm begins when as many updates in a
row as the detector asks for exceed its bound. It ends after `calm_updates` in a row, of that device or of the
fleet, that do not. What a detector finds in a device is a warning for people: it never takes the device's weight.
The remedy of a detector of the fleet holds as long as its alarm. All decisions follow from reported scalars, so a
replay decides the same.
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
"""Share of the first losses up to which no rise of the loss is alarming: most of what was learnt still holds."""

STEPS_FACTOR = 0.5
"""Factor of the local steps under the remedy `increase_frequency`."""

REDUCTION = 0.5
"""Factor of the learning rate under the remedies `reduce_lr`, `reduce_local_lr` and `rollback`."""

RatioMax = Annotated[float, Meta(gt=1.0, le=1e9)]
CountMax = Annotated[int, Meta(ge=1, le=100_000)]


class Observation(msgspec.Struct, frozen=True, gc=False):
    """An update as the monitor sees it; `norm` and `loss` may be infinite or NaN, and the loss may be missing.

    `finite` says whether its values and its loss are, also of one whose norm is not compared and NaN. `known` says
    whether this run has had the version that it was trained from. `base_loss` is the device's usual loss of
    the fleet's model in its last updates, NaN while there are too few. `slowness` is how many times as many of the
    device's updates as usual the model needs to learn its data, 1 to 4: they are late, or of few steps. `voter` is
    the device's key or, without keys, its id.

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
    """What a detector found: words for a person, and the figures that they rest on, by their names.

    >>> from edgeasync.policies import Evidence
    >>> Evidence("its loss is 1.77, the fleet's 0.002", {"loss": 1.77, "fleet_loss": 0.002}).figures["loss"]
    1.77
    """

    words: str
    figures: dict[str, float] = {}


@runtime_checkable
class Detector(Protocol):
    """Looks for one sign of divergence.

    Show every update to `cause`: with the scope "device" before `fleet` has recorded the update, with the scope
    "fleet" after that. An alarm begins when `count_max` updates in a row have a cause, and `remedy` applies while
    it lasts; that of a device's detector is "alert". The answer depends on nothing but the arguments, so that a
    replay decides the same.

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
        """How many updates in a row must have a cause."""

    patient: ClassVar[bool]
    """Whether it waits for as many times more of them as the update's `slowness` says."""

    @property
    def remedy(self) -> Remedy:
        """The remedy of its alarms."""

    scope: ClassVar[Scope]
    """Whether its alarms are about a device or about the fleet."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Return what is alarming about the update or the fleet, or `None`."""


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
    """Find a device whose updates are far longer than what is usual, for any number of steps and for its own.

    Its own number counts by its root: random steps grow with that, and aimed ones not much faster.
    """

    ratio_max: RatioMax = 4.0
    """An update over this multiple of the usual norm is alarming."""
    count_max: CountMax = 3
    """Such updates in a row that begin an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Compare the norm, and the norm over the root of the steps."""
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
    """Such updates in a row that begin an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Look at the values and at the loss."""
        if update.finite:
            return None
        return Evidence("its updates or their losses are not finite: check its data for missing or huge values")


class RefusedDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="refused"):
    """A device whose updates are repeatedly from versions that this run never had: broken, or made up."""

    count_max: CountMax = 5
    """Such updates in a row that begin an alarm."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Look at the version."""
        return None if update.known else Evidence("its updates are from versions that this run never had")


class DataMismatchDetector(_DeviceDetector, frozen=True, tag_field="kind", tag="data_mismatch"):
    """Find a device whose data contradict the others': the model learns theirs sooner than its.

    So it is with wrong labels, a broken sensor, inputs on another scale. The updates of such a device count, too:
    after some time the model has learnt some of its data, and the difference gets smaller.
    """

    patient: ClassVar[bool] = True

    ratio_max: RatioMax = 2.0
    """A loss over this multiple of the fleet's median may be alarming."""
    peak_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """A loss up to this share of the highest that the fleet's median has been is calm."""
    count_max: CountMax = 8
    """Such updates in a row that begin an alarm. If they are staler than usual, or of fewer steps, up to four
    times as many, since the model learns a slow device's data more slowly.
    """

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:
        """Compare the device's median loss of the fleet's model with the others', now and at first."""
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
    """Find when the loss of the whole fleet, and of more than half of the voters, rises well above its average."""

    ratio_max: RatioMax = 3.0
    """A loss over this multiple of the median of the last 64 is alarming."""
    remedy: Remedy = "rollback"
    """What the hub does about it."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the last quarter of the losses with their median, unless most of what was learnt still holds."""
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
    """A variance over this multiple of the median of the last 64 is alarming."""
    remedy: Remedy = "increase_frequency"
    """What the hub does about it."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the last quarter of the variances with their median, unless losses are small by now."""
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
    """Find when devices pull in opposite directions: the mean cosine between updates of one fold is negative."""

    cosine_min: Annotated[float, Meta(ge=-1.0, le=1.0)] = -0.05
    """A mean cosine under this is alarming."""
    remedy: Remedy = "reduce_lr"
    """What the hub does about it."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the moving average with the bound, unless losses are small by now."""
        if fleet.agreement < self.cosine_min and not fleet.settled:
            words = f"updates pull apart: their mean cosine is {fleet.agreement:.2f}"
            return Evidence(words, {"cosine": fleet.agreement})
        return None


class ThresholdDetector(_FleetDetector, frozen=True, tag_field="kind", tag="threshold"):
    """Find when a figure of the whole fleet, its voters' median, is above a bound, whatever is usual."""

    metric: Literal["loss", "loss_variance", "gradient_norm"] = "loss_variance"
    """The figure. `gradient_norm` is the norm of an update divided by its local steps; the learning rate is part
    of it.
    """
    threshold: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.5
    """A figure over this is alarming."""
    remedy: Remedy = "increase_frequency"
    """What the hub does about it."""

    def cause(self, update: Observation, fleet: FleetMeasurements) -> Evidence | None:  # noqa: ARG002
        """Compare the figure with the bound."""
        found = fleet.gradients.median if self.metric == "gradient_norm" else getattr(fleet, self.metric)
        if not found > self.threshold:  # nor before the first figure
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
    """Watch for divergence. An empty list watches nothing."""

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
    """Updates in a row without alarm that end an alarm."""

    clip: Annotated[float, Meta(ge=0.0, le=1e9)] = 1.0
    """The hub shortens an update to at most this multiple of the usual norm; 0: never."""

    probation: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.25
    """An update of a device on probation counts with at most this multiple of the usual norm; only under `trust =
    "open"`.
    """

    def norm_max(self, fleet: FleetMeasurements, slack: float = 0.0) -> float:
        """Return the norm that longer updates are shortened to; infinity while too few voters are known."""
        return self.clip * fleet.lengths.usual(slack) if self.clip else math.inf

    @property
    def rolls_back(self) -> bool:
        """Whether a detector may return the hub to an earlier version."""
        return any(detector.remedy == "rollback" for detector in self.detectors)
