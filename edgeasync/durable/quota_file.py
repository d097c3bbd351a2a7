"""A device's count of the day's bytes on disk, so that a restart does not begin another day."""

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
    """The count in a device's state folder, under 100 bytes, replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / QUOTA_FILE

    def read(self) -> QuotaRecord:
        """Return what was kept, or a new day; raises `StorageError`, and changes nothing, if it cannot."""
        remedy = "delete it to begin a new day"
        try:
            written = read_json(self.path, _Format, remedy=remedy).format
            if written != QUOTA_FORMAT:
                raise StorageError(
                    f"{self.path}: has format {written}, and this version knows {QUOTA_FORMAT}; "
                    f"install the newer edgeasync again, or {remedy}"
                )
            day = read_json(self.path, _Quota, remedy=remedy)
        except FileNotFoundError:
            return QuotaRecord()
        return QuotaRecord(day.used_bytes, day.remaining_s)

    def write(self, record: QuotaRecord) -> None:
        """Keep this instead; raises `StorageError`."""
        day = _Quota(QUOTA_FORMAT, record.used_bytes, record.remaining_s)
        replace_file(self.path, msgspec.json.encode(day))
