"""How long a payload may be, compared with the receiver's model and what the others last sent."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.core.peer.norms import TIMES_MAX, longest

LENGTHS = st.floats(0.0, 1e6)


@pytest.mark.parametrize(
    ("own", "others", "usual"),
    [
        (0.0, [], 1.0),
        (5.0, [], 5.0),
        (5.0, [7.0, 6.0], 6.0),
        (5.0, [7.0, math.inf], 7.0),
        (5.0, [1e30], 5.0),  # of two members only the receiver counts
        (5.0, [1e-30], 5.0),
        (1.0, [2.0, 4.0, 1e30], 2.0),
        (9.0, [2.0, 4.0, 1e30], 9.0),
    ],
)
def test_the_usual_norm_is_the_median_and_at_least_one(own, others, usual):
    assert longest((own, 0.0), [(norm, 0.0) for norm in others]) == (TIMES_MAX * usual, TIMES_MAX)
    assert longest((0.0, own), [(0.0, norm) for norm in others]) == (TIMES_MAX, TIMES_MAX * usual)


@given(honest=st.lists(LENGTHS, min_size=1, max_size=9), lie=st.floats(0.0, math.inf))
def test_one_member_moves_the_bound_only_between_what_honest_ones_have(honest, lie):
    bound, _ = longest((honest[0], 0.0), [(norm, 0.0) for norm in [*honest[1:], lie]])
    assert TIMES_MAX * max(1.0, min(honest)) <= bound <= TIMES_MAX * max(1.0, *honest)
