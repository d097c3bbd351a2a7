"""A simulated link: bytes leave one after the other at a rate, and arrive after a delay, in order."""

import math
from collections.abc import Callable

import msgspec

from edgeasync.simulation.clock import VirtualClock


class LinkProfile(msgspec.Struct, frozen=True):
    """Rates in bytes a second, delay one way in seconds."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    delay_s: float = 0.0


class Direction:
    """One direction of a link."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float, delay_s: float) -> None:
        self.bytes_sent = 0
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._free_at_s = 0.0

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when the last byte has arrived."""
        now_s = self._clock.now_s
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
        self.bytes_sent += size_bytes
        self._clock.after(self._free_at_s - now_s + self._delay_s, deliver)
