"""Read the machine's state from `/sys`, `/proc` and `/run`: board, temperature, power and memory.

A reading is `None`, or empty, if this machine does not provide it. Tests pass a different root
folder.
"""

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Literal

import msgspec

from edgeasync.training.free_memory import field_bytes

THROTTLED = {
    0: "under-voltage now",
    1: "frequency capped now",
    2: "throttled now",
    3: "at the soft limit of temperature now",
    16: "under-voltage since boot",
    17: "frequency was capped since boot",
    18: "was throttled since boot",
    19: "was at the soft limit of temperature since boot",
}
"""Meaning of the bits of a Raspberry Pi's `get_throttled`."""

PLAUSIBLE_C = (-40.0, 150.0)
"""Range of plausible temperatures in degrees Celsius. A value outside this range comes from a
broken sensor, or from a sensor that is not a thermometer.
"""

TEXT_BYTES_MAX = 1 << 20

Resource = Literal["cpu", "memory", "io"]


class Zone(msgspec.Struct, frozen=True):
    """A thermal zone and its temperature."""

    name: str
    celsius: float


class Power(msgspec.Struct, frozen=True):
    """The machine's power supply: whether mains power is connected, and the battery's charge (0 to 1)."""

    mains: bool | None
    battery: float | None
    discharging: bool = False


class Memory(msgspec.Struct, frozen=True):
    """Total memory, and memory that programs can allocate without swapping, in bytes."""

    total_bytes: int
    available_bytes: int


class Pressure(msgspec.Struct, frozen=True):
    """Fraction of the last ten seconds during which some, or all, tasks waited for a resource."""

    some: float
    full: float


class Processor(msgspec.Struct, frozen=True):
    """The processor's name, if available, and its instruction set extensions."""

    name: str
    features: frozenset[str]


class Mount(msgspec.Struct, frozen=True):
    """The file system that contains a path."""

    point: str
    kind: str
    read_only: bool


class Readings:
    """Reads files below a root folder, without caching."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def board(self) -> str:
        """Return the model name of the board or machine, or an empty text if unknown."""
        return self._first_text(
            "sys/firmware/devicetree/base/model", "proc/device-tree/model", "sys/class/dmi/id/product_name"
        )

    def serial(self) -> str:
        """Return a serial number that differs even between boards whose SD cards are copies.

        Returns an empty text if it is unknown.
        """
        return self._first_text(
            "sys/firmware/devicetree/base/serial-number",
            "proc/device-tree/serial-number",
            "sys/class/dmi/id/product_uuid",
            "etc/machine-id",
        )

    def mark(self) -> str:
        """Return 16 hexadecimal digits that identify this machine, or an empty text if unknown."""
        serial = self.serial()
        return hashlib.sha256(b"edgeasync " + serial.encode()).hexdigest()[:16] if serial else ""

    def zones(self) -> tuple[Zone, ...]:
        """Return the thermal zones that report a plausible temperature in degrees Celsius."""
        found = []
        for folder in self._folders("sys/class/thermal", "thermal_zone*"):
            millidegrees = parse_int(self._text(folder / "temp"))
            if millidegrees is not None and PLAUSIBLE_C[0] <= millidegrees / 1000 <= PLAUSIBLE_C[1]:
                found.append(Zone(self._text(folder / "type").strip() or folder.name, millidegrees / 1000))
        return tuple(found)

    def throttled(self) -> tuple[str, ...] | None:
        """Return why a Raspberry Pi has been throttled since boot, or is now; `None` on another board."""
        for path in ("sys/devices/platform/soc/soc:firmware/get_throttled", "sys/firmware/get_throttled"):
            if text := self._text(path).strip():
                return parse_throttled(text)
        return None

    def power(self) -> Power | None:
        """Return the power supply, or `None` if neither a battery nor a mains supply is reported."""
        mains, battery, discharging = None, None, False
        for folder in self._folders("sys/class/power_supply", "*"):
            kind = self._text(folder / "type").strip()
            # Ignore the batteries of mice and keyboards.
            if kind == "Battery" and self._text(folder / "scope").strip() != "Device":
                percent = parse_int(self._text(folder / "capacity"))
                if percent is not None and 0 <= percent <= 100:
                    battery = min(percent / 100, 1.0 if battery is None else battery)
                discharging = discharging or self._text(folder / "status").strip() == "Discharging"
            elif kind in ("Mains", "USB") and (online := parse_int(self._text(folder / "online"))) is not None:
                mains = bool(mains) or online > 0
        return None if mains is None and battery is None else Power(mains, battery, discharging)

    def memory(self) -> Memory | None:
        """Return the machine's memory. A cgroup may limit this process to less."""
        total, available = [
            field_bytes(self._path("proc/meminfo"), name) for name in ("MemTotal:", "MemAvailable:")
        ]
        return Memory(total, available) if total and available else None

    def pressure(self, resource: Resource) -> Pressure | None:
        """Return how long tasks wait for a resource, or `None` if the kernel does not measure this."""
        return parse_pressure(self._text(f"proc/pressure/{resource}"))

    def metered(self) -> bool | None:
        """Return whether the default route uses a mobile modem, or `None` without a default route."""
        for line in self._text("proc/net/route").splitlines()[1:]:
            words = line.split()
            if len(words) > 7 and words[1] == words[7] == "00000000" and "/" not in words[0]:
                return "DEVTYPE=wwan" in self._text(f"sys/class/net/{words[0]}/uevent").split()
        return None

    def processor(self) -> Processor:
        """Return the processor's name and features."""
        return parse_cpuinfo(self._text("proc/cpuinfo"))

    def clock_synchronized(self) -> bool | None:
        """Return whether systemd-timesyncd has set the clock since boot; `None` if it is not running."""
        if not self._path("run/systemd/timesync").is_dir():
            return None
        return self._path("run/systemd/timesync/synchronized").exists()

    def mount(self, path: Path) -> Mount | None:
        """Return the file system that contains an absolute path."""
        return find_mount(self._text("proc/self/mounts"), path)

    def _path(self, path: Path | str) -> Path:
        return self._root / path

    def _text(self, path: Path | str) -> str:
        """Return the beginning of a file, or an empty text if it cannot be read.

        Sensors may disappear at any time.
        """
        with contextlib.suppress(OSError, ValueError), self._path(path).open("rb") as file:
            return file.read(TEXT_BYTES_MAX).decode(errors="replace")
        return ""

    def _first_text(self, *paths: str) -> str:
        """Return the text of the first of several files that is not empty."""
        return next((text for path in paths if (text := self._text(path).strip("\0 \n"))), "")

    def _folders(self, path: str, pattern: str) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(self._path(path).glob(pattern))
        return []


def parse_int(text: str) -> int | None:
    """Parse an integer; return `None` if the text is not an integer of up to 18 digits."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}\s*", text, re.ASCII) else None


def parse_throttled(text: str) -> tuple[str, ...] | None:
    """Return the throttling reasons in a hexadecimal bit mask, or `None` if it is invalid."""
    with contextlib.suppress(ValueError):
        flags = int(text, 16)
        return tuple([reason for bit, reason in THROTTLED.items() if flags >> bit & 1])
    return None


def parse_pressure(text: str) -> Pressure | None:
    """Parse a file of `/proc/pressure`. Older kernels do not report `full` for the processor."""
    found = dict(re.findall(r"^(some|full) avg10=([0-9]+(?:\.[0-9]+)?) ", text, re.MULTILINE))
    return Pressure(float(found["some"]) / 100, float(found.get("full", 0)) / 100) if "some" in found else None


def parse_cpuinfo(text: str) -> Processor:
    """Parse `/proc/cpuinfo` of an x86 or ARM processor."""
    names = re.findall(r"^(?:model name|Model|Hardware)\s*: (.+)$", text, re.MULTILINE)
    features = re.findall(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return Processor(names[0].strip() if names else "", frozenset(features[0].split() if features else ()))


def find_mount(mounts: str, path: Path) -> Mount | None:
    """Return the entry of `/proc/self/mounts` with the longest mount point that contains a path.

    If several entries have the same mount point, the last one is returned.
    """
    best: Mount | None = None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 4:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), words[1])
        longer = best is None or len(point) >= len(best.point)
        if longer and path.is_relative_to(point):
            best = Mount(point, words[2], "ro" in words[3].split(","))
    return best
