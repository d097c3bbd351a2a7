"""Readings of a machine, below a folder that looks like one."""

import pytest

from edgeasync.host.readings import (
    Memory,
    Mount,
    Power,
    Pressure,
    Readings,
    Zone,
    find_mount,
    parse_cpuinfo,
    parse_pressure,
    parse_throttled,
)
from tests.support.boards.machine import write

MOUNTS = """\
/dev/root / ext4 rw,noatime 0 0
tmpfs /run tmpfs rw,nosuid 0 0
/dev/sda1 /mnt/my\\040disk vfat ro,relatime 0 0
/dev/sda2 /mnt/my ext4 rw 0 0
broken
"""


def test_a_machine_that_tells_nothing(tmp_path):
    readings = Readings(tmp_path)
    assert (readings.board(), readings.serial(), readings.mark()) == ("", "", "")
    assert readings.zones() == ()
    assert readings.processor().features == frozenset()
    nothing = [readings.throttled(), readings.power(), readings.memory(), readings.pressure("memory")]
    assert [*nothing, readings.clock_synchronized(), readings.mount(tmp_path)] == [None] * 6


def test_a_board(tmp_path):
    write(
        tmp_path,
        {
            "sys/firmware/devicetree/base/model": "Raspberry Pi 5 Model B Rev 1.0\0",
            "sys/firmware/devicetree/base/serial-number": "10000000abcdef01\0",
            "etc/machine-id": "of the card\n",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": "81250\n",
            "sys/class/thermal/thermal_zone1/temp": "-274000\n",
            "sys/class/thermal/thermal_zone2/temp": "",
            "sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n",
        },
    )
    readings = Readings(tmp_path)
    assert readings.board() == "Raspberry Pi 5 Model B Rev 1.0"
    assert readings.zones() == (Zone("cpu-thermal", 81.25),)
    assert readings.throttled()[0] == "under-voltage now"
    assert len(readings.throttled()) == 4
    assert readings.serial() == "10000000abcdef01"  # not the card's: a copy of it is in another board
    assert len(readings.mark()) == 16


BATTERY = {"type": "Battery", "capacity": "37", "status": "Discharging"}
UNPLUGGED, PLUGGED = {"type": "USB", "online": "0"}, {"type": "USB", "online": "1"}


@pytest.mark.parametrize(
    ("supplies", "power"),
    [
        ({"BAT0": BATTERY}, Power(None, 0.37, discharging=True)),
        ({"AC": {"type": "Mains", "online": "1"}}, Power(mains=True, battery=None)),
        ({"a": UNPLUGGED, "b": BATTERY}, Power(mains=False, battery=0.37, discharging=True)),
        ({"a": UNPLUGGED, "b": PLUGGED}, Power(mains=True, battery=None)),
        ({"mouse": {"type": "Battery", "capacity": "3", "scope": "Device"}}, None),
        ({"BAT0": {"type": "Battery", "capacity": "full"}}, None),
    ],
)  # fmt: skip
def test_what_a_machine_runs_on(tmp_path, supplies, power):
    files = {
        f"sys/class/power_supply/{name}/{key}": value for name, of in supplies.items() for key, value in of.items()
    }
    write(tmp_path, files)
    assert Readings(tmp_path).power() == power


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:   200 kB\n", Memory(1_024_000, 204_800)),
        ("MemTotal:  1000 kB\n", None),
    ],
)
def test_the_memory_of_a_machine(tmp_path, text, memory):
    write(tmp_path, {"proc/meminfo": text})
    assert Readings(tmp_path).memory() == memory


def test_the_clock_is_set_when_timesyncd_says_so(tmp_path):
    write(tmp_path, {"run/systemd/timesync/clock": ""})
    assert Readings(tmp_path).clock_synchronized() is False
    write(tmp_path, {"run/systemd/timesync/synchronized": ""})
    assert Readings(tmp_path).clock_synchronized() is True


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (parse_throttled, "0\n", ()),
        (parse_throttled, "0x50000", ("under-voltage since boot", "was throttled since boot")),
        (parse_throttled, "hot", None),
        (parse_pressure, "some avg10=12.50 avg60=0.00 avg300=0.00 total=7\n", Pressure(0.125, 0.0)),
        (
            parse_pressure,
            "some avg10=4.00 avg60=0 total=7\nfull avg10=1.00 avg60=0 total=7\n",
            Pressure(0.04, 0.01),
        ),
        (parse_pressure, "", None),
    ],
)
def test_what_a_file_says(parse, text, found):
    assert parse(text) == found


@pytest.mark.parametrize(
    ("text", "name", "feature"),
    [
        (
            "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd03\n\nModel\t\t: Raspberry Pi\n",
            "Raspberry Pi",
            "asimd",
        ),
        ("model name\t: An x86\nflags\t\t: sse avx2\n", "An x86", "avx2"),
    ],
)
def test_a_processor(text, name, feature):
    processor = parse_cpuinfo(text)
    assert processor.name == name
    assert feature in processor.features


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/var/lib", Mount("/", "ext4", read_only=False)),
        ("/mnt/my disk/state", Mount("/mnt/my disk", "vfat", read_only=True)),
        ("/mnt/my/state", Mount("/mnt/my", "ext4", read_only=False)),
        ("/running", Mount("/", "ext4", read_only=False)),
    ],
)
def test_the_file_system_of_a_path(tmp_path, path, mount):
    assert find_mount(MOUNTS, tmp_path.__class__(path)) == mount
    assert find_mount("", tmp_path) is None
