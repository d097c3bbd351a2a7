"""Measurements of a device's link: bytes transferred, round trip and bandwidth.

They are based on ordinary traffic: no message is sent only to measure the link.
"""

from edgeasync.measurements.medians import RECENT, add_recent, median
from edgeasync.protocol.messages import Ping
from edgeasync.protocol.transfers import PIECE_BYTES_MIN, CreditWindow

MEASURED_BYTES_MIN = 1 << 16
"""A cycle measures the bandwidth only if it transfers at least this number of bytes. The duration
of a smaller cycle depends mostly on the latency.
"""

CYCLES = 32
"""Number of latest cycles. The fastest one determines the bandwidth, because a busy machine slows
down most cycles.
"""

SURE_CYCLES_MIN = 3
SURE_CYCLES = 16
SURE_S = 1.0
"""A low bandwidth is considered reliable after `SURE_CYCLES` cycles, or earlier if the cycles were
long.

After `SURE_CYCLES_MIN` cycles, it is reliable if the number of cycles times the duration of the
shortest one is at least `SURE_S`.
"""

BANDWIDTH_MAX_BYTES_PER_S = 1e12
"""Upper limit for measured bandwidths, which are too high if the measured time is close to 0."""


class LinkEstimate:
    """The link of one device, measured over all its connections.

    Sizes are those of whole frames, including headers.

    - `bytes_up` counts the bytes sent from the device to the hub, and `bytes_down` the bytes sent
      to the device.
    - `round_trip_s` is the median round trip of the last five pings, as measured by the device.
    - `bandwidth_bytes_per_s` is the larger of two measurements. The first is the median bandwidth
      of the last five full windows of transfers to the device. The second is the highest bandwidth
      of the last `CYCLES` cycles that transferred at least `MEASURED_BYTES_MIN`. Cycles include
      other work, so the bandwidths measured by them are too low.
    - `address` is the IP address of the last connection, or empty.
    - `clock_offset_s` is the device's wall clock minus that of the hub, or `None` if unknown.
    - `is_sure` is true once enough cycles were measured to rule out a faster link.
    - `window` returns the credit window of transfers to the device.
    """

    __slots__ = (
        "_begun_bytes",
        "_counted",
        "_cycles",
        "_round_trips_s",
        "_window",
        "_windows",
        "address",
        "bytes_down",
        "bytes_up",
        "clock_offset_s",
    )

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.address = ""
        self.clock_offset_s: float | None = None
        self._counted = (0, 0)
        self._begun_bytes = 0
        self._round_trips_s: list[float] = []
        self._windows: list[float] = []
        self._cycles: list[tuple[float, float]] = []
        self._window: CreditWindow | None = None

    @property
    def round_trip_s(self) -> float:
        """The median round trip of the latest pings in seconds; 0 if not measured yet."""
        return median(self._round_trips_s) if self._round_trips_s else 0.0

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The bandwidth in bytes per second; 0 if not measured yet."""
        fastest = max(self._cycles, default=(0.0, 0.0))[0]
        return max(fastest, median(self._windows) if self._windows else 0.0)

    @property
    def is_sure(self) -> bool:
        """Whether a low bandwidth is due to the link, not to a busy machine."""
        count = len(self._cycles)
        if SURE_CYCLES_MIN <= count < SURE_CYCLES:
            return count * min(moving_s for _, moving_s in self._cycles) >= SURE_S
        return count >= SURE_CYCLES

    @property
    def uncounted(self) -> tuple[int, int]:
        """The bytes sent by and to the device since the last call of `take_uncounted`."""
        return self.bytes_up - self._counted[0], self.bytes_down - self._counted[1]

    def take_uncounted(self) -> tuple[int, int]:
        """Return the bytes sent by and to the device since the last call, for the core to count."""
        uncounted, self._counted = self.uncounted, (self.bytes_up, self.bytes_down)
        return uncounted

    def window(self, piece_bytes: int, *, narrow: bool) -> CreditWindow:
        """Return the credit window of transfers to the device.

        If `narrow` is set, a new window starts with one piece.
        """
        if self._window is None or self._window.piece_bytes != piece_bytes:
            self._window = CreditWindow(piece_bytes, PIECE_BYTES_MIN) if narrow else CreditWindow(piece_bytes)
            if self._round_trips_s:
                self._window.observe_round_trip(min(self._round_trips_s), at_rest=False)
        return self._window

    def observe_ping(self, round_trip_s: float) -> None:
        """Record the round trip of a ping that the device measured; 0 if unknown."""
        if round_trip_s > 0.0:
            add_recent(self._round_trips_s, round_trip_s, RECENT)
            if self._window is not None:
                self._window.observe_round_trip(round_trip_s, at_rest=False)

    def observe_clock(self, ping: Ping, hub_s: float) -> None:
        """Record the device's wall clock; `hub_s` is the hub's when the ping arrived.

        A ping may wait behind an upload, so the offset may be too low by that time.
        """
        if ping.clock_s is not None:
            self.clock_offset_s = round(ping.clock_s + ping.round_trip_s / 2.0 - hub_s, 3)

    def observe_window(self, window: CreditWindow) -> None:
        """Record the bandwidth of a full window if one was transferred since the last call."""
        if window.bytes_per_s > 0.0:
            add_recent(self._windows, min(window.bytes_per_s, BANDWIDTH_MAX_BYTES_PER_S), RECENT)
            window.bytes_per_s = 0.0

    def begin_cycle(self) -> None:
        """Start a cycle: record the number of bytes transferred so far."""
        self._begun_bytes = self.bytes_up + self.bytes_down

    def end_cycle(self, communication_s: float) -> None:
        """End a cycle that communicated for `communication_s` seconds, and record its bandwidth."""
        moved = self.bytes_up + self.bytes_down - self._begun_bytes
        if moved < MEASURED_BYTES_MIN or communication_s <= self.round_trip_s:
            return
        # Pings may have waited behind other messages, so that their round trip is too long.
        # Subtract at most half of the time.
        moving_s = max(communication_s - self.round_trip_s, communication_s / 2)
        add_recent(self._cycles, (min(moved / moving_s, BANDWIDTH_MAX_BYTES_PER_S), moving_s), CYCLES)
        if self._windows and len(self._cycles) >= RECENT:
            del self._windows[0]  # the link may have changed since
