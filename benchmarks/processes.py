"""What a process uses, as seen from outside."""

from dataclasses import dataclass
from pathlib import Path

import psutil


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time that a process has used, in all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(pid: int | None) -> int:
    """Return the memory that a process has in use, shared pages included."""
    return int(psutil.Process(pid).memory_info().rss)


def peak_resident_bytes(pid: int | None) -> int:
    """Return the most memory that a process ever had in use, shared pages included; on Linux alone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(kilobytes)


@dataclass(frozen=True)
class Used:
    """What a process uses at a moment; `written_bytes` is what it has had written to disks since its start."""

    resident_bytes: int
    descriptors: int
    threads: int
    written_bytes: int


def used_by(pid: int) -> Used:
    """Look at a process; on Linux alone."""
    process = psutil.Process(pid)
    with process.oneshot():
        return Used(
            int(process.memory_info().rss),
            int(process.num_fds()),
            int(process.num_threads()),
            int(process.io_counters().write_bytes),
        )
