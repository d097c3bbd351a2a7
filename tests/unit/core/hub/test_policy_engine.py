"""What the policy engine makes of updates, seen through its core: which count, when, and what is done after."""

import math
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeasync.core.hub.divergence import KEEP_EVERY_UPDATES
from edgeasync.core.hub.effects import Assign, Discard, Evaluate, Fold, HubReport, Keep, Restore, WriteBest
from edgeasync.core.hub.events import Evaluated, Folded, PushArrived, Revoked
from edgeasync.core.hub.settings import CheckpointSettings, EvaluationSettings
from edgeasync.measurements.medians import WINDOW, median
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import MedianCombiner
from edgeasync.policies.frequency import AdaptiveFrequency, Cadence, FixedFrequency
from edgeasync.policies.monitor import (
    DataMismatchDetector,
    DisagreementDetector,
    Evidence,
    LossDetector,
    LossVarianceDetector,
    Monitor,
    NotFiniteDetector,
    UpdateNormDetector,
)
from edgeasync.policies.policy import Plateau, WarmUp
from edgeasync.policies.staleness import ConstantStaleness, PolynomialStaleness
from edgeasync.protocol.messages import Ack, Applied, Buffered, DeviceProfile, Rejected
from tests.support.parts.hub_bench import HubBench
from tests.support.parts.hub_bench import plain_policy as policy

QUIET = Monitor(detectors=())
AT_ONCE = ImmediateAggregator()
FREQUENCY = FixedFrequency()


def push(hub, device_id="a", base=None, *, norm=1.0, at_s=None, **fields):
    """Push an update from the newest version, or from `base`; return why it does not count, if so."""
    seq = hub.core.members.members[device_id].seq_last + 1
    made = hub.make_push(device_id, seq, hub.core.version if base is None else base)
    made = msgspec.structs.replace(made, **fields)
    key = hub.keys.get(device_id, b"")
    hub.handle = next(hub.handles)
    hub.give(PushArrived(hub.peers[device_id], made, hub.handle, norm, key=key), at_s)
    outcome = hub.core.members.members[device_id].outcome_last
    return outcome.reason if isinstance(outcome, Rejected) else None


def joined(hub_bench, policy, devices="a", **settings):
    hub = hub_bench(policy, **{"liveness": {"lease_s": 1e6}} | settings)
    for name in devices:
        hub.join(name)
    return hub


def warned(hub):
    """The devices that there are alarms about."""
    return list(hub.core.policy_engine.state.divergence.devices)


def kinds(hub):
    return [type(effect) for effect in hub.effects if not isinstance(effect, Assign | WriteBest)]


# -- rollback ------------------------------------------------------------------------------------------------


def rising(hub_bench, *, calm_updates=6, **parts):
    """A hub whose devices' losses have been calm for 32 updates."""
    monitor = Monitor(detectors=(LossDetector(),), calm_updates=calm_updates)
    hub = joined(hub_bench, policy(aggregate=BufferedAggregator(count=4), monitor=monitor, **parts), "abc")
    for number in range(31):
        push(hub, "abc"[number % 3])
        assert Keep not in kinds(hub)
    push(hub, "b")
    assert kinds(hub) == [Fold, Keep]
    return hub


def test_a_rollback_drops_what_waits_and_what_comes_of_versions_that_are_no_more(hub_bench):
    hub = rising(hub_bench)
    assert [push(hub, name) for name in "abc"] == [None] * 3
    # As long as most of the last 16 are calm, so is the fleet.
    assert [push(hub, name, loss_mean=100.0) for name in "abcabcab"] == [None] * 8
    assert push(hub, "c", loss_mean=100.0) == "rolled_back"
    last = next(hub.handles)
    assert kinds(hub) == [HubReport, Discard, Discard, Discard, Restore, Discard]
    assert [effect.handle for effect in hub.all_of(Discard)] == [last - 4, last - 3, last - 2, last - 1]
    assert hub.one(HubReport).event == "alarm"
    assert hub.one(HubReport).detail.startswith("the loss is 50.2, 100.5 times its median; rolled back to")
    assert hub.one(Restore).number == hub.core.version == 11
    assert hub.one(Assign).version.number == 11
    status = hub.core.status(0.0)
    assert (status["updates_applied"], status["updates_rejected"], status["rollbacks"]) == (40, 4, 1)
    assert [(alarm["remedy"], alarm["device"]) for alarm in status["alarms"]] == [("rollback", "")]
    assert push(hub, "a", 10) == push(hub, "b", 3) == "rolled_back"
    assert push(hub, "a", 11) is None
    # Six calm updates end the alarm, and with it the halved learning rate.
    scales, reports = [], []
    for _ in range(11):
        push(hub)
        scales += [fold.scale for fold in hub.all_of(Fold)]
        reports += hub.reports
    assert (scales, reports) == ([0.5, 0.5, 0.5], ["calm"])
    assert hub.core.version == 14
    assert hub.core.status(0.0)["rollbacks"] == 1


def test_one_key_that_sends_often_neither_sets_the_first_losses_nor_hides_a_rise(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(LossDetector(),))), "abcd")

    def round_of(loss_mean):
        for name in "abc":
            told = [push(hub, "d", loss_mean=1e6) for _ in range(20)]
            if "rolled_back" in (*told, push(hub, name, loss_mean=loss_mean)):
                return True
        return False

    for _ in range(20):
        assert not round_of(1.0)
    fleet = hub.core.policy_engine.state.fleet
    assert (fleet.loss_first, fleet.loss) == (1.0, 1.0)
    loss_mean = 1.0
    for _ in range(20):
        loss_mean *= 1.5
        if round_of(loss_mean):
            break
    assert hub.core.policy_engine.state.divergence.rollbacks == 1, "the fleet's rise is seen"
    assert loss_mean < 30.0
    for _ in range(3 * WINDOW):
        push(hub, "d", loss_mean=1e-6)
    assert fleet.losses == [], "after a rollback, too, one key alone is not the fleet"


@pytest.mark.parametrize(("rising", "rollbacks"), [("ab", 0), ("abc", 1)])
def test_half_of_the_keys_do_not_move_the_model_back(hub_bench, rising, rollbacks):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(LossDetector(),))), "abcd")
    for number in range(2 * WINDOW):
        name = "abcd"[number % 4]
        push(hub, name, loss_mean=1e6 if number >= WINDOW and name in rising else 1.0)
    assert (hub.core.policy_engine.state.divergence.rollbacks > 0) == bool(rollbacks)


def test_after_a_rollback_the_optimizer_counts_anew_and_nothing_is_looked_back_on(hub_bench):
    hub = rising(hub_bench)
    assert [push(hub, name, loss_mean=100.0) for name in "abcabcabc"] == [None] * 8 + ["rolled_back"]
    fleet = hub.core.policy_engine.state.fleet
    assert not any([fleet.losses, fleet.norms, fleet.scores])
    assert hub.core.policy_engine.state.gathering.folds == 0
    for _ in range(31):
        assert push(hub, loss_mean=100.0) is None, "with 31 updates there is nothing to compare with"


def test_who_waits_for_a_flush_that_was_rolled_back_gets_the_old_model(hub_bench):
    monitor = Monitor(detectors=(LossDetector(),))
    hub = joined(hub_bench, policy(aggregate=SynchronousAggregator(), monitor=monitor), "abc")
    for _ in range(11):
        for name in "abc":
            push(hub, name)
    push(hub, "a", loss_mean=100.0)
    # The voters' median is high from the second on; while most of the last 16 medians are calm, so is the fleet.
    assert [push(hub, name, loss_mean=100.0) for name in "bcabcabc"] == [None] * 7 + ["rolled_back"]
    answers = {effect.peer: effect for effect in hub.all_of(Assign)}
    assert set(answers) == {hub.peers[name] for name in "abc"}
    assert {answer.version.number for answer in answers.values()} == {14}
    assert hub.one(Restore).number == 14


def test_one_rollback_for_one_alarm(hub_bench):
    @dataclass(frozen=True)
    class Always:
        scope: str = "fleet"
        count_max: int = 1
        patient: bool = False
        remedy: str = "rollback"

        def cause(self, update, fleet):
            return Evidence("always")

    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(Always(),))))
    assert [push(hub) for _ in range(20)] == ["rolled_back"] + [None] * 19
    assert hub.core.policy_engine.state.divergence.rollbacks == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_the_first_updates_are_looked_at_again_once_there_are_others_to_compare_them_with(hub_bench, leaves):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(LossDetector(),))), "abcd")
    assert push(hub, "d", norm=50.0) is None, "nobody knows yet how long updates are"
    if leaves:
        hub.leave("d")
    assert [push(hub, name) for name in "abcabc"] == [None] * 6
    assert push(hub, "a") == "rolled_back"
    assert (hub.one(HubReport).event, hub.one(HubReport).device_id) == ("alarm", "d")
    assert hub.one(HubReport).detail.startswith(
        "the norm of one of its first updates was 50 times the usual norm; rolled back"
    )
    assert hub.one(Restore).number == 8
    assert push(hub, "a") is None
    if not leaves:
        assert push(hub, "d") is None
    assert hub.core.policy_engine.divergence.count == 0, "nobody would be calm for it"


def test_without_a_remedy_that_goes_back_a_long_first_update_is_told_and_stays(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(UpdateNormDetector(),))), "abcd")
    push(hub, "d", norm=50.0)
    assert [push(hub, name) for name in "abcabca"] == [None] * 7
    words, figures = "the norm of one of its first updates was 50 times the usual norm", {"times_usual": 50.0}
    assert hub.one(HubReport) == HubReport("alarm", "d", words, figures)


def test_devices_that_never_counted_do_not_say_that_the_model_is_at_fault(hub_bench):
    """They may have been broken from the start."""
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(NotFiniteDetector(), LossDetector()))), "abcde")
    for _ in range(20):
        assert [push(hub, name, norm=math.nan) for name in "abc"] == ["not_finite"] * 3
        assert [push(hub, name) for name in "de"] == [None] * 2
    assert list(hub.core.policy_engine.state.divergence.devices) == ["a", "b", "c"]
    assert hub.core.policy_engine.state.divergence.rollbacks == 0


def test_devices_that_counted_and_then_alarm_make_the_hub_return_each_time(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(NotFiniteDetector(), LossDetector()))), "abc")
    for rollbacks in range(1, 4):
        assert [push(hub, name) for name in "abc"] == [None] * 3
        told = [push(hub, name, norm=math.nan) for name in "ababab"]
        assert told == ["not_finite"] * 5 + ["rolled_back"]
        assert hub.core.policy_engine.state.divergence.rollbacks == rollbacks


@pytest.mark.parametrize(("devices", "every"), [("a", KEEP_EVERY_UPDATES), ("abcdefghijklmnopqrst", 40)])
def test_how_often_a_version_is_kept(hub_bench, devices, every):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(LossDetector(),))), devices)
    kept = []
    for number in range(1, 130):
        push(hub, devices[number % len(devices)])
        kept += [number] if hub.all_of(Keep) else []
    assert kept == list(range(every, 130, every))


def test_no_version_is_kept_in_an_alarm_of_the_fleet_but_that_of_a_device_is_none(hub_bench):
    hub = joined(
        hub_bench,
        policy(monitor=Monitor(detectors=(NotFiniteDetector(), DisagreementDetector(), LossDetector()))),
        "ab",
    )
    kept = []
    for number in range(1, 101):
        push(hub, "b", norm=math.nan)
        hub.core.policy_engine.state.fleet.agreement = -1.0 if 20 <= number < 30 else 0.5
        push(hub, "a")
        kept += [number] if hub.all_of(Keep) else []
    # The alarm of 20 to 29 ends with the tenth calm update after it, at 39; from there on 32 make 70.
    assert kept == [70]


def test_without_a_remedy_that_needs_it_nothing_is_kept(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(LossDetector(remedy="alert"),))))
    for _ in range(70):
        push(hub)
        assert not hub.all_of(Keep)


# -- quarantine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", [SynchronousAggregator(), QuorumAggregator(share=1.0, patience=100.0)])
@pytest.mark.parametrize("watched", [True, False])
def test_a_device_whose_updates_never_count_holds_up_nobody(hub_bench, aggregate, watched):
    """All have spoken when it has, too."""
    monitor = Monitor() if watched else QUIET
    hub = joined(
        hub_bench,
        policy(aggregate=aggregate, monitor=monitor),
        "abc",
        checkpoint=CheckpointSettings(every="1000 hours"),
    )
    for version in range(1, 7):
        order = ("a", "b", "c") if version % 2 else ("c", "a", "b")
        folds = []
        for name in order:
            push(hub, name, norm=math.nan if name == "c" else 1.0, at_s=float(version))
            folds += hub.all_of(Fold)
        assert [(fold.number, len(fold.handles)) for fold in folds] == [(version, 2)]
        assert {effect.peer for effect in hub.all_of(Assign)} >= {hub.peers["a"]}
        assert not any(member.waiting for member in hub.core.members.members.values())


def test_who_was_refused_and_then_counts_is_one_and_not_two(hub_bench):
    hub = joined(hub_bench, policy(aggregate=SynchronousAggregator()), "abc")
    push(hub, "a", norm=math.nan)
    push(hub, "a")
    push(hub, "b")
    assert not hub.all_of(Fold)
    push(hub, "c")
    assert len(hub.one(Fold).handles) == 3


def test_a_stale_update_is_not_a_word_in_this_round(hub_bench):
    """Its device continues from the newest model, and this round waits for it."""
    hub = joined(
        hub_bench, policy(aggregate=SynchronousAggregator(), staleness=ConstantStaleness(staleness_max=0)), "ab"
    )
    push(hub, "a")
    push(hub, "b")
    assert push(hub, "a", 0) == "stale"
    push(hub, "b")
    assert not hub.all_of(Fold)
    push(hub, "a")
    assert hub.one(Fold).number == 2


# -- one key, one vote ---------------------------------------------------------------------------------------


def of_keys(hub_bench, policy, *names, **settings):
    """A hub with these devices; the key of `k/3` is that of `k`."""
    hub = hub_bench(policy, liveness={"lease_s": 1e6}, **settings)
    for name in names:
        hub.keys[name] = name.partition("/")[0].encode().ljust(32, b".")
        hub.join(name)
    return hub


LIARS = [f"k/{number}" for number in range(20)]


def test_one_key_under_many_names_neither_makes_a_version_nor_has_more_of_one(hub_bench):
    rounds = policy(aggregate=SynchronousAggregator(share=0.5))
    hub = of_keys(hub_bench, rounds, *LIARS, "a", "b", "c", limits={"updates_held_max": 99})
    for name in LIARS:
        push(hub, name)
        assert not hub.all_of(Fold)
    push(hub, "a")
    assert hub.one(Fold).weights == pytest.approx([0.5 / 20] * 20 + [0.5])
    members = hub.core.members
    assert sorted(members.voters.values()) == [1, 1, 1, 20]
    for name in LIARS[2:]:
        hub.leave(name)
    assert members.shared == {members.members["k/0"].voter: 2}


def test_for_a_robust_combiner_a_key_is_one_row(hub_bench):
    hub = of_keys(
        hub_bench,
        policy(aggregate=SynchronousAggregator(), combine=MedianCombiner()),
        "k/0", "a", "k/1", "b",
    )  # fmt: skip
    for name in ("k/0", "a", "k/1", "b"):
        push(hub, name)
    fold = hub.one(Fold)
    assert fold.rows == (0, 1, 0, 2)
    assert fold.weights == pytest.approx((1 / 6, 1 / 3, 1 / 6, 1 / 3))


def test_alarms_about_many_names_of_a_key_are_no_epidemic(hub_bench):
    monitor = Monitor(detectors=(NotFiniteDetector(count_max=1), LossDetector()))
    hub = of_keys(hub_bench, policy(monitor=monitor), *LIARS, "a", "b")
    for name in (*LIARS, "a", "b"):
        assert push(hub, name) is None
    for name in LIARS:
        assert push(hub, name, norm=math.nan) == "not_finite"
    assert hub.core.policy_engine.state.divergence.rollbacks == 0
    assert push(hub, "a", norm=math.nan) == "rolled_back", "two of three keys are more than half"


def test_a_key_that_takes_over_a_device_leaves_no_vote_behind(hub_bench):
    hub = joined(hub_bench, policy(), "ab")
    push(hub, "a", loss_mean=7.0)
    hub.keys["a"] = b"a" * 32
    hub.hello("a", start=2)
    assert set(hub.core.members.voters) == {(b"a" * 32).hex(), "b"}
    assert not hub.core.policy_engine.state.fleet.newest_losses.newest


def test_parts_of_votes_add_up_to_the_same_bits_whatever_the_devices_are_called(hub_bench):
    """A set of names has another order with every start of Python: in a replay its sum had another last bit."""
    found = set()
    for letter in "abcdefgh":
        names = [f"{letter}{key}/{number}" for key in range(1, 8) for number in range(key)]
        gathering = policy(aggregate=BufferedAggregator(count=15))
        hub = of_keys(hub_bench, gathering, *names, limits={"updates_held_max": 999})
        engine = hub.core.policy_engine
        engine.state.rest.resting = True
        for name in names[::2]:
            push(hub, name)
        for name in names[1::2]:
            push(hub, name, norm=math.nan)
        refused = engine.electorate.fleet(engine.gathering._waiting).voters_live
        push(hub, names[0])
        found.add((refused, hub.one(Fold).weights))
    assert len(found) == 1


# -- what is said, and how long an update may be ---------------------------------------------------------------

CLIPPING = Monitor(detectors=(), clip=2.0)


def test_an_update_counts_with_a_length_that_is_usual_among_the_voters(hub_bench):
    hub = joined(hub_bench, policy(aggregate=BufferedAggregator(count=4), monitor=CLIPPING), "abcd")
    for name, norm in zip("abcd", (1.0, 1.0, 2.0, 1e6), strict=True):
        assert push(hub, name, norm=norm) is None
    # The median of 1, 1, 2 and a million is 1.5, so already the first version is safe.
    assert hub.one(Fold).weights == pytest.approx((0.25, 0.25, 0.25, 0.25 * 3.0 / 1e6))


@pytest.mark.parametrize("claim", [{"local_steps": 2**31}, {"local_steps": 2**31, "overlap_steps": 2**31}])
def test_claimed_steps_excuse_no_length(hub_bench, claim):
    hub = joined(hub_bench, policy(monitor=Monitor(clip=2.0)), "abcd")
    for name in "abcabc":
        push(hub, name)
    assert [push(hub, "d", norm=100.0, **claim) for _ in range(3)] == [None] * 3
    assert hub.one(Fold).weights == (pytest.approx(0.02),)
    if "overlap_steps" in claim:
        assert "d" not in hub.core.policy_engine.state.fleet.norms.newest, "alone for long: not compared"
        assert not warned(hub)
    else:
        assert warned(hub) == ["d"]


def test_who_says_that_it_was_alone_is_not_calm_by_that(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(calm_updates=2)), "abcd")
    for name in "abcabc":
        push(hub, name)
    assert [push(hub, "d", norm=100.0) for _ in range(3)] == [None] * 3
    for _ in range(5):
        assert push(hub, "d", local_steps=8, overlap_steps=8) is None
        assert warned(hub) == ["d"]
    push(hub, "d")
    assert warned(hub) == ["d"]
    push(hub, "d")
    assert not warned(hub)


def test_an_assignment_that_was_repeated_is_no_lie(hub_bench):
    """An answer was lost, and the next one had fewer steps; or it came late, behind the update of another."""
    hub = joined(hub_bench, policy(frequency=FixedFrequency(local_steps=64)), "a")
    member = hub.core.members.members["a"]
    for _ in range(2):
        push(hub, local_steps=64)
        assert member.measurements.local_steps == 64
    member.measurements.local_steps_max = 4
    hub.fetch("a")
    assert member.measurements.assigned_steps == 4
    push(hub, local_steps=64)
    assert member.measurements.local_steps == 64, "of the assignment before"
    push(hub, local_steps=64)
    assert member.measurements.local_steps == 64, "it may have come late"
    push(hub, local_steps=64)
    assert member.measurements.local_steps == 4


def test_examples_beyond_reason_weigh_no_more_than_ten_times_the_median(hub_bench):
    hub = hub_bench(policy(aggregate=SynchronousAggregator(weigh_by="examples")), liveness={"lease_s": 1e6})
    for name, examples in (("a", 100), ("b", 100), ("c", 2**53)):
        hub.join(name, profile=DeviceProfile(examples=examples))
    for _ in range(2):
        for name in "abc":
            push(hub, name)
    assert hub.one(Fold).weights == pytest.approx((1 / 12, 1 / 12, 10 / 12))


def test_a_loss_that_one_key_makes_up_ends_nothing_and_is_not_the_best(hub_bench):
    hub = of_keys(
        hub_bench, policy(), *LIARS, "a", "b", stop={"loss": 0.1}, evaluation=EvaluationSettings(every="1 updates")
    )
    for _ in range(3):
        for name in (*LIARS, "a", "b"):
            push(hub, name, loss_mean=0.0 if name in LIARS else 0.5, examples=2**50)
            assert all(effect.loss >= 0.5 for effect in hub.all_of(WriteBest))
    assert not hub.core.stopped
    push(hub, "a", loss_mean=0.1)
    assert hub.core.stopped, "two of three keys are most"


# -- whose updates count -------------------------------------------------------------------------------------


def scored(hub, told):
    """Push scores, `a4` for 0.4 of device a; return those that were refused."""
    refused = []
    for word in told.split():
        reason = push(hub, word[0], score=float(word[1:]) / 10)
        assert reason in (None, "behind")
        refused += [word] if reason else []
    return refused


@pytest.mark.parametrize(
    ("parts", "told", "refused"),
    [
        # The medians of both before each: none, 4, 5, 5.5, 4.75, 4.65.
        ({"take": "better"}, "a4 b6 a5 b4.5 a4.8 a4.6", ["b6", "a4.8"]),
        ({"take": "all"}, "a4 b6 a4 b5 a99", []),
        ({"behind_max": 2.0}, "a4 b8 a12.1 a4 a4 b8", ["a12.1"]),
        ({"behind_max": 2.0}, "a4 binf a8", ["binf"]),
        # Below 0 twice as much as is usual is no limit at all: -4, -6, -4 allow what is not above 0.
        ({"behind_max": 2.0}, "a-4 b-8 a0.1 b0.1 a-0.1", ["a0.1", "b0.1"]),
        # The best of those that counted when they were last looked at: a's 4; then b's 3.
        ({"take": "best"}, "a4 b6 a4 b3 a4 a5 b3", ["b6", "a4", "a5"]),
        ({"take": "better", "behind_max": 1.1}, "a4 b6 a4", ["b6"]),
    ],
)
@pytest.mark.parametrize("aggregate", [AT_ONCE, ModelAverageAggregator()])
def test_whose_updates_count_one_by_one(hub_bench, aggregate, parts, told, refused):
    assert scored(joined(hub_bench, policy(aggregate=aggregate, **parts), "ab"), told) == refused


def test_the_best_is_among_those_that_count(hub_bench):
    """A device that never counts must not shut out all others."""
    hub = joined(hub_bench, policy(take="best"), "abc")
    assert scored(hub, "a4 b3") == []
    for told in ("a3", "b3", "a3", "b3"):
        assert push(hub, "c", norm=math.nan, score=-1e9) == "not_finite"
        assert scored(hub, told) == []
    assert scored(hub, "c2 a3") == ["a3"]
    assert push(hub, "c", norm=math.nan, score=-1e9) == "not_finite", "though the one before counted"
    assert scored(hub, "b3 a3") == []


def test_a_score_that_is_unheard_of_is_not_the_best_one_by_one(hub_bench):
    hub = joined(hub_bench, policy(take="best"), "abcd")
    for name, score in zip("abcd", (0.5, 0.4, 0.6, 0.45), strict=True):
        push(hub, name, score=score)
    assert push(hub, "d", score=-1e30) == "behind"
    assert scored(hub, "a4 b3 a4") == ["a4"], "the best of the others still is the best"
    assert push(hub, "d", score=-1e30) == "behind"


def test_of_those_folded_together_the_best_counts_for_all(hub_bench):
    hub = joined(hub_bench, policy(take="best", aggregate=BufferedAggregator(count=3)), "abc")
    assert scored(hub, "a4 b3 c5") == []
    assert hub.one(Fold).weights == (0.0, pytest.approx(1.0), 0.0)
    push(hub, "a", 0, score=0.1)
    push(hub, "b", score=0.1)
    push(hub, "c", score=0.2)
    assert hub.one(Fold).weights == (pytest.approx(1.0), 0.0, 0.0)
    assert hub.one(Fold).measure
    hub.core.handle(Folded(2, 1.0), 0.0)
    assert math.isnan(hub.core.policy_engine.state.fleet.agreement), "of one update there is no cosine"


SCORES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
TOLD = st.lists(st.tuples(st.sampled_from("abcde"), SCORES), min_size=5, max_size=60)


def as_told(score):
    """What the hub makes of a score: one that is not finite is the worst."""
    return score if math.isfinite(score) else math.inf


@given(told=TOLD)
@settings(deadline=None)
def test_better_takes_those_that_are_not_over_the_median_of_the_newest(told):
    hub, newest = joined(HubBench, policy(take="better"), "abcde"), {}
    for name, score in told:
        usual = median(newest.values()) if newest else math.inf
        refused = push(hub, name, validation_loss=score, score=0.0) == "behind"
        assert refused == (bool(newest) and as_told(score) > usual)
        if math.isfinite(score):
            newest[name] = score


@given(told=st.lists(SCORES, min_size=5, max_size=5), lie=st.floats(-1e30, 1e30))
@settings(deadline=None)
def test_best_takes_the_lowest_of_a_version_that_can_be_believed(told, lie):
    """Two versions, so that all are known by the second; the last device may say what it likes."""
    hub = joined(HubBench, policy(take="best", aggregate=BufferedAggregator(count=5)), "abcde")
    for _ in range(2):
        for name, score in zip("abcde", [*told[:4], lie], strict=True):
            push(hub, name, validation_loss=score)
    weights, scores = hub.one(Fold).weights, [*map(as_told, told[:4]), lie]
    least = hub.core.policy_engine.state.fleet.scores.least_credible
    believed = [score for score in scores if score >= least]
    assert weights[scores.index(min(believed))] == pytest.approx(1.0)
    assert sum(weight > 0 for weight in weights) == 1


def test_a_device_is_told_to_start_over_only_where_its_training_has_gone_wrong(hub_bench):
    """Who is only left out by `better` trains well enough; who has a foreign base is told that alone."""
    hub = joined(hub_bench, policy(take="better", behind_max=3.0, preempt=True), "abc")
    told = {}
    for name in "abc":
        push(hub, name, score=1.0)
    for reason, norm, score, base in (
        ("behind", 1.0, 2.0, None),
        ("future_version", 1.0, 1.0, 99),
        ("behind", 1.0, 3.5, None),
        ("not_finite", math.nan, 1.0, None),
        ("quarantined", 1.0, 1.0, None),
    ):
        if reason == "quarantined":
            hub.order("a")
        assert push(hub, "a", base, norm=norm, score=score) == reason
        told[reason, score] = hub.core.members.members["a"].outcome_last.preempted
    assert told == {
        ("behind", 2.0): False,
        ("future_version", 1.0): False,
        ("behind", 3.5): True,
        ("not_finite", 1.0): True,
        ("quarantined", 1.0): True,
    }


def test_a_score_of_ones_own_parameters_is_no_loss_of_the_hubs_model(hub_bench):
    hub = joined(hub_bench, policy(take="better"), "a")
    push(hub, "a", score=0.5, validation_loss=0.25)
    history = hub.core.members.members["a"].measurements
    assert (history.score, history.base_losses.newest) == (0.25, 0.5)


SILENT = {"loss_mean": None, "loss_variance": None}


def test_the_loss_of_who_is_behind_is_a_vote_and_of_who_is_excluded_is_none(hub_bench):
    hub = joined(hub_bench, policy(take="better"), "abcd")
    for name in "abcd":
        push(hub, name, loss_mean=1.0)
    assert push(hub, "a", loss_mean=2.0) == "behind"
    hub.order("b")
    assert push(hub, "b", loss_mean=3.0) == "quarantined"
    votes = hub.core.policy_engine.state.fleet.newest_losses
    assert votes.newest == {"a": 2.0, "c": 1.0, "d": 1.0}


@pytest.mark.parametrize("parts", [{"take": "better"}, {"take": "best"}, {"behind_max": 1.5}])
def test_who_tells_no_loss_is_behind_nobody(hub_bench, parts):
    hub = joined(hub_bench, policy(**parts), "abc")
    for _ in range(3):
        assert push(hub, "a", **SILENT) is None
    assert scored(hub, "b1 c5") == ["c5"]
    assert push(hub, "a", **SILENT) is None
    engine = hub.core.policy_engine
    engine._look_at_fleet(hub.now_s)
    assert engine.state.survey.score_best == 0.1


def test_of_those_folded_together_one_without_a_loss_is_not_the_best(hub_bench):
    hub = joined(hub_bench, policy(take="best", aggregate=BufferedAggregator(count=2)), "ab")
    push(hub, "a", **SILENT)
    push(hub, "b", loss_mean=9.0)
    assert hub.one(Fold).weights == (0.0, pytest.approx(1.0))
    push(hub, "a", **SILENT)
    push(hub, "b", **SILENT)
    assert hub.one(Fold).weights == (0.5, 0.5), "nobody knows which is the best"


@pytest.mark.parametrize(
    ("parts", "stop", "waits"),
    [
        ({}, {"loss": 0.1}, "stop.loss"),
        ({"plateau": Plateau()}, {}, "plateau"),
        ({"plateau": Plateau()}, {"loss": 0.1}, "stop.loss and plateau"),
        ({}, {}, None),
    ],
)
def test_a_loss_that_nobody_tells_ends_nothing_and_that_is_said_once(hub_bench, parts, stop, waits):
    hub = joined(hub_bench, policy(**parts), "a", stop=stop, evaluation=EvaluationSettings(every="2 updates"))
    warnings = []
    for _ in range(8):
        assert push(hub, **SILENT) is None
        warnings += [report.detail for report in hub.all_of(HubReport) if report.event == "warning"]
    wanted = f"no device reports a loss, so {waits} cannot be checked; set evaluation.data"
    assert warnings == ([wanted] if waits else [])
    assert not hub.core.stopped
    assert hub.core.status(0.0)["evaluation"] is None
    assert hub.core.status(0.0)["devices"][0]["loss"] is None


@pytest.mark.parametrize("parts", [{"take": "better"}, {"behind_max": 1.5}])
def test_when_the_best_device_goes_the_others_count_again(hub_bench, parts):
    """The mean is of all that is heard: of those that count alone it would never rise again."""
    hub = joined(hub_bench, policy(**parts), "abc")
    for _ in range(20):
        scored(hub, "a1 b6 c6")
    hub.leave("a")
    refused = [scored(hub, "b6 c6") for _ in range(12)]
    assert refused[-1] == []


def test_a_device_counts_by_its_data_or_by_what_it_trained_on_if_it_does_not_say(hub_bench):
    hub = hub_bench(policy(aggregate=SynchronousAggregator(weigh_by="examples")))
    hub.join("a", profile=DeviceProfile(examples=128))
    hub.join("b")
    push(hub, "a", examples=1)
    push(hub, "b", examples=64)
    assert hub.one(Fold).weights == pytest.approx((2 / 3, 1 / 3))


# -- warm-up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "rounds"),
    [({"updates": 4}, 2), ({"updates": 5}, 3), ({"epochs": 1.0}, 2), ({"epochs": 1.1}, 3), ({"epochs": 0.01}, 1)],
)
def test_a_warm_up_is_more_synchronous_and_then_it_is_over(hub_bench, until, rounds):
    """Two devices with 128 examples each, of which every update takes 64."""
    warm_up = WarmUp(**until, aggregate=SynchronousAggregator(), frequency=FixedFrequency(local_steps=2))
    hub = hub_bench(policy(warm_up=warm_up), liveness={"lease_s": 1e6})
    for name in "ab":
        hub.join(name, profile=DeviceProfile(examples=128))
    for done in range(rounds):
        assert not hub.core.policy_engine.state.warm_up.over
        push(hub, "a", local_steps=2)
        assert kinds(hub)[0] is not Fold
        assert not hub.all_of(Assign)
        push(hub, "b", local_steps=2)
        assert hub.one(Fold).number == done + 1
        assert hub.reports == (["warm"] if done + 1 == rounds else [])
    assert hub.core.policy_engine.state.warm_up.over
    seen = []
    for _ in range(4):
        push(hub, "a")
        assert len(hub.one(Fold).handles) == 1
        seen.append(hub.one(Assign).local_steps)
    assert seen == [8, 16, 16, 16], "from the 4 of the last answer on, at most twice as many"
    assert hub.reports == []


@pytest.mark.parametrize("told", [64, 10**6])
def test_examples_that_one_key_makes_up_do_not_end_a_warm_up(hub_bench, told):
    """Four devices with 640 examples each, of which every update takes 64: ten rounds."""
    warm_up = WarmUp(epochs=1.0, frequency=FixedFrequency(local_steps=2))
    hub = hub_bench(policy(warm_up=warm_up), liveness={"lease_s": 1e6})
    for name in "abcd":
        hub.join(name, profile=DeviceProfile(examples=640))
    for _ in range(10):
        assert not hub.core.policy_engine.state.warm_up.over
        for name in "abcd":
            push(hub, name, local_steps=2, examples=told if name == "d" else 64)
    assert hub.core.policy_engine.state.warm_up.over


# -- the cadence, what is measured, what is watched ------------------------------------------------------------


@dataclass
class Counting:
    """Every device the same, and a count of how often the fleet was looked at."""

    looked: list = field(default_factory=list)
    steps_factors: set = field(default_factory=set)

    def retune(self, cadence, fleet, devices):
        self.looked.append(len(devices))
        return Cadence(1.0, 0.5, 0.123, "why not")

    def interval(self, device, cadence):
        self.steps_factors.add(cadence.steps_factor)
        return FREQUENCY.interval(device, cadence)


@pytest.mark.parametrize(("devices", "every"), [("a", 1), ("ab", 1), ("abc", 1), ("abcdefghij", 5)])
def test_the_fleet_is_looked_at_once_for_every_few_updates(hub_bench, devices, every):
    counting = Counting()
    hub = joined(hub_bench, policy(frequency=counting), devices)
    counting.looked.clear()  # it was tried
    counting.steps_factors.clear()
    for number in range(40):
        push(hub, devices[number % len(devices)])
    assert len(counting.looked) == 1 + (39 // every)
    assert counting.looked[:2] == [1, min(len(devices), 1 + every)]
    assert hub.core.policy_engine.state.cadence == Cadence(1.0, 0.5, 0.123, "why not")
    assert counting.steps_factors == {1.0}, "the steps factor is for remedies alone"


def test_updates_folded_together_are_measured_and_pulling_apart_is_alarming(hub_bench):
    hub = joined(
        hub_bench,
        policy(aggregate=BufferedAggregator(count=2), monitor=Monitor(detectors=(DisagreementDetector(),))),
    )
    seen = []
    for norm in (1.0, math.sqrt(0.5), 0.0, 0.0, math.nan):
        push(hub)
        assert not hub.all_of(Fold)
        push(hub)
        fold = hub.one(Fold)
        assert fold.measure
        hub.core.handle(Folded(fold.number, norm), 0.0)
        seen.append((hub.core.status(0.0)["fleet"]["agreement"], fold.scale))
    # Moving by a fifth: towards 1, 0, -1 and -1; what is not a number changes nothing.
    assert seen == [(1.0, 1.0), (0.8, 1.0), (0.44, 1.0), (0.152, 1.0), (0.152, 1.0)]
    assert not hub.core.policy_engine.state.gathering.measuring
    hub.core.policy_engine.state.fleet.agreement = -0.06
    push(hub)
    assert hub.reports == ["alarm"]
    push(hub)
    assert hub.one(Fold).scale == 0.5


@pytest.mark.parametrize(
    "parts",
    [
        {"aggregate": AT_ONCE},
        {"aggregate": BufferedAggregator(count=1)},
        {"aggregate": BufferedAggregator(count=2), "combine": MedianCombiner()},
    ],
)
def test_what_cannot_be_compared_is_not_measured(hub_bench, parts):
    hub = joined(hub_bench, policy(**parts))
    push(hub)
    if not hub.all_of(Fold):
        push(hub)
    assert not hub.one(Fold).measure
    assert not hub.core.policy_engine.state.gathering.measuring


def test_a_measure_of_a_version_nobody_asked_for_is_nothing(hub_bench):
    hub = joined(hub_bench, policy())
    hub.core.handle(Folded(77, 1.0), 0.0)
    assert math.isnan(hub.core.policy_engine.state.fleet.agreement)


def test_losses_that_vary_make_all_devices_hurry(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=(LossVarianceDetector(),), calm_updates=1)))
    for _ in range(32):
        push(hub)
    assert hub.one(Assign).local_steps == 16
    seen = []
    for variance in [50.0] * 8 + [0.25] * 10:
        push(hub, loss_variance=variance)
        seen.append(hub.one(Assign).local_steps)
    # The median is high as long as eight of the last 16 are.
    assert seen == [16] * 7 + [8] * 9 + [16] * 2
    assert hub.core.members.members["a"].measurements.why == "fixed"


def test_plateaus_and_alarms_both_lower_the_learning_rate(hub_bench):
    monitor = Monitor(detectors=(DisagreementDetector(),), calm_updates=2)
    hub = joined(
        hub_bench,
        policy(plateau=Plateau(patience=1), monitor=monitor),
        held_out=True,
        evaluation=EvaluationSettings(every="2 updates"),
    )
    scales = []
    for number in range(6):
        hub.core.policy_engine.state.fleet.agreement = -1.0 if number < 2 else 1.0
        push(hub)
        scales.append(hub.one(Fold).scale)
        assert bool(hub.all_of(Evaluate)) == (number % 2 == 1)
        if hub.all_of(Evaluate):
            hub.core.handle(Evaluated(hub.core.version, 1.0, 0.5), 0.0)
    assert scales == [0.5, 0.5, 0.5, 1.0, 0.5, 0.5]


def test_no_loss_stands_for_the_fleet_unless_most_voters_reach_it(hub_bench):
    hub = joined(hub_bench, policy(), "abcd")
    members = hub.core.members

    def loss():
        return members.loss_of_majority(members.members.values())

    found = []
    for name, told in (("a", 0.0), ("b", 1.0), ("c", 5.0), ("d", 9.0)):
        assert push(hub, name, loss_mean=told, examples=2**50) is None
        found.append(loss())
    assert found == [None, None, 5.0, 5.0], "two of four are no majority, however many examples they claim"
    push(hub, "c", **SILENT)
    assert loss() == 9.0, "a device that tells no loss reaches none"
    push(hub, "d", norm=math.nan, loss_mean=0.0)
    assert loss() == 1.0, "an update that does not count has no word: of a, b and c two are most"
    hub.leave("b")
    assert loss() is None


@pytest.mark.parametrize("aggregate", [SynchronousAggregator(), BufferedAggregator(count=9), QuorumAggregator()])
def test_when_the_queue_is_full_it_is_folded_whatever_the_aggregator_waits_for(hub_bench, aggregate):
    hub = joined(hub_bench, policy(aggregate=aggregate), "abcdefghi", limits={"updates_held_max": 3})
    for name in "ab":
        push(hub, name)
        assert hub.core.members.members[name].outcome_last == Buffered("ab".index(name) + 1)
    push(hub, "c")
    assert len(hub.one(Fold).handles) == 3
    assert hub.all_of(Assign)[0].ack == Ack(1, Applied(1))


# -- whatever is told ----------------------------------------------------------------------------------------

ANY = st.floats() | st.sampled_from([0.0, 5e-324, 1e200, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan])
NORM = st.just(math.nan) | st.floats(0.0, 1e24)  # of what is in float32, whose squares too are finite
PUSHES = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        NORM,
        st.fixed_dictionaries(
            {
                "local_steps": st.sampled_from([1, 8, 2**31]),
                "examples": st.sampled_from([0, 1, 64, 2**53]),
                "step_s": st.floats(0.0, 1e9),
                "loss_mean": ANY,
                "loss_variance": ANY,
                "score": st.none() | ANY,
            }
        ),
    ),
    min_size=1,
    max_size=6,
)
EVERYTHING = Monitor(
    detectors=(
        NotFiniteDetector(),
        UpdateNormDetector(),
        DataMismatchDetector(),
        LossDetector(),
        LossVarianceDetector(),
        DisagreementDetector(),
    )
)


@pytest.mark.parametrize(
    "parts",
    [
        {"aggregate": QuorumAggregator(weigh_by="examples"), "take": "better"},
        {"aggregate": ModelAverageAggregator(), "behind_max": 2.0},
        {"aggregate": BufferedAggregator(count=3), "take": "best", "plateau": Plateau()},
    ],
    ids=["quorum", "model_average", "buffered"],
)
@pytest.mark.parametrize("metric", ["stability", "none"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture is a class
@given(told=PUSHES)
def test_nothing_a_device_says_of_its_update_stops_the_hub(hub_bench, parts, metric, told):
    parts = {"frequency": AdaptiveFrequency(metric=metric), "staleness": PolynomialStaleness()} | parts
    hub = joined(
        hub_bench, policy(monitor=EVERYTHING, **parts), "abc", evaluation=EvaluationSettings(every="3 updates")
    )
    for number, (name, norm, fields) in enumerate(told * 14):
        push(hub, name, norm=norm, at_s=float(number), **fields)
        for fold in hub.all_of(Fold):
            assert all(0.0 <= weight <= 1.0 + 1e-9 for weight in fold.weights)
            assert fold.scale > 0.0
            hub.core.handle(Folded(fold.number, norm), hub.now_s)
        hub.tick(hub.now_s)
        msgspec.json.encode(hub.core.status(hub.now_s))
    watched = hub.core.policy_engine
    assert (
        max(map(len, (watched.state.fleet.norms, watched.state.fleet.losses, watched.state.fleet.scores)))
        <= WINDOW
    )
    assert watched.divergence.count <= 3 + 3


# -- places and votes of a key ---------------------------------------------------------------------------------

EIGHT = policy(aggregate=BufferedAggregator(count=8))


def test_one_key_takes_no_place_from_the_others(hub_bench):
    """Under many names it could fill all places for updates that wait, and so make a version alone."""
    names = ["a", *(f"a/{number}" for number in range(7)), "b", "c", "d"]
    hub = of_keys(hub_bench, EIGHT, *names, limits={"updates_held_max": 8})
    for name in names[:8]:
        push(hub, name)
    assert (hub.core.version, hub.core.policy_engine.gathering.count) == (0, 2)
    assert [name for name in names[:8] if hub.core.members.members[name].seq_last] == names[:2]
    for name in "bcd":
        push(hub, name)
    assert (hub.core.version, hub.core.policy_engine.gathering.count) == (0, 5)


def test_a_key_alone_has_all_places(hub_bench):
    names = ["a", *(f"a/{number}" for number in range(7))]
    hub = of_keys(hub_bench, EIGHT, *names, limits={"updates_held_max": 8})
    for name in names:
        push(hub, name)
    assert hub.core.version == 1


def test_a_revoked_key_has_no_vote_on_norms(hub_bench):
    hub = of_keys(hub_bench, EIGHT, *"abcd")
    for name, norm in zip("abcd", (1.0, 1.0, 9.0, 9.0), strict=True):
        push(hub, name, norm=norm)
    assert hub.core.policy_engine.state.fleet.lengths.median == 5.0
    hub.core.handle(Revoked(hub.keys["d"]), hub.now_s)
    assert hub.core.policy_engine.state.fleet.lengths.median == 1.0


# -- what becomes of each device's updates -------------------------------------------------------------------


def test_the_status_tells_how_many_updates_were_refused_shortened_and_kept(hub_bench):
    hub = joined(hub_bench, policy(monitor=Monitor(detectors=())), "abcd")
    for name in "abcabc":
        push(hub, name)
    assert push(hub, "d", norm=4.0) is None
    assert push(hub, "d", norm=math.nan) == "not_finite"
    assert push(hub, "d", 99) == "future_version"
    keys = ("updates_applied", "updates_rejected", "updates_shortened", "weight_kept")
    shown = {one["id"]: tuple(one[key] for key in keys) for one in hub.core.status(0.0)["devices"]}
    assert shown["a"] == (2, {}, 0, 1.0)
    assert shown["d"] == (1, {"not_finite": 1, "future_version": 1}, 1, 0.25)
