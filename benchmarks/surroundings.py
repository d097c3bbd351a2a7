"""What a benchmark ran on: commit, machine, versions, load and disk.

It contains no names of hosts, users or folders. What a system does not report is omitted or
`unknown`.
"""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import zmq

ROOT = Path(__file__).parents[1]

NOT_MEASURED = ("benchmarks/results", "docs")
"""Paths whose changes leave a commit clean, because `run` and `plot` write there."""

LOOK_S = 1.0
"""How long `load` measures the cores."""

DISKS = {"nvme": "NVMe", "mmcblk": "SD card or eMMC", "vd": "virtual disk", "xvd": "virtual disk"}
"""Kinds of disks by the prefix of a device's name. Other disks are told apart by rotation."""


def commit() -> str:
    """Return the checked-out commit, with `-dirty` appended if code differs from it."""
    changed = ["status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in NOT_MEASURED)]
    try:
        return _git("rev-parse", "--short", "HEAD") + "-dirty" * bool(_git(*changed))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> dict[str, str | int]:
    """Describe the hardware and the system."""
    release = ".".join(platform.release().split(".")[:2])
    found: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {release} {platform.machine()}",
    }
    return found | gpu()


def gpu() -> dict[str, str | int]:
    """Return the first NVIDIA GPU's name from its driver; nothing without one."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20.0).stdout
    except (OSError, subprocess.SubprocessError):
        return {"gpu": "NVIDIA GPU of unknown name"} if Path("/dev/nvidia0").exists() else {}
    name, _, driver = next(iter(told.strip().splitlines()), "").partition(",")
    return {"gpu": f"{name.strip()}, driver {driver.strip()}"} if name.strip() else {}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the figures."""
    packages = ("edgeasync", "jax", "numpy", "onnxruntime", "pyzmq", "torch")
    found = {"python": platform.python_version(), "libzmq": zmq.zmq_version()}
    return found | {package: _version_of(package) for package in packages}


def load() -> dict[str, float]:
    """Return how many cores are busy now, and the load average of the last minute.

    The load average falls more slowly.
    """
    busy = psutil.cpu_percent(LOOK_S) / 100.0 * (os.cpu_count() or 1)
    return {"cores busy": round(busy, 2), "average": round(os.getloadavg()[0], 2)}


def disk(folder: str) -> dict[str, str]:
    """Describe the disk of a folder: file system and kind."""
    device = Path(folder).stat().st_dev
    return describe_disk(f"{os.major(device)}:{os.minor(device)}", Path("/"))


def describe_disk(device: str, root: Path) -> dict[str, str]:
    """Describe a disk by its major and minor number; `root` contains `proc` and `sys`."""
    system = "unknown"
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text("utf-8").splitlines():
            if line.split()[2] == device:
                system = line.partition(" - ")[2].split()[0]
    kind = "memory" if system == "tmpfs" else _kind(root / "sys/dev/block" / device)
    return {"file system": system, "kind": kind}


def _kind(block: Path) -> str:
    """Return the kind of a block device; for a partition, that of its disk."""
    if not block.exists():
        return "unknown"
    place = block.resolve()
    whole = place.parent if (place / "partition").exists() else place
    for letters, kind in DISKS.items():
        if whole.name.startswith(letters):
            return kind
    with suppress(OSError):
        return "hard disk" if (whole / "queue/rotational").read_text("ascii").strip() == "1" else "SSD"
    return "unknown"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
