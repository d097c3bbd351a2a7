"""Reuses large buffers, because newly allocated memory costs a page fault for every 4 KiB."""

import weakref

import numpy as np
import numpy.typing as npt

from edgeasync.parameters import Vector

POOLED_BYTES_MIN = 1 << 16
"""Minimum size of snapshots that are sent without a copy and whose buffers are reused."""


class BufferPool:
    """A pool of buffers of one size.

    A buffer returns to the pool when nothing references the array returned by `take` any more.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[memoryview] = []
        self._made = 0

    @property
    def in_use(self) -> int:
        """The number of buffers that are still referenced."""
        return self._made - len(self._free)

    def take_vector(self) -> Vector:
        """Return a vector with arbitrary contents, to be overwritten.

        Small vectors do not come from the pool.
        """
        if self._nbytes < POOLED_BYTES_MIN:
            return np.empty(self._nbytes // 4, np.float32)
        return self.take().view(np.float32)

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a writable array over a buffer, with the contents from its last use."""
        try:
            buffer = self._free.pop()  # the newest, which may still be in the processor's cache
        except IndexError:
            # A bytearray would be zeroed, which takes 0.1 s for 100 MB.
            buffer = np.empty(self._nbytes, np.uint8).data
            self._made += 1
        # Views keep this array alive, but not `buffer`, because numpy tracks only arrays as bases.
        array = np.frombuffer(buffer, np.uint8)
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return array
