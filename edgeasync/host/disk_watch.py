"""Warn when a device's disk fails, but only once until it works again."""

from collections.abc import Callable

from edgeasync.errors import StorageError


class DiskWatch:
    """Writes files of one kind. Use it in a single thread only.

    If the disk fails, `warn` is called with a message that contains the error and `costs`, which
    describes the consequence.
    """

    def __init__(self, warn: Callable[[str], None], costs: str) -> None:
        self._warn = warn
        self._costs = costs
        self._fails = False

    def write(self, write: Callable[[], None]) -> None:
        """Call `write`. If it raises `StorageError`, warn, unless the previous write also failed."""
        try:
            write()
            self._fails = False
        except StorageError as error:
            if not self._fails:
                self._warn(f"{error}; until then {self._costs}")
            self._fails = True
