"""A share of the link for a device's traffic: how fast the link is, by pieces that left one right after the other.

Before anything is measured a device is not paced: the pieces of its first model show the rate. From then on the
first pieces of every update leave without a pause, as a train; how far its credits are apart shows the rate of the
way up. The traffic between two trains waits as long as it must, so that the share is kept all the same.
"""

from collections import deque

from edgeasync.measurements.medians import median
from edgeasync.protocol.pacing import Pacer
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

TRAIN_BYTES = 4 * PIECE_BYTES_MIN
"""A longer train would show the rate better, and exceed the share by more."""

MEASURED_BYTES = TRAIN_BYTES - PIECE_BYTES_MIN
"""The rate is that from the end of the first piece to here: the first one finds an idle link with empty buffers,
and nothing follows the last one that would push its end out of a buffer."""

TRAINS = 15
"""How many of the latest trains count: their median is the link's rate."""

SHARE_BYTES_PER_S_MIN = 1 << 14
"""However slow a link seems, a piece must not take longer than the hub waits for a sign of life."""


class LinkShare:
    """Paces traffic to a share of the link, and to no more than a cap if there is one."""

    def __init__(self, link_share: float, bandwidth_bytes_per_s_max: float | None) -> None:
        self._share, self._cap = link_share, bandwidth_bytes_per_s_max
        self._rates: deque[float] = deque(maxlen=TRAINS)
        self._first: tuple[int, float] | None = None
        self._end = 0
        self._measured_up = False

    @property
    def bytes_per_s(self) -> float | None:
        """The link's rate; `None` before it was measured."""
        return median(self._rates) if self._rates else None

    def begin_train(self, end_byte: int) -> None:
        """Note that a train leaves, which is measured up to this byte; 0: there is none."""
        self._first, self._end = None, end_byte

    def note_passed(self, total_bytes: int, now_s: float, *, up: bool) -> bool:
        """Note how much of a train has passed; return whether the rate is known better than before."""
        if not self._end or (self._measured_up and not up):
            return False
        if self._first is None:
            self._first = total_bytes, now_s
            return False
        if total_bytes < self._end:
            return False
        first_bytes, first_s = self._first
        self._first, self._end = None, 0
        if now_s <= first_s:
            return False  # all credits came at once, and show nothing
        if up and not self._measured_up:
            self._measured_up = True
            self._rates.clear()
        self._rates.append((total_bytes - first_bytes) / (now_s - first_s))
        return True

    def pace(self, pacer: Pacer | None, now_s: float) -> Pacer:
        """Return the pacer for the share of the rate; what one was to wait for, it waits for."""
        rate = self.bytes_per_s
        assert rate is not None
        allowed = max(SHARE_BYTES_PER_S_MIN, self._share * rate)
        if self._cap is not None:
            allowed = min(allowed, self._cap)
        if pacer is None:
            return Pacer(allowed)
        pacer.change(allowed, now_s)
        return pacer
