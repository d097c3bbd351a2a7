"""What this machine has, and how this process uses it."""

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
"""Of memory: the parameters, their base, the gradient and a payload, of four bytes each."""

KEPT_BYTES = 64 << 20
"""The most freed memory that stays at the end of a heap."""

HEAP_BYTES_MAX = 32 << 20
"""Larger blocks never come from a heap, and are given back at once; glibc allows no higher threshold."""

COLLECTED_EVERY = (10_000, 50, 100)
"""How many new objects, and then how many smaller collections, there are until Python's next collection."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def memory_bytes() -> int:
    """Return how much memory there is, 0 where the system does not say."""
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
    """Return how many values a model may have for this machine to train it, by its memory."""
    return min(memory_bytes() // BYTES_A_PARAMETER, PARAMETERS_MAX) or PARAMETERS_MAX


def resident_bytes() -> int:
    """Return the memory that this process has in use, 0 where that is not told."""
    return field_bytes(Path("/proc/self/status"), "VmRSS:")


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: the machine's, or what its cgroup allows; 0 if not known."""
    limits = [memory_bytes(), *[group.limit_bytes for group in memory_groups(root)]]
    return min((limit for limit in limits if limit), default=0)


def half_of_memory_bytes() -> int:
    """Return half of the memory that this process may use: what building an unknown model gets; 0 if not known."""
    return memory_limit_bytes() // 2


def prepare_for_service() -> None:
    """Make this process one that runs for long and must never stand still: a hub's."""
    _collect_rarely()
    _keep_freed_memory()


def _collect_rarely() -> None:
    """Let the collector look at what lives now no more, and seldom at all objects: of 10,000 devices for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_EVERY)


def _keep_freed_memory() -> None:
    """Let this process keep up to `KEPT_BYTES` of freed memory in each heap; there is one for each of its threads.

    glibc would give it back, and every page of the next model would be a fault. Other allocators are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES_MAX)
