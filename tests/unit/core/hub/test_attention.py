"""Who needs attention: planted faults in fleets of 3, 30 and 3,000 devices."""

from typing import get_args

import pytest

from edgeasync.core.hub.attention import duration, find_attention
from edgeasync.protocol.feed import Reason
from edgeasync.protocol.status import Quarantine
from tests.support.parts.statuses import alarm, device, status

FAULTS = {
    "lost": {"state": "lost", "last_seen_s": 200.0},
    "quarantined": {"state": "quarantined", "quarantine": Quarantine("an operator's order", "by release")},
    "warned": {},
    "stuck": {"state": "joining", "stalled_s": 100.0, "examples_per_s": 0.0},
    "hot": {"state": "paused", "pace_percent": 0, "pace_reason": "81 C"},
    "paused": {"state": "paused", "pace_percent": 0, "pace_reason": "quiet hours"},
    "rejected": {"updates_rejected": {"stale": 10}},
    "clipped": {"weight_kept": 0.25},
    "slowed": {"pace_percent": 50, "pace_reason": "low voltage"},
    "slow_link": {"talk_s": 4.0, "talk_share": 0.8},
    "slow": {"examples_per_s": 5.0},
}
WORDS = {
    "lost": "lost, last seen 3.3 min ago",
    "quarantined": "quarantined: an operator's order; ends by release",
    "warned": "warned for 90 s: labels",
    "stuck": "joining for 100 s without a local step: read its agent's log",
    "hot": "hot (81 C), so it is paused",
    "paused": "paused: quiet hours",
    "rejected": "10 of 20 updates rejected: 10 stale",
    "clipped": "its updates were clipped to 25% of their length",
    "slowed": "trains at 50 % of the time: low voltage",
    "slow_link": "slow link: an exchange takes 4 s, 20 times the median",
    "slow": "slow: 5 examples/s, the median is 20 times that",
    "refused": "refused: another model",
    "never_came": "its key may join, but it has not connected in this run",
}


def fleet(healthy, faults=(), **changes):
    """Return the status of a fleet, its devices named after their faults."""
    alarms = [alarm("warned", "labels")] if "warned" in faults else []
    unseen = ["never_came"] if "never_came" in faults else []
    refused = {"refused": "another model"} if "refused" in faults else {}
    devices = [device(f"pi-{number}") for number in range(healthy)]
    devices += [device(name, **FAULTS[name]) for name in faults if name in FAULTS]
    return status(devices, alarms=alarms, enrolled_unseen=unseen, refused=refused, **changes)


@pytest.mark.parametrize("healthy", [3, 30, 3000])
def test_a_healthy_fleet_needs_none(healthy):
    assert find_attention(fleet(healthy)) == []


@pytest.mark.parametrize("healthy", [30, 3000])
def test_every_fault_is_found_the_most_urgent_first(healthy):
    order = get_args(Reason)
    found = find_attention(fleet(healthy, order[::-1]))
    assert [(one.device, one.reason) for one in found] == [(reason, reason) for reason in order]
    assert {one.device: one.words for one in found} == WORDS


@pytest.mark.parametrize("fault", [*FAULTS, "refused", "never_came"])
def test_a_fleet_of_three_has_its_faults_found_too(fault):
    (found,) = find_attention(fleet(3, [fault]))
    assert (found.device, found.reason, found.words) == (fault, fault, WORDS[fault])


def test_a_device_that_slows_down_because_it_is_hot_is_called_hot():
    (found,) = find_attention(status([device("warm", pace_percent=50, pace_reason="76 C")]))
    assert (found.reason, found.words) == ("hot", "hot (76 C), so it trains at 50 % of the time")


def test_a_device_has_one_line_with_all_its_reasons():
    both = device("both", **FAULTS["slow"] | FAULTS["slowed"])
    (found,) = find_attention(status([*fleet(3).devices, both]))
    assert found.reason == "slowed"
    assert found.words == f"{WORDS['slowed']}; {WORDS['slow']}"


def test_the_worst_of_a_kind_is_first():
    slow = [device(f"slow-{times}", examples_per_s=100.0 / times) for times in (8, 50, 20)]
    found = find_attention(status([*fleet(5).devices, *slow]))
    assert [one.device for one in found] == ["slow-50", "slow-20", "slow-8"]


def test_a_warning_about_long_updates_does_not_mention_that_they_are_clipped():
    (found,) = find_attention(status([device("pi", weight_kept=0.1)], alarms=[alarm("pi", "long")]))
    assert found.words == "warned for 90 s: long"


@pytest.mark.parametrize(
    "changes", [{"talk_s": 4.0}, {"talk_share": 0.8}, {"examples_per_s": 30.0}, {"weight_kept": 0.84}]
)
def test_what_costs_little_is_not_named(changes):
    """For example, a slow link matters little to a device that rarely communicates."""
    assert find_attention(status([*fleet(3).devices, device("pi", **changes)])) == []


def test_two_devices_are_not_compared():
    assert find_attention(fleet(1, ["slow"])) == []


def test_a_trainer_that_hangs_is_stuck_and_a_device_that_left_is_not_slow():
    hangs = device("hangs", state="paused", stalled_s=400.0)
    left = device("left", state="left", **FAULTS["slow"])
    failed = device("failed", state="left", pushes_answered=0, last_seen_s=90.0)
    found, other = find_attention(status([*fleet(3).devices, hangs, left, failed]))
    assert (other.device, other.words) == ("failed", "left without an update: read its agent's log")
    assert (found.device, found.reason) == ("hangs", "stuck")
    assert found.words == "no local step for 6.7 min: its trainer hangs, or the board is overloaded"


def test_durations():
    assert [duration(seconds) for seconds in (5.48, 90.9, 599.0, 600.0, 7200.0, 900_000.0)] == [
        "5.5 s",
        "91 s",
        "10 min",
        "10 min",
        "2 h",
        "10 days",
    ]
