import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.protocol.pacing import LATENESS_S, Pacer

SIZES = st.integers(1, 65_600)
RATES = st.floats(1e4, 1e8)


def run(rate, steps):
    """Send messages as soon as it is time and the sender has them; return their times and sizes."""
    pacer, now_s, sent = Pacer(rate), 0.0, []
    for size, idle_s, late_s in steps:
        now_s = max(now_s + idle_s, pacer.due_s + late_s)
        pacer.spend(size, now_s)
        sent.append((now_s, size))
    return sent


@given(
    RATES,
    st.lists(st.tuples(SIZES, st.sampled_from([0.0, 0.001, 1.0]), st.floats(0.0, 0.05)), min_size=1, max_size=60),
)
def test_in_any_time_no_more_goes_out_than_the_rate_and_one_message(rate, steps):
    sent = run(rate, steps)
    for first in range(len(sent)):
        total = 0
        for last in range(first, len(sent)):
            total += sent[last][1]
            elapsed_s = sent[last][0] - sent[first][0]
            assert total <= rate * (elapsed_s + LATENESS_S) * (1 + 1e-9) + sent[last][1]


@given(RATES, st.lists(st.tuples(SIZES, st.floats(0.0, LATENESS_S)), min_size=2, max_size=60))
def test_nothing_of_the_rate_is_lost_to_timers_that_come_a_little_late(rate, steps):
    sent = run(rate, [(size, 0.0, late_s) for size, late_s in steps])
    total = sum(size for _, size in sent[:-1])
    assert sent[-1][0] - sent[0][0] <= total / rate * (1 + 1e-9) + 2 * LATENESS_S


@given(RATES, st.lists(SIZES, min_size=1, max_size=20))
def test_what_went_at_once_is_paid_for_later(rate, sizes):
    pacer = Pacer(rate)
    for size in sizes:
        pacer.spend(size, 5.0)
    assert pacer.due_s == pytest.approx(5.0 - LATENESS_S + sum(sizes) / rate)


@pytest.mark.parametrize("rate", [0, -1.0])
def test_a_rate_of_nothing_is_refused(rate):
    with pytest.raises(ValueError, match="is too low"):
        Pacer(rate)
