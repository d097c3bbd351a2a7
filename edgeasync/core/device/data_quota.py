"""A device's own daily quota, and its records on disk. Part of `DeviceCore`.

The device counts its own traffic, whatever its hub reports or sends. A day is a period of 24 hours
during which the agent runs. Time without the agent does not count, since a device may lack a clock
that measures it.
"""

import math

import msgspec

from edgeasync.protocol.messages import COUNT_MAX, DAY_S, HEADERS_BYTES, HEARTBEAT_BYTES
from edgeasync.protocol.transfers import PIECE_BYTES_MIN

SPARE_BYTES = PIECE_BYTES_MIN + HEADERS_BYTES
"""Bytes that no exchange may use, because a hub may send one piece of a model without a request."""

HEADERS_SHARE = 256
"""The headers of a payload's pieces take at most 1/256 of the payload's size. Each piece needs two
messages of 64 bytes.
"""

BYTES_PER_DAY_MIN = 2 * PIECE_BYTES_MIN
"""Minimum quota. A smaller one would not be enough for `SPARE_BYTES` and an exchange."""

RECORDS_A_DAY = 128
"""A record on disk exceeds the actual count by at most 1/128 of the quota.

So a day has at most 256 records.
"""

RECORD_EVERY_S = 3600.0
RECORD_EVERY_S_MIN = 60.0
"""Maximum and minimum time between two records while there is little traffic."""


class QuotaRecord(msgspec.Struct, frozen=True):
    """The durable state of the quota: the bytes used, and the remaining seconds of the day."""

    used_bytes: int = 0
    remaining_s: float = DAY_S


class DataQuota:
    """The device's daily quota. If `bytes_per_day_max` is not set, it counts nothing.

    After a crash, the day continues from the last record. Each record contains a higher count than
    the actual one, and the next record is due before the actual count reaches it. So no used bytes
    are forgotten in a crash. A record exceeds the actual count by at most the bytes used since the
    start, or by one piece if that is more. After a start, records are written at shorter intervals,
    so that days also end on a board that often loses its power.
    """

    def __init__(self, bytes_per_day_max: int | None = None) -> None:
        # A size from settings has a type of its own, which messages cannot encode.
        self.bytes_per_day_max = None if bytes_per_day_max is None else int(bytes_per_day_max)
        self._used_bytes = self._recorded_bytes = 0
        self._ends_s, self._remaining_s = math.inf, DAY_S
        self._began_s, self._began_bytes = 0.0, 0
        """The time at which the agent started, and the count at that time or at the start of the
        day.
        """
        self.record_at_s = math.inf if bytes_per_day_max is None else 0.0
        """The time at which a record is due to save the elapsed time, even without traffic."""

    @property
    def is_set(self) -> bool:
        """Whether there is a quota."""
        return self.bytes_per_day_max is not None

    def recall(self, record: QuotaRecord) -> None:
        """Continue the day that began before a restart; call before `begin`."""
        self._used_bytes, self._remaining_s = record.used_bytes, record.remaining_s

    def begin(self, now_s: float) -> None:
        """Start the clock of the day."""
        self._ends_s = now_s + self._remaining_s
        self._began_s, self._began_bytes = now_s, self._used_bytes

    def count(self, nbytes: int, now_s: float) -> None:
        """Count bytes that were sent or received."""
        if self.bytes_per_day_max is not None:
            self._turn(now_s)
            self._used_bytes += nbytes

    def left_bytes(self, now_s: float) -> int | None:
        """Return how many bytes are left for the day; `None` if there is no quota."""
        if self.bytes_per_day_max is None:
            return None
        self._turn(now_s)
        return max(0, self.bytes_per_day_max - self._used_bytes)

    def ends_s(self, now_s: float) -> float:
        """Return the time at which the day ends."""
        self._turn(now_s)
        return self._ends_s

    def bears(self, nbytes: int, now_s: float) -> bool:
        """Return whether enough bytes are left for the day to transfer payloads of this size.

        The calculation includes headers, and messages that the hub may send without a request.
        """
        left_bytes = self.left_bytes(now_s)
        return left_bytes is None or left_bytes >= needed_bytes(nbytes)

    def warning(self, heartbeat_s: float) -> str:
        """Return a warning if pings use more than half of the quota, or "".

        With such a quota, the hub might not plan any exchanges.
        """
        pings_bytes = round(DAY_S / heartbeat_s) * HEARTBEAT_BYTES
        if self.bytes_per_day_max is None or self.bytes_per_day_max >= 2 * pings_bytes:
            return ""
        return (
            f"pings alone take {pings_bytes} bytes a day, but the quota is {self.bytes_per_day_max} bytes, so "
            "there may be none left for training; raise [limits] bytes_per_day_max, or the hub's "
            "liveness.heartbeat_s"
        )

    def is_spent(self, now_s: float) -> bool:
        """Return whether so few bytes are left that the device must disconnect."""
        left_bytes = self.left_bytes(now_s)
        return left_bytes is not None and left_bytes < HEADERS_BYTES

    def record(self, now_s: float) -> QuotaRecord:
        """Return the record to save when the device stops."""
        self._turn(now_s)
        return self._record(self._used_bytes, now_s)

    def take_due_record(self, now_s: float) -> QuotaRecord | None:
        """Return the record to save now, if one is due.

        Its count is higher than the actual one. After a crash, the bytes between the two counts can
        no longer be used.
        """
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
        """Start a new day if the current one is over. Records of the old day become invalid."""
        if now_s >= self._ends_s:
            self._ends_s += DAY_S * (math.floor((now_s - self._ends_s) / DAY_S) + 1)
            self._remaining_s = DAY_S
            self._used_bytes = self._recorded_bytes = self._began_bytes = 0
            self.record_at_s = now_s


class ExchangeCost:
    """Estimates the size of the next exchange. Part of `WorkCycle`."""

    def __init__(self, data_quota: DataQuota) -> None:
        self.needs_bytes = 0
        """If the quota is too small for an exchange, the number of bytes that it requires,
        otherwise 0. The device disconnects if this is set.
        """
        self.model_bytes: int | None = None
        self.update_bytes: int | None = None
        """The payload sizes of the last whole model (`model_bytes`) and of the last update."""
        self._data_quota = data_quota

    def bears(self, payload_bytes: int, now_s: float) -> bool:
        """Return whether the daily quota allows these payloads.

        If it does not, record this, so that the device disconnects.
        """
        borne = self._data_quota.bears(payload_bytes, now_s)
        self.needs_bytes = 0 if borne else needed_bytes(payload_bytes)
        return borne

    def of_update(self, raw_bytes: int) -> int:
        """Estimate the size of the next update; `raw_bytes` is the size of the model in float32."""
        return self.update_bytes or raw_bytes

    def of_exchange(self, raw_bytes: int) -> int:
        """Estimate the size of an exchange, which consists of a model and an update."""
        return (self.model_bytes or raw_bytes) + self.of_update(raw_bytes)


def needed_bytes(payload_bytes: int) -> int:
    """Return how many bytes must be left for the day to transfer payloads of this size."""
    return payload_bytes + payload_bytes // HEADERS_SHARE + SPARE_BYTES
