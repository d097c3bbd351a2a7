"""What a process uses, as seen from outside."""

import psutil


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time that a process has used, in all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(pid: int | None) -> int:
    """Return the memory that a process has in use, shared pages included."""
    return int(psutil.Process(pid).memory_info().rss)
