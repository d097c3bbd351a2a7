"""What a process uses, as seen from outside."""

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
