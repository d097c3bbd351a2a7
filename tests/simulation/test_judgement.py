"""What the hub decides about devices in virtual time: honest ones count, and spoilt ones are warned of."""

from dataclasses import replace

import pytest

from benchmarks import fairness, security_poison_fleet
from benchmarks.fairness import FLEETS, SHARED, SHORTENED_MAX, WEIGHT_MIN
from benchmarks.security_poison import WARNED_WITHIN
from benchmarks.security_poison_fleet import FAULTS, FLIPPED, POLICIES, SMARTWATCH, Case

ONE_AFTER_THE_OTHER = {number: 2.0 * number for number in range(10)}

gate = pytest.mark.gate  # README's test command does not install seglearn, which has the smartwatch recordings


@pytest.mark.parametrize(
    ("fleet", "weight_min"),
    [
        pytest.param(FLEETS[SHARED], WEIGHT_MIN, marks=gate, id="smartwatch"),
        pytest.param(replace(FLEETS[SHARED], killed=True), WEIGHT_MIN, marks=gate, id="hub killed"),
        pytest.param(replace(FLEETS[SHARED], late=ONE_AFTER_THE_OTHER), 0.95, marks=gate, id="late"),
        pytest.param(replace(FLEETS[SHARED], data="Dirichlet 0.1"), WEIGHT_MIN, id="digits"),
    ],
)
def test_honest_devices_count_though_one_is_ten_times_slower_and_knows_what_nobody_else_does(
    fleet, weight_min, monkeypatch
):
    monkeypatch.setitem(FLEETS, "this one", fleet)
    outcome = fairness.measure(fairness.Case("this one", 1, until_s=15.0))
    assert (outcome.refused, outcome.warned) == (0, {})
    assert outcome.shortened <= SHORTENED_MAX
    assert min(outcome.weights) >= weight_min


@gate
@pytest.mark.parametrize(
    ("fault", "bad"),
    [*((fault, 1) for fault in sorted(FAULTS.keys() - {FLIPPED})), ("labels off by one", 2), ("one class", 2)],
)
def test_a_spoilt_device_is_warned_of_soon_and_nobody_else(fault, bad):
    outcome = security_poison_fleet.measure(
        Case(POLICIES["admitted"], 1, fault, data=SMARTWATCH, bad=bad, updates=300)
    )
    assert outcome.warned <= WARNED_WITHIN
    assert outcome.honest_warned == 0


@gate
def test_a_slow_device_is_not_named_while_the_model_has_seen_little_of_its_data():
    """A device of a person whom nobody else is like, which takes one step while the others take twelve."""
    outcome = fairness.measure(fairness.Case("smartwatch by person, two slow", 1, until_s=12.0))
    assert (outcome.refused, outcome.warned) == (0, {})
