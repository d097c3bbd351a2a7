"""Opens files from untrusted folders.

Only regular files are opened, because a pipe would block until it has a writer, and a device file
may be endless.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading, or a link to one if `links` is set.

    Raises `OSError` on failure, and for other kinds of files.
    """
    file = open(path, "rb", opener=_open if links else _open_no_link)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def read_regular(path: Path, offset: int = 0, nbytes: int = -1) -> bytes:
    """Return a file's content from `offset` on: all of it, or at most `nbytes`.

    Raises `OSError`, for example if `path` is not a regular file or its content does not fit into
    memory.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(nbytes)
    except MemoryError:
        raise OSError(errno.ENOMEM, "Longer than this machine's memory", str(path)) from None


def check_regular(path: Path) -> None:
    """Raise `OSError` unless a file is regular. Call this before a library opens the file by its path."""
    open_regular(path).close()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _open_no_link(path: str, flags: int) -> int:
    return _open(path, flags | os.O_NOFOLLOW)
