"""Files that are replaced as a whole, and folders that one process uses.

A file is written beside the old one, synced, and renamed: a power cut leaves the old one or the new one, never
a torn one.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer


def replace_file(path: Path, *content: Buffer) -> None:
    """Write the parts of `content` to `path` atomically; raises `StorageError`."""
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(f"{path}: cannot be written: {error.strerror}; free space or fix its rights") from error


class FolderLock:
    """A folder that one process at a time may use, made if it is missing; `flag` is what chooses another."""

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path
        self._flag = flag
        self._file = -1

    def take(self, taken: str) -> None:
        """Lock the folder; raises `StorageError`, with the sentence `taken` if another process has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StorageError(f"{self.path}: {taken}") from None
        except OSError as error:
            self.close()
            raise StorageError(
                f"{self.path}: cannot be used: {error.strerror}; choose another {self._flag} folder"
            ) from error

    def check(self) -> None:
        """Raise `FileNotFoundError` if the folder was moved or removed: nobody would find what is written."""
        try:
            same = os.path.samestat(os.fstat(self._file), (self.path / "lock").stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise FileNotFoundError(errno.ENOENT, "the folder was moved or removed")

    def close(self) -> None:
        """Let another process have the folder."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
