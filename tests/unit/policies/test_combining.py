import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner, MedianCombiner, TrimmedMeanCombiner

F = np.float32
SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 12)
ALL = [MeanCombiner(), MedianCombiner(), TrimmedMeanCombiner(), TrimmedMeanCombiner(trim=0.3)]
every_kind = pytest.mark.parametrize("combiner", ALL, ids=str)


def draw(seed, count, length=50):
    return np.random.default_rng(seed).standard_normal((count, length)).astype(F)


def combine(combiner, rows):
    out = np.full(rows.shape[1], np.nan, F)
    combiner.combine(rows.copy(), out)
    return out


@pytest.mark.parametrize(
    ("combiner", "combined"),
    [
        (MeanCombiner(), [22.0, 4.0]),
        (MedianCombiner(), [3.0, 5.0]),
        (TrimmedMeanCombiner(trim=0.2), [3.0, 16 / 3]),
        (TrimmedMeanCombiner(trim=0.21), [3.0, 5.0]),
    ],
)
def test_five_rows_by_hand(combiner, combined):
    rows = np.array([[1, 5], [100, -4], [3, 8], [2, 8], [4, 3]], F)
    np.testing.assert_allclose(combine(combiner, rows), combined, rtol=1e-6)


@pytest.mark.parametrize(
    ("trim", "count", "left_out"),
    [(0.1, 1, 0), (0.1, 2, 0), (0.1, 3, 1), (0.1, 10, 1), (0.1, 11, 2), (0.3, 10, 3), (0.49, 4, 1), (0.49, 5, 2)],
)
def test_how_many_are_trimmed_at_either_end(trim, count, left_out):
    rows = np.sort(draw(count, count), axis=0)
    expected = rows[left_out : count - left_out].astype(float).mean(axis=0)
    np.testing.assert_allclose(combine(TrimmedMeanCombiner(trim=trim), rows), expected, rtol=1e-5, atol=1e-6)


@given(SEEDS, COUNTS)
def test_mean_and_median_are_numpys(seed, count):
    rows = draw(seed, count)
    np.testing.assert_allclose(combine(MedianCombiner(), rows), np.median(rows, axis=0), rtol=1e-6)
    np.testing.assert_allclose(
        combine(MeanCombiner(), rows), rows.astype(float).mean(axis=0), rtol=1e-5, atol=1e-6
    )


@every_kind
@given(seed=SEEDS, count=COUNTS)
def test_any_slice_can_be_done_alone_and_equals_stay_what_they_are(combiner, seed, count):
    rows = draw(seed, count)
    whole = combine(combiner, rows)
    parts = np.concatenate([combine(combiner, rows[:, :7]), combine(combiner, rows[:, 7:])])
    assert parts.tobytes() == whole.tobytes()
    assert (whole >= rows.min(axis=0) - 1e-6).all()
    assert (whole <= rows.max(axis=0) + 1e-6).all()
    np.testing.assert_allclose(combine(combiner, np.repeat(rows[:1], count, axis=0)), rows[0], rtol=1e-6)


@given(SEEDS, COUNTS, st.randoms(use_true_random=False))
def test_the_order_does_not_matter_where_rows_are_ranked(seed, count, random):
    rows = draw(seed, count)
    shuffled = rows[random.sample(range(count), count)]
    for combiner in ALL:
        close = {} if combiner.robust else {"rtol": 1e-4, "atol": 1e-6}
        check = np.testing.assert_array_equal if combiner.robust else np.testing.assert_allclose
        check(combine(combiner, rows), combine(combiner, shuffled), **close)


@given(SEEDS, st.integers(3, 12), st.sampled_from([np.inf, -np.inf, F(3e38), F(-1e9)]))
def test_a_minority_cannot_move_them_beyond_the_others(seed, count, lie):
    rows = draw(seed, count)
    generator = np.random.default_rng(seed)
    for combiner, liars in ((MedianCombiner(), (count - 1) // 2), (TrimmedMeanCombiner(trim=0.25), count // 4)):
        told = rows.copy()
        honest = np.sort(generator.permuted(np.arange(count)))[liars:]
        told[:liars] = lie
        combined = combine(combiner, generator.permutation(told))
        assert (combined >= rows[honest].min(axis=0) - 1e-6).all()
        assert (combined <= rows[honest].max(axis=0) + 1e-6).all()


# -- around a centre -------------------------------------------------------------------------------------------


def test_how_much_of_a_difference_from_the_centre_counts():
    combiner = CentredClipCombiner(radius=2.0)
    assert combiner.shares([0.0, 1.0, 4.0, 8.0, math.inf], 2.0) == [1.0, 1.0, 1.0, 0.5, 0.0]
    assert (combiner.robust, combiner.centred) == (True, True)


@given(SEEDS, st.floats(0.0, 0.99))
def test_the_centre_is_a_moving_average_of_what_was_folded(seed, momentum):
    centre, folded = draw(seed, 2)
    expected = momentum * centre.astype(float) + (1.0 - momentum) * folded.astype(float)
    CentredClipCombiner(momentum=momentum).move(centre, folded)
    np.testing.assert_allclose(centre, expected, rtol=1e-5, atol=1e-6)
