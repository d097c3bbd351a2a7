"""A root folder with the files by which a machine tells of its sensors, to be changed at will."""

from pathlib import Path

ZONE = "sys/class/thermal/thermal_zone0"
MAINS, BATTERY = "sys/class/power_supply/AC", "sys/class/power_supply/BAT0"
MODEL = "sys/firmware/devicetree/base/model"


class FakeSys:
    """Writes what sensors tell; `root` is what an agent is given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.heat(50.0)
        self.memory(400 << 20)

    def write(self, path: str, text: str) -> None:
        """Write a file, as a kernel does: at once."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name("fresh")
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(file)

    def heat(self, celsius: float) -> None:
        """Let the processor have this temperature."""
        self.write(f"{ZONE}/type", "cpu-thermal\n")
        self.write(f"{ZONE}/temp", f"{1000 * celsius:.0f}\n")

    def power(self, *, mains: bool, percent: int = 100) -> None:
        """Let there be a battery, and mains beside it."""
        self.write(f"{MAINS}/type", "Mains\n")
        self.write(f"{MAINS}/online", f"{mains:d}\n")
        self.write(f"{BATTERY}/type", "Battery\n")
        self.write(f"{BATTERY}/capacity", f"{percent}\n")
        self.write(f"{BATTERY}/status", "Charging\n" if mains else "Discharging\n")

    def memory(self, free_bytes: int, pressure: float = 0.0) -> None:
        """Let this much memory be free, and programs wait for it for this share of the time."""
        total_kib = max(512 << 10, free_bytes >> 10)
        self.write("proc/meminfo", f"MemTotal: {total_kib:8} kB\nMemAvailable: {free_bytes >> 10:8} kB\n")
        full = f"full avg10={100 * pressure:.2f} avg60=0.00 avg300=0.00 total=0\n"
        self.write("proc/pressure/memory", full.replace("full", "some") + full)

    def way_out(self, interface: str, kind: str = "") -> None:
        """Let the way to other networks be this interface."""
        header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        self.write("proc/net/route", f"{header}{interface} 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\n")
        self.write(f"sys/class/net/{interface}/uevent", f"{f'DEVTYPE={kind}' if kind else ''}\nIFINDEX=2\n")

    def throttle(self, flags: int) -> None:
        """Let a Raspberry Pi's firmware say why it runs slower."""
        self.write("sys/devices/platform/soc/soc:firmware/get_throttled", f"{flags:x}\n")
