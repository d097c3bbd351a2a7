"""Warn once when a device's disk fails, until it works again."""

from collections.abc import Callable

from edgeasync.errors import StorageError


class DiskWatch:
    """Writes one kind of file, in one thread.

    If the disk fails, `warn` is called with the error and the consequence `costs`.
    """

    def __init__(self, warn: Callable[[str], None], costs: str) -> None:
        self._warn = warn
        self._costs = costs
        self._fails = False

    def write(self, write: Callable[[], None]) -> None:
        """Call `write`; warn of its `StorageError` unless the previous write failed, too."""
        try:
            write()
            self._fails = False
        except StorageError as error:
            if not self._fails:
                self._warn(f"{error}; until then {self._costs}")
            self._fails = True
