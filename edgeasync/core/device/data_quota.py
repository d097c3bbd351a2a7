"""A device's own limit of a day's bytes: what is left, and what has to be kept. Part of `DeviceCore`.

The device counts for itself, whatever its hub says or sends. A day is 24 hours in which the agent runs: while it
does not, time stands still, since a device may have no clock that shows how long that was.
"""

import math

import msgspec

from edgeasync.protocol.messages import COUNT_MAX, DAY_S, HEADERS_BYTES, HEARTBEAT_BYTES
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

SPARE_BYTES = PIECE_BYTES_MIN + HEADERS_BYTES
"""What no exchange may touch: a hub may send a model of one piece that the device did not ask for."""

HEADERS_SHARE = 256
"""What the pieces of a payload take beside it: at most this part of it. Two messages of 64 bytes go with each."""

BYTES_PER_DAY_MIN = 2 * PIECE_BYTES_MIN
"""Under a lower limit no exchange fits beside `SPARE_BYTES`."""

RECORDS_A_DAY = 128
"""A record is ahead of the count by this part of the limit at most; twice as many last for a day."""

RECORD_EVERY_S = 3600.0
RECORD_EVERY_S_MIN = 60.0
"""The longest and the shortest time between two records, if few bytes move."""


class QuotaRecord(msgspec.Struct, frozen=True):
    """What outlives a restart: the bytes used, and how long the day lasts from then on."""

    used_bytes: int = 0
    remaining_s: float = DAY_S


class DataQuota:
    """The bytes of the device's day. Without `bytes_per_day_max` everything is allowed and nothing is counted.

    After a crash the day continues from the last record. A record says more bytes than were used, and another is
    due before there are more: what a crash forgets was never spent. It is ahead by a piece at most, or by what was
    used since the start, and records follow one another quickly at first: so the days of a board that only ever
    loses its power end, too.
    """

    def __init__(self, bytes_per_day_max: int | None = None) -> None:
        # A size from a settings file has a type of its own, which no message can hold.
        self.bytes_per_day_max = None if bytes_per_day_max is None else int(bytes_per_day_max)
        self._used_bytes = self._recorded_bytes = 0
        self._ends_s, self._remaining_s = math.inf, DAY_S
        self._began_s, self._began_bytes = 0.0, 0
        """When the agent began, and the count then or as the day began."""
        self.record_at_s = math.inf if bytes_per_day_max is None else 0.0
        """When a record is due for the time that has passed, though no bytes have."""

    def recall(self, record: QuotaRecord) -> None:
        """Continue the day of an earlier start; call this before `begin`."""
        self._used_bytes, self._remaining_s = record.used_bytes, record.remaining_s

    def begin(self, now_s: float) -> None:
        """Let the time of the day pass from now on."""
        self._ends_s = now_s + self._remaining_s
        self._began_s, self._began_bytes = now_s, self._used_bytes

    def count(self, nbytes: int, now_s: float) -> None:
        """Count bytes sent or received."""
        if self.bytes_per_day_max is not None:
            self._turn(now_s)
            self._used_bytes += nbytes

    def left_bytes(self, now_s: float) -> int | None:
        """Return how many bytes the day has left; `None` without a limit."""
        if self.bytes_per_day_max is None:
            return None
        self._turn(now_s)
        return max(0, self.bytes_per_day_max - self._used_bytes)

    def ends_s(self, now_s: float) -> float:
        """Return when the day ends."""
        self._turn(now_s)
        return self._ends_s

    def bears(self, nbytes: int, now_s: float) -> bool:
        """Whether the day bears payloads of these bytes, their headers, and what the hub may send unasked."""
        left_bytes = self.left_bytes(now_s)
        return left_bytes is None or left_bytes >= needed_bytes(nbytes)

    def warning(self, heartbeat_s: float) -> str:
        """Return what to tell if pings take more than half of the limit: the hub may then plan no exchange."""
        pings_bytes = round(DAY_S / heartbeat_s) * HEARTBEAT_BYTES
        if self.bytes_per_day_max is None or self.bytes_per_day_max >= 2 * pings_bytes:
            return ""
        return (
            f"pings alone take {pings_bytes} bytes a day, and the limit is {self.bytes_per_day_max}: perhaps "
            "nothing is left for training. Raise [limits] bytes_per_day_max, or liveness.heartbeat_s of the hub"
        )

    def is_spent(self, now_s: float) -> bool:
        """Whether so little is left that the device has to leave, whatever it is doing."""
        left_bytes = self.left_bytes(now_s)
        return left_bytes is not None and left_bytes < HEADERS_BYTES

    def record(self, now_s: float) -> QuotaRecord:
        """Return what to keep of a device that stops."""
        self._turn(now_s)
        return self._record(self._used_bytes, now_s)

    def take_due_record(self, now_s: float) -> QuotaRecord | None:
        """Return what to keep now, if that is due: bytes in advance, which a crash then costs."""
        if self.bytes_per_day_max is None:
            return None
        self._turn(now_s)
        since_bytes = self._used_bytes - self._began_bytes
        ahead_bytes = min(self.bytes_per_day_max // RECORDS_A_DAY, max(since_bytes, PIECE_BYTES_MIN))
        if self._used_bytes + ahead_bytes // 2 <= self._recorded_bytes and now_s < self.record_at_s:
            return None
        self._recorded_bytes = self._used_bytes + ahead_bytes
        self.record_at_s = now_s + min(RECORD_EVERY_S, max(now_s - self._began_s, RECORD_EVERY_S_MIN))
        return self._record(self._recorded_bytes, now_s)

    def _record(self, used_bytes: int, now_s: float) -> QuotaRecord:
        return QuotaRecord(min(used_bytes, COUNT_MAX), min(self.ends_s(now_s) - now_s, self._remaining_s))

    def _turn(self, now_s: float) -> None:
        """Begin another day if this one is over; a record of the old one is worth nothing."""
        if now_s >= self._ends_s:
            self._ends_s += DAY_S * (math.floor((now_s - self._ends_s) / DAY_S) + 1)
            self._remaining_s = DAY_S
            self._used_bytes = self._recorded_bytes = self._began_bytes = 0
            self.record_at_s = now_s


class ExchangeCost:
    """What the next exchange takes of a day's bytes, by the payloads of those before. Part of `WorkCycle`."""

    def __init__(self, data_quota: DataQuota) -> None:
        self.needs_bytes = 0
        """What the day's bytes do not bear, until the hub is left."""
        self.model_bytes: int | None = None
        self.update_bytes: int | None = None
        """The payloads of the last whole model and the last update."""
        self._data_quota = data_quota

    def bears(self, payload_bytes: int, now_s: float) -> bool:
        """Whether the day's bytes bear these payloads; if not, note that, and the hub will be left."""
        borne = self._data_quota.bears(payload_bytes, now_s)
        self.needs_bytes = 0 if borne else needed_bytes(payload_bytes)
        return borne

    def of_update(self, raw_bytes: int) -> int:
        """Return the bytes of the next update; `raw_bytes` is a model as float32, of which codecs make less."""
        return self.update_bytes or raw_bytes

    def of_exchange(self, raw_bytes: int) -> int:
        """Return the bytes of a model and its update."""
        return (self.model_bytes or raw_bytes) + self.of_update(raw_bytes)


def needed_bytes(payload_bytes: int) -> int:
    """Return what must be left of a day before payloads of these bytes may move."""
    return payload_bytes + payload_bytes // HEADERS_SHARE + SPARE_BYTES
