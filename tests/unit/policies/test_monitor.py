import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from edgeasync.core.hub.divergence import PAST_MAX, DivergenceGuard
from edgeasync.core.hub.effects import HubReport
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.policies.monitor import (
    DataMismatchDetector,
    DisagreementDetector,
    Evidence,
    LossDetector,
    LossVarianceDetector,
    Monitor,
    NotFiniteDetector,
    Observation,
    RefusedDetector,
    ThresholdDetector,
    UpdateNormDetector,
)
from edgeasync.protocol.status import ActiveAlarm, AlarmCause, EndedAlarm


def update(norm=1.0, local_steps=4, *, device_id="a", loss=0.5, voter=None, **more):
    return Observation(device_id, norm, local_steps, loss, voter or device_id, **more)


def norms(count=3, norm=1.0, local_steps=4, *, peak=0.0):
    """The last norms of `count` devices, of which the median was once `peak`."""
    return fleet_of([(f"device-{number}", norm, local_steps) for number in range(count)], peak)


def fleet_of(last, peak=0.0):
    fleet = FleetMeasurements()
    for voter, _, local_steps in last:
        fleet.observe_norm(voter, peak, local_steps)
    fleet.note_peaks(1)
    for voter, norm, local_steps in last:
        fleet.observe_norm(voter, norm, local_steps)
    return fleet


def losses(usual, last, *, count=64, first=0.0):
    """Losses and variances of which the last quarter has another value."""
    series = [usual] * (count - 16) + [last] * 16
    fleet = FleetMeasurements(losses=series, loss_variances=series, loss_first=first)
    for votes in (fleet.newest_losses, fleet.newest_variances):
        votes.cast("a", last)
    return fleet


# -- one device's updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("detector", "norm", "local_steps", "fleet", "alarming"),
    [
        (UpdateNormDetector(), 4.0, 4, norms(), False),
        (UpdateNormDetector(), 4.1, 4, norms(), True),
        (UpdateNormDetector(), 4.1, 4, norms(2), False),
        # One that is long beside the last updates may be usual beside those when there was more to learn.
        (UpdateNormDetector(), 12.0, 4, norms(peak=10.0), False),
        (UpdateNormDetector(), 12.1, 4, norms(peak=10.0), True),
        (UpdateNormDetector(), 1.3, 4, norms(norm=0.0, peak=1.0), True),
        (UpdateNormDetector(), 1.1, 4, norms(norm=0.0, peak=1.0), False),
        # Sixteen times the steps may be four times as long, and few steps excuse nothing.
        (UpdateNormDetector(), 16.0, 64, norms(), False),
        (UpdateNormDetector(), 16.1, 64, norms(), True),
        (UpdateNormDetector(), 4.0, 1, norms(), False),
        (UpdateNormDetector(), 4.1, 1, norms(), True),
        (UpdateNormDetector(), 1e300, 4, norms(norm=0.0), False),
        (UpdateNormDetector(), math.nan, 4, norms(), False),
    ],
)
def test_how_long_an_update_may_be(detector, norm, local_steps, fleet, alarming):
    cause = detector.cause(update(norm, local_steps), fleet)
    assert (cause is not None) == alarming
    assert detector.scope == "device"


def test_long_updates_of_some_devices_do_not_hide_the_next():
    fleet = fleet_of([(voter, 1.0 if voter < "f" else 1e9, 4) for voter in "abcdefghi"])
    found = UpdateNormDetector().cause(update(30.0), fleet)
    assert found.figures == {"times_usual": 30.0}
    assert found.words.startswith("its updates are 30 times as long as usual: ")


def alarms_of(detector, updates, fleet=None):
    """Whether the device has an alarm after each of its updates."""
    guard = DivergenceGuard(Monitor(detectors=(detector,), calm_updates=2), probation=False)
    seen = []
    for one in updates:
        guard.watch_device(one, fleet or FleetMeasurements(), 0.0, voters="ab", voters_live=3)
        seen.append("a" in guard.state.devices)
    return seen


@pytest.mark.parametrize(
    ("detector", "bad"),
    [
        (NotFiniteDetector(count_max=3), update(finite=False)),
        (RefusedDetector(count_max=3), update(known=False)),
        (UpdateNormDetector(count_max=3), update(9.0)),
    ],
)
def test_an_alarm_begins_after_some_in_a_row_and_ends_after_some_calm_ones(detector, bad):
    calm, fleet = update(), norms()
    assert alarms_of(detector, [bad, bad, calm, bad, bad, bad], fleet) == [False] * 5 + [True]
    assert alarms_of(detector, [bad, bad, bad, calm, bad, calm, calm], fleet) == [False] * 2 + [True] * 4 + [False]


def test_another_device_neither_begins_nor_delays_an_alarm():
    bad, other = update(finite=False), update(finite=False, device_id="b")
    assert alarms_of(NotFiniteDetector(count_max=2), [bad, other, bad]) == [False, False, True]
    assert alarms_of(NotFiniteDetector(count_max=2), [bad, update(device_id="b"), bad]) == [False, False, True]


# -- data that the model does not learn ------------------------------------------------------------------------


def mismatch(own, *, fleet=0.05, peak=2.0, voters=4):
    """What the detector says of a device with this loss of the fleet's model, beside a fleet with others."""
    history = FleetMeasurements()
    for number in range(voters):
        history.observe_base_loss(str(number), peak)
    history.base_losses.note_peak()
    for number in range(voters):
        history.observe_base_loss(str(number), fleet)
    return DataMismatchDetector().cause(update(base_loss=own), history)


@pytest.mark.parametrize(
    ("losses", "alarming"),
    [
        ({"own": 2.0}, True),
        ({"own": math.nan}, False),  # too new to be judged
        ({"own": 1.0}, False),  # half has been learnt
        ({"own": 1.01}, True),
        ({"own": 2.0, "fleet": 1.0}, False),  # nobody has learnt much
        ({"own": 2.01, "fleet": 1.0}, True),
        ({"own": 2.0, "voters": 2}, False),
        ({"own": 0.1, "fleet": 0.0, "peak": 0.12}, True),
    ],
)
def test_whose_data_contradict_the_others(losses, alarming):
    cause = mismatch(**losses)
    assert (cause is not None) == alarming
    if cause is not None:
        usual = losses.get("fleet", 0.05)
        assert cause.figures == {"loss": losses["own"], "fleet_loss": usual}
        figures = f"(loss {losses['own']:.3g}, the fleet's {usual:.3g})"
        assert cause.words == f"the model does not fit its data {figures}: check labels and inputs"


def test_who_tells_no_loss_is_not_judged_by_it():
    assert DataMismatchDetector().cause(update(), norms()) is None


def test_a_key_under_many_names_is_one_of_those_that_norms_are_compared_with():
    fleet = fleet_of([("a", 1.0, 4), ("b", 1.0, 4), *[("liar", 100.0, 4)] * 50])
    assert UpdateNormDetector().cause(update(9.0, voter="liar", device_id="liar/7"), fleet) is not None
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
        (FleetMeasurements(), False, False),
        (losses(1.0, 2.0), False, False),
        (losses(1.0, 2.01), True, False),
        (losses(1.0, 8.01), True, True),
        (losses(1.0, 9.0, count=31), False, False),
        (losses(1.0, 9.0, count=33), True, True),
        # Beside the first losses: what varies below 0.2 of them is noise, and below half of them little is lost.
        (losses(0.001, 2.0, first=10.0), False, False),
        (losses(0.001, 2.1, first=10.0), False, True),
        (losses(0.001, 5.1, first=10.0), True, True),
        # Of nothing there are no times.
        (losses(0.0, 1.0), False, False),
        (losses(-1.0, 1.0), False, False),
    ],
)
def test_when_losses_alarm(fleet, loss_alarms, variance_alarms):
    causes = [
        detector.cause(update(), fleet) for detector in (LossDetector(ratio_max=2.0), LossVarianceDetector())
    ]
    assert [cause is not None for cause in causes] == [loss_alarms, variance_alarms]


def test_what_is_said_of_losses():
    found = LossDetector().cause(update(), losses(1.0, 3.5))
    assert found == Evidence("the loss is 3.5, 3.5 times its median", {"loss": 3.5, "usual": 1.0})
    words = "the loss is 35, 3500.0 times its median"
    assert LossDetector().cause(update(), losses(0.01, 35.0)).words == words
    found = LossVarianceDetector().cause(update(), losses(1.0, 9.0))
    words = "the variance of the losses is 9, 9.0 times its median"
    assert found == Evidence(words, {"loss_variance": 9.0, "usual": 1.0})


@pytest.mark.parametrize(
    ("cosine_min", "agreement", "alarming"),
    [(-0.05, -0.05, False), (-0.05, -0.06, True), (0.5, 0.4, True), (-0.05, math.nan, False), (-1.0, -1.0, False)],
)
def test_when_disagreement_alarms(cosine_min, agreement, alarming):
    cause = DisagreementDetector(cosine_min=cosine_min).cause(update(), FleetMeasurements(agreement=agreement))
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
    over = ThresholdDetector(metric=metric, threshold=0.99 * figure)
    words = f"the {metric} is {figure:.3g}, and the threshold {0.99 * figure:g}"
    assert over.cause(update(), fleet) == Evidence(words, {metric: figure})
    assert ThresholdDetector(metric=metric, threshold=figure).cause(update(), fleet) is None
    assert over.cause(update(), FleetMeasurements()) is None


def test_devices_may_disagree_about_a_loss_that_is_small():
    causes = []
    for loss in (2.0, 2.1):
        fleet = losses(loss, loss, first=10.0)
        fleet.agreement = -0.5
        causes.append(DisagreementDetector().cause(update(), fleet))
    assert causes == [None, Evidence("updates pull apart: their mean cosine is -0.50", {"cosine": -0.5})]


# -- alarms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loud:
    """Alarmed by a loss over `bound`."""

    scope: str
    remedy: str = "alert"
    count_max: int = 1
    patient: bool = False
    bound: float = 1.0

    def cause(self, update, fleet):
        found = update.loss > self.bound
        return Evidence(f"loss {update.loss:g}, over {self.bound:g}", {"loss": update.loss}) if found else None


def guard_of(detectors, calm_updates, *, probation=False, rolls_back=False):
    monitor = SimpleNamespace(detectors=detectors, calm_updates=calm_updates, rolls_back=rolls_back)
    return DivergenceGuard(monitor, probation=probation)


def look(guard, scope, word, now_s=0.0, **fields):
    """Show an update, `a2` for one of device a with loss 2; return the reports."""
    observation = update(device_id=word[0], loss=float(word[1:]), **fields)
    if scope == "device":
        reports, _ = guard.watch_device(observation, FleetMeasurements(), now_s, voters="abc", voters_live=100)
    else:
        reports, _ = guard.watch_fleet(observation, FleetMeasurements(), now_s)
    return reports


def looks(guard, scope, *told):
    """Show updates; return what began and ended with each."""
    reports = [look(guard, scope, word) for word in told]
    return [[("+" if one.event == "alarm" else "-") + one.device_id for one in found] for found in reports]


def test_an_alarm_ends_after_so_many_calm_updates_in_a_row():
    guard = guard_of([Loud("device")], calm_updates=3)
    assert looks(guard, "device", "a1", "a2", "a3", "a0", "a0") == [[], ["+a"], [], [], []]
    (alarm,) = guard.state.devices.values()
    (cause,) = alarm.causes.values()
    assert (alarm.words, cause.updates, cause.calm) == ("loss 3, over 1", 2, 2)
    # Another device's calm is not its own.
    assert looks(guard, "device", "a2", "b0", "b0", "b0", "a0", "a0") == [[]] * 6
    assert list(guard.state.devices) == ["a"]
    assert looks(guard, "device", "a0", "a2") == [["-a"], ["+a"]]


def test_one_alarm_of_a_device_has_all_its_causes_with_their_figures():
    guard = guard_of([Loud("device", count_max=2), Loud("device", bound=5.0), Loud("device", bound=9.0)], 2)
    assert look(guard, "device", "a2", 10.0) == []
    (report,) = look(guard, "device", "a3", 11.0)
    words = "loss 3, over 1; to exclude it, run 'edgeasync device quarantine a'"
    assert report == HubReport("alarm", "a", words, {"loss": 3.0, "updates": 2})
    (report,) = look(guard, "device", "a6", 12.0)
    assert (report.event, report.figures) == ("alarm", {"loss": 6.0, "updates": 1})
    assert look(guard, "device", "a7", 13.0) == []
    assert guard.ended_alarms(20.0) == []
    causes = [
        AlarmCause("loss 7, over 1", since_s=9.0, updates=4, figures={"loss": 7.0}),
        AlarmCause("loss 7, over 5", since_s=8.0, updates=2, figures={"loss": 7.0}),
    ]
    assert guard.active_alarms(20.0) == [
        ActiveAlarm("a", "loss 7, over 1; loss 7, over 5", "alert", since_s=9.0, causes=causes)
    ]
    # A cause ends for itself, and the alarm with the last of them.
    assert [look(guard, "device", word, 30.0) for word in ("a2", "a2", "a0")] == [[], [], []]
    assert [cause.cause for cause in guard.active_alarms(31.0)[0].causes] == ["loss 2, over 1"]
    (report,) = look(guard, "device", "a0", 51.0)
    assert report == HubReport("calm", "a", "ended after 40 s: loss 2, over 1")
    assert guard.active_alarms(60.0) == []
    assert guard.ended_alarms(60.0) == [EndedAlarm("a", "loss 2, over 1", ended_ago_s=9.0, duration_s=40.0)]


def test_an_alarm_of_the_fleet_has_figures_begin_and_duration_too():
    guard = guard_of([Loud("fleet", "reduce_lr")], calm_updates=1)
    (report,) = look(guard, "fleet", "a2", 5.0)
    assert report == HubReport("alarm", "", "loss 2, over 1; the hub's learning rate is halved", {"loss": 2.0})
    (shown,) = guard.active_alarms(6.0)
    assert (shown.device, shown.remedy, shown.since_s) == ("", "reduce_lr", 1.0)
    look(guard, "fleet", "b0", 9.0)
    assert guard.active_alarms(9.5) == []
    assert guard.ended_alarms(9.5) == [EndedAlarm("", "loss 2, over 1", ended_ago_s=0.5, duration_s=4.0)]


def test_so_many_alarms_that_are_over_are_remembered():
    guard = guard_of([Loud("device")], calm_updates=1)
    for number in range(PAST_MAX + 5):
        look(guard, "device", "a2", float(number))
        look(guard, "device", "a0", number + 0.5)
    shown = guard.ended_alarms(100.0)
    assert len(shown) == PAST_MAX
    assert [shown[0].ended_ago_s, shown[-1].ended_ago_s] == [94.5, 63.5]


@pytest.mark.parametrize(
    ("patient", "slowness", "needed"), [(False, 2.0, 2), (True, 1.0, 2), (True, 1.5, 3), (True, 2.0, 4)]
)
def test_a_patient_detector_waits_for_more_updates_of_a_slow_device(patient, slowness, needed):
    guard = guard_of([Loud("device", count_max=2, patient=patient)], calm_updates=3)
    begun = [bool(look(guard, "device", "a2", slowness=slowness)) for _ in range(5)]
    assert begun.index(True) + 1 == needed


@pytest.mark.parametrize(
    ("staleness", "local_steps", "slowness"),
    [
        (0, 12, 1.0),
        (5, 12, 1.5),
        (1000, 12, 4.0),
        (0, 8, 1.5),
    ],
)
def test_slowness_is_measured_by_what_is_usual_and_bounded(staleness, local_steps, slowness):
    fleet = fleet_of([("a", 1.0, 12), ("b", 2.0, 12), ("c", 3.0, 12)])
    fleet.staleness_mean = 3.0
    assert fleet.slowness(staleness, local_steps) == pytest.approx(slowness)


@pytest.mark.parametrize("fleet", [FleetMeasurements(), norms(norm=0.0)])
def test_without_lengths_to_compare_steps_with_nobody_is_slow_by_them(fleet):
    assert fleet.slowness(0, 1) == 1.0


def test_the_fleets_alarm_ends_with_anybodys_calm():
    guard = guard_of([Loud("fleet", "reduce_lr"), Loud("device")], calm_updates=2)
    assert looks(guard, "fleet", "a2", "b0", "c0", "b2") == [["+"], [], ["-"], ["+"]]
    assert guard.is_active("reduce_lr")
    assert not guard.is_active("alert"), "that of a device is none of the fleet"
    assert looks(guard, "device", "b2") == [["+b"]]
    guard.release("b", "b", 0.0)
    assert (list(guard.state.fleet), guard.state.devices, guard.count) == ([0], {}, 1)


def test_devices_halve_their_learning_rates_as_long_as_the_alarm_lasts():
    guard = guard_of([Loud("fleet", "reduce_local_lr")], calm_updates=2)
    assert guard.local_learning_rate_factor == 1.0
    looks(guard, "fleet", "a9")
    assert (guard.local_learning_rate_factor, guard.learning_rate_factor) == (0.5, 1.0)
    looks(guard, "fleet", "a0", "a0")
    assert guard.local_learning_rate_factor == 1.0
