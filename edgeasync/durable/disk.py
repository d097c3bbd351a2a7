"""A folder as the journal and the checkpoints see it: few operations, each of which may fail as a disk does.

`FolderDisk` is the real one; the simulator has one that tears writes, forgets what was not synced, and fills up.
Everything raises `OSError`, and nothing is promised to outlive a power cut before it is synced: a file's content
by `File.sync`, its name by `sync_folder`.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from edgeasync.durable.files import create_file, sync_folder
from edgeasync.protocol.wire import Buffer
from edgeasync.regular_file import read_regular

PARTS_MAX = 512
"""Buffers that one system call may be given; POSIX promises 16, Linux and macOS take 1024."""

FORGET_BYTES = 1 << 18
"""The system is told to forget synced bytes, this number at a time: they are hardly ever read, and its memory is
better used again at once, for the next ones."""


class File(Protocol):
    """A file that is written from front to back."""

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append all parts, whole; after an error any beginning of them may be there."""

    def sync(self) -> None:
        """Return once all that was written would outlive a power cut; after an error nobody knows what would."""

    def close(self) -> None:
        """Let go of the file."""


class ReadableDisk(Protocol):
    """One folder of files, all of them directly in it, to be read."""

    def names(self) -> list[str]:
        """Return the names of the files there are, in order."""

    def size(self, name: str) -> int:
        """Return how many bytes a file has."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Return a file's content from `offset` on: all of it, or `nbytes`, or fewer where it ends before."""


class Disk(ReadableDisk, Protocol):
    """One folder of files, to be read and written."""

    def create(self, name: str) -> File:
        """Make an empty file, in place of one of that name."""

    def reopen(self, name: str) -> File:
        """Open a file that there is, to append to it."""

    def truncate(self, name: str, nbytes: int) -> None:
        """Cut a file to its first bytes, and sync that."""

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of one that has it."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def sync_folder(self) -> None:
        """Return once all names would outlive a power cut."""


class _FolderFile:
    """A real file, open for writing."""

    def __init__(self, descriptor: int, check: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._check = check
        self._nbytes = self._forgotten_bytes = 0

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append all parts, however few bytes the system takes at a time."""
        rest = [memoryview(part).cast("B") for part in parts if len(part)]
        while rest:
            written = os.writev(self._descriptor, rest[:PARTS_MAX])
            self._nbytes += written
            while written:
                if written < len(rest[0]):
                    rest[0] = rest[0][written:]
                    break
                written -= len(rest.pop(0))

    def sync(self) -> None:
        """Sync content and length, not the times; what nobody would find any more does not count."""
        getattr(os, "fdatasync", os.fsync)(self._descriptor)
        self._check()
        synced_bytes = self._nbytes - self._forgotten_bytes
        if synced_bytes >= FORGET_BYTES and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # it is only advice
                os.posix_fadvise(self._descriptor, self._forgotten_bytes, synced_bytes, os.POSIX_FADV_DONTNEED)
            self._forgotten_bytes = self._nbytes

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FolderSnapshot:
    """Some files of a real folder as they were at one moment, while somebody else writes to it.

    They are kept open: what is appended later is not seen, and what is removed later is still read.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._files: dict[str, tuple[int, os.stat_result]] = {}
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(path / name, os.O_RDONLY)
                    self._files[name] = descriptor, os.fstat(descriptor)
        except OSError:
            self.close()
            raise

    def names(self) -> list[str]:
        """Return the names of the files that were there, in order."""
        return sorted(self._files)

    def size(self, name: str) -> int:
        """Return how many bytes a file had."""
        return self.status(name).st_size

    def status(self, name: str) -> os.stat_result:
        """Return what the system said of a file."""
        return self._files[name][1]

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Read a file, or a part of it, no further than it went."""
        descriptor, status = self._files[name]
        left = max(0, status.st_size - offset)
        return os.pread(descriptor, left if nbytes is None else min(nbytes, left), offset)

    def close(self) -> None:
        """Let go of the files."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a folder is a regular file; a link to itself is none. Raises `OSError`."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


class FolderDisk:
    """The files of a real folder, which must exist. `check` raises `OSError` if it is not the one it was."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check

    def names(self) -> list[str]:
        """Return the names of the regular files, in order."""
        return sorted(entry.name for entry in os.scandir(self._path) if _is_file(entry))

    def size(self, name: str) -> int:
        """Return how many bytes a file has."""
        return (self._path / name).stat().st_size

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Read a file, or a part of it."""
        return read_regular(self._path / name, offset, -1 if nbytes is None else nbytes)

    def create(self, name: str) -> File:
        """Make an empty file that only its owner may read."""
        self._check()
        return _FolderFile(create_file(self._path / name), self._check)

    def reopen(self, name: str) -> File:
        """Open a file that there is, to append to it."""
        self._check()
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        return _FolderFile(os.open(self._path / name, flags), self._check)

    def truncate(self, name: str, nbytes: int) -> None:
        """Cut a file and sync it."""
        descriptor = os.open(self._path / name, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name."""
        (self._path / source).replace(self._path / target)

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self._path / name).unlink()

    def sync_folder(self) -> None:
        """Sync the folder itself."""
        sync_folder(self._path)
