"""Tells when a file that people edit has changed, and can be read."""

import os
from pathlib import Path

Stamp = tuple[int, int, int]
"""What changes when a file does: its inode, the time of its last change, and its size."""


class FileWatch:
    """Looks at a file now and then.

    A file that has taken the place of another is whole. One that is written where it lies may be half written: it
    counts as changed once it has stayed the same for one look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = self._seen = stamp_of(path)

    def note_read(self) -> None:
        """Note that the file is read now."""
        self._read = stamp_of(self.path)

    def has_changed(self, *, replaced: bool = False) -> bool:
        """Return whether the file is to be read again; with `replaced`, only if it took the place of another."""
        stamp = stamp_of(self.path)
        is_another = stamp is not None and self._read is not None and stamp[0] != self._read[0]
        if replaced and not is_another:
            return False
        seen, self._seen = self._seen, stamp
        return stamp != self._read and (stamp == seen or is_another)


def stamp_of(path: Path) -> Stamp | None:
    """Return what changes when a file does; `None` if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - five times a second, and for each stranger
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
