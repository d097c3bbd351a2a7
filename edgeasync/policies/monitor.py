"""The divergence monitor: what is watched, when it is alarming, and what is done about it.

A watch looks either at one device's updates or at the whole fleet. An alarm begins with an update that breaks
the watch's bound and ends after `calm_updates` in a row that do not (of that device, or of the fleet); its remedy
holds for as long. Everything is decided from reported scalars, so a replay decides the same.
"""

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.policies.history import WINDOW, FleetHistory, median

Remedy = Literal["alert", "increase_frequency", "reduce_lr", "rollback", "quarantine"]
Scope = Literal["device", "fleet"]
FleetRemedy = Literal["alert", "increase_frequency", "reduce_lr", "rollback"]

DEVICES_MIN = 3
"""Devices that one is compared with at the least, itself included: of two nobody knows which is wrong."""

LOST = 0.5
"""Share of the first losses that the loss must come back to before a version is returned to."""

STEPS_FACTOR = 0.5
"""What `increase_frequency` leaves of the local steps."""

REDUCTION = 0.5
"""What `reduce_lr` and `rollback` leave of the learning rate."""

NORM_RATIO = "of the median of the devices' last norms, and of their first ones"

RatioMax = Annotated[float, Meta(gt=1.0, le=1e9)]


class Observation(msgspec.Struct, frozen=True, gc=False):
    """An update as the monitor sees it; `norm` and `loss` may be infinite or NaN, and there may be no loss.

    `not_finite_run` is how many of the device's updates in a row, this one included, had such a norm or loss.
    """

    device_id: str
    norm: float
    local_steps: int
    loss: float | None
    not_finite_run: int = 0


class Watch(Protocol):
    """One thing that is watched."""

    @property
    def remedy(self) -> Remedy:
        """What is done about an alarm."""

    @property
    def scope(self) -> Scope:
        """Whether a device or the fleet is at fault."""

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:
        """Return what is alarming about the update or the fleet after it, in words, or `None`."""


class UpdateNormWatch(Section, frozen=True, tag_field="kind", tag="update_norm"):
    """A device whose updates are far longer than the others', per square root of their local steps."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    ratio_max: Annotated[RatioMax, Meta(description=NORM_RATIO)] = 8.0
    remedy: Annotated[Remedy, Meta(description="what is done about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:
        """Compare norms over the root of the steps: aimless steps grow with it, and aimed ones not much faster."""
        return _over_usual(update, fleet, self.ratio_max, 0.5, "norm of its update")


class GradientNormWatch(Section, frozen=True, tag_field="kind", tag="gradient_norm"):
    """A device whose mean gradient, its update over its local steps, is far longer than the others'."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    ratio_max: Annotated[RatioMax, Meta(description=NORM_RATIO)] = 20.0
    remedy: Annotated[Remedy, Meta(description="what is done about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:
        """Compare the norm over the number of steps."""
        return _over_usual(update, fleet, self.ratio_max, 1.0, "norm of its mean gradient")


class NotFiniteWatch(Section, frozen=True, tag_field="kind", tag="not_finite"):
    """A device whose updates or losses are no numbers, again and again. Such updates are refused in any case."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    count_max: Annotated[int, Meta(ge=1, le=100_000, description="such updates in a row that are alarming")] = 3
    remedy: Annotated[Remedy, Meta(description="what is done about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Count them."""
        if update.not_finite_run < self.count_max:
            return None
        return f"its last {update.not_finite_run} updates or their losses are not finite: look at its data"


class LossWatch(Section, frozen=True, tag_field="kind", tag="loss"):
    """The loss of the whole fleet rises well above its average."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["fleet"]] = "fleet"

    ratio_max: Annotated[RatioMax, Meta(description="of the last losses over the median of the window")] = 3.0
    remedy: Annotated[FleetRemedy, Meta(description="what is done about it")] = "rollback"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the last quarter of the window with its median, unless most of what was learnt still holds."""
        # The cheap question first: it is asked with every update.
        if len(fleet.losses) < WINDOW // 2 or fleet.loss <= LOST * fleet.loss_first:
            return None
        usual = median(fleet.losses)
        if fleet.loss > self.ratio_max * usual > 0.0:
            return f"the loss is {fleet.loss:.3g}, {fleet.loss / usual:.1f} times its median"
        return None


class LossVarianceWatch(Section, frozen=True, tag_field="kind", tag="loss_variance"):
    """The losses of the whole fleet vary far more than they did."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["fleet"]] = "fleet"

    ratio_max: Annotated[RatioMax, Meta(description="of the last variances over the median of the window")] = 8.0
    remedy: Annotated[FleetRemedy, Meta(description="what is done about it")] = "increase_frequency"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the last quarter of the window with its median, unless losses are small beside the first."""
        if len(fleet.loss_variances) < WINDOW // 2 or fleet.settled:
            return None
        usual = median(fleet.loss_variances)
        if fleet.loss_variance > self.ratio_max * usual > 0.0:
            times = fleet.loss_variance / usual
            return f"the variance of the losses is {fleet.loss_variance:.3g}, {times:.1f} times its median"
        return None


class DisagreementWatch(Section, frozen=True, tag_field="kind", tag="disagreement"):
    """The devices pull in opposite directions: the mean cosine between updates folded together is negative."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["fleet"]] = "fleet"

    cosine_min: Annotated[float, Meta(ge=-1.0, le=1.0, description="mean cosine that is still calm")] = -0.05
    remedy: Annotated[FleetRemedy, Meta(description="what is done about it")] = "reduce_lr"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Look at the moving average, unless the losses are small beside the first ones."""
        if fleet.agreement < self.cosine_min and not fleet.settled:
            return f"updates pull apart: their mean cosine is {fleet.agreement:.2f}"
        return None


WatchKind = (
    UpdateNormWatch | GradientNormWatch | NotFiniteWatch | LossWatch | LossVarianceWatch | DisagreementWatch
)


class Monitor(Section, frozen=True):
    """What is watched for divergence; an empty list watches nothing."""

    watch: Annotated[tuple[WatchKind, ...], Meta(description="what is watched")] = (
        NotFiniteWatch(),
        UpdateNormWatch(),
        LossWatch(),
        LossVarianceWatch(),
        DisagreementWatch(),
    )
    calm_updates: Annotated[
        int, Meta(ge=1, le=100_000, description="updates in a row without alarm that end it")
    ] = 10

    @property
    def rolls_back(self) -> bool:
        """Whether a watch may want to return to an earlier version."""
        return any(watch.remedy == "rollback" for watch in self.watch)


def _over_usual(update: Observation, fleet: FleetHistory, ratio_max: float, power: float, what: str) -> str | None:
    compared = len(fleet.norms) + (update.device_id not in fleet.norms)
    if compared < DEVICES_MIN or not math.isfinite(update.norm):
        return None
    usual = _median_norm(fleet.norms.values(), power)
    own = update.norm / update.local_steps**power
    # Updates shorten as training goes on: one as long as the first were may come of a class not seen before.
    if own > ratio_max * max(usual, _median_norm(fleet.norms_first, power)) > 0.0:
        return f"the {what} is {own / usual:.3g} times the fleet's median" if usual else f"the {what} is {own:.3g}"
    return None


def _median_norm(norms: Iterable[tuple[float, int]], power: float) -> float:
    return median([norm / float(local_steps**power) for norm, local_steps in norms])
