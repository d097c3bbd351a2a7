"""Large buffers that are used again: fresh memory of that size costs a page fault for every 4 KiB of it."""

import weakref

import numpy as np
import numpy.typing as npt


class BufferPool:
    """Buffers of one size. Each comes back by itself when nothing refers to what `take` returned."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[memoryview] = []
        self._made = 0

    @property
    def in_use(self) -> int:
        """Buffers that something still refers to."""
        return self._made - len(self._free)

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a writable array over a buffer, with whatever was last in it."""
        try:
            buffer = self._free.pop()  # the newest, which may still be in the processor's cache
        except IndexError:
            # Not a bytearray, which would be filled with zeros: a tenth of a second for a hundred megabytes.
            buffer = np.empty(self._nbytes, np.uint8).data
            self._made += 1
        # Views of the array keep the array alive, not the buffer: numpy follows bases only through arrays.
        array = np.frombuffer(buffer, np.uint8)
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return array
