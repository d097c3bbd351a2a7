"""What a device says of a disk that fails: one warning, until the disk works again."""

from collections.abc import Callable

from edgeasync.errors import StorageError


class DiskWatch:
    """Writes one kind of file, in one thread. If the disk fails, `warn` hears the error, and what that `costs`."""

    def __init__(self, warn: Callable[[str], None], costs: str) -> None:
        self._warn = warn
        self._costs = costs
        self._fails = False

    def write(self, write: Callable[[], None]) -> None:
        """Call `write`; warn of its `StorageError` unless the write before failed, too."""
        try:
            write()
            self._fails = False
        except StorageError as error:
            if not self._fails:
                self._warn(f"{error}; until then {self._costs}")
            self._fails = True
