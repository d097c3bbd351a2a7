"""Reuse of large buffers: fresh memory costs a page fault for every 4 KiB."""

import weakref

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import Vector

POOLED_BYTES_MIN = 1 << 16
"""Snapshots of at least this size are sent without a copy, and their buffers are reused."""


class BufferPool:
    """Buffers of one size. A buffer returns to the pool when nothing refers to the array that `take` returned."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[memoryview] = []
        self._made = 0

    @property
    def in_use(self) -> int:
        """How many buffers something still refers to."""
        return self._made - len(self._free)

    def take_vector(self) -> Vector:
        """Return a vector with arbitrary contents, to be written to; one of few bytes is not of the pool."""
        if self._nbytes < POOLED_BYTES_MIN:
            return np.empty(self._nbytes // 4, np.float32)
        return self.take().view(np.float32)

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a writable array over a buffer; it has the contents of its last use."""
        try:
            buffer = self._free.pop()  # the newest, which may still be in the processor's cache
        except IndexError:
            # A bytearray would be filled with zeros, which takes a tenth of a second for a hundred megabytes.
            buffer = np.empty(self._nbytes, np.uint8).data
            self._made += 1
        # Views of the array keep the array alive, not the buffer: numpy follows bases only through arrays.
        array = np.frombuffer(buffer, np.uint8)
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return array
