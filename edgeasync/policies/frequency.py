"""Frequency controllers: how many local steps a device takes between two exchanges.

A controller decides in two stages. `retune` occasionally sets the *cadence* of the whole fleet.
With every answer, `interval` sets the local steps of one device from the cadence. All times are
measured.
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
"""Largest factor by which a device's local steps change from one answer to the next."""

FIRST_STEPS = 8
"""Local steps of a device that is not measured yet."""

AIM = 0.95
"""Safety margin on the communication share of a slow link, because measurements are noisy."""

INFREQUENT = 4.0
"""A device whose exchange takes more than this many periods of the fast devices is infrequent.

Nobody waits for it.
"""

GAIN_MIN = 0.25
SHRINK = 0.7
AGREEMENT_MIN = 0.0
VARIANCE_RATIO_MAX = 4.0


STEPS_MAX = 2**31
"""Maximum local steps of an assignment, whatever the bounds of its controller."""

LocalSteps = Annotated[int, Meta(ge=1, le=100_000)]
Bound = Literal["", "local_steps_min", "local_steps_max", "epochs_max", "change", "device"]
"""The bound that limits a device's steps: a key of its controller, `CHANGE_MAX` or the device's
limit.
"""


class Cadence(msgspec.Struct, frozen=True):
    """The pace that a controller has set for the fleet.

    `period_s` is the usual time between two exchanges of a device, 0 before any measurement. `gain`
    is the factor that shortens it while models drift apart, 1 for none, and `cause` is the reason.
    `steps_factor` multiplies the local steps while a remedy against divergence is active, 1 for
    none. `quick_s` is the period that a third of the devices could keep on their own, 0 before any
    measurement.

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
        """The longest cycle of a device that is not infrequent; infinity before any measurement."""
        return INFREQUENT * self.quick_s or math.inf


class Interval(msgspec.Struct, frozen=True, gc=False):
    """The local steps of one assignment, at least 1, with the reason and the bound that applied.

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

    The hub calls `retune` occasionally, with the cadence that it returned last, and `interval` for
    every assignment. Both must depend on their arguments only, so that a replay decides the same.

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

    The monitor or the device's own limit may lower it.
    """

    paper: ClassVar[str] = "local SGD, Stich 2019 (arXiv:1805.09767)"

    local_steps: LocalSteps = 16
    """Local steps between two exchanges."""

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:  # noqa: ARG002
        """Return the median cycle of the devices that are not infrequent as the period."""
        quick_s = _quick(cycles := [device.cycle_s for device in devices])
        period_s = _median([cycle_s for cycle_s in cycles if cycle_s <= INFREQUENT * quick_s])
        return msgspec.structs.replace(cadence, period_s=period_s, quick_s=quick_s)

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return `local_steps`."""
        return _within(device, cadence, self.local_steps, "fixed", most=self.local_steps)


class TimeFrequency(Section, frozen=True, tag_field="kind", tag="time"):
    """As many local steps as fit into a given time, minus the device's communication."""

    paper: ClassVar[str] = "local steps by speed as in Liu et al. 2024 (arXiv:2401.09135)"

    seconds: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 10.0
    """Seconds from one exchange to the next."""
    local_steps_min: LocalSteps = 1
    """Minimum number of steps, even if the time, the monitor or the doubling rule require fewer.
    Only a device's own `local_steps_max` overrides it. It must not exceed `local_steps_max`.
    """
    local_steps_max: LocalSteps | None = None
    """Maximum number of steps. A device may then exchange more often than every `seconds`."""

    def __post_init__(self) -> None:
        _check_steps("local_steps_min", self.local_steps_min, self._most)

    def retune(self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]) -> Cadence:  # noqa: ARG002
        """Return the configured time as the period."""
        return msgspec.structs.replace(cadence, period_s=self.seconds, quick_s=self.seconds)

    def interval(self, device: DeviceMeasurements, cadence: Cadence) -> Interval:
        """Return the number of steps that fit."""
        if not device.step_s:
            return _first(device, cadence, min(FIRST_STEPS, self._most), least=self.local_steps_min)
        steps = (self.seconds - device.communication_s) / device.step_s
        why = f"{self.seconds:.3g} s as set"
        return _within(device, cadence, steps, why, least=self.local_steps_min, most=self._most)

    @property
    def _most(self) -> int:
        return STEPS_MAX if self.local_steps_max is None else self.local_steps_max


class AdaptiveFrequency(Section, frozen=True, tag_field="kind", tag="adaptive"):
    """Equal time between exchanges for all devices, as short as the links and the learning allow.

    The period is the longer of two times. The first is `period_steps_min` steps and one exchange of
    the median device. The second is the time in which that device's communication has a share of
    `communication_share`. While `metric` requires it, the period shrinks, down to a quarter. A
    device exchanges less often if communication would take more than `communication_share_max` of
    its time. If that, or its slow steps, make a device infrequent, it does not count for the
    median.

    A quiet hub extends the period up to `period_s_max` once training has plateaued (`Rest`).

    With `metric` "loss_variance", the period shrinks while the variance of the losses is over four
    times its median. With "stability", it also shrinks while updates that are folded together
    diverge (mean cosine under 0). With "none", it never shrinks.
    """

    paper: ClassVar[str] = "FedCompass, Li et al. 2023 (arXiv:2309.14675)"

    metric: Literal["stability", "loss_variance", "none"] = "stability"
    """What shortens the period. `loss_variance`: the median of the last 16 variances of the losses
    is over 4 times that of the last 64. `stability`: that, or updates that are folded together have
    a mean cosine under 0. `none`: nothing. Neither acts once the losses are low, that is while the
    median of the last 16 is under a fifth of the median of the first 16.
    """
    period_steps_min: LocalSteps = 5
    """Local steps of the median device that fit into the period, before `metric` shortens it; at
    most `local_steps_max`.
    """
    local_steps_min: LocalSteps = 1
    """Minimum number of steps, as for the kind `time`."""
    local_steps_max: LocalSteps = 128
    """Maximum number of steps, for any device."""
    communication_share: Annotated[float, Meta(ge=0.01, lt=1.0)] = 0.4
    """Maximum share of the median device's time for communication; at most
    `communication_share_max`.
    """
    communication_share_max: Annotated[float, Meta(ge=0.01, lt=1.0)] = 0.6
    """Maximum share of any device's time for communication, as far as the other bounds allow."""
    epochs_max: Annotated[float, Meta(gt=0.0, le=1e6)] = 8.0
    """Maximum passes over a device's own data between two exchanges. Two steps are always allowed.
    """
    period_s_min: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.2
    """Minimum period of a quiet hub at full pace, before `metric` shortens it. Devices keep it by
    more local steps within `local_steps_max` and `epochs_max`, never by waiting. It must not exceed
    `period_s_max`.
    """
    period_s_max: Annotated[float, Meta(gt=0.0, le=3600.0)] = 600.0
    """Maximum period of a quiet hub once training has plateaued."""
    rest: bool = True
    """Whether devices idle in a longer period. With `false`, they train on within `local_steps_max`
    and `epochs_max`, and idle after that.
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
        """Return the period for the median device's step and communication time, and the gain."""
        return self._retune(cadence, fleet, devices, 0.0)

    def retune_quietly(
        self, cadence: Cadence, fleet: FleetMeasurements, devices: Sequence[DeviceMeasurements]
    ) -> Cadence:
        """Do the same as `retune`, but respect `period_s_min`; used by a quiet hub."""
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
        """Return the steps that fit into the period, or those that a slow link needs."""
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
    """Return the shortest time between exchanges of each device.

    It allows `steps` steps, and at most `share` for communication. Devices are `measured` by their
    step and communication times.
    """
    return [
        by_share_s if (by_share_s := talk_s / share) > (by_steps_s := talk_s + steps * step_s) else by_steps_s
        for step_s, talk_s in measured
    ]  # avoids calling max() for every device


def _quick(values: list[float]) -> float:
    """Return the time that a third of the devices achieve; with two or three devices, the shortest."""
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

    Bounds may conflict. Each one overrides those before it. So the device's own limit always
    applies, and before it `least`. A controller without an upper bound passes `STEPS_MAX` as
    `most`.
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
