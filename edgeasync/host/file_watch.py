"""Detect changes in a file that users edit."""

import os
from pathlib import Path

Stamp = tuple[int, int, int]
"""A file's inode, modification time and size, at least one of which changes with the content."""


class FileWatch:
    """Checks a file for changes.

    A file that replaced an older one is complete. A file that is modified in place may be
    incomplete, so it counts as changed only after two consecutive checks have found the same stamp.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = self._seen = stamp_of(path)

    def note_read(self) -> None:
        """Record that the caller is now reading the file."""
        self._read = stamp_of(self.path)

    def has_changed(self, *, replaced: bool = False) -> bool:
        """Return whether to read the file again. If `replaced` is true, ignore changes in place."""
        stamp = stamp_of(self.path)
        is_another = stamp is not None and self._read is not None and stamp[0] != self._read[0]
        if replaced and not is_another:
            return False
        seen, self._seen = self._seen, stamp
        return stamp != self._read and (stamp == seen or is_another)


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file, or `None` if it cannot be read."""
    try:
        found = os.stat(path)  # noqa: PTH116 - called five times a second, and for each unknown key
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
