"""The governor: what sensors tell, and how fast the device trains for that."""

import math

import pytest

from edgeasync.core.device.throttle import HOLD_S, Pace, Throttle, ThrottleReadings, ThrottleSection

HOT = ThrottleSection(temperature_c_max=80.0, temperature_c_slow=75.0)
FULL = Pace(1.0, "")


def paces(limits, *told):
    """Return the pace after each of the readings, `HOLD_S` apart."""
    throttle, found = Throttle(limits), []
    for number, readings in enumerate(told):
        throttle.observe(readings, number * HOLD_S)
        found.append((throttle.pace.share, throttle.pace.reason))
    return found


def degrees(*values):
    return [ThrottleReadings(temperature_c=value) for value in values]


def test_a_device_pauses_while_it_is_hot_and_slows_down_while_it_is_warm():
    assert paces(HOT, *degrees(74.9, 75.0, 79.9, 80.0, 85.0, 75.0, 74.9, 70.0, 69.9)) == [
        (1.0, ""), (0.5, "75 C"), (0.5, "80 C"), (0.0, "80 C"), (0.0, "85 C"), (0.0, "75 C"),
        (0.5, "75 C"), (0.5, "70 C"), (1.0, ""),
    ]  # fmt: skip


MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "reading", "values", "reason"),
    [
        ({"only_on_mains": True}, "on_mains", [False, True], "on battery"),
        ({"battery_min": 0.3}, "battery", [0.29, 0.34, 0.36], "battery at 29%"),
        ({"memory_free_bytes_min": 64 * MIB}, "memory_free_bytes", [50 * MIB, 79 * MIB, 81 * MIB],
         "50 MiB of memory free"),
        ({"memory_free_bytes_min": 1}, "memory_pressure", [0.1, 0.06, 0.04], "short of memory"),
        ({"only_unmetered": True}, "metered", [True, False], "metered link"),
        ({"quiet_hours": "22:00-07:00"}, "minute", [1320, 419, 420], "quiet hours"),
        ({"quiet_hours": "01:00-02:00"}, "minute", [60, 119, 120], "quiet hours"),
    ],
)  # fmt: skip
def test_each_limit_pauses_the_device_until_it_is_kept_for_sure(limit, reading, values, reason):
    told = [ThrottleReadings(**{reading: value}) for value in [values[-1], *values]]
    found = paces(ThrottleSection(**limit), *told)
    assert found[0] == found[-1] == (1.0, "")
    assert found[1] == (0.0, reason)
    assert all(share == 0.0 for share, _ in found[1:-1])
    assert paces(None, told[1]) == [(1.0, "")], "without the limit nothing is wrong"


def test_what_no_sensor_tells_holds_nothing_up():
    limits = ThrottleSection(
        only_on_mains=True, only_unmetered=True, battery_min=0.5, memory_free_bytes_min=1 << 30,
        quiet_hours="00:00-23:59",
    )  # fmt: skip
    odd = ThrottleReadings(temperature_c=math.nan, battery=math.nan, memory_pressure=7.0)
    assert paces(limits, ThrottleReadings(), odd, ThrottleReadings(temperature_c=1000.0)) == [(1.0, "")] * 3


def test_a_throttled_board_is_slowed_unless_its_heat_is_of_no_interest():
    assert paces(HOT, ThrottleReadings(throttled="throttled")) == [(0.5, "throttled")]
    assert paces(None, ThrottleReadings(throttled="throttled")) == [(1.0, "")]


def test_a_share_of_the_processor_holds_at_once_and_a_warm_device_takes_half_of_it():
    limits = ThrottleSection(temperature_c_slow=75.0, cpu_share=0.4)
    assert Throttle(limits).pace == Pace(0.4)
    assert paces(limits, *degrees(60.0, 76.0)) == [(0.4, ""), (0.2, "76 C")]


def test_a_pause_holds_for_a_while_though_its_cause_is_over():
    throttle = Throttle(ThrottleSection(only_on_mains=True))
    at = [(0.0, False), (1.0, True), (HOLD_S - 0.1, True), (HOLD_S, True)]
    changed = [throttle.observe(ThrottleReadings(on_mains=mains), now_s) for now_s, mains in at]
    assert changed == [True, False, False, True]
    assert throttle.pace == FULL
