"""What the hub knows of a device's link: the bytes that went over it, its round trip and its bandwidth.

All of it is learnt in passing: nothing is sent to measure anything.
"""

from collections import deque

from edgeasync.policies.history import RECENT, median
from edgeasync.protocol.transfers import PIECE_BYTES_MIN, CreditWindow

MEASURED_BYTES_MIN = 1 << 16
"""A cycle that moves less tells of delays, not of bandwidth."""

BANDWIDTH_MAX_BYTES_PER_S = 1e12
"""What comes out higher was measured over no time at all."""


class LinkEstimate:
    """The link of one device, through all its connections. Sizes are of whole frames, headers included.

    `bytes_up` go from the device to the hub. `round_trip_s` is the median of the last five pings, as the device
    says. `bandwidth_bytes_per_s` is the larger of two, 0 before either: the median of the last five full windows
    of transfers to the device; and the best of the last five cycles that moved more than a little, in each of
    which other things took time, too. `window` is that of transfers to it.
    """

    __slots__ = ("_begun_bytes", "_cycles", "_round_trips_s", "_window", "_windows", "bytes_down", "bytes_up")

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self._begun_bytes = 0
        self._round_trips_s: deque[float] = deque(maxlen=RECENT)
        self._windows: deque[float] = deque(maxlen=RECENT)
        self._cycles: deque[float] = deque(maxlen=RECENT)
        self._window: CreditWindow | None = None

    @property
    def round_trip_s(self) -> float:
        """The usual round trip of a ping, in seconds."""
        return median(self._round_trips_s) if self._round_trips_s else 0.0

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What the link moves, in bytes a second."""
        return max(max(self._cycles, default=0.0), median(self._windows) if self._windows else 0.0)

    def window(self, piece_bytes: int, *, narrow: bool) -> CreditWindow:
        """Return the window of transfers to the device; a `narrow` one begins with a single piece."""
        if self._window is None or self._window.piece_bytes != piece_bytes:
            self._window = CreditWindow(piece_bytes, PIECE_BYTES_MIN) if narrow else CreditWindow(piece_bytes)
            if self._round_trips_s:
                self._window.observe_round_trip(min(self._round_trips_s), at_rest=False)
        return self._window

    def observe_ping(self, round_trip_s: float) -> None:
        """Take in how long a ping took, as the device says; 0 is not known."""
        if round_trip_s > 0.0:
            self._round_trips_s.append(round_trip_s)
            if self._window is not None:
                self._window.observe_round_trip(round_trip_s, at_rest=False)

    def observe_window(self, window: CreditWindow) -> None:
        """Take in what a full window has moved, if one has since this was last called."""
        if window.bytes_per_s > 0.0:
            self._windows.append(min(window.bytes_per_s, BANDWIDTH_MAX_BYTES_PER_S))
            window.bytes_per_s = 0.0

    def begin_cycle(self) -> None:
        """Remember what had gone over the link when a cycle began."""
        self._begun_bytes = self.bytes_up + self.bytes_down

    def end_cycle(self, communication_s: float) -> None:
        """Take in how long the device talked in the cycle that ends, both ways together."""
        moved = self.bytes_up + self.bytes_down - self._begun_bytes
        if moved >= MEASURED_BYTES_MIN and (moving_s := communication_s - self.round_trip_s) > 0.0:
            self._cycles.append(min(moved / moving_s, BANDWIDTH_MAX_BYTES_PER_S))
            if self._windows and len(self._cycles) == RECENT:
                self._windows.popleft()  # the link may have changed since

    def describe(self) -> dict[str, int | float]:
        """Return what the status says of the link (docs/wire.md)."""
        return {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "round_trip_s": round(self.round_trip_s, 6),
            "bandwidth_bytes_per_s": round(self.bandwidth_bytes_per_s),
        }
