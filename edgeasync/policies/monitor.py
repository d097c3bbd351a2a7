"""The divergence monitor: its watches, their alarms, and the remedies.

A watch looks either at one device's updates or at the whole fleet. An alarm begins with an update that exceeds the
watch's bound. It ends after `calm_updates` in a row, of that device or of the fleet, that do not. Its remedy holds
as long as the alarm. All decisions follow from reported scalars, so a replay decides the same.
"""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.policies.history import DEVICES_MIN, WINDOW, FleetHistory, Votes, median

Remedy = Literal["alert", "increase_frequency", "reduce_lr", "rollback", "quarantine"]
Scope = Literal["device", "fleet"]
FleetRemedy = Literal["alert", "increase_frequency", "reduce_lr", "rollback"]

LOST = 0.5
"""Share of the first losses up to which no rise of the loss is alarming: most of what was learnt still holds."""

STEPS_FACTOR = 0.5
"""Factor of the local steps under the remedy `increase_frequency`."""

REDUCTION = 0.5
"""Factor of the learning rate under the remedies `reduce_lr` and `rollback`."""

NORM_RATIO = "times the median of the devices' last norms, or of their first ones if larger, that is still calm"

RatioMax = Annotated[float, Meta(gt=1.0, le=1e9)]


class Observation(msgspec.Struct, frozen=True, gc=False):
    """An update as the monitor sees it; `norm` and `loss` may be infinite or NaN, and the loss may be missing.

    `not_finite_run` counts the device's latest updates in a row, this one included, with a norm or loss that is
    not finite, `refused_run` those from versions that this run never had. `voter` is the device's key or, without
    keys, its id.
    """

    device_id: str
    norm: float
    local_steps: int
    loss: float | None
    not_finite_run: int = 0
    voter: str = ""
    refused_run: int = 0


class Watch(Protocol):
    """Watches for one sign of divergence.

    Show every update to `cause`: with the scope "device" before `fleet` has recorded the update, with the scope
    "fleet" after that. A cause begins an alarm, and `remedy` applies while it lasts. The answer depends on nothing
    but the arguments, so that a replay decides the same.
    """

    @property
    def remedy(self) -> Remedy:
        """The remedy of its alarms."""

    @property
    def scope(self) -> Scope:
        """Whether its alarms are about a device or about the fleet."""

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:
        """Return in words what is alarming about the update or the fleet, or `None`."""


class UpdateNormWatch(Section, frozen=True, tag_field="kind", tag="update_norm"):
    """Find a device with far longer updates than others, each divided by the root of its number of steps."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    ratio_max: Annotated[RatioMax, Meta(description=NORM_RATIO)] = 8.0
    remedy: Annotated[Remedy, Meta(description="what the hub does about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:
        """Compare norms over the root of the steps: random steps grow with it, and aimed ones not much faster."""
        return _over_usual(update, fleet, fleet.norms, self.ratio_max, share=math.sqrt, what="norm of its update")


class GradientNormWatch(Section, frozen=True, tag_field="kind", tag="gradient_norm"):
    """Find a device whose mean gradient (update over local steps) is far longer than the others'."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    ratio_max: Annotated[RatioMax, Meta(description=NORM_RATIO)] = 20.0
    remedy: Annotated[Remedy, Meta(description="what the hub does about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:
        """Compare the norm over the number of steps."""
        return _over_usual(
            update, fleet, fleet.gradients, self.ratio_max, share=float, what="norm of its mean gradient"
        )


class NotFiniteWatch(Section, frozen=True, tag_field="kind", tag="not_finite"):
    """Find a device whose updates or losses are repeatedly NaN or infinite.

    Such updates are rejected in any case.
    """

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    count_max: Annotated[int, Meta(ge=1, le=100_000, description="such updates in a row that are alarming")] = 3
    remedy: Annotated[Remedy, Meta(description="what the hub does about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the number of such updates in a row."""
        if update.not_finite_run < self.count_max:
            return None
        return f"its last {update.not_finite_run} updates or their losses are not finite: look at its data"


class RefusedWatch(Section, frozen=True, tag_field="kind", tag="refused"):
    """A device whose updates are repeatedly from versions that this run never had: broken, or made up."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["device"]] = "device"

    count_max: Annotated[int, Meta(ge=1, le=100_000, description="such updates in a row that are alarming")] = 5
    remedy: Annotated[Remedy, Meta(description="what the hub does about it")] = "quarantine"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the number of such updates in a row."""
        if update.refused_run < self.count_max:
            return None
        return f"its last {update.refused_run} updates are from versions that this run never had"


class LossWatch(Section, frozen=True, tag_field="kind", tag="loss"):
    """Find when the loss of the whole fleet, and of more than half of the voters, rises well above its average."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["fleet"]] = "fleet"

    ratio_max: Annotated[RatioMax, Meta(description="times the median of the losses that is still calm")] = 3.0
    remedy: Annotated[FleetRemedy, Meta(description="what the hub does about it")] = "rollback"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the last quarter of the losses with their median, unless most of what was learnt still holds."""
        # The cheap test comes first, since it runs with every update.
        if len(fleet.losses) < WINDOW // 2 or fleet.loss <= LOST * fleet.loss_first:
            return None
        usual = median(fleet.losses)
        bound = self.ratio_max * usual
        if fleet.loss > bound > 0.0 and fleet.newest_losses.reached_by_most > bound:
            return f"the loss is {fleet.loss:.3g}, {fleet.loss / usual:.1f} times its median"
        return None


class LossVarianceWatch(Section, frozen=True, tag_field="kind", tag="loss_variance"):
    """Find when the losses of the whole fleet vary far more than before."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["fleet"]] = "fleet"

    ratio_max: Annotated[RatioMax, Meta(description="times the median of the variances that is still calm")] = 8.0
    remedy: Annotated[FleetRemedy, Meta(description="what the hub does about it")] = "increase_frequency"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the last quarter of the variances with their median, unless losses are small by now."""
        if len(fleet.loss_variances) < WINDOW // 2 or fleet.settled:
            return None
        usual = median(fleet.loss_variances)
        bound, most = self.ratio_max * usual, fleet.newest_variances.reached_by_most
        if fleet.loss_variance > bound > 0.0 and (self.remedy != "rollback" or most > bound):
            times = fleet.loss_variance / usual
            return f"the variance of the losses is {fleet.loss_variance:.3g}, {times:.1f} times its median"
        return None


class DisagreementWatch(Section, frozen=True, tag_field="kind", tag="disagreement"):
    """Find when devices pull in opposite directions: the mean cosine between updates of one fold is negative."""

    paper: ClassVar[str] = ""
    scope: ClassVar[Literal["fleet"]] = "fleet"

    cosine_min: Annotated[float, Meta(ge=-1.0, le=1.0, description="mean cosine that is still calm")] = -0.05
    remedy: Annotated[FleetRemedy, Meta(description="what the hub does about it")] = "reduce_lr"

    def cause(self, update: Observation, fleet: FleetHistory) -> str | None:  # noqa: ARG002
        """Compare the moving average with the bound, unless losses are small by now."""
        if fleet.agreement < self.cosine_min and not fleet.settled:
            return f"updates pull apart: their mean cosine is {fleet.agreement:.2f}"
        return None


WatchKind = (
    UpdateNormWatch
    | GradientNormWatch
    | NotFiniteWatch
    | RefusedWatch
    | LossWatch
    | LossVarianceWatch
    | DisagreementWatch
)


class Monitor(Section, frozen=True):
    """Watch for divergence. An empty list watches nothing."""

    watch: Annotated[tuple[WatchKind, ...], Meta(description="the watches")] = (
        NotFiniteWatch(),
        RefusedWatch(),
        UpdateNormWatch(),
        LossWatch(),
        LossVarianceWatch(),
        DisagreementWatch(),
    )
    calm_updates: Annotated[
        int, Meta(ge=1, le=100_000, description="updates in a row without alarm that end it")
    ] = 10

    clip: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1e9,
            description="an update that is longer than this many times the median of the devices' last norms "
            "counts as one of that length; 0: updates may have any length",
        ),
    ] = 1.0

    def norm_max(self, fleet: FleetHistory) -> float:
        """Return the norm that longer updates are shortened to; infinity while too few voters are known."""
        usual = fleet.lengths.median
        return self.clip * usual if self.clip and len(fleet.lengths) >= DEVICES_MIN and usual > 0.0 else math.inf

    @property
    def rolls_back(self) -> bool:
        """Whether a watch may return the hub to an earlier version."""
        return any(watch.remedy == "rollback" for watch in self.watch)


def _over_usual(
    update: Observation,
    fleet: FleetHistory,
    votes: Votes,
    ratio_max: float,
    *,
    share: Callable[[int], float],
    what: str,
) -> str | None:
    """Compare a norm over a `share` of the local steps with the voters' median, and with the first norms."""
    compared = len(votes) + (update.voter not in votes.newest)
    if compared < DEVICES_MIN or not math.isfinite(update.norm):
        return None
    own, usual = update.norm / share(update.local_steps), votes.median
    if not own > ratio_max * usual:  # the cheap test comes first, since it runs with every update
        return None
    # Updates shorten during training: one as long as the first ones may come from a class not seen before.
    first = median([norm / share(local_steps) for norm, local_steps in fleet.norms_first])
    if own > ratio_max * max(usual, first) > 0.0:
        return f"the {what} is {own / usual:.3g} times the fleet's median" if usual else f"the {what} is {own:.3g}"
    return None
