"""Selects the training pace by temperature, power, memory and time. Part of `DeviceCore`.

This governor does no I/O: it receives sensor readings and the time, and returns a pace. A missing
sensor does not limit the pace. A board without a battery is treated as running on mains power, and
a board without a thermometer is never throttled for its temperature.
"""

import math
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.config import ByteCount, Section

HYSTERESIS_C = 5.0
"""Degrees Celsius by which the temperature must fall below a limit before the limit is lifted."""

BATTERY_HYSTERESIS = 0.05
"""How far the battery's charge must rise above its limit before the limit is lifted."""

MEMORY_HYSTERESIS = 1.25
"""The limit on free memory is lifted once free memory reaches this multiple of the limit."""

PRESSURE_MAX = 0.1
"""Memory is short if all programs were stalled on memory for this fraction of the last 10 s.

The shortage ends once that fraction falls below half of this value.
"""

SLOW_SHARE = 0.5
"""The fraction of time during which a warm or throttled device trains."""

HOLD_S = 5.0
"""Minimum duration of a slower pace, so that a noisy sensor does not make the pace oscillate."""

REASON_LENGTH_MAX = 32
"""Maximum length of the reason for a pace in a ping."""

CELSIUS = (-60.0, 150.0)
"""Range of valid temperatures. Readings outside it come from a defective sensor."""


class ThrottleReadings(msgspec.Struct, frozen=True, gc=False):
    """Readings of the device's sensors; `None` if a sensor is missing or unreadable.

    `throttled` is the reason why the board has throttled itself. `battery` and `memory_pressure`
    are fractions from 0 to 1. `minute` is the minute of the day in local time, from 0 to 1439.
    """

    temperature_c: float | None = None
    throttled: str = ""
    on_mains: bool | None = None
    battery: float | None = None
    memory_free_bytes: int | None = None
    memory_pressure: float | None = None
    metered: bool | None = None
    minute: int | None = None


class ThrottleSection(Section, frozen=True):
    """`[throttle]`: when a device pauses or trains slower; `None` means no limit."""

    temperature_c_max: Annotated[float, Meta(ge=30, le=150)] = 80.0
    """Pause when the hottest sensor reaches this temperature in degrees Celsius. With 150, never
    pause.
    """
    temperature_c_slow: Annotated[float, Meta(ge=30, le=150)] | None = None
    """From this temperature on, train during half of the time. The default is 5 degrees Celsius
    below `temperature_c_max`.
    """
    only_on_mains: bool = False
    """Pause while the device runs on battery power."""
    only_unmetered: bool = False
    """Pause while the default route uses a mobile modem."""
    battery_min: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Pause while the battery's charge, from 0 to 1, is below this value."""
    memory_free_bytes_min: ByteCount | None = None
    """Pause while less memory than this is free."""
    quiet_hours: str | None = None
    """Pause every day during this time range, such as `22:00-07:00`."""
    cpu_share: Annotated[float, Meta(ge=0.01, le=1)] = 1.0
    """Maximum fraction of the time during which the device takes local steps."""

    @property
    def slow_c(self) -> float:
        """The temperature from which on a device trains during half of the time."""
        slow_c = self.temperature_c_slow
        return self.temperature_c_max - HYSTERESIS_C if slow_c is None else slow_c

    @property
    def quiet(self) -> tuple[int, int] | None:
        """The first and the last minute of the daily pause."""
        return None if self.quiet_hours is None else _read_hours(self.quiet_hours)

    def __post_init__(self) -> None:
        if self.temperature_c_slow is not None and self.temperature_c_slow > self.temperature_c_max:
            raise ValueError("temperature_c_slow must be at most temperature_c_max")
        if self.quiet_hours is not None:
            _read_hours(self.quiet_hours)


class Pace(msgspec.Struct, frozen=True, gc=False):
    """The fraction of time during which the device trains (0 if paused), and the reason."""

    share: float = 1.0
    reason: str = ""


class Throttle:
    """Computes the pace from sensor readings and time. Deterministic.

    Without a `[throttle]` section, there are no limits.
    """

    def __init__(self, limits: ThrottleSection | None) -> None:
        self._limits = limits
        self._quiet = None if limits is None else limits.quiet
        self.pace = Pace() if limits is None else Pace(limits.cpu_share)
        self.temperature_c: float | None = None
        self._over: set[str] = set()
        """The limits that are exceeded now. A limit is removed once readings recover beyond its
        hysteresis.
        """
        self._slowed_s = -math.inf

    def observe(self, readings: ThrottleReadings, now_s: float) -> bool:
        """Record sensor readings; return whether they change the pace."""
        self.temperature_c = _within(readings.temperature_c, *CELSIUS)
        before, pace = self.pace, self._pace_by(readings)
        if pace.share < before.share:
            self._slowed_s = now_s
        if pace.share <= before.share or now_s >= self._slowed_s + HOLD_S:
            self.pace = pace
        # A rise from 81 to 82 C changes only the reason, which the next heartbeat reports.
        return self.pace.share != before.share

    def _pace_by(self, readings: ThrottleReadings) -> Pace:
        if self._limits is None:
            return Pace()
        if paused := self._pause(readings, self._limits):
            return Pace(0.0, paused)
        slowed = self._slow(readings, self._limits)
        return Pace(self._limits.cpu_share * (SLOW_SHARE if slowed else 1.0), slowed)

    def _pause(self, readings: ThrottleReadings, limits: ThrottleSection) -> str:
        """Return why the device must pause, or "". Also update the set of exceeded limits."""
        hot_c, free_bytes, free_bytes_min = (
            self.temperature_c,
            readings.memory_free_bytes,
            limits.memory_free_bytes_min,
        )
        pressure_max = None if free_bytes_min is None else PRESSURE_MAX
        battery, pressure = _within(readings.battery, 0.0, 1.0), _within(readings.memory_pressure, 0.0, 1.0)
        found = [
            self._is_over("hot", hot_c, limits.temperature_c_max, HYSTERESIS_C) and f"{hot_c:.0f} C",
            limits.only_on_mains and readings.on_mains is False and "on battery",
            self._is_under("battery", battery, limits.battery_min, BATTERY_HYSTERESIS)
            and f"battery at {battery:.0%}",
            self._is_under("memory", free_bytes, free_bytes_min, (MEMORY_HYSTERESIS - 1.0) * (free_bytes_min or 0))
            and f"{(free_bytes or 0) >> 20} MiB of memory free",
            self._is_over("pressure", pressure, pressure_max, PRESSURE_MAX / 2) and "short of memory",
            limits.only_unmetered and readings.metered is True and "metered link",
            _is_quiet(readings.minute, self._quiet) and "quiet hours",
        ]
        return next((reason for reason in found if reason), "")

    def _slow(self, readings: ThrottleReadings, limits: ThrottleSection) -> str:
        """Return why the device should train only half of the time, or ""."""
        hot_c = self.temperature_c
        if self._is_over("warm", hot_c, limits.slow_c, HYSTERESIS_C):
            return f"{hot_c:.0f} C"
        return readings.throttled[:REASON_LENGTH_MAX]

    def _is_over(self, name: str, value: float | None, limit: float | None, hysteresis: float) -> bool:
        """Return whether a value has reached its limit.

        After that, return true until the value has fallen below the limit by `hysteresis`.
        """
        if value is None or limit is None:
            self._over.discard(name)
        elif value >= limit:
            self._over.add(name)
        elif value < limit - hysteresis:
            self._over.discard(name)
        return name in self._over

    def _is_under(self, name: str, value: float | None, limit: float | None, hysteresis: float) -> bool:
        """Return whether a value is below its limit.

        After that, return true until the value has risen above the limit by `hysteresis`.
        """
        if value is None or limit is None:
            return self._is_over(name, None, None, hysteresis)
        return self._is_over(name, -value, math.nextafter(-limit, math.inf), hysteresis)


def _within(value: float | None, least: float, most: float) -> float | None:
    """Return the value if it lies within the bounds, else `None`."""
    return value if value is not None and least <= value <= most else None


def _is_quiet(minute: int | None, quiet: tuple[int, int] | None) -> bool:
    """Return whether a minute is in the quiet hours, which may span midnight."""
    if minute is None or quiet is None:
        return False
    begin, end = quiet
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _read_hours(text: str) -> tuple[int, int]:
    """Parse quiet hours to minutes of the day; raises `ValueError`."""
    found = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", text)
    if found is None:
        raise ValueError(f"quiet_hours = {text!r} is invalid; write it like '22:00-07:00'")
    from_hour, from_minute, to_hour, to_minute = map(int, found.groups())
    begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
    if begin == end:
        raise ValueError(f"quiet_hours = {text!r} has equal start and end; remove it, or change one of them")
    return begin, end
