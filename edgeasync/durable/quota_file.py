"""A device's count of the day's bytes on disk, so that a restart does not begin another day."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.core.device.data_quota import DayRecord
from edgeasync.durable.files import replace_file
from edgeasync.durable.json_file import read_json
from edgeasync.errors import StorageError
from edgeasync.protocol.messages import DAY_S, Count

DAY_FILE = "day.json"
DAY_FORMAT = 1


class _Format(msgspec.Struct):
    format: Annotated[int, Meta(ge=1)]


class _Day(_Format):
    used_bytes: Count
    remaining_s: Annotated[float, Meta(ge=0.0, le=DAY_S)]


class DayFile:
    """The count in a device's state folder, under 100 bytes, replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DAY_FILE

    def read(self) -> DayRecord:
        """Return what was kept, or a new day; raises `StorageError`, and changes nothing, if it cannot."""
        remedy = "delete it to begin a new day"
        try:
            written = read_json(self.path, _Format, remedy=remedy).format
            if written != DAY_FORMAT:
                raise StorageError(
                    f"{self.path}: has format {written}, and this version knows {DAY_FORMAT}; "
                    f"install the newer edgeasync again, or {remedy}"
                )
            day = read_json(self.path, _Day, remedy=remedy)
        except FileNotFoundError:
            return DayRecord()
        return DayRecord(day.used_bytes, day.remaining_s)

    def write(self, record: DayRecord) -> None:
        """Keep this instead; raises `StorageError`."""
        day = _Day(DAY_FORMAT, record.used_bytes, record.remaining_s)
        replace_file(self.path, msgspec.json.encode(day))
