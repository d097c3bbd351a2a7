"""Detect changes of a file that people edit."""

import os
from pathlib import Path

Stamp = tuple[int, int, int]
"""A file's inode, modification time and size, which change with its content."""


class FileWatch:
    """Checks a file for changes.

    A file that replaced another one is complete. A file that is written in place may be incomplete,
    so it counts as changed once two checks in a row have found the same stamp.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = self._seen = stamp_of(path)

    def note_read(self) -> None:
        """Record that the file is being read now."""
        self._read = stamp_of(self.path)

    def has_changed(self, *, replaced: bool = False) -> bool:
        """Return whether to read the file again; with `replaced`, only if it replaced another one."""
        stamp = stamp_of(self.path)
        is_another = stamp is not None and self._read is not None and stamp[0] != self._read[0]
        if replaced and not is_another:
            return False
        seen, self._seen = self._seen, stamp
        return stamp != self._read and (stamp == seen or is_another)


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file; `None` if it cannot be read."""
    try:
        found = os.stat(path)  # noqa: PTH116 - five times a second, and for each stranger
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
