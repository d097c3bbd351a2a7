"""Caches bases on disk, so that a device downloads each of them once.

All agents of a user share one folder. A complete base is a file `<SHA-256>.base`, and a partial
download is a file `<SHA-256>.base.part`. Files are locked with `flock`: an agent locks the base
that it uses as shared, and the partial download that it writes as exclusive. So no agent downloads
a base that another one downloads, and no agent deletes a file that another one uses. If an agent is
killed, the kernel releases its locks, and the next agent resumes the download.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import xxhash

from edgeasync.config import expanded
from edgeasync.durable.files import make_folder, protect, sync_folder
from edgeasync.errors import StorageError
from edgeasync.file_lock import FileLock
from edgeasync.protocol.graph import Base
from edgeasync.protocol.wire import Buffer

PART_SUFFIX = ".part"

READ_BYTES = 1 << 20
SYNC_BYTES = 8 << 20
"""A download is synced after this number of bytes. So the last sync is short, and a power cut costs
at most this part of the download.
"""

Warn = Callable[[str], None]


class _Partial:
    """A base that is being downloaded: its locked file, and the hashes of what was written."""

    def __init__(self, base: Base, lock: FileLock) -> None:
        self.base = base
        self.lock = lock
        self.nbytes = self._synced_bytes = 0
        self._sha256 = hashlib.sha256()
        self._checksum = xxhash.xxh3_64()

    def recover(self) -> None:
        """Hash what an earlier agent has written; raises `OSError`."""
        if os.fstat(self.lock.descriptor).st_size > self.base.nbytes:
            os.ftruncate(self.lock.descriptor, 0)
        for part in _content(self.lock):
            self._count(part)
        self._synced_bytes = self.nbytes

    def write(self, part: Buffer) -> None:
        """Append bytes, and sync the file at intervals; raises `OSError`."""
        left = memoryview(part).cast("B")
        while left:
            written = os.pwrite(self.lock.descriptor, left, self.nbytes)
            self._count(left[:written])
            left = left[written:]
        if self.nbytes - self._synced_bytes >= SYNC_BYTES:
            os.fdatasync(self.lock.descriptor)
            self._synced_bytes = self.nbytes

    def _count(self, part: Buffer) -> None:
        self._sha256.update(part)
        self._checksum.update(part)
        self.nbytes += len(part)

    @property
    def is_announced(self) -> bool:
        """Whether the content has the fingerprint of the base."""
        return self._sha256.hexdigest() == self.base.fingerprint

    @property
    def checksum(self) -> int:
        """The hub's kind of checksum of the content."""
        return self._checksum.intdigest()


class BaseCache:
    """A folder with bases of at most `bytes_max` bytes in total, for one agent.

    If a new base does not fit, the least recently used bases and partial downloads that no agent
    has locked are deleted. `warn` is called with a message if a stored base is damaged. Call the
    methods from one thread at a time.
    """

    def __init__(self, folder: Path, bytes_max: int, warn: Warn) -> None:
        self._path = folder
        self._bytes_max = bytes_max
        self._warn = warn
        self._used: tuple[Base, FileLock] | None = None
        self._partial: _Partial | None = None

    @cached_property
    def folder(self) -> Path:
        """The folder; raises `ConfigError` if it is in an unknown home folder."""
        return expanded(self._path)

    def find(self, base: Base) -> int | None:
        """Return how many bytes of a base are stored, or `None` if another agent downloads it.

        If all are stored, the base has been verified, and stays locked until `close`. Raises
        `StorageError`.
        """
        if self._used is not None and self._used[0] == base:
            return base.nbytes
        if self._partial is not None and self._partial.base == base:
            return self._partial.nbytes
        self.close()
        try:
            make_folder(self.folder)
            if (lock := self._open_base(base)) is not None:
                self._used = base, lock
                return base.nbytes
            return self._open_partial(base)
        except BlockingIOError:
            return None
        except OSError as error:
            self.close()
            raise self._trouble(error) from error

    def append(self, base: Base, offset: int, part: Buffer) -> None:
        """Store the next bytes of the base that `find` has found incomplete.

        Raises `StorageError`. Call `find` again afterwards.
        """
        partial = self._download(base, offset)
        try:
            partial.write(part)
        except OSError as error:
            self.close()
            raise self._trouble(error) from error

    def finish(self, base: Base, checksum: int) -> bool:
        """Verify and keep the complete base; return whether it is the announced one.

        Raises `StorageError` if the content does not match the hub's `checksum`. A base that is not
        kept is deleted.
        """
        partial = self._download(base, base.nbytes)
        try:
            if partial.is_announced:
                self._keep(partial)
                return True
            self._part_file(base).unlink(missing_ok=True)
        except OSError as error:
            raise self._trouble(error) from error
        finally:
            if self._used is None:
                self.close()
        if partial.checksum != checksum:
            raise StorageError(f"{self._part_file(base)}: damaged; downloading the base again")
        return False

    def close(self) -> None:
        """Unlock what this agent uses or downloads."""
        if self._used is not None:
            self._used[1].close()
        if self._partial is not None:
            self._partial.lock.close()
        self._used = self._partial = None

    def _download(self, base: Base, nbytes: int) -> _Partial:
        """Return the download of a base, of which so many bytes are stored; raises `StorageError`."""
        partial = self._partial
        if partial is None or (partial.base, partial.nbytes) != (base, nbytes):
            raise StorageError(f"{self.folder}: the download of the base was interrupted; it continues soon")
        return partial

    def _open_base(self, base: Base) -> FileLock | None:
        """Return the lock of a complete base, or `None` if it is missing or damaged."""
        file = self.folder / base.file_name
        try:
            lock = FileLock(file, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            _take(lock, file, fcntl.LOCK_SH)
            digest = hashlib.sha256()
            for part in _content(lock):
                digest.update(part)
            if digest.hexdigest() == base.fingerprint:
                os.utime(lock.descriptor)
                protect(lock.descriptor)
                return lock
            self._warn(f"{file}: damaged; deleting it and downloading the base again")
            file.unlink(missing_ok=True)
        except BaseException:
            lock.close()
            raise
        lock.close()
        return None

    def _open_partial(self, base: Base) -> int:
        """Lock and hash the partial download of a base, which may be empty; return its length.

        Raises `BlockingIOError` if another agent has locked it.
        """
        file = self._part_file(base)
        lock = FileLock(file, os.O_RDWR | os.O_CREAT)
        self._partial = partial = _Partial(base, lock)
        try:
            _take(lock, file, fcntl.LOCK_EX)
            self._make_room(base)
            partial.recover()
        except BaseException:
            self.close()
            raise
        if partial.nbytes < base.nbytes:
            return partial.nbytes
        if partial.is_announced:
            self._keep(partial)
            return base.nbytes
        self._warn(f"{file}: damaged; downloading the base again")
        os.ftruncate(lock.descriptor, 0)
        self._partial = _Partial(base, lock)
        return 0

    def _keep(self, partial: _Partial) -> None:
        """Rename a verified download, and use it from now on."""
        protect(partial.lock.descriptor)
        os.fsync(partial.lock.descriptor)
        self._part_file(partial.base).replace(self.folder / partial.base.file_name)
        sync_folder(self.folder)
        partial.lock.take(fcntl.LOCK_SH)
        self._used, self._partial = (partial.base, partial.lock), None

    def _make_room(self, base: Base) -> None:
        """Delete the least recently used files that nobody has locked, until the base fits."""
        others = [
            (status.st_mtime_ns, status.st_size, file)
            for file in self.folder.iterdir()
            if file != self._part_file(base) and (status := _status(file)) is not None
        ]
        held_bytes = sum(nbytes for _, nbytes, _ in others)
        for _, nbytes, file in sorted(others):
            if held_bytes + base.nbytes <= self._bytes_max:
                break
            if _delete_unused(file):
                held_bytes -= nbytes

    def _part_file(self, base: Base) -> Path:
        return self.folder / (base.file_name + PART_SUFFIX)

    def _trouble(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.folder}: cannot store the hub's base: {error.strerror or error}; free disk space, or set "
            "[agent] base_cache to a writable folder"
        )


def _content(lock: FileLock) -> Iterator[memoryview]:
    """Yield the content of a locked file in parts, which share one buffer."""
    buffer = memoryview(bytearray(READ_BYTES))
    offset = 0
    while nbytes := os.preadv(lock.descriptor, [buffer], offset):
        yield buffer[:nbytes]
        offset += nbytes


def _status(file: Path) -> os.stat_result | None:
    """Return a file's status, or `None` if it was deleted meanwhile or is not a regular file."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _take(lock: FileLock, file: Path, how: int) -> None:
    """Lock a file; raises `BlockingIOError` if it is locked, or was just renamed or deleted."""
    lock.take(how | fcntl.LOCK_NB)
    try:
        is_there = os.path.samestat(os.fstat(lock.descriptor), file.lstat())
    except FileNotFoundError:
        is_there = False
    if not is_there:
        raise BlockingIOError(errno.EWOULDBLOCK, "Renamed or deleted", str(file))


def _delete_unused(file: Path) -> bool:
    """Delete a file unless an agent has locked it; return whether it was deleted."""
    try:
        lock = FileLock(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        _take(lock, file, fcntl.LOCK_EX)
        file.unlink()
    except OSError:
        return False
    finally:
        lock.close()
    return True
