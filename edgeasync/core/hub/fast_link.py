"""Determines which devices have links so fast that encoding costs more than it saves.

Unlike the other measurements of a link, the result is durable and depends only on logged events.
It decides which versions the hub publishes, and a replay must publish the same ones.
"""

import msgspec

from edgeasync.core.hub.link import MEASURED_BYTES_MIN

FAST_BYTES_PER_S = 170e6
"""Bandwidth (about 1.4 Gbit/s) from which sending a byte costs less than saving it by encoding.

Encoding and decoding an update in `int8` costs hub and device together about 2 ms for each megabyte
that it saves. Measured bandwidths include the hub's work, so a link of 1 Gbit/s stays below this.
"""

SAME_HOST_BYTES_PER_S_MIN = 10e6
"""Bandwidth below which a connection from the hub's own machine is taken for a tunnel."""

FASTER_CYCLES = 2
SLOWER_CYCLES = 32
"""Number of consecutive cycles that must disagree before the result changes. It is large for a
change to slow, because a busy machine slows down most cycles.
"""


class FastLink(msgspec.Struct, array_like=True):
    """Whether a device's link is fast. Durable.

    `cycles` counts the latest consecutive cycles that disagree with `is_fast`. `begun_bytes` is the
    device's traffic at the start of the current cycle.
    """

    same_host: bool = False
    is_fast: bool = False
    cycles: int = 0
    begun_bytes: int = 0

    def greet(self, *, same_host: bool) -> None:
        """Start with a new connection. A device on the hub's own machine starts with a fast link."""
        if same_host != self.same_host:
            self.same_host = self.is_fast = same_host
            self.cycles = 0

    def observe(self, traffic_bytes: int, communication_s: float) -> None:
        """Record a cycle that communicated for `communication_s` seconds."""
        moved = traffic_bytes - self.begun_bytes
        if moved < MEASURED_BYTES_MIN or communication_s <= 0:
            return
        least = SAME_HOST_BYTES_PER_S_MIN if self.same_host else FAST_BYTES_PER_S
        fast = moved >= least * communication_s
        self.cycles = 0 if fast == self.is_fast else self.cycles + 1
        if self.cycles >= (FASTER_CYCLES if fast else SLOWER_CYCLES):
            self.is_fast, self.cycles = fast, 0
