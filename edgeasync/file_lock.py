"""File locks that belong to one process and are not inherited by forked children.

`flock` locks an open file, and a fork shares its parent's open files. A child that outlives its
parent, such as a worker of a data loader, would keep the lock. So every child closes the files
right after the fork.
"""

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import NamedTuple

FILE_MODE = 0o600


class FileLock:
    """An open file to lock. Raises `OSError` if it cannot be opened or is a symbolic link."""

    def __init__(self, path: Path, flags: int) -> None:
        with _forking:
            self.descriptor = os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
            _open.add(self)

    def take(self, how: int) -> None:
        """Lock the file with `fcntl.flock`.

        Raises `BlockingIOError` if it is locked and `how` forbids waiting.
        """
        fcntl.flock(self.descriptor, how)

    def close(self) -> None:
        """Release the lock. Does nothing in a forked child, or if called again."""
        with _forking:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
                _open.discard(self)


_open: set[FileLock] = set()
_forking = threading.Lock()
"""Locked while a file is opened or closed, so that the process cannot fork meanwhile."""


def _close_in_child() -> None:
    for lock in _open:
        os.close(lock.descriptor)
        lock.descriptor = -1
    _open.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


class Holders(NamedTuple):
    """The processes that have a locked file open, and the process that locked it.

    `processes` omits processes of other users. `owner` is 0 if the process that locked the file is
    unknown.
    """

    processes: dict[int, str]
    """Process names by process id."""
    owner: int


def find_holders(path: Path) -> Holders:
    """Return the holders of a file's lock. `processes` is empty if /proc does not show them."""
    processes: dict[int, str] = {}
    owner, locked = 0, path.stat()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it belongs to another user, or has just exited
            for file in (process / "fd").iterdir():
                if os.path.samestat(file.stat(), locked) and (locker := _locker(process / "fdinfo" / file.name)):
                    processes[int(process.name)] = (process / "comm").read_text().strip()
                    owner = locker
    return Holders(processes, owner)


def _locker(descriptor: Path) -> int:
    """Return the id of the process that locked an open file, or 0 if unknown."""
    for line in descriptor.read_text().splitlines():
        if line.startswith("lock:") and "FLOCK" in line:
            return int(line.split("FLOCK")[1].split()[2])
    return 0
