from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.schedules import CosineSchedule
from edgeasync.policies.transforms import Conditions

COUNTS = st.integers(0, 2**62)
SCHEDULES = st.builds(CosineSchedule, updates=st.integers(1, 10**9))


def factor(schedule, count):
    """Return the factor of an update, whatever the norm and the staleness."""
    scalars = schedule.plan(Conditions(3.0, count, 0.7))
    assert scalars == schedule.plan(Conditions(0.0, count))
    assert schedule.factor(scalars) == scalars[0]
    return scalars[0]


@pytest.mark.parametrize(
    ("updates", "factors"),
    [(4, [1.0, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2, 0.0, 0.0]), (1, [1.0, 0.0, 0.0])],
)
def test_factors_by_hand(updates, factors):
    schedule = CosineSchedule(updates=updates)
    assert [factor(schedule, count) for count in range(len(factors))] == pytest.approx(factors, abs=1e-15)


@given(SCHEDULES, COUNTS, COUNTS)
def test_a_factor_only_falls_from_1_to_0(schedule, one, other):
    one, other = sorted((one, other))
    assert 0.0 <= factor(schedule, other) <= factor(schedule, one) <= factor(schedule, 0) == 1.0
