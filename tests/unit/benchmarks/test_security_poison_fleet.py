"""What the poison benchmark says of a run by whom the hub warned of."""

import pytest

from benchmarks.security_poison import is_warned
from benchmarks.security_poison_fleet import NEVER, Outcome

HOSTILE = ["x", "y"]


@pytest.mark.parametrize(
    ("warned", "hostile", "expected"),
    [
        ({}, [], (0, 0, True, True)),
        ({"y": 4, "x": 30}, HOSTILE, (0, 30, True, True)),
        ({"x": 4, "y": 31}, HOSTILE, (0, 31, True, False)),
        ({"x": 4, "y": 5, "a": 1}, HOSTILE, (1, 5, True, True)),
        ({"x": 4, "a": 1, "y": 5}, HOSTILE, (1, 5, False, False)),
        ({"x": 4}, HOSTILE, (0, NEVER, False, False)),
        ({"a": 1}, [], (1, 0, True, True)),
    ],
)
def test_the_hostile_are_warned_of_in_time_if_all_are_soon_and_first(warned, hostile, expected):
    outcome = Outcome.of(0.9, 0.0, 0, warned, hostile)
    assert (outcome.honest_warned, outcome.warned, outcome.first, is_warned(outcome)) == expected
