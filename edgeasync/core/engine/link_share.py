"""Limits a device's traffic to a share of the link, whose bandwidth it measures.

The device does not pace the first model, and measures the rate with its pieces. After that, the
first pieces of every update are sent back to back, as a train. The intervals between the credits of
a train measure the rate of the uplink. The device waits long enough between two trains for its
traffic to stay within the share.
"""

from collections import deque

from edgeasync.measurements.medians import median
from edgeasync.protocol.pacing import Pacer
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

TRAIN_BYTES = 4 * PIECE_BYTES_MIN
"""Length of a train. A longer train would give a more precise measurement, but exceed the share by
more.
"""

MEASURED_BYTES = TRAIN_BYTES - PIECE_BYTES_MIN
"""The rate is measured from the end of the first piece to this byte. The first piece is not
representative, because the buffers are empty when it is sent. The last piece may remain in a
buffer, because no other piece follows it.
"""

TRAINS = 15
"""The rate of the link is the median over this number of latest trains."""

SHARE_BYTES_PER_S_MIN = 1 << 14
"""Minimum rate, so that a piece never takes longer than a lease."""


class LinkShare:
    """Paces traffic to a share of the link and, if there is a cap, to the cap."""

    def __init__(self, link_share: float, bandwidth_bytes_per_s_max: float | None) -> None:
        self._share, self._cap = link_share, bandwidth_bytes_per_s_max
        self._rates: deque[float] = deque(maxlen=TRAINS)
        self._first: tuple[int, float] | None = None
        self._end = 0
        self._measured_up = False

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of the link; `None` if not measured yet."""
        return median(self._rates) if self._rates else None

    def begin_train(self, end_byte: int) -> None:
        """Start a train of pieces that is measured up to this byte; with 0, measure no train."""
        self._first, self._end = None, end_byte

    def note_passed(self, total_bytes: int, now_s: float, *, up: bool) -> bool:
        """Record the progress of a train of pieces; return whether this updated the rate."""
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
        """Return the pacer for the share of the rate.

        If there is a pacer already, only its rate changes: the bytes that were already sent still
        delay later messages.
        """
        rate = self.bytes_per_s
        assert rate is not None
        allowed = max(SHARE_BYTES_PER_S_MIN, self._share * rate)
        if self._cap is not None:
            allowed = min(allowed, self._cap)
        if pacer is None:
            return Pacer(allowed)
        pacer.change(allowed, now_s)
        return pacer
