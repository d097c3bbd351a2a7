"""Describe this machine's resources, and adjust this process's use of memory."""

import ctypes
import gc
import os
import platform
from pathlib import Path

from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol.messages import DeviceProfile
from edgeasync.training.free_memory import field_bytes, memory_groups
from edgeasync.version import VERSION

BYTES_A_PARAMETER = 16
"""Bytes of memory per parameter: value, base, gradient and payload, with four bytes each."""

KEPT_BYTES = 64 << 20
"""Maximum freed memory that the allocator retains at the end of a heap."""

HEAP_BYTES_MAX = 32 << 20
"""Larger blocks are allocated outside the heaps, and returned to the system when they are freed.

This is glibc's highest threshold.
"""

COLLECTED_EVERY = (10_000, 50, 100)
"""Thresholds of Python's garbage collector for its three generations: the number of new objects,
then the number of collections of the next younger generation.

So code that runs once a second or for each message must not create reference cycles, such as a
nested function that refers to itself: their memory may stay allocated for hours.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def memory_bytes() -> int:
    """Return the machine's memory in bytes, or 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def describe_machine(examples: int) -> DeviceProfile:
    """Return the description of this machine that a device sends to its hub."""
    return DeviceProfile(
        machine=platform.machine()[:64],
        cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        examples=examples,
        software=f"edgeasync {VERSION}",
    )


def parameters_that_fit() -> int:
    """Return the maximum number of parameters that this machine's memory allows for training."""
    return min(memory_bytes() // BYTES_A_PARAMETER, PARAMETERS_MAX) or PARAMETERS_MAX


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, or 0 if unknown."""
    return field_bytes(Path("/proc/self/status"), "VmRSS:")


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory limit that the machine and cgroups set for this process; 0 if unknown."""
    limits = [memory_bytes(), *[group.limit_bytes for group in memory_groups(root)]]
    return min((limit for limit in limits if limit), default=0)


def half_of_memory_bytes() -> int:
    """Return half of this process's memory limit, to limit building a model; 0 if unknown."""
    return memory_limit_bytes() // 2


def prepare_for_service() -> None:
    """Configure the memory management of a long-running process, such as a hub, for short pauses."""
    _collect_rarely()
    _keep_freed_memory()


def _collect_rarely() -> None:
    """Exclude existing objects from garbage collection, and make full collections rare.

    A full collection takes 50 ms if the hub has 10,000 devices.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_EVERY)


def _keep_freed_memory() -> None:
    """Let the allocator retain up to `KEPT_BYTES` of freed memory in the heap of each thread.

    By default, glibc returns this memory to the system, so that every page of the next model causes
    a page fault. This function has no effect on other allocators.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES_MAX)
