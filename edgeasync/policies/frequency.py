"""Frequency controllers decide how many local steps a device takes between two exchanges.

A controller decides in two stages. The hub occasionally calls `retune`, which sets the *cadence* of
the whole fleet. With every answer to a device, the hub calls `interval`, which computes the
device's local steps from the cadence and from measured times.
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.measurements.medians import median

CHANGE_MAX = 2.0
"""Maximum factor by which a device's number of local steps changes from one answer to the next."""

FIRST_STEPS = 8
"""Number of local steps of a device that has not been measured yet."""

AIM = 0.95
"""On a slow link, the target is this share of `communication_share_max`, because measurements are
noisy.
"""

INFREQUENT = 4.0
"""A device whose cycle is longer than this number of periods of the fast devices is infrequent.

The hub and the other devices do not wait for infrequent devices.
"""

GAIN_MIN = 0.25
SHRINK = 0.7
AGREEMENT_MIN = 0.0
VARIANCE_RATIO_MAX = 4.0


STEPS_MAX = 2**31
"""Maximum number of local steps per assignment, whatever the bounds of the controller."""

LocalSteps = Annotated[int, Meta(ge=1, le=100_000)]
Bound = Literal["", "local_steps_min", "local_steps_max", "epochs_max", "change", "device"]
"""The bound that limits a device's steps: a key of the controller, "change" for `CHANGE_MAX`, or
"device" for the device's own limit.
"""


class Cadence(msgspec.Struct, frozen=True):
    """The pace that a controller has set for the fleet.

    `period_s` is the intended time between two exchanges of a device. `gain` is the factor that
    shortens this time while the devices' models drift apart; otherwise it is 1. `cause` is the
    reason for a `gain` below 1. `steps_factor` multiplies the local steps while a remedy against
    divergence is active; otherwise it is 1. `quick_s` is the shortest period that a third of the
    devices could achieve. `period_s` and `quick_s` are 0 before the first measurement.

    >>> from edgeasync.policies import Cadence
    >>> Cadence(period_s=2.0).gain
    1.0
    """

    period_s: float = 0.0
    gain: float = 1.0
    steps_factor: float = 1.0
    cause: str = ""
    quick_s: float = 0.0

    def is_infrequent(self, device: DeviceMeasurements) -> bool:
        """Return whether a device's cycle is longer than `INFREQUENT` periods of the fast devices."""
        return device.cycle_s > self.infrequent_s

    @property
    def infrequent_s(self) -> float:
        """A device with a longer cycle time is infrequent. Infinity before any measurement."""
        return INFREQUENT * self.quick_s or math.inf


class Interval(msgspec.Struct, frozen=True, gc=False):
    """An assignment's number of local steps (at least 1), the reason, and the bound that applied.

    >>> from edgeasync.policies import Interval
    >>> Interval(16, "as always").local_steps
    16
    """

    local_steps: int
    why: str
    bound: Bound = ""


@runtime_checkable
class FrequencyController(Protocol):
    """Sets the cadence of the fleet, and each device's local steps.

    The hub occasionally calls `retune` with the cadence that the last call returned. It calls
    `interval` for every assignment. The results of both methods must depend only on the arguments,
    so that a replay makes the same decisions.

    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Interval, Plugin
    >>> class OnePass(Plugin, frozen=True):
    ...     def retune(self, cadence, fleet, devices):
    ...         return cadence
    ...     def interval(self, device, cadence):
    ...         batch = max(1.0, device.batch_examples)
    ...         return Interval(max(1, round(device.examples / batch)), "a pass over its data")
    >>> policy = Policy(frequency=OnePass())
    """

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:
        """Return the next cadence; `devices` are the live ones that have sent an update."""

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return the local steps of the device's next assignment."""


class FixedFrequency(Section, frozen=True, tag_field="kind", tag="fixed"):
    """The same number of local steps for every device.

    A remedy of the monitor, or the device's own limit, may lower this number.
    """

    paper: ClassVar[str] = "local SGD, Stich 2019 (arXiv:1805.09767)"

    local_steps: LocalSteps = 16
    """Number of local steps between two exchanges."""

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:  # noqa: ARG002
        """Set the period to the median cycle time of the devices that are not infrequent."""
        quick_s = _quick(cycles := [device.cycle_s for device in devices])
        period_s = _median([cycle_s for cycle_s in cycles if cycle_s <= INFREQUENT * quick_s])
        return msgspec.structs.replace(cadence, period_s=period_s, quick_s=quick_s)

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return `local_steps`."""
        return _within(device, cadence, self.local_steps, "fixed", most=self.local_steps)


class TimeFrequency(Section, frozen=True, tag_field="kind", tag="time"):
    """As many local steps as fit into a fixed time, including the device's communication."""

    paper: ClassVar[str] = "local steps by speed as in Liu et al. 2024 (arXiv:2401.09135)"

    seconds: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 10.0
    """Seconds from one exchange to the next."""
    local_steps_min: LocalSteps = 1
    """Minimum number of local steps. It applies even if fewer steps fit into the time. It also
    overrides a remedy of the monitor, and the limit on changes (a factor of 2 per assignment). Only
    a device's own `local_steps_max` overrides it. It must not exceed this table's
    `local_steps_max`.
    """
    local_steps_max: LocalSteps | None = None
    """Maximum number of local steps. A device that reaches this maximum in less than `seconds`
    exchanges more often.
    """

    def __post_init__(self) -> None:
        _check_steps("local_steps_min", self.local_steps_min, self._most)

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:  # noqa: ARG002
        """Set the period to the configured time."""
        return msgspec.structs.replace(cadence, period_s=self.seconds, quick_s=self.seconds)

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return the number of local steps that fit into the time."""
        if not device.step_s:
            return _first(device, cadence, min(FIRST_STEPS, self._most), least=self.local_steps_min)
        steps = (self.seconds - device.communication_s) / device.step_s
        why = f"{self.seconds:.3g} s as set"
        return _within(device, cadence, steps, why, least=self.local_steps_min, most=self._most)

    @property
    def _most(self) -> int:
        return STEPS_MAX if self.local_steps_max is None else self.local_steps_max


class AdaptiveFrequency(Section, frozen=True, tag_field="kind", tag="adaptive"):
    """The same period between exchanges for all devices, as short as links and training allow.

    The period is the longer of two times, which are computed for the median device. The first is
    the time for `period_steps_min` steps and one exchange. The second is the time for one exchange,
    divided by `communication_share`. While the criterion that `metric` selects is met, the period
    shrinks, down to a quarter. A device exchanges less often than once per period if communication
    would otherwise take more than `communication_share_max` of its time. A device that is
    infrequent for this reason, or because its steps are slow, is ignored in the median.

    Once training has plateaued, a quiet hub extends the period up to `period_s_max` (`Rest`).

    If `metric` is "loss_variance", the period shrinks while the variance of the losses is over four
    times its median. If it is "stability", the period also shrinks while updates that are folded
    together have a mean cosine under 0. If it is "none", the period never shrinks.
    """

    paper: ClassVar[str] = "FedCompass, Li et al. 2023 (arXiv:2309.14675)"

    metric: Literal["stability", "loss_variance", "none"] = "stability"
    """Criterion that shortens the period: `stability`, `loss_variance` or `none`. With
    `loss_variance`, the period shrinks while the median of the last 16 loss variances is over 4
    times the median of the last 64. With `stability`, it also shrinks while updates that are folded
    together have a mean cosine under 0. The period does not shrink while losses are low, that is,
    while the median of the last 16 losses is under a fifth of the median of the first 16.
    """
    period_steps_min: LocalSteps = 5
    """The period is long enough for the median device to take this number of local steps, unless
    `metric` shortens it. The value must not exceed `local_steps_max`.
    """
    local_steps_min: LocalSteps = 1
    """Minimum number of local steps, with the same rules as for the kind `time`."""
    local_steps_max: LocalSteps = 128
    """Maximum number of local steps of any device."""
    communication_share: Annotated[float, Meta(ge=0.01, lt=1.0)] = 0.4
    """Maximum share of its time that the median device spends on communication. The value must not
    exceed `communication_share_max`.
    """
    communication_share_max: Annotated[float, Meta(ge=0.01, lt=1.0)] = 0.6
    """Maximum share of its time that any device spends on communication, if other bounds allow it.
    """
    epochs_max: Annotated[float, Meta(gt=0.0, le=1e6)] = 8.0
    """Maximum passes over a device's own data between two exchanges. Two steps are always allowed.
    """
    period_s_min: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.2
    """Minimum period of a quiet hub until training plateaus, unless `metric` shortens it. To fill a
    longer period, devices take more local steps, up to `local_steps_max` and `epochs_max`. They
    never wait. The value must not exceed `period_s_max`.
    """
    period_s_max: Annotated[float, Meta(gt=0.0, le=3600.0)] = 600.0
    """Maximum period of a quiet hub once training has plateaued."""
    rest: bool = True
    """Whether devices idle when the period is extended after training has plateaued. If `false`,
    they continue training up to `local_steps_max` and `epochs_max`, and idle only after that.
    """

    def __post_init__(self) -> None:
        _check_steps("period_steps_min", self.period_steps_min, self.local_steps_max)
        _check_steps("local_steps_min", self.local_steps_min, self.local_steps_max)
        if self.period_s_min > self.period_s_max:
            least, most = self.period_s_min, self.period_s_max
            raise ValueError(f"period_s_min ({least:g}) must not exceed period_s_max ({most:g})")
        if self.communication_share > self.communication_share_max:
            share, most = self.communication_share, self.communication_share_max
            raise ValueError(f"communication_share ({share:g}) must not exceed communication_share_max ({most:g})")

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:
        """Compute the gain, and the period from the median device's step and communication times."""
        return self._retune(cadence, fleet, devices, 0.0)

    def retune_quietly(
        self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]
    ) -> Cadence:
        """Do the same as `retune`, but respect `period_s_min`. A quiet hub calls this method."""
        return self._retune(cadence, fleet, devices, self.period_s_min)

    def _retune(
        self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements], least_s: float
    ) -> Cadence:
        measured = [(device.step_s, device.communication_s) for device in devices if device.step_s]
        if not measured:
            return cadence
        share, steps = self.communication_share, self.period_steps_min
        times_s = _times_s(measured, share, max(steps, self.local_steps_min))
        quick_s = _quick(times_s)
        if max(times_s) > INFREQUENT * quick_s:
            shortest_s = _times_s(measured, self.communication_share_max, self.local_steps_min)
            measured = [
                one for one, least in zip(measured, shortest_s, strict=True) if least <= INFREQUENT * quick_s
            ]
        step_s, communication_s = map(median, zip(*measured, strict=True))
        period_s = max(least_s, *_times_s([(step_s, communication_s)], share, steps))
        gain, cause = self._gain(cadence.gain, fleet)
        period_s = communication_s + (period_s - communication_s) * gain
        return Cadence(period_s, gain, cadence.steps_factor, cause, quick_s)

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return the steps that fit into the period, or the number required for a slow link."""
        if not device.step_s or not cadence.period_s:
            first = min(max(FIRST_STEPS, self.period_steps_min), self.local_steps_max)
            return _first(device, cadence, first, least=self.local_steps_min)
        step_s, communication_s = device.step_s, device.communication_s
        period_s, bytes_too = cadence.period_s, ""
        if device.period_s_min > period_s:
            period_s, bytes_too = device.period_s_min, ", for the day's bytes"
        steps = (period_s - communication_s) / step_s
        why = f"period {period_s:.3g} s{bytes_too}"
        if cadence.gain < 1.0:
            why += f", shortened: {cadence.cause}"
        by_link = communication_s * (1.0 / (AIM * self.communication_share_max) - 1.0) / step_s
        if by_link > steps and by_link > 1.0:
            steps = math.ceil(by_link)
            talking = f"talking takes {communication_s:.3g} s"
            why = f"slow link: {talking}, at most {self.communication_share_max:.0%} of its time"
        least, most = self.local_steps_min, self.local_steps_max
        return _within(device, cadence, steps, why, least=least, most=most, epochs=self.epochs_max)

    def _gain(self, gain: float, fleet: FleetMeasurements) -> tuple[float, str]:
        """Return the factor that shortens the period, and the reason."""
        cause = ""
        if fleet.settled:
            return min(1.0, gain / SHRINK), "models drifted apart before"
        if self.metric == "stability" and fleet.agreement < AGREEMENT_MIN:
            cause = f"updates point apart (mean cosine {fleet.agreement:.2f})"
        elif self.metric != "none" and fleet.loss_variances:
            usual = fleet.past_variances.usual
            if fleet.loss_variance > VARIANCE_RATIO_MAX * usual > 0.0:
                cause = f"the variance of the losses is {fleet.loss_variance / usual:.1f} times its median"
        if cause:
            return max(GAIN_MIN, gain * SHRINK), cause
        return min(1.0, gain / SHRINK), "models drifted apart before" if gain < SHRINK else ""


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _times_s(measured: list[tuple[float, float]], share: float, steps: int) -> list[float]:
    """Return the shortest possible time between exchanges for each device.

    In this time, the device can take `steps` steps, and communication takes at most `share` of it.
    `measured` contains the step time and the communication time of each device.
    """
    return [
        by_share_s if (by_share_s := talk_s / share) > (by_steps_s := talk_s + steps * step_s) else by_steps_s
        for step_s, talk_s in measured
    ]  # avoids calling max() for every device


def _quick(values: list[float]) -> float:
    """Return the shortest time that at least a third of the devices achieve."""
    return sorted(values)[(len(values) - 1) // 3] if values else 0.0


def _check_steps(name: str, steps: int, local_steps_max: int) -> None:
    if steps > local_steps_max:
        raise ValueError(f"{name} ({steps}) must not exceed local_steps_max ({local_steps_max})")


def _first(device: DeviceMeasurements, cadence: Cadence, local_steps: int, *, least: int) -> Interval:
    local_steps = max(local_steps, least)
    return _within(device, cadence, local_steps, "first measurement", least=least, most=local_steps)


def _within(
    device: DeviceMeasurements,
    cadence: Cadence,
    steps: float,
    why: str,
    *,
    least: int = 1,
    most: int,
    epochs: float = math.inf,
) -> Interval:
    """Return `steps` within all bounds, the reason, and the bound that applied.

    Bounds may conflict. They are applied in order, and each overrides those applied before it.
    `least` is applied second to last. The device's own limit is applied last, so it always holds. A
    controller without an upper bound passes `STEPS_MAX` as `most`.
    """
    if cadence.steps_factor < 1.0:
        steps *= cadence.steps_factor
        why = f"{why}; hurried against divergence"
    bound: Bound = ""
    local_steps = 1 if steps < 1.0 else math.floor(min(steps, 2.0**53))
    if steps < 1.0 and least == 1:
        why, bound = f"a single step; {why}", "local_steps_min"
    if local_steps > most:
        local_steps, why, bound = most, f"at most {most} steps; {why}", "local_steps_max"
    if math.isfinite(epochs) and device.batch_examples > 0 and device.examples > 0:
        by_data = max(2, math.floor(epochs * device.examples / device.batch_examples))
        if local_steps > by_data:
            local_steps, bound = by_data, "epochs_max"
            why = f"at most {epochs:g} passes over its {device.examples} examples"
    before = device.assigned_steps
    if before and device.updates and not before / CHANGE_MAX <= local_steps <= before * CHANGE_MAX:
        local_steps = min(max(local_steps, math.ceil(before / CHANGE_MAX)), math.floor(before * CHANGE_MAX))
        why, bound = f"on its way; {why}", "change"
    if local_steps < least:
        local_steps, why, bound = least, f"at least {least} steps; {why}", "local_steps_min"
    if device.local_steps_max and local_steps > device.local_steps_max:
        local_steps, bound = device.local_steps_max, "device"
        why = f"the device allows {device.local_steps_max} steps"
    return Interval(local_steps, why, bound)
