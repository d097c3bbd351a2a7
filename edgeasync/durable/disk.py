"""The file operations of journal and checkpoints, any of which may fail.

`FolderDisk` is the implementation for real folders. The simulator has an implementation that tears
writes, loses unsynced data and runs out of space. Every operation may raise `OSError`. Data
survives a power cut only after it is synced. `File.sync` syncs the content of a file, and
`sync_folder` syncs the file names.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from edgeasync.durable.direct_file import DirectFile
from edgeasync.durable.files import create_file, sync_folder
from edgeasync.protocol.wire import Buffer
from edgeasync.regular_file import read_regular

PARTS_MAX = 512
"""Maximum number of buffers per system call. POSIX guarantees 16; Linux and macOS accept 1024."""

FORGET_BYTES = 1 << 18
"""Number of synced bytes after which the kernel is asked to drop them from its page cache.

The hub hardly ever reads these bytes again.
"""


class File(Protocol):
    """A file that is written sequentially."""

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append all parts. After an error, the file may contain any prefix of them.

        A padded file may delay the write until `sync`.
        """

    def sync(self) -> None:
        """Sync the written content to disk.

        After an error, it is unknown which part of the content would survive a power cut.
        """

    def close(self) -> None:
        """Close the file."""


class ReadableDisk(Protocol):
    """A flat folder of files, for reading."""

    def names(self) -> list[str]:
        """Return the sorted names of the files."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Return up to `nbytes` bytes of a file from `offset` on.

        By default, return the whole file.
        """


class Disk(ReadableDisk, Protocol):
    """A flat folder of files, for reading and writing."""

    def create(self, name: str, *, padded: bool = False) -> File:
        """Create an empty file, replacing any file of that name.

        If `padded` is true, zeros up to the end of a block may follow the content until the file is
        closed. After a crash, they may still be there.
        """

    def reopen(self, name: str) -> File:
        """Open an existing file to append to it."""

    def truncate(self, name: str, nbytes: int) -> None:
        """Truncate a file to its first `nbytes` bytes, and sync it."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing any file named `target`."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def sync_folder(self) -> None:
        """Sync all file names of the folder to disk."""


class _FolderFile:
    """A real file, open for writing."""

    def __init__(self, descriptor: int, check: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._check = check
        self._nbytes = self._forgotten_bytes = 0

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append all parts, in several system calls if needed."""
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
        """Sync content and length but not timestamps; raise `OSError` if the folder was moved."""
        getattr(os, "fdatasync", os.fsync)(self._descriptor)
        self._check()
        synced_bytes = self._nbytes - self._forgotten_bytes
        if synced_bytes >= FORGET_BYTES and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # the advice is optional
                os.posix_fadvise(self._descriptor, self._forgotten_bytes, synced_bytes, os.POSIX_FADV_DONTNEED)
            self._forgotten_bytes = self._nbytes

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FolderSnapshot:
    """Some files of a real folder as they were at one moment.

    The snapshot keeps the files open. It does not show data that another process appends later, and
    it can still read files that are removed later.
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
        """Return the sorted names of the files at the time of the snapshot."""
        return sorted(self._files)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes at the time of the snapshot."""
        return self.status(name).st_size

    def status(self, name: str) -> os.stat_result:
        """Return the `stat` result of a file at the time of the snapshot."""
        return self._files[name][1]

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Return up to `nbytes` bytes of a file from `offset` on.

        Bytes that were appended after the snapshot are not returned.
        """
        descriptor, status = self._files[name]
        left = max(0, status.st_size - offset)
        return os.pread(descriptor, left if nbytes is None else min(nbytes, left), offset)

    def close(self) -> None:
        """Close the files."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file; raises `OSError`.

    The result is `False` for a symbolic link that points to itself.
    """
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


class FolderDisk:
    """The files of a real folder. The folder must exist.

    `check` raises `OSError` if the folder was replaced or moved.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check

    def names(self) -> list[str]:
        """Return the sorted names of the regular files."""
        return sorted(entry.name for entry in os.scandir(self._path) if _is_file(entry))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return (self._path / name).stat().st_size

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Return up to `nbytes` bytes of a file from `offset` on."""
        return read_regular(self._path / name, offset, -1 if nbytes is None else nbytes)

    def create(self, name: str, *, padded: bool = False) -> File:
        """Create an empty file that only its owner can read; a `padded` one skips the page cache."""
        self._check()
        descriptor = create_file(self._path / name)
        if padded and hasattr(os, "O_DIRECT") and hasattr(os, "RWF_DSYNC"):
            with contextlib.suppress(OSError):  # the file system does not support it
                return DirectFile(descriptor, self._check)
        return _FolderFile(descriptor, self._check)

    def reopen(self, name: str) -> File:
        """Open an existing file to append to it."""
        self._check()
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        return _FolderFile(os.open(self._path / name, flags), self._check)

    def truncate(self, name: str, nbytes: int) -> None:
        """Truncate a file and sync it."""
        descriptor = os.open(self._path / name, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Rename a file."""
        (self._path / source).replace(self._path / target)

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self._path / name).unlink()

    def sync_folder(self) -> None:
        """Sync the folder itself."""
        sync_folder(self._path)
