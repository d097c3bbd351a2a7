"""What a device's governor is told by the files of a machine, whatever is in them."""

import time

import pytest

from edgeasync.core.device.throttle import ThrottleReadings
from edgeasync.host.sensing import make_sense
from tests.support.boards.fake_sys import ZONE, FakeSys

NOON = time.struct_time((2026, 5, 1, 12, 30, 0, 4, 121, 0))
NEVER_SET = time.struct_time((1970, 1, 1, 12, 30, 0, 3, 1, 0))


@pytest.fixture
def fake(tmp_path):
    return FakeSys(tmp_path)


def told(fake, local=NOON):
    return make_sense(fake.root, lambda: local)()


def test_a_board_without_a_battery_tells_its_heat_its_memory_and_the_time(fake):
    fake.heat(61.25)
    assert told(fake) == ThrottleReadings(
        temperature_c=61.25, memory_free_bytes=400 << 20, memory_pressure=0.0, minute=12 * 60 + 30
    )


def test_a_clock_that_was_never_set_tells_no_time(fake):
    assert told(fake, NEVER_SET).minute is None


def test_power_throttling_and_the_way_out(fake):
    fake.power(mains=False, percent=42)
    fake.throttle(0x50004)
    fake.way_out("wwan0", "wwan")
    found = told(fake)
    assert (found.on_mains, found.battery, found.throttled, found.metered) == (False, 0.42, "throttled", True)
    fake.power(mains=True)
    fake.throttle(0x50000)  # since boot, and no more
    fake.way_out("eth0")
    found = told(fake)
    assert (found.on_mains, found.battery, found.throttled, found.metered) == (True, 1.0, "", False)


def test_the_hottest_zone_counts_but_none_that_always_tells_the_same(fake):
    for number, (name, millidegrees) in enumerate(
        [("CPU-therm", 70_000), ("GPU-therm", 72_500), ("PMIC-Die", 100_000), ("broken", -273_000)]
    ):
        fake.write(f"{ZONE[:-1]}{number}/type", name)
        fake.write(f"{ZONE[:-1]}{number}/temp", str(millidegrees))
    assert told(fake).temperature_c == 72.5


@pytest.mark.parametrize(
    "content", ["", "nan", "\x00\x1b[2J", "9" * 400, "-1", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_files_that_say_nonsense_are_no_readings(fake, content):
    text = content if isinstance(content, str) else content.decode("latin-1")
    for path in (
        f"{ZONE}/temp", "proc/meminfo", "proc/pressure/memory", "proc/net/route", "proc/self/cgroup",
        "sys/class/power_supply/BAT0/capacity", "sys/devices/platform/soc/soc:firmware/get_throttled",
    ):  # fmt: skip
        fake.write(path, text)
    fake.write("sys/class/power_supply/BAT0/type", "Battery")
    found = told(fake)
    assert found.temperature_c in (None, -0.001)
    assert (found.on_mains, found.battery, found.memory_free_bytes, found.metered) == (None, None, None, None)
