"""How fast a device may train: by its temperature, power, memory and the time of day. Part of `DeviceCore`.

A governor without I/O: readings and time in, a pace out. A missing sensor holds nothing up: a board without a
battery is on mains, and one without a sensor is never too hot.
"""

import math
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.config import ByteCount, Section

HYSTERESIS_C = 5.0
"""So far the temperature must fall below a limit before the limit is over."""

BATTERY_HYSTERESIS = 0.05
"""So far the charge must rise over its limit."""

MEMORY_HYSTERESIS = 1.25
"""This many times its limit must be free."""

PRESSURE_MAX = 0.1
"""Memory is short if all programs waited for it for this share of the last ten seconds; over at half of that."""

SLOW_SHARE = 0.5
"""The share of the time in which a warm or throttled device trains."""

HOLD_S = 5.0
"""A slower pace lasts at least this long: a sensor that jumps must not start and stop the device all the time."""

REASON_LENGTH_MAX = 32
"""What a ping has place for."""

CELSIUS = (-60.0, 150.0)
"""What a sensor can mean: one that is out of order tells something else."""


class ThrottleReadings(msgspec.Struct, frozen=True, gc=False):
    """What the device's sensors tell; `None` where there is no sensor, or none that can be read.

    `throttled` is why the board has slowed itself down. `battery`, `memory_pressure` are shares of 1. `minute` is
    that of the local day, from 0 to 1439.
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
    """`[throttle]`: when a device pauses, and how fast it trains; `None` is no limit."""

    temperature_c_max: Annotated[float, Meta(ge=30, le=150)] = 80.0
    """Pause at this temperature of the hottest sensor; 150: never."""
    temperature_c_slow: Annotated[float, Meta(ge=30, le=150)] | None = None
    """Train in half of the time from this temperature on. By default 5 C below `temperature_c_max`."""
    only_on_mains: bool = False
    """Pause on battery."""
    only_unmetered: bool = False
    """Pause while the way to other networks is a mobile modem."""
    battery_min: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Pause while the battery has less charge."""
    memory_free_bytes_min: ByteCount | None = None
    """Pause while less memory is free."""
    quiet_hours: str | None = None
    """Pause each day from the first time to the second, such as `22:00-07:00`."""
    cpu_share: Annotated[float, Meta(ge=0.01, le=1)] = 1.0
    """Share of the time that local steps may take."""

    @property
    def slow_c(self) -> float:
        """The temperature from which a device trains at half its pace."""
        slow_c = self.temperature_c_slow
        return self.temperature_c_max - HYSTERESIS_C if slow_c is None else slow_c

    @property
    def quiet(self) -> tuple[int, int] | None:
        """The minutes of the day from which and until a device pauses."""
        return None if self.quiet_hours is None else _read_hours(self.quiet_hours)

    def __post_init__(self) -> None:
        if self.temperature_c_slow is not None and self.temperature_c_slow > self.temperature_c_max:
            raise ValueError("temperature_c_slow is over temperature_c_max: a device slows down before it pauses")
        if self.quiet_hours is not None:
            _read_hours(self.quiet_hours)


class Pace(msgspec.Struct, frozen=True, gc=False):
    """The share of the time in which the device trains: 1 at full pace, 0 while it pauses. And why it is not 1."""

    share: float = 1.0
    reason: str = ""


class Throttle:
    """Decides the pace. The same readings at the same times give the same paces. `None` is no limit at all."""

    def __init__(self, limits: ThrottleSection | None) -> None:
        self._limits = limits
        self._quiet = None if limits is None else limits.quiet
        self.pace = Pace() if limits is None else Pace(limits.cpu_share)
        self.temperature_c: float | None = None
        self._over: set[str] = set()
        """The limits that are exceeded, until they are kept by more than their hysteresis."""
        self._slowed_s = -math.inf

    def observe(self, readings: ThrottleReadings, now_s: float) -> bool:
        """Note what the sensors tell; return whether the pace has changed."""
        self.temperature_c = _within(readings.temperature_c, *CELSIUS)
        before, pace = self.pace, self._pace_by(readings)
        if pace.share < before.share:
            self._slowed_s = now_s
        if pace.share <= before.share or now_s >= self._slowed_s + HOLD_S:
            self.pace = pace
        # From 81 to 82 C is no other pace; the next heartbeat tells it all the same.
        return self.pace.share != before.share

    def _pace_by(self, readings: ThrottleReadings) -> Pace:
        if self._limits is None:
            return Pace()
        if paused := self._pause(readings, self._limits):
            return Pace(0.0, paused)
        slowed = self._slow(readings, self._limits)
        return Pace(self._limits.cpu_share * (SLOW_SHARE if slowed else 1.0), slowed)

    def _pause(self, readings: ThrottleReadings, limits: ThrottleSection) -> str:
        """Return why the device must not train, or nothing. Each limit notes whether it is exceeded."""
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
        """Return why the device should train at half its pace, or nothing."""
        hot_c = self.temperature_c
        if self._is_over("warm", hot_c, limits.slow_c, HYSTERESIS_C):
            return f"{hot_c:.0f} C"
        return readings.throttled[:REASON_LENGTH_MAX]

    def _is_over(self, name: str, value: float | None, limit: float | None, hysteresis: float) -> bool:
        """Return whether a limit is reached; once it was, until the value is below by more than `hysteresis`."""
        if value is None or limit is None:
            self._over.discard(name)
        elif value >= limit:
            self._over.add(name)
        elif value < limit - hysteresis:
            self._over.discard(name)
        return name in self._over

    def _is_under(self, name: str, value: float | None, limit: float | None, hysteresis: float) -> bool:
        """Return whether a value is too small; once it was, until it is over by more than `hysteresis`."""
        if value is None or limit is None:
            return self._is_over(name, None, None, hysteresis)
        return self._is_over(name, -value, math.nextafter(-limit, math.inf), hysteresis)


def _within(value: float | None, least: float, most: float) -> float | None:
    """Return a value that a sensor can mean; a NaN is none."""
    return value if value is not None and least <= value <= most else None


def _is_quiet(minute: int | None, quiet: tuple[int, int] | None) -> bool:
    """Return whether a minute of the day is one of the quiet ones, which may begin in the evening."""
    if minute is None or quiet is None:
        return False
    begin, end = quiet
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _read_hours(text: str) -> tuple[int, int]:
    """Return the minutes of the day from which and until; raises `ValueError`."""
    found = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", text)
    if found is None:
        raise ValueError(f"quiet_hours {text!r} is not like '22:00-07:00'")
    from_hour, from_minute, to_hour, to_minute = map(int, found.groups())
    begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
    if begin == end:
        raise ValueError(f"quiet_hours {text!r} begin and end at the same minute: leave them out, or change one")
    return begin, end
