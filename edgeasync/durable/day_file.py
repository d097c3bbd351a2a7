"""A device's count of the day's bytes on disk, so that a restart does not begin another day."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.core.device.day import DayRecord
from edgeasync.durable.files import replace_file
from edgeasync.errors import StorageError
from edgeasync.protocol.messages import DAY_S, Count
from edgeasync.structs import ready

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
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return DayRecord()
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}; fix its rights") from error
        try:
            written = msgspec.json.decode(content, type=ready(_Format)).format
            if written != DAY_FORMAT:
                raise StorageError(
                    f"{self.path}: has format {written}, and this version knows {DAY_FORMAT}; "
                    "install the newer edgeasync again, or delete it to begin a new day"
                )
            day = msgspec.json.decode(content, type=ready(_Day))
        except msgspec.DecodeError as error:
            raise StorageError(f"{self.path}: damaged ({error}); delete it to begin a new day") from error
        return DayRecord(day.used_bytes, day.remaining_s)

    def write(self, record: DayRecord) -> None:
        """Keep this instead; raises `StorageError`."""
        day = _Day(DAY_FORMAT, record.used_bytes, record.remaining_s)
        replace_file(self.path, msgspec.json.encode(day))
