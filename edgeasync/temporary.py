"""Temporary folders of a program: one whose program was killed is removed when the next program makes one."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from edgeasync.file_lock import FileLock

PREFIX = "edgeasync-"

OWNER = "owner.lock"
"""A file in each folder that its program holds locked. However the program ends, the system unlocks it."""


class TemporaryFolder:
    """A new folder that only this user can open. If it is not removed, a later program removes it."""

    def __init__(self, purpose: str = "") -> None:
        remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}"))
        part = self.path / f"{OWNER}.part"
        self._lock = FileLock(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes what is left behind
            self._lock.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.replace(self.path / OWNER)  # nobody finds it before it is locked

    def remove(self) -> None:
        """Remove it, with all that is in it; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_leftovers() -> None:
    """Remove this user's temporary folders whose programs are gone; raises nothing."""
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
