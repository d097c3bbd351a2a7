import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from edgeasync.core.hub.divergence import DivergenceGuard
from edgeasync.policies.history import FleetHistory
from edgeasync.policies.monitor import (
    DisagreementWatch,
    GradientNormWatch,
    LossVarianceWatch,
    LossWatch,
    MisfitWatch,
    Monitor,
    NotFiniteWatch,
    Observation,
    RefusedWatch,
    ThresholdWatch,
    UpdateNormWatch,
)


def update(norm=1.0, local_steps=4, *, device_id="a", loss=0.5, voter=None, **more):
    return Observation(device_id, norm, local_steps, loss, voter or device_id, **more)


def norms(count=3, norm=1.0, local_steps=4, *, peak=0.0):
    """The last norms of `count` devices, of which the median was once `peak`."""
    return fleet_of([(f"device-{number}", norm, local_steps) for number in range(count)], peak)


def fleet_of(last, peak=0.0):
    fleet = FleetHistory()
    for voter, _, local_steps in last:
        fleet.observe_norm(voter, peak, local_steps)
    fleet.note_peaks(1)
    for voter, norm, local_steps in last:
        fleet.observe_norm(voter, norm, local_steps)
    return fleet


def losses(usual, last, *, count=64, first=0.0):
    """Losses and variances of which the last quarter has another value."""
    series = [usual] * (count - 16) + [last] * 16
    fleet = FleetHistory(losses=series, loss_variances=series, loss_first=first)
    for votes in (fleet.newest_losses, fleet.newest_variances):
        votes.cast("a", last)
    return fleet


# -- one device's updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watch", "norm", "local_steps", "fleet", "alarming"),
    [
        (UpdateNormWatch(), 4.0, 4, norms(), False),
        (UpdateNormWatch(), 4.1, 4, norms(), True),
        (UpdateNormWatch(), 4.1, 4, norms(2), False),
        # One that is long beside the last updates may be usual beside those when there was more to learn.
        (UpdateNormWatch(), 12.0, 4, norms(peak=10.0), False),
        (UpdateNormWatch(), 12.1, 4, norms(peak=10.0), True),
        (UpdateNormWatch(), 1.3, 4, norms(norm=0.0, peak=1.0), True),
        (UpdateNormWatch(), 1.1, 4, norms(norm=0.0, peak=1.0), False),
        # Sixteen times the steps may be four times as long, and few steps excuse nothing.
        (UpdateNormWatch(), 16.0, 64, norms(), False),
        (UpdateNormWatch(), 16.1, 64, norms(), True),
        (UpdateNormWatch(), 4.0, 1, norms(), False),
        (UpdateNormWatch(), 4.1, 1, norms(), True),
        (UpdateNormWatch(ratio_max=2.0), 2.1, 4, norms(), True),
        (UpdateNormWatch(), 41.0, 4, norms(norm=10.0), True),
        (UpdateNormWatch(), 39.0, 4, norms(norm=10.0), False),
        (UpdateNormWatch(), 1e300, 4, norms(norm=0.0), False),
        (UpdateNormWatch(), math.nan, 4, norms(), False),
        (UpdateNormWatch(), math.inf, 4, norms(), False),
        (GradientNormWatch(), 20.0, 4, norms(), False),
        (GradientNormWatch(), 20.1, 4, norms(), True),
        (GradientNormWatch(), 320.0, 64, norms(), False),
        (GradientNormWatch(), 320.1, 64, norms(), True),
        (GradientNormWatch(), 5.1, 1, norms(), True),
        (GradientNormWatch(), 20.1, 4, norms(2), False),
        (GradientNormWatch(), 60.0, 4, norms(peak=10.0), False),
        (GradientNormWatch(), 60.1, 4, norms(peak=10.0), True),
    ],
)
def test_how_long_an_update_may_be(watch, norm, local_steps, fleet, alarming):
    cause = watch.cause(update(norm, local_steps), fleet)
    assert (cause is not None) == alarming
    assert watch.scope == "device"


def test_long_updates_of_some_devices_do_not_hide_the_next():
    fleet = fleet_of([(voter, 1.0 if voter < "f" else 1e9, 4) for voter in "abcdefghi"])
    found = [watch.cause(update(30.0), fleet) for watch in (UpdateNormWatch(), GradientNormWatch())]
    assert found == [
        "the norm of its update is 30 times what is usual in the fleet",
        "the norm of its mean gradient is 30 times what is usual in the fleet",
    ]


def test_a_device_that_speaks_often_is_one_of_those_it_is_compared_with():
    fleet = FleetHistory()
    for voter, norm in [("a", 1.0), ("b", 1.0), *[("fast", 50.0)] * 30]:
        fleet.observe_norm(voter, norm, 4)
    assert UpdateNormWatch().cause(update(50.0, device_id="fast"), fleet) is not None


def alarms_of(watch, updates, fleet=None):
    """Whether the device has an alarm after each of its updates."""
    guard = DivergenceGuard(Monitor(watch=(watch,), calm_updates=2))
    seen = []
    for one in updates:
        guard.watch_device(one, fleet or FleetHistory(), 3)
        seen.append(guard.quarantine_of("a") is not None)
    return seen


@pytest.mark.parametrize(
    ("watch", "bad"),
    [
        (NotFiniteWatch(count_max=3), update(finite=False)),
        (RefusedWatch(count_max=3), update(known=False)),
        (UpdateNormWatch(count_max=3), update(9.0)),
    ],
)
def test_an_alarm_begins_after_some_in_a_row_and_ends_after_some_calm_ones(watch, bad):
    calm, fleet = update(), norms()
    assert alarms_of(watch, [bad, bad, calm, bad, bad, bad], fleet) == [False] * 5 + [True]
    assert alarms_of(watch, [bad, bad, bad, calm, bad, calm, calm], fleet) == [False] * 2 + [True] * 4 + [False]


def test_another_device_neither_begins_nor_delays_an_alarm():
    bad, other = update(finite=False), update(finite=False, device_id="b")
    assert alarms_of(NotFiniteWatch(count_max=2), [bad, other, bad]) == [False, False, True]
    assert alarms_of(NotFiniteWatch(count_max=2), [bad, update(device_id="b"), bad]) == [False, False, True]


# -- data that the model does not learn ------------------------------------------------------------------------


def misfit(recent, before, *, fleet=0.05, peak=2.0, voters=4):
    """What the watch says of a device with these losses of the fleet's model, beside a fleet with others."""
    history = FleetHistory()
    for number in range(voters):
        history.observe_base_loss(str(number), peak)
    history.base_losses.note_peak()
    for number in range(voters):
        history.observe_base_loss(str(number), fleet)
    return MisfitWatch().cause(update(base_loss=recent, base_loss_before=before), history)


@pytest.mark.parametrize(
    ("losses", "alarming"),
    [
        ({"recent": 2.0, "before": 2.0}, True),
        ({"recent": 2.0, "before": 4.0}, True),
        ({"recent": math.nan, "before": math.nan}, False),  # too new to be judged
        ({"recent": 2.0, "before": 4.1}, False),  # its loss falls
        ({"recent": 1.4, "before": 1.4}, False),  # most has been learnt
        ({"recent": 1.41, "before": 1.41}, True),
        ({"recent": 2.0, "before": 2.0, "fleet": 0.34}, False),  # nobody has learnt much
        ({"recent": 2.0, "before": 2.0, "voters": 2}, False),
        ({"recent": 0.1, "before": 0.1, "fleet": 0.0, "peak": 0.12}, True),
    ],
)
def test_whose_data_contradict_the_others(losses, alarming):
    cause = misfit(**losses)
    assert (cause is not None) == alarming
    if cause is not None:
        assert cause.startswith(
            f"the model does not learn its data: its loss is {losses['recent']:.3g}, the fleet's"
        )


def test_who_tells_no_loss_is_not_judged_by_it():
    assert MisfitWatch().cause(update(), norms()) is None


def test_a_key_under_many_names_is_one_of_those_that_norms_are_compared_with():
    fleet = fleet_of([("a", 1.0, 4), ("b", 1.0, 4), *[("liar", 100.0, 4)] * 50])
    assert UpdateNormWatch().cause(update(9.0, voter="liar", device_id="liar/7"), fleet) is not None
    assert (len(fleet.norms), fleet.lengths.median) == (3, 1.0)


# -- how long an update counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "last", "norm_max"),
    [
        (2.0, [1.0, 3.0, 1e9], 6.0),
        (0.0, [1.0, 3.0, 1e9], math.inf),
        (2.0, [1.0, 3.0], math.inf),  # of two, either may be wrong
        (2.0, [0.0, 0.0, 1.0], math.inf),  # where most stand still, nothing says how long a step is
    ],
)
def test_the_norm_that_updates_are_shortened_to(clip, last, norm_max):
    fleet = fleet_of([(str(place), norm, 1) for place, norm in enumerate(last)])
    assert Monitor(clip=clip).norm_max(fleet) == norm_max


# -- the fleet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "loss_alarms", "variance_alarms"),
    [
        (FleetHistory(), False, False),
        (losses(1.0, 2.0), False, False),
        (losses(1.0, 2.01), True, False),
        (losses(1.0, 8.0), True, False),
        (losses(1.0, 8.01), True, True),
        (losses(1.0, 9.0, count=31), False, False),
        (losses(1.0, 9.0, count=33), True, True),
        # Beside the first losses: what varies below 0.2 of them is noise, and below half of them little is lost.
        (losses(0.001, 2.0, first=10.0), False, False),
        (losses(0.001, 2.1, first=10.0), False, True),
        (losses(0.001, 5.0, first=10.0), False, True),
        (losses(0.001, 5.1, first=10.0), True, True),
        # Of nothing there are no times.
        (losses(0.0, 1.0), False, False),
        (losses(-1.0, 1.0), False, False),
    ],
)
def test_when_losses_alarm(fleet, loss_alarms, variance_alarms):
    causes = [watch.cause(update(), fleet) for watch in (LossWatch(ratio_max=2.0), LossVarianceWatch())]
    assert [cause is not None for cause in causes] == [loss_alarms, variance_alarms]


def test_what_is_said_of_losses():
    assert LossWatch().cause(update(), losses(1.0, 3.5)) == "the loss is 3.5, 3.5 times its median"
    assert LossWatch().cause(update(), losses(0.01, 35.0)) == "the loss is 35, 3500.0 times its median"
    expected = "the variance of the losses is 9, 9.0 times its median"
    assert LossVarianceWatch().cause(update(), losses(1.0, 9.0)) == expected


@pytest.mark.parametrize(
    ("cosine_min", "agreement", "alarming"),
    [(-0.05, -0.05, False), (-0.05, -0.06, True), (0.5, 0.4, True), (-0.05, math.nan, False), (-1.0, -1.0, False)],
)
def test_when_disagreement_alarms(cosine_min, agreement, alarming):
    cause = DisagreementWatch(cosine_min=cosine_min).cause(update(), FleetHistory(agreement=agreement))
    assert (cause is not None) == alarming


@pytest.mark.parametrize(
    ("metric", "fleet", "figure"),
    [
        ("loss", losses(1.0, 2.0), 2.0),
        ("loss_variance", losses(9.0, 3.0), 3.0),
        ("gradient_norm", norms(norm=8.0, local_steps=4), 2.0),
        ("gradient_norm", norms(1, norm=8.0, local_steps=4), 2.0),
    ],
)
def test_a_figure_over_its_threshold_alarms_whatever_is_usual(metric, fleet, figure):
    over = ThresholdWatch(metric=metric, threshold=0.99 * figure)
    assert over.cause(update(), fleet) == f"the {metric} is {figure:.3g}, and the threshold {0.99 * figure:g}"
    assert ThresholdWatch(metric=metric, threshold=figure).cause(update(), fleet) is None
    assert over.cause(update(), FleetHistory()) is None


def test_devices_may_disagree_about_a_loss_that_is_small():
    causes = []
    for loss in (2.0, 2.1):
        fleet = losses(loss, loss, first=10.0)
        fleet.agreement = -0.5
        causes.append(DisagreementWatch().cause(update(), fleet))
    assert causes == [None, "updates pull apart: their mean cosine is -0.50"]


def test_the_usual_remedies():
    remedies = {type(watch).__name__: (watch.scope, watch.remedy) for watch in Monitor().watch}
    assert remedies == {
        "NotFiniteWatch": ("device", "quarantine"),
        "RefusedWatch": ("device", "quarantine"),
        "UpdateNormWatch": ("device", "quarantine"),
        "MisfitWatch": ("device", "quarantine"),
        "LossWatch": ("fleet", "rollback"),
        "LossVarianceWatch": ("fleet", "increase_frequency"),
        "DisagreementWatch": ("fleet", "reduce_lr"),
    }
    assert Monitor().rolls_back
    assert not Monitor(watch=(LossWatch(remedy="alert"), UpdateNormWatch())).rolls_back


# -- alarms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loud:
    """Alarmed by a loss over 1."""

    scope: str
    remedy: str = "alert"
    count_max: int = 1
    patient: bool = False

    def cause(self, update, fleet):
        return f"loss {update.loss:g}" if update.loss > 1.0 else None


def guard_of(watches, calm_updates):
    return DivergenceGuard(SimpleNamespace(watch=watches, calm_updates=calm_updates, rolls_back=False))


def looks(guard, scope, *told):
    """Show updates, `a2` for one of device a with loss 2; return what began and ended."""
    changes = []
    for word in told:
        observation = update(device_id=word[0], loss=float(word[1:]))
        if scope == "device":
            reports, _ = guard.watch_device(observation, FleetHistory(), 100)
        else:
            reports, _ = guard.watch_fleet(observation, FleetHistory())
        changes.append([("+" if report.event == "alarm" else "-") + report.device_id for report in reports])
    return changes


def test_an_alarm_ends_after_so_many_calm_updates_in_a_row():
    guard = guard_of([Loud("device")], calm_updates=3)
    assert looks(guard, "device", "a1", "a2", "a3", "a0", "a0") == [[], ["+a"], [], [], []]
    (alarm,) = guard.state.alarms.values()
    assert (alarm.cause, alarm.calm) == ("loss 3", 2)
    # Another device's calm is not its own.
    assert looks(guard, "device", "a2", "b0", "b0", "b0", "a0", "a0") == [[]] * 6
    assert [alarm.device_id for alarm in guard.state.alarms.values()] == ["a"]
    assert guard.is_active("alert")
    assert not guard.is_active("rollback")
    assert looks(guard, "device", "a0", "a2") == [["-a"], ["+a"]]


@pytest.mark.parametrize(
    ("patient", "lateness", "needed"), [(False, 2.0, 2), (True, 1.0, 2), (True, 1.5, 3), (True, 2.0, 4)]
)
def test_a_patient_watch_waits_for_more_updates_if_they_are_late(patient, lateness, needed):
    guard = guard_of([Loud("device", count_max=2, patient=patient)], calm_updates=3)
    late = update(loss=2.0, lateness=lateness)
    begun = [bool(guard.watch_device(late, FleetHistory(), 100)[0]) for _ in range(5)]
    assert begun.index(True) + 1 == needed


def test_lateness_is_measured_by_what_is_usual_and_bounded():
    fleet = FleetHistory(staleness_mean=3.0)
    assert [fleet.lateness(staleness) for staleness in (0, 3, 5, 1000)] == [1.0, 1.0, 1.5, 2.0]


def test_the_fleets_alarm_ends_with_anybodys_calm():
    guard = guard_of([Loud("fleet", "reduce_lr"), Loud("device")], calm_updates=2)
    assert looks(guard, "fleet", "a2", "b0", "c0", "b2") == [["+"], [], ["-"], ["+"]]
    assert [(alarm.watch, alarm.remedy) for alarm in guard.state.alarms.values()] == [(0, "reduce_lr")]
    assert looks(guard, "device", "b2") == [["+b"]]
    guard.forget("b")
    assert [alarm.watch for alarm in guard.state.alarms.values()] == [0]


def test_devices_halve_their_learning_rates_as_long_as_the_alarm_lasts():
    guard = guard_of([Loud("fleet", "reduce_local_lr")], calm_updates=2)
    assert guard.local_learning_rate_factor == 1.0
    looks(guard, "fleet", "a9")
    assert (guard.local_learning_rate_factor, guard.learning_rate_factor) == (0.5, 1.0)
    looks(guard, "fleet", "a0", "a0")
    assert guard.local_learning_rate_factor == 1.0
