"""When a fleet rests, and what wakes it."""

import math

import pytest

from edgeasync.core.hub.rest import JUDGED_MIN, KNOWN_MAX, Rest, patience_s
from edgeasync.measurements.device import BaseLosses
from edgeasync.measurements.votes import Votes

PACE_S = 1.0
LONGEST_S = 600.0


def votes(**losses):
    found = Votes()
    for voter, loss in losses.items():
        found.cast(voter, loss)
    return found


def told(*losses):
    found = BaseLosses()
    for loss in losses:
        found.observe(loss)
    return found


def learnt(at_s=0.0, voters="abc"):
    """A model whose loss has fallen from 2 to 0.1 by some time, by the word of all voters."""
    rest = Rest()
    for number, loss in enumerate((2.0, 1.0, 0.5, 0.1)):
        hear(rest, at_s - 3 + number, dict.fromkeys(voters, loss))
    return rest


def hear(rest, now_s, losses, *, judges=True):
    return rest.told(votes(**losses), len(losses), now_s, PACE_S, judges=judges)


def stand_still(rest, from_s, until_s, voters="abc", every_s=1.0):
    now_s = from_s
    while (now_s := now_s + every_s) <= until_s:
        assert not hear(rest, now_s, dict.fromkeys(voters, 0.1))
    rest.state.resting = True
    return rest


def period(rest):
    return rest.period_s(PACE_S, LONGEST_S)


def test_the_period_is_a_share_of_the_time_for_which_the_model_stands_still():
    rest = learnt()
    periods = []
    for until_s in (90, 200, 500, 3000):
        stand_still(rest, until_s - 10, until_s)
        periods.append(period(rest))
    assert periods == [PACE_S, 25.0, 100.0, LONGEST_S]
    assert patience_s(PACE_S) == 100.0


@pytest.mark.parametrize(("pace_s", "expected"), [(0.2, 20.0), (2.0, 200.0), (5.0, 300.0), (20.0, 600.0)])
def test_the_patience_is_thirty_periods_and_up_to_a_hundred_if_they_are_short(pace_s, expected):
    assert patience_s(pace_s) == pytest.approx(expected)


def test_a_model_that_was_judged_once_or_not_at_all_does_not_stand_still():
    rest = learnt()
    for number in range(JUDGED_MIN - 1):
        hear(rest, 1000.0 + number, {"a": 0.1, "b": 0.1})
    assert period(rest) == PACE_S
    hear(rest, 2000.0, {"a": 0.1, "b": 0.1})
    assert period(rest) > PACE_S


def test_a_small_improvement_shortens_the_period_and_a_large_one_ends_the_rest():
    rest = stand_still(learnt(), 0, 3000)
    assert not hear(rest, 3001.0, dict.fromkeys("abc", 0.097))
    assert 200.0 < period(rest) < 250.0
    assert hear(rest, 3002.0, dict.fromkeys("abc", 0.05))
    assert (period(rest), rest.state.resting) == (PACE_S, False)
    assert rest.state.cause == "the devices' losses fell"


def test_an_accuracy_or_a_loss_on_held_out_data_may_improve():
    rest = Rest()
    for number in range(1000):
        rest.evaluated(0.3, 0.9, float(number), PACE_S)
    assert period(rest) > 200.0
    rest.state.resting = True
    assert not rest.evaluated(0.3, 0.902, 1000.0, PACE_S)
    assert period(rest) < 100.0
    assert rest.evaluated(0.3, 0.95, 1001.0, PACE_S)
    assert not rest.evaluated(math.nan, None, 1002.0, PACE_S)


def test_who_hears_evaluations_hears_the_devices_only_when_their_losses_rise():
    rest = Rest()
    for number in range(1000):
        rest.evaluated(0.3, 0.9, float(number), PACE_S)
        hear(rest, float(number), dict.fromkeys("abc", 1.0 / (1 + number)), judges=False)
    assert period(rest) > 200.0
    rest.state.resting = True
    assert hear(rest, 1000.0, dict.fromkeys("abc", 1.0), judges=False)


# -- one key's word ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("honest", ["b", "bc", "bcd"])
@pytest.mark.parametrize("lie", [1e9, 0.0, -1e9])
def test_one_keys_word_neither_wakes_nor_quiets_a_fleet(lie, honest):
    rest = stand_still(learnt(voters="a" + honest), 0, 3000, voters="a" + honest)
    for number in range(20):
        assert not hear(rest, 3001.0 + number, {"a": lie} | dict.fromkeys(honest, 0.1))
    assert period(rest) == LONGEST_S if len(honest) > 1 else rest.state.resting
    rest = learnt(voters="a" + honest)
    for number in range(600):
        hear(rest, float(number), {"a": lie} | dict.fromkeys(honest, 0.1 / (1 + 0.1 * number) - 1e-3 * number))
    assert period(rest) == PACE_S


def test_half_of_the_voters_judge_nothing():
    rest = learnt()
    rest.told(votes(a=9.0, b=9.0), 4, 100.0, PACE_S, judges=True)
    assert rest.state.judged_s == 0.0


def test_most_voters_losses_rise_as_labels_drift_even_one_after_the_other():
    rest = stand_still(learnt(voters="abcdef"), 0, 3000, voters="abcdef")
    losses = dict.fromkeys("abcdef", 0.1)
    woken = []
    for voter in "abcdef":
        losses[voter] = 5.0
        woken.append(hear(rest, 3100.0, losses))
    assert woken == [False, False, False, True, False, False]
    assert rest.state.cause == "the devices' losses rose to 5"
    rest.state.resting = True
    for number in range(100):  # what is as bad ever since is no news
        assert not hear(rest, 3101.0 + number, dict.fromkeys("abcdef", 5.0))


def test_a_newcomer_wakes_the_fleet_once_and_only_with_something_new():
    rest = stand_still(learnt(), 0, 3000)
    assert not rest.joined("d", "four", told(0.1, 0.1, 0.1), 3001.0)
    assert rest.joined("e", "five", told(4.0, 4.0, 4.0), 3001.0)
    assert rest.state.cause == "five has joined with data that the model does not fit"
    # A tenth of what was learnt is a rise for the fleet, half of that is news of a newcomer.
    rise = rest.state.told.learnt
    assert not rest.state.told.has_risen(rest.state.told.worst + 0.6 * rise)
    for share, woken in ((0.4, False), (0.6, True)):
        rest.state.resting = True
        loss = rest.state.told.worst + share * rise
        assert rest.joined(f"voter {share}", "six", told(loss, loss, loss), 3001.5) == woken
    rest.state.resting = True
    assert not rest.joined("e", "five", told(9.0, 9.0, 9.0), 3002.0)
    for number in range(KNOWN_MAX + 10):
        rest.joined(str(number), "", told(0.1), 3003.0)
    assert len(rest.state.known) == KNOWN_MAX


def test_a_devices_own_loss_is_news_if_it_is_far_over_all_that_it_told():
    rest = stand_still(learnt(), 0, 3000)
    usual = [0.1, 0.15, 0.05, 0.1, 0.2, 0.1]
    assert not rest.has_news(told(*usual, 0.25))
    assert rest.has_news(told(*usual, 5.0))
    assert not rest.has_news(told(*usual, 5.0, 5.0))
    assert not rest.has_news(told(0.1, 5.0))
    assert not Rest().has_news(told(*usual, 5.0))


def test_an_operator_wakes_a_fleet_that_rests():
    rest = stand_still(learnt(), 0, 3000)
    assert rest.wake("an operator requested it", 3000.0)
    assert period(rest) == PACE_S
    assert not rest.wake("again", 3001.0)
    assert rest.state.cause == "an operator requested it"


def test_where_nobody_tells_a_loss_a_fleet_rests_once_updates_point_no_way():
    rest = Rest()
    for number in range(300):
        rest.moved(0.5, float(number), PACE_S)
    assert period(rest) == PACE_S
    for number in range(300, 600):
        rest.moved(0.02, float(number), PACE_S)
    assert period(rest) == pytest.approx(50.0, abs=1.0)
    assert not Rest().moved(math.nan, 1.0, PACE_S)


def test_a_lower_learning_rate_may_make_a_model_better():
    rest = stand_still(learnt(), 0, 3000)
    rest.nudge(3000.0, PACE_S)
    assert period(rest) == pytest.approx(200.0)
