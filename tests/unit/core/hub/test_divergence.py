"""Warnings that leave a device its weight, probation, operators' orders, and how long an update may be."""

import math
from random import Random

import msgspec
import numpy as np
import pytest

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.divergence import PAST_MAX, WATCHED_PER_MEMBER, Exclusion
from edgeasync.core.hub.effects import Assign, Discard, Fold, SendStatus
from edgeasync.core.hub.events import PushArrived, Revoked
from edgeasync.core.recovery.state import dump_state, load_state
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner
from edgeasync.policies.monitor import (
    DataMismatchDetector,
    LossDetector,
    Monitor,
    NotFiniteDetector,
    RefusedDetector,
    UpdateNormDetector,
)
from edgeasync.protocol.codecs import VectorSource
from edgeasync.protocol.messages import Rejected
from tests.support.parts.hub_bench import SPEC, HubBench, plain_policy

AT_ONCE = ImmediateAggregator()
LONG = Monitor(detectors=(UpdateNormDetector(count_max=1),), calm_updates=2)


def policy(**parts):
    return plain_policy(**{"monitor": Monitor()} | parts)


class Bench(HubBench):
    """A bench on which every update has a weight; the key of `k/3` is that of `k` where there are keys."""

    def __init__(self, policy, names="abcd", *, keyed=False, **settings):
        super().__init__(policy, **{"liveness": {"lease_s": 1e6}} | settings)
        self.weights = {}
        """The weights of folded updates, by their handles."""
        self.dropped = []
        """The handles of updates that were dropped."""
        self.keyed = keyed
        self.enter(*names)

    def enter(self, *names, **fields):
        for name in names:
            if self.keyed:
                self.keys[name] = name.partition("/")[0].encode().ljust(32, b".")
            self.join(name, at_s=self.now_s, **fields)

    def send(self, name, norm=1.0, base=None, *, at_s=None, **fields):
        """Push an update from the newest version; return its handle, or why it does not count."""
        member = self.core.members.members[name]
        made = self.make_push(name, member.seq_last + 1, self.core.version if base is None else base)
        made = msgspec.structs.replace(made, **fields)
        handle = next(self.handles)
        self.give(PushArrived(self.peers[name], made, handle, norm, key=self.keys.get(name, b"")), at_s)
        outcome = member.outcome_last
        return outcome.reason if isinstance(outcome, Rejected) else handle

    def round(self, others="abc", norm=1.0, **fields):
        for name in others:
            assert isinstance(self.send(name, norm, **fields), int)

    def _account(self):
        for fold in self.all_of(Fold):
            self.weights |= dict(zip(fold.handles, fold.weights, strict=True))
        self.dropped += [effect.handle for effect in self.all_of(Discard)]
        return super()._account()

    @property
    def state(self):
        return self.core.policy_engine.state.divergence

    @property
    def warned(self):
        return list(self.state.devices)

    def shown(self, name):
        (device,) = [one for one in self.core.status(self.now_s)["devices"] if one["id"] == name]
        return device["state"], device["quarantine"]

    def again(self):
        """Let another core resume from what this one would write down."""
        written = dump_state(self.core)
        self.core, self.events = type(self)(self.core.policy_engine.policy, "").core, 0
        load_state(self.core, written)
        assert dump_state(self.core) == written


# -- a warning takes no weight ---------------------------------------------------------------------------------

AGGREGATORS = {
    "immediate": AT_ONCE,
    "buffered": BufferedAggregator(count=2),
    "quorum": QuorumAggregator(),
    "synchronous": SynchronousAggregator(),
    "model_average": ModelAverageAggregator(),
}
# What a device sends until it is warned of, and whether that counts itself.
ODD = {
    "update_norm": (UpdateNormDetector(), {"norm": 100.0}, None),
    "data_mismatch": (DataMismatchDetector(), {"base_loss": 9.0, "loss_mean": 9.0}, None),
    "not_finite": (NotFiniteDetector(), {"norm": math.nan}, "not_finite"),
    "a loss that is not": (NotFiniteDetector(), {"loss_mean": math.nan}, None),
    "refused": (RefusedDetector(), {"base": 10**6}, "future_version"),
}


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("odd", ODD)
def test_no_warning_refuses_a_finite_update_or_takes_its_weight(aggregator, odd):
    """Not by default, whatever the detector and however long the warning lasts."""
    detector, fields, refused = ODD[odd]
    hub = Bench(policy(aggregate=AGGREGATORS[aggregator], monitor=Monitor(detectors=(detector, LossDetector()))))
    counted = []
    for number in range(60):
        hub.round(base_loss=2.0 if number < 4 else 0.05, loss_mean=2.0 if number < 4 else 0.05)
        usual_norm = hub.core.policy_engine.state.fleet.lengths.median
        found = hub.send("d", **fields)
        if refused:
            assert found == refused
        else:
            counted.append((found, fields.get("norm", 1.0)))
    assert hub.warned == ["d"]
    for number in range(4):
        hub.round()
        counted.append((hub.send("d"), 1.0))
        assert (hub.warned == ["d"]) or number, "it was warned of when it sent the first of these"
    hub.round()
    share = hub.weights[counted[-2][0]]
    for handle, norm in counted[1:-1]:
        weight = hub.weights[handle]
        assert weight * norm >= 0.29 * share * usual_norm, "at least what was ever usual, less the slack"
    assert share > 0.05
    device = hub.core.status(hub.now_s)["devices"][3]
    assert device["updates_rejected"] == ({refused: 60} if refused else {})


# -- fewer than three keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "b/1", "b/2", "b/3"]])
@pytest.mark.parametrize("combine", [MeanCombiner(), CentredClipCombiner()])
def test_with_fewer_than_three_keys_an_update_must_be_finite_and_no_more(names, combine):
    """Of two nobody knows which is wrong."""
    parts = {"combine": combine, "aggregate": BufferedAggregator(count=1), "trust": "open"}
    hub = Bench(policy(**parts), names, keyed=True)
    for _ in range(80):
        for name in names:
            found = hub.send(name, 1e6 if name[0] == "b" else 1.0)
            assert hub.weights[found] > 0.24
    assert not hub.warned
    for norm in (math.nan, math.inf):
        assert hub.send(names[-1], norm) == "not_finite"
    assert hub.state.rollbacks == 0


# -- slack -------------------------------------------------------------------------------------------------------


def slack_of(hub, name, norm=10.0):
    """The length with which a long update counts, as a share of the longest that was ever usual."""
    members = hub.core.members
    weight = hub.weights[hub.send(name, norm)] * members.shared.get(members.members[name].voter, 1)
    return weight * norm / hub.core.policy_engine.state.fleet.lengths.peak


def settled(*names, keyed=False):
    """A hub whose first voters have learnt: their updates were 10 long, and are 0.1; and others that come."""
    hub = Bench(policy(monitor=Monitor(detectors=())), "abc", keyed=keyed)
    for number in range(200):
        hub.round(norm=10.0 if number < 8 else 0.1)
    hub.enter(*names)
    return hub


def test_a_long_update_may_be_as_long_as_was_ever_usual_and_less_with_each_of_them():
    hub = settled("d")
    kept = [slack_of(hub, "d") for _ in range(129)]
    assert kept[0] == pytest.approx(1.0)
    assert kept[64] == pytest.approx(0.5)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == pytest.approx(0.3)
    hub.send("d", 0.1)
    assert hub.core.members.members["d"].updates_long == 129


def test_who_was_short_for_long_has_all_slack_when_its_data_change():
    """That is no question of how new a device is."""
    hub = settled("d")
    for _ in range(500):
        hub.send("d", 0.1)
    assert slack_of(hub, "d") == pytest.approx(1.0)


def test_the_names_of_a_key_share_its_slack():
    hub = settled("d", *[f"d/{number}" for number in range(40)], keyed=True)
    for number in range(40):
        for _ in range(2):
            slack_of(hub, f"d/{number}")
    assert slack_of(hub, "d") == pytest.approx(0.5 ** (80 / 64))
    hub.enter("d/77")
    assert slack_of(hub, "d/77") == pytest.approx(0.5 ** (81 / 64)), "a new name brings none"
    hub.enter(*[f"d/{number}" for number in range(100, 160)])
    assert slack_of(hub, "d/159") == pytest.approx(0.3), "with that many names there is none"


# -- probation ---------------------------------------------------------------------------------------------------

COMBINERS = {"mean": MeanCombiner(), "centred": CentredClipCombiner()}


def length_counted(hub, name, norm):
    """How far an update of this length moves the model, alone and from a centre of nothing."""
    found = hub.send(name, norm)
    fold = msgspec.structs.replace(hub.one(Fold), number=1, scale=1.0)
    core = hub.core.policy_engine
    model = HubModel(SPEC, np.zeros(3, np.float32), 0, core.policy)
    values = np.array([norm, 0.0, 0.0], np.float32)
    snapshot, _ = model.fold(fold, [VectorSource(values)])
    assert hub.weights[found] > 0.0
    return float(np.linalg.norm(snapshot.vector)) / core.policy.optimizer[0].learning_rate


def on_probation(**parts):
    hub = Bench(policy(**{"trust": "open", "monitor": LONG} | parts))
    for _ in range(3):
        hub.round()
    hub.send("d", 9.0)
    assert hub.warned == ["d"]
    assert hub.core.status(hub.now_s)["alarms"][0]["remedy"] == "probation"
    return hub


@pytest.mark.parametrize("combine", COMBINERS)
@pytest.mark.parametrize("norm", [0.1, 0.25, 1.0, 5.0, 100.0, 1e9])
def test_on_probation_an_update_counts_at_most_a_quarter_of_what_is_usual_and_not_nothing(combine, norm):
    length = length_counted(on_probation(combine=COMBINERS[combine]), "d", norm)
    assert length <= 0.25 * 1.001
    assert length >= min(norm, 0.25) * (1.0 if combine == "mean" else 0.24), "the model still sees its data"


def test_probation_holds_without_a_clip_too():
    hub = on_probation(combine=MeanCombiner(), monitor=msgspec.structs.replace(LONG, clip=0.0))
    assert length_counted(hub, "d", 8.0) == pytest.approx(0.25)
    assert hub.weights[hub.send("a", 3.0)] == 1.0


def test_probation_ends_once_the_updates_are_calm():
    hub = on_probation(combine=MeanCombiner())
    weights = [hub.weights[hub.send("d", 1.0)] for _ in range(3)]
    assert weights == [pytest.approx(0.25), 1.0, 1.0], "the second calm update ends it"
    (past,) = hub.core.status(hub.now_s)["alarms_past"]
    assert past["device"] == "d"


def test_probation_ends_by_release_under_any_name_of_the_key():
    hub = Bench(
        policy(trust="open", combine=MeanCombiner(), monitor=LONG), ["a", "b", "c", "d", "d/1"], keyed=True
    )
    hub.round()
    hub.send("d", 9.0)
    assert hub.weights[hub.send("d/1", 1.0)] == pytest.approx(0.25 * 0.5), "of its half of the key's vote"
    assert hub.order("d/1", "release") is None
    assert hub.reports == ["released"]
    assert not hub.warned
    assert hub.weights[hub.send("d", 1.0)] == 0.5


# -- orders ------------------------------------------------------------------------------------------------------


def test_an_order_excludes_a_device_until_it_is_released():
    hub = Bench(policy())
    hub.round("abcd")
    assert hub.order("d", at_s=5.0) is None
    assert hub.reports == ["excluded"]
    assert hub.one(SendStatus).peer == b"operator"
    assert hub.send("d") == "quarantined"
    assert hub.one(Assign).peer == hub.peers["d"], "it trains on"
    ends = "by 'edgeasync device release d'"
    assert hub.shown("d") == ("quarantined", {"cause": "an operator's order", "ends": ends})
    assert hub.shown("a") == ("training", None)
    votes = hub.core.policy_engine.state.fleet
    assert "d" not in votes.lengths.newest
    assert "d" not in votes.newest_losses.newest
    assert hub.order("d", "release") is None
    assert hub.reports == ["released"]
    assert hub.weights[hub.send("d")] == 1.0
    assert hub.shown("d") == ("training", None)
    assert hub.core.status(0.0)["devices"][3]["updates_rejected"] == {"quarantined": 1}


@pytest.mark.parametrize("order", ["quarantine", "release"])
def test_to_give_an_order_twice_changes_nothing(order):
    hub = Bench(policy())
    hub.order("d", at_s=5.0)
    if order == "release":
        hub.order("d", "release", at_s=6.0)
    before = msgspec.json.encode(hub.state)
    for at_s in (7.0, 8.0):
        assert hub.order("d", order, at_s=at_s) is None
        assert hub.reports == []
        assert hub.one(SendStatus)
    assert msgspec.json.encode(hub.state) == before


def test_an_order_is_about_all_names_of_a_key():
    hub = Bench(policy(), ["a", "b", "d", "d/1"], keyed=True)
    hub.order("d")
    hub.send("a")
    assert [hub.send(name) for name in ("d", "d/1")] == ["quarantined"] * 2
    hub.enter("d/2")
    assert hub.send("d/2") == "quarantined", "of a name that comes later, too"
    assert [hub.shown(name)[0] for name in ("a", "d", "d/1", "d/2")] == ["training", *["quarantined"] * 3]
    assert isinstance(hub.send("a"), int)
    hub.order("d/2", "release")
    assert all(isinstance(hub.send(name), int) for name in ("d", "d/1", "d/2"))


@pytest.mark.parametrize("aggregator", ["buffered", "quorum", "synchronous"])
def test_updates_that_wait_are_dropped(aggregator):
    aggregate = BufferedAggregator(count=9) if aggregator == "buffered" else AGGREGATORS[aggregator]
    hub = Bench(policy(aggregate=aggregate), ["a", "d", "d/1", "e"], keyed=True)
    first, second, third = [hub.send(name) for name in ("a", "d", "d/1")]
    hub.order("d")
    assert hub.dropped == [second, third]
    rejected = {one["id"]: one["updates_rejected"] for one in hub.core.status(0.0)["devices"]}
    assert rejected == {"a": {}, "d": {"quarantined": 1}, "d/1": {"quarantined": 1}, "e": {}}
    assert first not in hub.dropped


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "aggregate", [SynchronousAggregator(), QuorumAggregator(share=1.0, patience=100.0)], ids=["rounds", "quorum"]
)
def test_nobody_waits_for_who_is_excluded(aggregate, waits, keyed):
    """Neither when its update waits, nor when it is silent, nor in later rounds."""
    hub = Bench(policy(aggregate=aggregate), ["a", "b", "d", "d/1"], keyed=keyed)
    if waits:
        hub.send("d")
    hub.send("a")
    hub.send("b")
    assert not hub.weights
    for name in ("d", "d/1"):
        hub.order(name)
    assert len(hub.weights) == 2, "with the order the others are all there are"
    hub.tick()
    assert not any(member.waiting for member in hub.core.members.members.values())
    for version in range(2, 6):
        hub.send("a")
        assert hub.core.version == version - 1
        if version % 2:
            assert hub.send("d") == "quarantined"
            assert hub.core.version == version - 1, "its refusal is no vote either"
        hub.send("b")
        assert hub.core.version == version


def test_who_is_released_is_waited_for_again():
    hub = Bench(policy(aggregate=SynchronousAggregator()), "abd")
    hub.order("d")
    hub.order("d", "release")
    hub.round("ab")
    assert hub.core.version == 0
    hub.send("d")
    assert hub.core.version == 1


def test_alarms_of_the_excluded_do_not_say_that_the_model_is_at_fault():
    monitor = Monitor(detectors=(NotFiniteDetector(count_max=1), LossDetector()))
    hub = Bench(policy(monitor=monitor), "abcdef")
    hub.round("abcdef")
    for name in "ab":
        hub.order(name)
        hub.send(name, math.nan)
    assert hub.send("c", math.nan) == "not_finite"
    assert hub.send("d", math.nan) == "not_finite", "of four voters two are half"
    assert hub.send("e", math.nan) == "rolled_back"


@pytest.mark.parametrize("goes", ["leaves", "is lost", "the hub starts again", "is forgotten"])
def test_an_order_outlives(goes):
    hub = Bench(policy(), "abcd", limits={"devices_max": 4})
    hub.order("d", at_s=1.0)
    match goes:
        case "leaves":
            hub.leave("d")
            hub.join("d", start=2)
        case "is lost":
            hub.tick(2e6)
            hub.join("d", start=2, at_s=2e6)
        case "the hub starts again":
            hub.again()
        case "is forgotten":
            hub.leave("d")
            hub.enter("e")
            hub.leave("e")
            assert "d" not in hub.core.members.members
            hub.join("d", start=2)
    assert hub.send("d") == "quarantined"
    assert hub.shown("d")[0] == "quarantined"
    assert hub.state.orders == {"d": Exclusion("d", 1.0)}


def test_an_order_about_a_device_that_the_hub_has_forgotten_can_be_ended():
    hub = Bench(policy(), "abcd", limits={"devices_max": 4})
    hub.order("d")
    hub.leave("d")
    hub.enter("e")
    assert hub.order("d", "release") is None
    assert hub.reports == ["released"]
    assert not hub.state.orders
    assert hub.order("d", "release") == "unknown_device"


def test_a_revoked_key_takes_its_order_along():
    hub = Bench(policy(), "abd", keyed=True)
    hub.order("d")
    hub.give(Revoked(hub.keys["d"]))
    assert not hub.state.orders


@pytest.mark.parametrize("order", ["quarantine", "release"])
def test_an_unknown_name_is_refused(order):
    hub = Bench(policy(), "abc")
    assert hub.order("d", order) == "unknown_device"
    assert hub.refusal.sentence == "unknown device d; list the devices with 'edgeasync status'"
    assert not hub.state.orders


@pytest.mark.parametrize(
    ("trust", "keyed", "refused"),
    [("open", False, "not_allowed"), ("open", True, None), ("admitted", False, None), (None, False, None)],
)
def test_a_hub_that_is_open_and_has_no_keys_knows_no_operator(trust, keyed, refused):
    hub = Bench(policy(trust=trust), "abc", keyed=keyed)
    assert [hub.order("c", order) for order in ("quarantine", "release")] == [refused, refused]


# -- a restart changes nothing -----------------------------------------------------------------------------------


def start_again(hub, name, how, start):
    match how:
        case "leaves":
            hub.leave(name)
        case "is lost":
            hub.tick(hub.now_s + 2e6)
            for other in "abc":
                hub.join(other, start=start, at_s=hub.now_s)
    hub.join(name, start=start, at_s=hub.now_s)


def calm_of(hub):
    """How many calm updates each cause has seen."""
    return [cause.calm for alarm in hub.state.devices.values() for cause in alarm.causes.values()]


@pytest.mark.parametrize("how", ["leaves", "is lost", "starts again at once"])
def test_a_restart_of_a_device_changes_nothing(how):
    """Neither its alarm, nor the updates in a row before one, nor its calm ones, nor its slack."""
    monitor = Monitor(detectors=(UpdateNormDetector(count_max=4),), calm_updates=4)
    random, hubs = Random(0), [Bench(policy(monitor=monitor)) for _ in range(2)]
    plain, restarted = hubs
    for hub in hubs:
        for _ in range(4):
            hub.round()
    seen = []
    for number, norm in enumerate([9.0, 9.0, 1.0, *[9.0] * 4, 1.0, 1.0, 9.0, *[1.0] * 5, *[9.0] * 4]):
        if random.random() < 0.6:
            start_again(restarted, "d", how, number + 2)
        for hub in hubs:
            hub.round()
            hub.send("d", norm)
        assert restarted.warned == plain.warned
        found = [hub.core.members.members["d"] for hub in hubs]
        assert found[0].updates_long == found[1].updates_long
        assert list(plain.weights.values()) == list(restarted.weights.values())
        assert plain.state.causes == restarted.state.causes
        assert calm_of(plain) == calm_of(restarted)
        seen.append(bool(plain.warned))
    assert (seen.count(True), seen[-1]) == (8, True)


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [math.nan, 1.0])
def test_what_is_known_of_devices_that_the_hub_has_forgotten_is_bounded(norm):
    """Otherwise every new name that sends something and goes would stay for ever."""
    hub = Bench(
        policy(monitor=Monitor(detectors=(NotFiniteDetector(), UpdateNormDetector()))),
        "",
        limits={"devices_max": 3},
    )
    for number in range(100):
        name = f"device{number}"
        hub.enter(name)
        for _ in range(3 - number % 2):
            hub.send(name, norm)
        assert (
            len(hub.state.devices) + len(hub.state.causes) + len(hub.state.counted) <= 3 * WATCHED_PER_MEMBER + 3
        )
        if math.isnan(norm):
            assert (name in hub.state.devices) == (number % 2 == 0)
        hub.leave(name)
    assert len(hub.state.past) <= PAST_MAX


def test_an_alarm_about_a_device_that_is_known_is_not_dropped():
    hub = Bench(policy(monitor=Monitor(detectors=(NotFiniteDetector(),))), "a", limits={"devices_max": 3})
    for _ in range(3):
        hub.send("a", math.nan)
    for number in range(50):
        name = f"device{number}"
        hub.enter(name)
        hub.send(name)
        hub.leave(name)
    assert hub.warned == ["a"]
