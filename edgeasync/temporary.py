"""Temporary folders of a program: one whose program was killed is removed when the next program makes one."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "edgeasync-"

OWNER = "owner.lock"
"""A file in each folder that its program holds locked. However the program ends, the system unlocks it."""

_held: set[int] = set()
"""Descriptors of this program's locks. A forked child closes them, so that it holds up no removal."""


class TemporaryFolder:
    """A new folder that only this user can open. If it is not removed, a later program removes it."""

    def __init__(self, purpose: str = "") -> None:
        remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}"))
        part = self.path / f"{OWNER}.part"
        self._lock = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _held.add(self._lock)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes what is left behind
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.replace(self.path / OWNER)  # nobody finds it before it is locked

    def remove(self) -> None:
        """Remove it, with all that is in it; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock in _held:
            _held.discard(self._lock)
            os.close(self._lock)


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
    lock = os.open(Path(entry.path) / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)


def _forget_locks() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)
