"""Large buffers that are used again: fresh memory of that size costs a page fault for every 4 KiB of it."""

import weakref

import numpy as np
import numpy.typing as npt

from edgeasync.protocol import wire


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


class Living:
    """Which of the arrays it was shown something still refers to, views and slices included."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[object]] = {}

    def __len__(self) -> int:
        return len(self._references)

    def __contains__(self, buffer: wire.Buffer) -> bool:
        return isinstance(buffer, memoryview) and id(buffer.obj) in self._references

    def watch(self, buffer: wire.Buffer) -> None:
        """Count the array under a buffer until it is gone; bytes cannot be watched, and are not counted."""
        if not isinstance(buffer, memoryview) or not isinstance(array := buffer.obj, np.ndarray):
            return
        key, references = id(array), self._references
        if key not in references:
            references[key] = weakref.ref(array, lambda _: references.pop(key, None))
