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
"""Memory per parameter: the value, its base, the gradient and a payload, four bytes each."""

KEPT_BYTES = 64 << 20
"""Maximum freed memory that remains at the end of a heap."""

HEAP_BYTES_MAX = 32 << 20
"""Larger blocks are allocated outside the heaps and freed at once; glibc's highest threshold."""

COLLECTED_EVERY = (10_000, 50, 100)
"""Thresholds of Python's garbage collector: new objects, then smaller collections."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def memory_bytes() -> int:
    """Return the machine's memory in bytes, 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def describe_machine(examples: int) -> DeviceProfile:
    """Return what a hub may know about this machine."""
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
    """Return this process's resident memory in bytes, 0 if unknown."""
    return field_bytes(Path("/proc/self/status"), "VmRSS:")


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory limit of this process, by the machine and its cgroups; 0 if unknown."""
    limits = [memory_bytes(), *[group.limit_bytes for group in memory_groups(root)]]
    return min((limit for limit in limits if limit), default=0)


def half_of_memory_bytes() -> int:
    """Return half of this process's memory limit, for building an unknown model; 0 if unknown."""
    return memory_limit_bytes() // 2


def prepare_for_service() -> None:
    """Configure this process for long service with short pauses, as a hub needs it."""
    _collect_rarely()
    _keep_freed_memory()


def _collect_rarely() -> None:
    """Exclude present objects from garbage collection, and collect all objects rarely.

    A full collection with 10,000 devices takes 50 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_EVERY)


def _keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` of freed memory in each heap, one per thread.

    glibc would return it to the system, and every page of the next model would cause a page fault.
    Other allocators are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES_MAX)
