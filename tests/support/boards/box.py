"""Boxes of a share of a core and so much memory, by cgroups of either version: what a small board has."""

import contextlib
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PERIOD_US = 20_000

ENTER = """
import os
for file in {files!r}:
    open(file, "w").write(str(os.getpid()))
"""


class Box:
    """A box; raises `OSError` where this process may make none."""

    def __init__(self, name, *, cpu_percent, memory_bytes):
        quota_us = PERIOD_US * cpu_percent // 100
        if (MOUNT / "cgroup.controllers").exists():
            with contextlib.suppress(OSError):
                (MOUNT / "cgroup.subtree_control").write_text("+cpu +memory")
            self._memory = MOUNT / name
            limits = {self._memory: {"cpu.max": f"{quota_us} {PERIOD_US}", "memory.max": memory_bytes}}
            self._peak, self._events = "memory.peak", "memory.events"
        else:
            self._memory = MOUNT / "memory" / name
            cpu = {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota_us}
            limits = {self._memory: {"memory.limit_in_bytes": memory_bytes}, MOUNT / "cpu" / name: cpu}
            self._peak, self._events = "memory.max_usage_in_bytes", "memory.oom_control"
        self._folders = list(limits)
        for folder, values in limits.items():
            folder.mkdir(exist_ok=True)
            for file, value in values.items():
                (folder / file).write_text(str(value))

    @property
    def enter(self):
        """Python by which a process enters the box, before it does anything else."""
        return ENTER.format(files=[str(folder / "cgroup.procs") for folder in self._folders])

    @property
    def peak_bytes(self):
        """The most memory that was in use in the box at a time, files that were read included."""
        return int((self._memory / self._peak).read_text())

    @property
    def kills(self):
        """How many processes were killed for want of memory."""
        events = dict(line.split() for line in (self._memory / self._events).read_text().splitlines())
        return int(events["oom_kill"])

    def close(self):
        """Remove the box; what ran in it must have ended."""
        for folder in self._folders:
            folder.rmdir()
