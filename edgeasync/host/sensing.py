"""Read a device's sensors for its throttle."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edgeasync.core.device.throttle import ThrottleReadings
from edgeasync.host.readings import Power, Readings, Zone
from edgeasync.training.free_memory import free_bytes

CONSTANT_ZONES = ("PMIC",)
"""Name prefixes of thermal zones that do not measure a temperature.

The power management chip of a Jetson always reports 100 °C.
"""

NOW = " now"
"""Suffix of the throttling reasons that apply now. The others applied at some time since boot."""

CLOCK_YEAR_MIN = 2025
"""Minimum year for a valid clock.

A board without a hardware clock starts in an earlier year, so its time of day is invalid.
"""


SENSE_EVERY_S = 1.0

Sense = Callable[[], ThrottleReadings]
"""Reads the sensors. It is called in a separate thread, because some sensors are slow."""


class SensorWatch:
    """Reads the sensors every second from `begin` to `cancel`. Call both on the event loop."""

    def __init__(self, sense: Sense) -> None:
        self._sense = sense
        self._task: asyncio.Task[None] | None = None

    def begin(self, then: Callable[[ThrottleReadings], None], fail: Callable[[BaseException], None]) -> None:
        """Start reading, and call `then` with each reading. An error ends the watch and calls `fail`."""
        self._task = asyncio.get_running_loop().create_task(self._run(then, fail))

    def cancel(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, then: Callable[[ThrottleReadings], None], fail: Callable[[BaseException], None]) -> None:
        try:
            while True:
                then(await asyncio.to_thread(self._sense))
                await asyncio.sleep(SENSE_EVERY_S)
        except Exception as error:  # noqa: BLE001 - would be lost with the task
            fail(error)


def make_sense(root: Path = Path("/"), localtime: Callable[[], time.struct_time] = time.localtime) -> Sense:
    """Return a function that reads the sensors below a root folder."""
    readings = Readings(root)

    def sense() -> ThrottleReadings:
        pressure = readings.pressure("memory")
        power = readings.power()
        return ThrottleReadings(
            temperature_c=_hottest(readings.zones()),
            throttled=_held(readings.throttled()),
            on_mains=_on_mains(power),
            battery=None if power is None else power.battery,
            memory_free_bytes=free_bytes(root) or None,
            memory_pressure=None if pressure is None else pressure.full,
            metered=readings.metered(),
            minute=_minute(localtime()),
        )

    return sense


def _hottest(zones: Sequence[Zone]) -> float | None:
    found = [zone.celsius for zone in zones if not zone.name.startswith(CONSTANT_ZONES)]
    return max(found, default=None)


def _held(throttled: Sequence[str] | None) -> str:
    return next((reason.removesuffix(NOW) for reason in throttled or () if reason.endswith(NOW)), "")


def _on_mains(power: Power | None) -> bool | None:
    """Return whether external power is connected, or `None` for a machine without a battery."""
    if power is None or power.battery is None:
        return None
    return not power.discharging if power.mains is None else power.mains


def _minute(local: time.struct_time) -> int | None:
    return None if local.tm_year < CLOCK_YEAR_MIN else 60 * local.tm_hour + local.tm_min
