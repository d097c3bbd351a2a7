"""Opens untrusted files only if they are regular: a pipe may block, and a device may never end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises `OSError`, also for any other kind of file."""
    file = open(path, "rb", opener=_open)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def read_regular(path: Path, offset: int = 0, nbytes: int = -1) -> bytes:
    """Read up to `nbytes` of a regular file from `offset`, by default all.

    Raises `OSError`, also for any other kind of file and for content larger than memory.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(nbytes)
    except MemoryError:
        raise OSError(errno.ENOMEM, "Longer than this machine's memory", str(path)) from None


def check_regular(path: Path) -> None:
    """Raise `OSError` unless `path` is a regular file. Call it before a library opens the path."""
    open_regular(path).close()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
