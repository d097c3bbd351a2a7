"""What the hub decides about devices in virtual time: honest ones count, and spoilt ones are named."""

from dataclasses import replace

import pytest

from benchmarks import fairness_fleets
from benchmarks.judgement import ALIKE, FLEETS, NAMED_WITHIN, SHORTENED_MAX, WEIGHT_MIN, Run, measure
from benchmarks.judgement_fleet import FAULTS, FLIPPED, SPEEDS, Case

gate = pytest.mark.gate  # README's test command does not install seglearn, which has the smartwatch recordings


@pytest.mark.parametrize(
    "fleet",
    [pytest.param({"data": "smartwatch"}, marks=gate, id="smartwatch"), pytest.param({"alpha": 0.1}, id="digits")],
)
def test_honest_devices_count_though_one_is_ten_times_slower_and_knows_what_nobody_else_does(fleet):
    outcome = measure(Run(Case(1, speeds=SPEEDS, **fleet), 15.0))
    assert (outcome.refused, outcome.named) == (0.0, {})
    assert outcome.shortened <= SHORTENED_MAX
    assert outcome.weight >= WEIGHT_MIN


@gate
def test_those_who_come_late_are_where_the_others_were_at_first():
    late = FLEETS["smartwatch, one after the other"]
    outcome = measure(Run(replace(late, seed=6, speeds=SPEEDS), 30.0))
    assert (outcome.refused, outcome.named) == (0.0, {})
    assert outcome.weight >= 0.95


@gate
@pytest.mark.parametrize(
    ("fault", "spoilt"),
    [
        *((fault, (0,)) for fault in sorted(FAULTS.keys() - {FLIPPED})),
        ("labels off by one", (0, 1)),
        ("one class", (0, 1)),
    ],
)
def test_spoilt_devices_are_named_soon_and_nobody_else(fault, spoilt):
    outcome = measure(Run(Case(1, speeds=ALIKE, data="smartwatch", spoilt=dict.fromkeys(spoilt, fault)), 6.0))
    assert set(outcome.named) == {f"device-{number + 1}" for number in spoilt}
    assert max(outcome.named.values()) <= NAMED_WITHIN


@gate
def test_a_slow_device_is_not_named_while_the_model_has_seen_little_of_its_data():
    """A device of a person whom nobody else is like, which takes one step while the others take twelve."""
    outcome = fairness_fleets.measure(fairness_fleets.Case("smartwatch by person, two slow", 1, until_s=12.0))
    assert (outcome.refused, outcome.warned) == (0, {})
