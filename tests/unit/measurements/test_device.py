import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.measurements.device import BaseLosses, DeviceMeasurements
from edgeasync.measurements.medians import RECENT

ANY = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, 1e200, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan])
STEPS = st.sampled_from([1, 8, 2**31])


def observe(history, **fields):
    usual = {"local_steps": 8, "examples": 64, "step_s": 0.25, "loss_mean": 0.5, "loss_variance": 0.25}
    history.observe(**usual | fields)


def test_times_are_medians_of_the_last_few_cycles():
    history = DeviceMeasurements()
    observe(history)
    assert (history.step_s, history.communication_s, history.cycle_s) == (0.25, 0.0, 2.0)
    for cycle_s, step_s in ((3.0, 0.25), (2.5, 0.25), (9.0, 1.0), (2.0, 0.25), (99.0, 0.25)):
        observe(history, cycle_s=cycle_s, step_s=step_s)
    # Talking: 1, 0.5, 1, 0 and 97 seconds; steps of 0.25 s but one.
    assert (history.step_s, history.communication_s) == (0.25, 1.0)
    assert history.cycle_s == 3.0
    assert history.communication_share == pytest.approx(1 / 3)
    history.assigned_steps = 16
    assert history.cycle_s == 5.0
    assert len(history.recent_step_s) == len(history.recent_communication_s) == RECENT
    assert history.batch_examples == 8.0


def test_a_step_change_shows_after_three_updates():
    history = DeviceMeasurements()
    for _ in range(20):
        observe(history, cycle_s=3.0)
    seen = []
    for _ in range(4):
        observe(history, step_s=2.5, cycle_s=8 * 2.5 + 10.0)
        seen.append((history.step_s, history.communication_s))
    assert seen == [(0.25, 1.0), (0.25, 1.0), (2.5, 10.0), (2.5, 10.0)]


def test_the_newest_losses_of_the_hubs_model_and_those_before_them_are_kept():
    history = DeviceMeasurements()
    assert math.isnan(history.base_losses.newest)
    for loss in (math.nan, None, math.inf, *range(25)):
        observe(history, base_loss=loss)
    assert history.base_losses == BaseLosses([float(n) for n in range(17, 25)], [float(n) for n in range(9, 17)])
    assert history.base_losses.newest == 22.0


def test_a_devices_loss_of_the_hubs_model_is_usual_after_a_few():
    history, seen = DeviceMeasurements(), []
    for loss in (9.0, 1.0, 2.0, 8.0, 3.0, 4.0):
        observe(history, base_loss=loss)
        seen.append(history.base_losses.usual)
    assert seen[4:] == [3.0, 3.0]
    assert all(map(math.isnan, seen[:4]))


def test_a_score_is_the_devices_own_or_its_loss():
    history = DeviceMeasurements()
    scores = []
    for fields in ({}, {"score": 0.1}, {"score": math.nan}, {"loss_mean": -math.inf}):
        observe(history, **fields)
        scores.append(history.score)
    assert scores == [0.5, 0.1, math.inf, math.inf]


def test_an_update_without_a_loss_is_no_fault():
    history = DeviceMeasurements()
    for _ in range(5):
        observe(history, loss_mean=None, loss_variance=None)
    assert math.isnan(history.score)
    observe(history, loss_mean=None, loss_variance=None, score=0.25)
    assert history.score == 0.25


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "local_steps": STEPS,
                "examples": st.sampled_from([0, 1, 2**53]),
                "step_s": st.floats(0.0, 1e9),
                "loss_mean": ANY,
                "loss_variance": ANY,
                "base_loss": st.none() | ANY,
                "score": st.none() | ANY,
                "cycle_s": st.none() | st.floats(0.0, 1e12),
            }
        ),
        max_size=12,
    )
)
def test_a_device_may_say_what_it_likes(told):
    history = DeviceMeasurements()
    for fields in told:
        history.observe(**fields)
        for value in (history.step_s, history.communication_s, history.cycle_s, history.examples_per_s):
            assert 0.0 <= value < math.inf
        assert 0.0 <= history.communication_share <= 1.0
        assert not math.isnan(history.score)
    assert len(history.recent_step_s) <= RECENT
