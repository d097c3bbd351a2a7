"""A file that is written in whole blocks, without using the page cache."""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from edgeasync.protocol.wire import Buffer

BLOCK_BYTES = 1 << 12
"""Unit of direct writes. Offsets and lengths that are multiples of it suit almost all file systems."""

STAGED_BYTES = 1 << 22
"""Number of bytes per system call, and size of the aligned buffer to which they are copied."""

_SHORT_BYTES = 1 << 16
"""Length below which a copy does not release the GIL.

Such a copy ends before another thread could make use of the GIL.
"""

_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class DirectFile:
    """A real file, open for writing with `O_DIRECT`.

    A direct write costs less CPU than a write to the page cache that is synced at once. Appended
    parts are collected in a buffer of `STAGED_BYTES`, which is written when it is full, and by
    `sync`. If the buffer was not full since the last sync, a single system call writes and syncs
    it. The last block is filled up with zeros, and is written again when the content grows.
    `close` cuts the zeros off, but a crash may leave them.

    The constructor raises `OSError` if the file system does not support direct writes, and leaves
    the descriptor open.
    """

    def __init__(self, descriptor: int, check: Callable[[], None]) -> None:
        # Without `O_APPEND`, because a block is written again at its old offset.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        self._descriptor = descriptor
        self._check = check
        self._direct = True
        self._staged = memoryview(mmap.mmap(-1, STAGED_BYTES))  # page-aligned
        self._staged_bytes = 0
        self._offset = 0  # of the staged bytes
        self._unsynced = False  # whether bytes before the staged ones are not synced
        self._nbytes = 0

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append all parts. After an error, the file may contain any prefix of them."""
        for part in parts:
            rest = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while rest:
                begin, count = self._staged_bytes, min(len(rest), STAGED_BYTES - self._staged_bytes)
                _copy(rest[:count], self._staged[begin : begin + count])
                self._staged_bytes += count
                rest = rest[count:]
                if self._staged_bytes == STAGED_BYTES:
                    self._flush(0)
                    self._unsynced = True

    def sync(self) -> None:
        """Sync content and length but not timestamps; raise `OSError` if the folder was moved."""
        # The flag covers only the bytes of the same call.
        self._flush(os.RWF_DSYNC if self._direct and not self._unsynced else 0)
        if self._unsynced or not self._direct:
            os.fdatasync(self._descriptor)
            self._unsynced = False
        self._check()
        self._nbytes = self._offset + self._staged_bytes

    def close(self) -> None:
        """Cut off what is not synced, and close the file. A second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # zeros at the end are harmless
                os.ftruncate(self._descriptor, self._nbytes)
            os.close(self._descriptor)
            self._descriptor = -1

    def _flush(self, flags: int) -> None:
        """Write the staged bytes; keep those of the last block, if it is not full."""
        whole = self._staged_bytes // BLOCK_BYTES * BLOCK_BYTES
        tail_bytes = self._staged_bytes - whole
        end = whole + BLOCK_BYTES if tail_bytes else whole
        self._staged[self._staged_bytes : end] = bytes(end - self._staged_bytes)
        written = 0
        while written < end:
            try:
                content = [self._staged[written:end]]
                written += os.pwritev(self._descriptor, content, self._offset + written, flags)
            except OSError as error:
                # Some file systems report only now that they need larger blocks or support no direct writes.
                if error.errno not in _UNSUPPORTED or not self._direct:
                    raise
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
                self._direct, flags = False, 0
        self._staged[:tail_bytes] = self._staged[whole : self._staged_bytes]
        self._offset += whole
        self._staged_bytes = tail_bytes


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes. During a long copy, other threads can run, because numpy releases the GIL."""
    if len(source) < _SHORT_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
