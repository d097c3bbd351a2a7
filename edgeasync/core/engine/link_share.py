"""Limits a device's traffic to a share of the link, whose bandwidth it measures.

The first model is not paced; its pieces measure the rate. After that, the first pieces of every
update leave without a pause, as a train. The intervals between its credits measure the uplink's
rate. Traffic between two trains waits long enough to keep the share.
"""

from collections import deque

from edgeasync.measurements.medians import median
from edgeasync.protocol.pacing import Pacer
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

TRAIN_BYTES = 4 * PIECE_BYTES_MIN
"""A longer train would measure more precisely, but exceed the share by more."""

MEASURED_BYTES = TRAIN_BYTES - PIECE_BYTES_MIN
"""The rate is measured from the end of the first piece to here. The first piece finds empty
buffers, and the last one may stay in a buffer, because nothing follows it.
"""

TRAINS = 15
"""The median of this number of latest trains is the link's rate."""

SHARE_BYTES_PER_S_MIN = 1 << 14
"""Minimum rate, so that a piece never takes longer than a lease."""


class LinkShare:
    """Paces traffic to a share of the link, and to a cap if there is one."""

    def __init__(self, link_share: float, bandwidth_bytes_per_s_max: float | None) -> None:
        self._share, self._cap = link_share, bandwidth_bytes_per_s_max
        self._rates: deque[float] = deque(maxlen=TRAINS)
        self._first: tuple[int, float] | None = None
        self._end = 0
        self._measured_up = False

    @property
    def bytes_per_s(self) -> float | None:
        """The link's rate; `None` if not measured yet."""
        return median(self._rates) if self._rates else None

    def begin_train(self, end_byte: int) -> None:
        """Start a train that is measured up to this byte; 0 for none."""
        self._first, self._end = None, end_byte

    def note_passed(self, total_bytes: int, now_s: float, *, up: bool) -> bool:
        """Record a train's progress; return whether it updated the rate."""
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
            return False  # all credits arrived at once, so the rate is unknown
        if up and not self._measured_up:
            self._measured_up = True
            self._rates.clear()
        self._rates.append((total_bytes - first_bytes) / (now_s - first_s))
        return True

    def pace(self, pacer: Pacer | None, now_s: float) -> Pacer:
        """Return the pacer for the share of the rate; an existing one keeps its debt."""
        rate = self.bytes_per_s
        assert rate is not None
        allowed = max(SHARE_BYTES_PER_S_MIN, self._share * rate)
        if self._cap is not None:
            allowed = min(allowed, self._cap)
        if pacer is None:
            return Pacer(allowed)
        pacer.change(allowed, now_s)
        return pacer
