"""Store a device's daily byte count on disk, so that a restart does not reset the daily quota."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.durable.files import replace_file
from edgeasync.durable.json_file import read_json
from edgeasync.errors import StorageError
from edgeasync.protocol.messages import DAY_S, Count

QUOTA_FILE = "quota.json"
QUOTA_FORMAT = 1


class _Format(msgspec.Struct):
    format: Annotated[int, Meta(ge=1)]


class _Quota(_Format):
    used_bytes: Count
    remaining_s: Annotated[float, Meta(ge=0.0, le=DAY_S)]


class QuotaFile:
    """A file in a device's state folder that contains the byte count.

    It is shorter than 100 bytes, and the whole file is replaced on every write.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / QUOTA_FILE

    def read(self) -> QuotaRecord:
        """Return the stored count, or zero if the file is missing; raises `StorageError`."""
        remedy = "delete it to begin a new day"
        try:
            written = read_json(self.path, _Format, remedy=remedy).format
            if written != QUOTA_FORMAT:
                raise StorageError(
                    f"{self.path}: has format {written}, but this edgeasync reads format {QUOTA_FORMAT}; "
                    f"use the version of edgeasync that wrote it, or {remedy}"
                )
            day = read_json(self.path, _Quota, remedy=remedy)
        except FileNotFoundError:
            return QuotaRecord()
        return QuotaRecord(day.used_bytes, day.remaining_s)

    def write(self, record: QuotaRecord) -> None:
        """Replace the stored count; raises `StorageError`."""
        day = _Quota(QUOTA_FORMAT, record.used_bytes, record.remaining_s)
        replace_file(self.path, msgspec.json.encode(day))
