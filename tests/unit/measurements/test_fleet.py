import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.core.hub.reported_stats import LOSS_MAX, VARIANCE_MAX
from edgeasync.measurements.fleet import FleetMeasurements, agreement_of
from edgeasync.measurements.medians import WINDOW
from edgeasync.policies.monitor import Monitor, Observation

STEPS = st.sampled_from([1, 8, 2**31])
LOSS = st.floats(-LOSS_MAX, LOSS_MAX) | st.sampled_from([-LOSS_MAX, LOSS_MAX, math.inf, -math.inf, math.nan])
VARIANCE = st.floats(0.0, VARIANCE_MAX) | st.sampled_from([VARIANCE_MAX, math.inf, math.nan])
"""Numbers as the hub lets them through: `ReportedStats` has them within these bounds."""


def look(fleet, voter="a", *, norm=1.0, local_steps=8, score=0.5, staleness=0, **fields):
    usual = {"voters_live": 1, "loss_mean": 0.5, "loss_variance": 0.25}
    fleet.observe_norm(voter, norm, local_steps)
    fleet.observe_score(voter, score)
    fleet.observe_loss(voter, **usual | fields)
    fleet.observe_staleness(staleness)


def test_an_update_without_a_loss_leaves_the_fleets_losses_as_they_are():
    fleet = FleetMeasurements()
    for _ in range(5):
        look(fleet, loss_mean=None, loss_variance=None, score=math.nan)
    assert (fleet.losses, fleet.loss_variances, len(fleet.scores)) == ([], [], 0)


def test_the_voters_median_over_the_last_quarter_stands_for_now():
    fleet = FleetMeasurements()
    assert math.isnan(fleet.loss)
    assert math.isnan(fleet.score)
    medians = []
    for number in range(WINDOW + 10):
        told = float(number * number)
        look(fleet, f"device-{number % 5}", loss_mean=told, loss_variance=2 * told, score=3 * told)
        medians.append(statistics.median([float(n * n) for n in range(max(0, number - 4), number + 1)]))
    last = statistics.median(medians[-16:])
    assert (fleet.loss, fleet.loss_variance, fleet.score) == (last, 2 * last, 3 * medians[-1])
    assert fleet.loss_first == statistics.median(medians[:16])
    assert {len(fleet.losses), len(fleet.loss_variances)} == {WINDOW}


@pytest.mark.parametrize("names", [1, 50])
def test_a_key_on_another_scale_does_not_speak_for_the_fleet_however_often_it_speaks(names):
    fleet = FleetMeasurements()
    for _ in range(WINDOW):
        for voter in ("a", *["liar"] * names, "b"):
            factor = 1e6 if voter == "liar" else 1.0
            look(fleet, voter, loss_mean=factor, loss_variance=factor, score=factor, norm=factor)
    assert fleet.loss == fleet.loss_variance == fleet.score == fleet.lengths.median == 1.0


@pytest.mark.parametrize(
    ("voters", "often", "notes"), [(10, 0, 100), (10, 30, 108), (3, 30, 40), (2, 30, 20), (1, 30, 310)]
)
def test_a_voter_that_tells_often_has_no_more_turns_than_half_of_the_others(voters, often, notes):
    """Ten rounds; the first voter repeats itself before each of the others."""
    fleet = FleetMeasurements()
    for number in range(11 * voters):
        if number == voters:
            before = fleet.losses_seen
        for _ in range(often if number >= voters and (number % voters or voters == 1) else 0):
            look(fleet, "0", voters_live=voters)
        look(fleet, str(number % voters), voters_live=voters)
    assert fleet.losses_seen - before == notes


def test_before_most_have_told_a_loss_there_is_no_first_one():
    for voters_live, most in ((1, 1), (2, 2), (7, 4), (10, 6), (1000, 33)):
        fleet = FleetMeasurements()
        for number in range(most):
            assert (fleet.losses, fleet.loss_first) == ([], 0.0)
            look(fleet, str(number), loss_mean=2.0, voters_live=voters_live)
            assert fleet.loss == 2.0, "for people"
        assert fleet.loss_first == 2.0


def test_of_each_voter_the_last_norm_is_kept():
    fleet = FleetMeasurements()
    for norm, voter in enumerate("abacab"):
        look(fleet, voter, norm=float(norm), local_steps=norm + 1)
    assert fleet.lengths.newest == {"c": 3.0, "a": 4.0, "b": 5.0}
    assert fleet.norms.newest == {"c": 1.5, "a": 4 / math.sqrt(5), "b": 5 / math.sqrt(6)}
    assert fleet.gradients.newest == {"c": 0.75, "a": 0.8, "b": 5 / 6}
    assert list(fleet.norms.newest) == ["c", "a", "b"], "the voter that spoke last is last"
    fleet.observe_norm("d", math.nan, 1)
    assert set(fleet.norms.newest) == set("abc")


def test_what_is_usual_never_falls_far_under_what_most_voters_once_had():
    fleet = FleetMeasurements()
    for voter in "abc":
        fleet.observe_norm(voter, 10.0, 4)
        fleet.note_peaks(6)
    assert (fleet.lengths.noted, fleet.lengths.usual()) == (0.0, 10.0), "half of the voters are not most"
    fleet.observe_norm("d", 10.0, 4)
    fleet.note_peaks(6)
    for voter in "abcd":
        fleet.observe_norm(voter, 0.1, 4)
        fleet.note_peaks(6)
    assert (fleet.lengths.peak, fleet.lengths.usual(), fleet.norms.usual()) == (10.0, 3.0, 1.5)
    assert [fleet.lengths.usual(slack) for slack in (0.1, 0.5, 1.0)] == pytest.approx([3.0, 5.0, 10.0])
    fleet.lengths.noted = 0.0
    assert fleet.lengths.peak == 10.0, "of the first ones: a third voter may come when two have learnt all"
    fleet.forget()
    assert fleet.lengths.usual() == math.inf


def test_a_peak_is_noted_in_a_fleet_with_more_voters_than_are_kept():
    fleet, voters = FleetMeasurements(), 3 * WINDOW
    for norm in (1.0, 9.0, 2.0):
        for voter in range(voters):
            fleet.observe_norm(str(voter), norm, 1)
        fleet.note_peaks(voters)
    assert fleet.lengths.noted == 9.0


def test_the_loss_of_what_is_not_learnt_counts_those_who_came_late():
    fleet = FleetMeasurements(loss_first=0.1)
    for number, loss in enumerate((2.0, 4.0, 5.0)):
        fleet.observe_base_loss(str(number), loss)
    assert fleet.loss_unlearnt == 4.0
    assert FleetMeasurements(loss_first=0.1).loss_unlearnt == 0.1


def test_who_is_gone_has_no_word_about_the_model():
    fleet = FleetMeasurements()
    for voter, loss in (("a", 1.0), ("b", 9.0), ("c", 9.0)):
        look(fleet, voter, loss_mean=loss, score=loss)
    fleet.withdraw("b")
    fleet.withdraw("c")
    look(fleet, loss_mean=1.0, score=1.0)
    assert (fleet.score, fleet.losses[-1]) == (1.0, 1.0)
    assert set(fleet.norms.newest) == set("abc")


def test_averages_move_by_hand():
    fleet = FleetMeasurements()
    for staleness, mean in ((10, 1.0), (0, 0.9), (1, 0.91)):
        look(fleet, staleness=staleness)
        assert fleet.staleness_mean == pytest.approx(mean)
    assert math.isnan(fleet.agreement)
    for agreement, mean in ((0.5, 0.5), (1.0, 0.6), (-1.0, 0.28)):
        fleet.observe_agreement(agreement)
        assert fleet.agreement == pytest.approx(mean)


def test_what_was_seen_of_a_model_that_is_no_more_is_forgotten():
    fleet = FleetMeasurements()
    look(fleet, staleness=10)
    fleet.observe_base_loss("a", 1.0)
    fleet.note_peaks(1)
    fleet.observe_agreement(-1.0)
    fleet.forget()
    votes = (
        fleet.lengths,
        fleet.norms,
        fleet.gradients,
        fleet.scores,
        fleet.newest_losses,
        fleet.newest_variances,
        fleet.base_losses,
    )
    assert not any([*votes, fleet.lengths.peak, fleet.base_losses.peak, fleet.losses, fleet.loss_variances])
    assert math.isnan(fleet.agreement)
    assert math.isnan(fleet.loss)
    assert fleet.staleness_mean == 1.0, "the network is the same"


def test_a_loss_that_is_no_number_is_left_out():
    fleet = FleetMeasurements()
    told = {"a": (math.nan, 1.0, 1.0), "b": (1.0, math.inf, math.inf), "c": (2.0, 3.0, math.nan)}
    for device_id, (loss_mean, loss_variance, score) in told.items():
        look(fleet, device_id, loss_mean=loss_mean, loss_variance=loss_variance, score=score)
    assert (fleet.losses, fleet.newest_variances.ordered, fleet.scores.ordered) == ([2.0], [3.0], [1.0])
    assert fleet.loss_variances == [], "from a voter's second update on"
    assert len(fleet.norms) == 3


@given(st.lists(st.tuples(LOSS, VARIANCE, LOSS), min_size=1, max_size=5), STEPS)
def test_whatever_the_hub_lets_through_can_be_averaged_and_watched(told, local_steps):
    fleet, monitor = FleetMeasurements(), Monitor()
    for number, (loss_mean, loss_variance, score) in enumerate(told * 40):
        fields = {"loss_mean": loss_mean, "loss_variance": loss_variance, "score": score}
        look(fleet, f"device-{number % 4}", local_steps=local_steps, **fields)
    assert all(math.isfinite(value) for value in (*fleet.losses, *fleet.loss_variances, *fleet.scores.ordered))
    for value, window in ((fleet.loss, fleet.losses), (fleet.score, fleet.scores.ordered)):
        assert math.isfinite(value) == bool(window)
    for watch in monitor.detectors:
        watch.cause(Observation("a", 1.0, local_steps, told[0][0]), fleet)


@pytest.mark.parametrize(
    ("agreement", "voters", "rate"),
    [
        (math.nan, 8, 0.0),
        (1.0, 8, 1 / 3),
        (0.5, 1, 1 / 3),
        (0.0, 8, 8 / 3),
        (0.2, 10, 1 / 3 / 0.28),
        (-1.0, 8, 1000 / 3),
    ],
)
def test_the_less_updates_agree_the_more_their_mean_is_lengthened(agreement, voters, rate):
    assert FleetMeasurements(agreement=agreement).extrapolation(voters) == pytest.approx(rate)


@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_at_many_angles_it_is_their_mean_by_length(seed, count):
    generator = np.random.default_rng(seed)
    vectors = generator.standard_normal((count, 5)) * generator.uniform(0.1, 9.0, (count, 1))
    weights = generator.uniform(0.0, 1.0, count)
    norms = np.linalg.norm(vectors, axis=1)
    lengths = np.outer(norms * weights, norms * weights)
    cosines = vectors @ vectors.T / np.outer(norms, norms)
    pairs = ~np.eye(count, dtype=bool)
    expected = (cosines * lengths)[pairs].sum() / lengths[pairs].sum()
    found = agreement_of(float(np.linalg.norm(weights @ vectors)), list(norms), list(weights))
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("norm", "norms", "weights", "agreement"),
    [
        (1.0, [1.0], [1.0], None),
        (0.0, [], [], None),
        (1.0, [1.0, 7.0], [1.0, 0.0], None),
        (0.0, [0.0, 0.0], [0.5, 0.5], None),
        (math.nan, [1.0, 1.0], [0.5, 0.5], None),
        (math.inf, [1.0, 1.0], [0.5, 0.5], None),
        (1.1, [1.0, 1.0], [0.5, 0.5], 1.0),
        (0.0, [1.0, 1.0], [0.5, 0.5], -1.0),
        (math.sqrt(0.5), [1.0, 1.0], [0.5, 0.5], pytest.approx(0.0, abs=1e-12)),
    ],
)
def test_agreement_at_the_edges(norm, norms, weights, agreement):
    assert agreement_of(norm, norms, weights) == agreement
