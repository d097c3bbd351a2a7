"""Temporary folders. Creating one deletes the folders that killed programs left behind."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from edgeasync.file_lock import FileLock

PREFIX = "edgeasync-"

OWNER = "owner.lock"
"""A locked file in each folder. The system unlocks it when the program ends, for whatever reason.
"""


class TemporaryFolder:
    """A new folder that only this user can open.

    If it is left behind, a later program deletes it.
    """

    def __init__(self, purpose: str = "") -> None:
        remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}"))
        part = self.path / f"{OWNER}.part"
        self._lock = FileLock(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):  # on a file system without locks, leftovers are never deleted
            self._lock.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.replace(self.path / OWNER)  # other programs find it only after it is locked

    def remove(self) -> None:
        """Delete the folder and its content. Does nothing if called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_leftovers() -> None:
    """Delete this user's temporary folders whose programs have ended. Never raises."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: "os.DirEntry[str]") -> None:
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    lock = FileLock(Path(entry.path) / OWNER, os.O_RDWR | os.O_NONBLOCK)
    try:
        lock.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        lock.close()
