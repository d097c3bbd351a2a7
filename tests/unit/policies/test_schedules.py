from math import cos, pi, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.policies.schedules import CosineSchedule, ExponentialSchedule, InverseSqrtSchedule
from edgeasync.policies.transforms import Conditions

COUNTS = st.integers(0, 2**62)
LENGTHS = st.integers(1, 10**9)


def factor(schedule, count):
    """Return the factor of an update, whatever the norm and the staleness."""
    scalars = schedule.plan(Conditions(3.0, count, 0.7))
    assert scalars == schedule.plan(Conditions(0.0, count))
    assert schedule.factor(scalars) == scalars[0]
    return scalars[0]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (CosineSchedule(updates=4), [1.0, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2, 0.0, 0.0]),
        (CosineSchedule(updates=2, final=0.2), [1.0, 0.6, 0.2, 0.2]),
        (CosineSchedule(updates=5, warm_up=3), [0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.0]),
        (CosineSchedule(updates=1), [1.0, 0.0, 0.0]),
        (CosineSchedule(updates=3, final=1.0), [1.0, 1.0, 1.0, 1.0]),
        (ExponentialSchedule(decay=0.5, every=2), [1.0, 1.0, 0.5, 0.5, 0.25]),
        (ExponentialSchedule(decay=0.1, every=1), [1.0, 0.1, 0.01]),
        (ExponentialSchedule(decay=1.0, every=1), [1.0, 1.0]),
        (InverseSqrtSchedule(warm_up=4), [0.25, 0.5, 0.75, 1.0, sqrt(4 / 5), sqrt(4 / 6)]),
        (InverseSqrtSchedule(warm_up=1), [1.0, sqrt(1 / 2), sqrt(1 / 3), 0.5]),
    ],
    ids=str,
)
def test_factors_by_hand(schedule, factors):
    assert [factor(schedule, count) for count in range(len(factors))] == pytest.approx(factors, abs=1e-15)


def test_cosine_far_along():
    schedule = CosineSchedule(updates=1_000_000, warm_up=1000, final=0.1)
    expected = 0.1 + 0.9 * (1 + cos(pi * 0.25)) / 2
    assert factor(schedule, 1000 + 999_000 // 4) == pytest.approx(expected, rel=1e-12)
    assert factor(schedule, 10**18) == pytest.approx(0.1, rel=1e-12)


SCHEDULES = st.one_of(
    st.builds(
        lambda updates, share, final: CosineSchedule(updates=updates, warm_up=int(updates * share), final=final),
        LENGTHS,
        st.floats(0.0, 0.999),
        st.floats(0.0, 1.0),
    ),
    st.builds(ExponentialSchedule, decay=st.floats(0.0, 1.0, exclude_min=True), every=LENGTHS),
    st.builds(InverseSqrtSchedule, warm_up=LENGTHS),
)


@given(SCHEDULES, COUNTS, COUNTS)
def test_a_factor_is_from_0_to_1_rises_while_warming_up_and_then_only_falls(schedule, one, other):
    one, other = sorted((one, other))
    first, last = factor(schedule, one), factor(schedule, other)
    assert 0.0 <= last <= 1.0
    assert 0.0 <= first <= 1.0
    peak = {CosineSchedule: 0, InverseSqrtSchedule: -1}.get(type(schedule), 0) + getattr(schedule, "warm_up", 0)
    assert factor(schedule, peak) == 1.0
    if other <= peak:
        assert first <= last
    if one >= peak:
        assert first >= last


@given(SCHEDULES)
def test_the_first_update_is_never_wasted(schedule):
    assert factor(schedule, 0) > 0.0


def test_it_scales_in_place_and_keeps_no_state():
    schedule = ExponentialSchedule(decay=0.5, every=1)
    gradient = np.array([4.0, -2.0], np.float32)
    schedule.apply(gradient, np.zeros(2, np.float32), [], schedule.plan(Conditions(1.0, 2)))
    assert gradient.tolist() == [1.0, -0.5]
    assert schedule.state_vectors == 0


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ({"kind": "cosine"}, CosineSchedule, "missing key `updates`"),
        ({"kind": "cosine", "updates": 0}, CosineSchedule, "updates: expected `int` >= 1"),
        ({"kind": "cosine", "updates": 5, "warm_up": 5}, CosineSchedule, "warm_up is 5; give fewer than the 5"),
        ({"kind": "cosine", "updates": 5, "final": 1.5}, CosineSchedule, "final: expected `float` <= 1.0"),
        ({"kind": "exponential", "decay": 0, "every": 1}, ExponentialSchedule, "decay: expected `float` > 0.0"),
        ({"kind": "exponential", "decay": 0.5}, ExponentialSchedule, "missing key `every`"),
        ({"kind": "inverse_sqrt", "warm_up": 0}, InverseSqrtSchedule, "warm_up: expected `int` >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(table, kind, message):
    with pytest.raises(ConfigError) as caught:
        convert(table, kind, where="here")
    assert str(caught.value).startswith(f"here: {message}")
