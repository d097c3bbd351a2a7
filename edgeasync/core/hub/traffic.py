"""Durable counts of bytes: total and daily. Part of `HubCore`."""

import math

import msgspec

from edgeasync.measurements.medians import RECENT, add_recent
from edgeasync.protocol.messages import DAY_S


class OwnDay(msgspec.Struct, array_like=True):
    """The current day of a device's own quota: used bytes, and the day's end by the hub's clock."""

    used_bytes: int
    ends_s: float

    def count(self, nbytes: int, now_s: float) -> None:
        """Count bytes."""
        if now_s >= self.ends_s:
            self.used_bytes, self.ends_s = 0, now_s + self.remaining_s(now_s)
        self.used_bytes += nbytes

    def left_bytes(self, most: int, now_s: float) -> int:
        """Return how many of the `most` bytes are left for the day."""
        return max(0, most - self.used_bytes) if now_s < self.ends_s else most

    def remaining_s(self, now_s: float) -> float:
        """Return the number of seconds until the day ends."""
        days = 0 if now_s < self.ends_s else math.floor((now_s - self.ends_s) / DAY_S) + 1
        return self.ends_s + DAY_S * days - now_s


class Traffic(msgspec.Struct, array_like=True):
    """Bytes in both directions: in total, and on the day with the number `day`.

    `exchanges` lists the sizes of the latest exchanges.
    """

    up_bytes: int = 0
    down_bytes: int = 0
    day: int = 0
    used_bytes: int = 0
    exchanges: list[float] = []

    @property
    def total_bytes(self) -> int:
        """The total number of bytes in both directions together."""
        return self.up_bytes + self.down_bytes

    def count(self, moved: tuple[int, int], now_s: float) -> None:
        """Count bytes sent and received."""
        up, down = moved
        day = int(now_s // DAY_S)
        if self.day != day:
            self.day, self.used_bytes = day, 0
        self.used_bytes += up + down
        self.up_bytes += up
        self.down_bytes += down

    def day_bytes(self, now_s: float) -> int:
        """Return the number of bytes counted on the current day."""
        return self.used_bytes if self.day == now_s // DAY_S else 0

    def left_bytes(self, most: int, now_s: float) -> int:
        """Return how many of the `most` bytes are left for the day."""
        return max(0, int(most) - self.day_bytes(now_s))

    def note_exchange(self, nbytes: float) -> None:
        """Record the size of an exchange."""
        add_recent(self.exchanges, max(1.0, nbytes), RECENT)
