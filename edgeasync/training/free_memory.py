"""Measures how much memory a process can still allocate within its limits."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class MemoryGroup(NamedTuple):
    """A cgroup with a memory limit, and the memory in use that cannot be reclaimed."""

    limit_bytes: int
    used_bytes: int


def free_bytes(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process can still allocate, or 0 if unknown."""
    free = [group.limit_bytes - group.used_bytes for group in memory_groups(root)]
    if (available := field_bytes(root / "proc/meminfo", "MemAvailable:")) > 0:
        free.append(available)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - field_bytes(root / "proc/self/status", "VmSize:"))
    return max(0, min(free, default=0))


def memory_groups(root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """Yield the cgroups that limit this process's memory: its own cgroup and all ancestors."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path:
            continue
        if not controllers:
            yield from _groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _groups(root / "sys/fs/cgroup/memory", path, *files)


def field_bytes(path: Path, name: str) -> int:
    """Return a field of a memory file in Linux's /proc in bytes, or 0 if the field is missing."""
    try:
        text = path.read_text(encoding="ascii")
        return int(text.partition(name)[2].split(None, 1)[0]) << 10
    except (OSError, ValueError, IndexError):
        return 0


def _groups(mount: Path, path: str, limit: str, usage: str, cached: str) -> Iterator[MemoryGroup]:
    group = PurePosixPath(path)
    for each in (group, *group.parents):
        folder = mount / str(each).lstrip("/")
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            limit_bytes = int((folder / limit).read_text(encoding="ascii"))
            used_bytes = 0
            with contextlib.suppress(OSError, ValueError):
                used_bytes = int((folder / usage).read_text(encoding="ascii"))
                used_bytes -= _statistic(folder / "memory.stat", cached)
            yield MemoryGroup(limit_bytes, max(0, used_bytes))


def _statistic(path: Path, name: str) -> int:
    """Return a value from `memory.stat`, such as the page cache that the kernel can reclaim."""
    for line in path.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
