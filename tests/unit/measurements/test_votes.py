import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.measurements.medians import WINDOW
from edgeasync.measurements.votes import Votes


@given(st.lists(st.tuples(st.integers(0, 90), st.floats(-1e9, 1e9) | st.just(0.0)), max_size=300))
def test_votes_are_the_newest_numbers_of_those_heard_last(told):
    votes, expected = Votes(), {}
    for who, value in told:
        votes.cast(str(who), value)
        expected.pop(str(who), None)
        expected[str(who)] = value
        expected = dict(list(expected.items())[-WINDOW:])
        assert votes.newest == expected
        assert votes.ordered == sorted(expected.values())
        assert votes.median == statistics.median(expected.values())
    for who in list(expected):
        votes.withdraw(who)
        votes.withdraw(who)
    assert (len(votes), votes.ordered) == (0, [])
    assert math.isnan(votes.median)


@pytest.mark.parametrize(
    ("told", "least"),
    [
        ([], -math.inf),
        ([1.0, 9.0], -math.inf),
        ([1.0, 2.0, 3.0], -6.0),
        ([2.0, 2.0, 2.0], 1.2),
        ([-2.0, -2.0, -2.0, -1e30], -2.8),
        ([1.0, 2.0, 3.0, 4.0, -1e30], -6.0),
    ],
)
def test_how_low_a_score_may_be(told, least):
    votes = Votes()
    for number, value in enumerate(told):
        votes.cast(str(number), value)
    assert votes.least_credible == pytest.approx(least)


@pytest.mark.parametrize(
    ("told", "reached"), [([], None), ([3.0], 3.0), ([1, 2], 1), ([1, 2, 9], 2), ([1, 2, 8, 9], 2)]
)
def test_half_is_not_most(told, reached):
    votes = Votes()
    for number, value in enumerate(told):
        votes.cast(str(number), value)
    assert votes.reached_by_most == reached if told else math.isnan(votes.reached_by_most)
