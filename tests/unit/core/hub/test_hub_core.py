"""Tables of the hub's transitions: what comes in, what goes out, and what has changed."""

import math

import msgspec
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.hub.effects import (
    Assign,
    Broadcast,
    Discard,
    EndHub,
    Evaluate,
    Fold,
    Publish,
    Save,
    SendGraph,
    SendStatus,
    SendToDevice,
    WriteBest,
)
from edgeasync.core.hub.events import (
    Evaluated,
    HubReceived,
    HubReceivedMalformed,
    HubStopRequested,
    PushArrived,
    Resumed,
)
from edgeasync.core.hub.fast_link import SLOWER_CYCLES
from edgeasync.core.hub.settings import CheckpointSettings, CodecSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import BufferedAggregator, ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import DisagreementDetector, Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import PolynomialStaleness
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    DeviceProfile,
    Duplicate,
    Fetch,
    Goodbye,
    ModelVersion,
    Rejected,
    StatusRequest,
)

STEADY = {"aggregate": ImmediateAggregator(), "optimizer": (SGD(),), "frequency": FixedFrequency()}


# -- the graph -----------------------------------------------------------------------------------------------


def test_a_graph_is_offered_to_everybody_and_sent_to_members_who_ask(hub_bench):
    graph = ShippedGraph(b"a graph")
    hub = hub_bench(graph=graph)
    hub.hello()
    welcome = hub.one(SendToDevice).message
    assert (welcome.graph, welcome.graph_bytes) == (graph.fingerprint, 7)
    hub.fetch_graph()
    assert hub.effects == [SendGraph(hub.peers["a"])]
    hub.fetch_graph(capacity=False)
    assert (hub.refused, hub.refusal.retry_after_s) == ("busy", 0.5)
    hub.sessions["a"] = b"?" * 16
    hub.fetch_graph()
    assert hub.refused == "unknown_session"


def test_who_asks_for_a_graph_that_was_not_offered_is_at_fault(hub_bench):
    hub = hub_bench(limits={"strikes_max": 2})
    hub.hello()
    assert (hub.one(SendToDevice).message.graph, hub.one(SendToDevice).message.graph_bytes) == (None, 0)
    hub.fetch_graph()
    assert hub.refused == "malformed"
    hub.fetch_graph()
    assert hub.reports == ["quarantined"]


# -- updates -------------------------------------------------------------------------------------------------


def test_an_update_is_folded_with_the_weight_of_its_staleness(hub_bench):
    hub = hub_bench()
    hub.join()
    for seq, (base, weight) in enumerate([(0, 1.0), (0, 2**-0.5), (1, 2**-0.5), (0, 0.5)], start=1):
        hub.push(seq=seq, base=base)
        fold = hub.one(Fold)
        assert fold.number == seq
        assert fold.weights == pytest.approx((weight,), rel=1e-15)
        assert fold.plan == ((1.0, 0.0),)
        assert hub.ack == Ack(seq, Applied(seq))
        assert hub.one(Assign).version == ModelVersion(hub.lineage, seq)
        assert hub.effects.index(fold) < hub.effects.index(hub.one(Assign))
        assert hub.core.members.measurements["a"].staleness == seq - 1 - base
    assert hub.core.updates_applied == 4
    assert hub.state_of() == "training"


def test_a_repeated_push_gets_its_outcome_and_the_newest_model_and_never_counts_again(hub_bench):
    hub = hub_bench()
    hub.join("a")
    hub.join("b")
    hub.push("a", 1)
    hub.push("b", 1)
    for count in (1, 2):
        hub.push("a", 1)
        assert not hub.all_of(Fold)
        assert len(hub.all_of(Discard)) == 1
        assert hub.ack == Ack(1, Duplicate(Applied(1)))
        assert hub.one(Assign).version.number == 2
        assert hub.core.duplicates == count
    hub.offer("a", 1)
    assert not hub.granted
    assert hub.ack == Ack(1, Duplicate(Applied(1)))
    hub.push("a", 2, base=2)
    hub.push("a", 1)
    assert [type(effect) for effect in hub.effects] == [Discard]
    hub.offer("a", 1)
    assert hub.effects == []
    assert hub.core.duplicates == 5
    assert hub.core.updates_applied == 3


def test_a_duplicate_after_a_reconnect_goes_to_the_new_connection(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.push(seq=1, norm=math.nan)
    hub.hello(peer=b"new", session=hub.sessions["a"])
    hub.push(seq=1)
    assert hub.one(Assign).peer == b"new"
    assert hub.ack == Ack(1, Duplicate(Rejected("not_finite")))


REJECTIONS = {
    "foreign lineage": ({"lineage": "f" * 16}, "foreign_lineage"),
    "future version": ({"base": 3}, "future_version"),
    "a NaN": ({"base": 2, "norm": math.nan}, "not_finite"),
    "an infinity": ({"base": 2, "norm": math.inf}, "not_finite"),
    "too stale": ({"base": 0}, "stale"),
    "foreign before not finite": ({"lineage": "f" * 16, "norm": math.nan, "base": 9}, "foreign_lineage"),
}


@pytest.mark.parametrize(("fields", "reason"), REJECTIONS.values(), ids=REJECTIONS)
def test_rejections(hub_bench, fields, reason):
    hub = hub_bench(Policy(**STEADY, staleness=PolynomialStaleness(staleness_max=1)))
    hub.join()
    hub.push(seq=1)
    hub.push(seq=2, base=1)
    hub.push(seq=3, **fields)
    assert not hub.all_of(Fold)
    assert len(hub.all_of(Discard)) == 1
    assert hub.ack == Ack(3, Rejected(reason))
    assert (hub.core.version, hub.core.updates_rejected) == (2, 1)
    hub.push(seq=4, base=1)
    assert hub.ack == Ack(4, Applied(3))


@pytest.mark.parametrize("way", ["push", "offer"])
def test_a_gap_in_the_sequence_is_refused_and_a_strike(hub_bench, way):
    hub = hub_bench(limits={"strikes_max": 2})
    hub.join()
    getattr(hub, way)(seq=2)
    assert hub.refused == "sequence"
    assert hub.core.members.members["a"].strikes == 1
    hub.push(seq=1)
    assert hub.ack == Ack(1, Applied(1))
    assert hub.core.members.members["a"].strikes == 0
    for seq in (3, 4):
        getattr(hub, way)(seq=seq)
    assert hub.reports == ["quarantined"]


@pytest.mark.parametrize("way", ["push", "offer"])
def test_busy_consumes_nothing(hub_bench, way):
    hub = hub_bench(limits={"retry_after_s": 0.75})
    hub.join()
    getattr(hub, way)(seq=1, capacity=False)
    assert (hub.refused, hub.refusal.retry_after_s) == ("busy", 0.75)
    assert not hub.granted
    assert hub.core.members.members["a"].seq_last == 0
    getattr(hub, way)(seq=1)
    assert hub.refused is None
    assert hub.granted == ([1] if way == "offer" else [])


def test_a_granted_transfer_is_applied_even_without_room(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.offer(seq=1)
    assert hub.granted == [1]
    hub.push(seq=1, transfer=1, capacity=False)
    assert hub.one(Fold).number == 1
    sends = [send.message for send in hub.all_of(SendToDevice)]
    assert sends[0] == Ack(1, Applied(1))
    assert (sends[1].code, len(sends)) == ("busy", 2)
    assert not hub.all_of(Assign)
    hub.fetch(capacity=False)
    assert hub.refused == "busy"
    hub.fetch()
    assert hub.one(Assign).version.number == 1
    assert hub.core.messages_accepted["piece"] == 1
    hub.push(seq=1, capacity=False)
    assert hub.all_of(SendToDevice)[0].message == Ack(1, Duplicate(Applied(1)))
    assert hub.refused == "busy"


@pytest.mark.parametrize("event", ["ping", "fetch", "push", "offer", "leave"])
def test_a_session_nobody_has(hub_bench, event):
    hub = hub_bench()
    hub.sessions["a"], hub.peers["a"] = b"?" * 16, b"x"
    getattr(hub, event)("a")
    assert hub.refused == "unknown_session"
    assert len(hub.all_of(Discard)) == (event == "push")


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "reason", "trigger"),
    [
        ({"updates": 3}, "finished", lambda hub: hub.push("a", 3)),
        ({"minutes": 0.5}, "finished", lambda hub: hub.tick(30.0)),
        ({}, "stopping", lambda hub: hub.give(HubStopRequested())),
        ({}, "finished", lambda hub: hub.give(HubStopRequested(finished=True))),
    ],
    ids=["updates", "minutes", "asked to stop", "asked to finish"],
)
def test_the_end(hub_bench, stop, reason, trigger):
    hub = hub_bench(stop=stop, liveness={"lease_s": 60.0})
    for name in "abc":
        hub.join(name)
    hub.leave("c")
    hub.push("a", 1)
    hub.push("a", 2, base=1)
    assert not hub.core.stopped
    trigger(hub)
    assert hub.all_of(Broadcast) == [Broadcast((hub.peers["a"], hub.peers["b"]), Goodbye(reason))]
    assert hub.reports == [reason]
    assert isinstance(hub.effects[-2], Save)
    assert hub.effects[-1] == EndHub(reason)
    assert hub.core.next_deadline_s() == math.inf
    accepted = dict(hub.core.messages_accepted)
    hub.hello("d")
    assert hub.effects == []
    hub.give(PushArrived(b"x", hub.make_push("a", 9), 7, 1.0))
    assert hub.effects == [Discard(7)]
    hub.give(HubStopRequested())
    assert hub.effects == []
    hub.tick(1e6)
    assert hub.effects == []
    assert dict(hub.core.messages_accepted) == accepted
    assert hub.core.messages_ignored == 2


def test_the_last_version_is_evaluated_before_the_end(hub_bench):
    hub = hub_bench(held_out=True)
    hub.join()
    hub.push(seq=1)
    hub.give(HubStopRequested(finished=True))
    assert [type(effect) for effect in hub.effects[-2:]] == [Save, Evaluate]
    hub.give(Evaluated(0, 2.0, None))
    assert hub.effects[-1] == Evaluate(), "one that was begun before the end"
    hub.hello("d")
    assert hub.effects == []
    hub.give(Evaluated(1, 1.0, None))
    assert hub.effects[-3:] == [WriteBest(1.0, None), Save(), EndHub("finished")]
    assert hub.core.policy_engine.state.evaluations.best == Evaluated(1, 1.0, None)
    hub.give(Evaluated(1, 0.5, None))
    assert hub.effects == []


def test_a_stop_ends_the_last_evaluation(hub_bench):
    hub = hub_bench(held_out=True)
    hub.give(HubStopRequested(finished=True))
    assert hub.effects[-1] == Evaluate()
    hub.give(HubStopRequested())
    assert hub.effects == [EndHub("finished")]
    hub.give(Evaluated(0, 1.0, None))
    assert hub.effects == []


EVALUATED_AT_THE_END = {
    "a new version": ([], True),
    "one that this start has evaluated": ([Evaluated(0, 1.0, None)], False),
    "one that an earlier start has evaluated, maybe on other data": (
        [Evaluated(0, 1.0, None), Resumed("1" * 16)],
        True,
    ),
}


@pytest.mark.parametrize(("events", "evaluates"), EVALUATED_AT_THE_END.values(), ids=EVALUATED_AT_THE_END)
def test_which_last_version_is_evaluated(hub_bench, events, evaluates):
    hub = hub_bench(held_out=True)
    for event in events:
        hub.core.handle(event, 0.0)
    hub.give(HubStopRequested(finished=True))
    assert hub.effects[-1] == (Evaluate() if evaluates else EndHub("finished"))


def test_the_model_is_saved_every_so_often(hub_bench):
    hub = hub_bench(checkpoint=CheckpointSettings(every="10 seconds"))
    hub.join("a")
    saves = []
    for seq in (1, 2):
        hub.push("a", seq)
        while hub.now_s < 10.0 + 20.0 * seq:
            hub.tick(max(hub.now_s, min(hub.core.next_deadline_s(), 10.0 + 20.0 * seq)))
            saves += [hub.now_s] * len(hub.all_of(Save))
    assert saves == [10.0, 30.0]  # nothing was new at 20, and what is new then has waited long enough


def test_the_model_is_saved_every_so_many_updates(hub_bench):
    hub = hub_bench(checkpoint=CheckpointSettings(every="3 updates"))
    hub.join("a")
    saves = []
    for seq in range(1, 8):
        hub.push("a", seq)
        saves += [seq] * len(hub.all_of(Save))
    assert saves == [3, 6]


# -- looking in ----------------------------------------------------------------------------------------------


def test_status_is_the_contract(hub_bench):
    hub = hub_bench()
    hub.join("a")
    hub.push("a", 1, at_s=2.0, examples=64, step_s=0.25)
    hub.push("a", 1)
    hub.push("a", 2, base=9)
    hub.give(HubReceivedMalformed(b"x", "nonsense"))
    hub.give(HubReceived(b"y", StatusRequest()))
    assert hub.effects == [SendStatus(b"y")]
    told = hub.core.status(3.5)
    (device,) = told["devices"]
    assert device == {
        **dict.fromkeys(("quarantine", "temperature_c", "bytes_per_day_max", "day_left_bytes")),
        **dict.fromkeys(("updates_buffered", "updates_shortened", "staleness", "talk_s", "talk_share"), 0),
        **dict.fromkeys(("bytes_up", "bytes_down", "day_bytes", "bandwidth_bytes_per_s"), 0),
        **dict.fromkeys(("rest_s", "round_trip_s"), 0),
        "id": "a", "state": "training", "local_steps": 8, "last_seen_s": 1.5, "examples_per_s": 32.0,
        "pushes_answered": 3, "updates_applied": 1, "duplicates": 1, "updates_rejected": {"future_version": 1},
        "weight_kept": 1.0, "loss": 0.5, "pace_percent": 100, "pace_reason": "", "assigned_steps": 16,
        "why": "fixed", "bound": "", "step_s": 0.25, "period_s": 4.0, "push_codec": "identity",
        "stalled_s": 1.5, "machine": "", "software": "", "address": "", "joined_s": 3.5, "clock_offset_s": None,
        "why_left": "", "last_error": "update rejected: future_version", "last_error_s": 1.5,
    }  # fmt: skip
    assert told["traffic"] == {
        "bytes_up": 0, "bytes_down": 0, "day_bytes": 0, "day_remaining_s": 86_396.5, "bytes_per_day_max": None,
        "day_left_bytes": None,
    }  # fmt: skip
    assert told["cadence"] == {
        "period_s": 4.0, "aim_s": 4.0, "bound": "", "gain": 1.0, "cause": "", "warming_up": False,
        "resting": False, "rest_period_s": 0.0, "still_s": 0.0, "rest_cause": "",
    }  # fmt: skip
    tables = {key: told[key] for key in ("devices", "traffic", "cadence")}
    assert told == tables | {
        "lineage": hub.lineage, "version": 1, "pushes_answered": 3, "updates_applied": 1, "updates_rejected": 1,
        "updates_buffered": 0, "duplicates": 1, "messages_refused": 1, "messages_ignored": 0,
        "messages_accepted": {"fetch": 1, "hello": 1, "push": 3, "statusrequest": 1},
        "fleet": {"staleness_mean": 0.0, "agreement": None, "loss": 0.5, "loss_variance": 0.25},
        "learning_rate_factor": 1.0, "rollbacks": 0, "alarms": [], "alarms_past": [], "evaluation": None,
        "best": None, "refused": {},
    }  # fmt: skip


# -- what is published ---------------------------------------------------------------------------------------

CHAIN = {"codec": CodecSettings(push="int8", model="float16", delta="int8")}
KNOWN = ("identity", "float16", "int8")


def fetch_holding(hub, number, *, lineage=None, device_id="a"):
    held = ModelVersion(lineage or hub.lineage, number)
    return hub.give(HubReceived(hub.peers[device_id], Fetch(hub.sessions[device_id], held, held_checksum=9)))


def test_a_device_is_led_on_from_what_it_says_it_holds(hub_bench):
    hub = hub_bench(Policy(aggregate=BufferedAggregator(count=1), optimizer=(SGD(),)), **CHAIN)
    hub.join(codecs=KNOWN)
    assert (hub.one(Assign).base, hub.one(Assign).codec) == (None, "float16")
    hub.push(seq=1, base=0, held_checksum=9)
    assert [type(effect) for effect in hub.effects if isinstance(effect, Fold | Publish | Assign)] == [
        Fold,
        Publish,
        Assign,
    ]
    assert hub.one(Publish) == Publish(1)
    assert (hub.one(Assign).version.number, hub.one(Assign).base) == (1, 0)
    fetch_holding(hub, 1)
    assert (hub.all_of(Publish), hub.one(Assign).base) == ([], 1)
    fetch_holding(hub, 1, lineage="f" * 16)
    assert hub.one(Assign).base is None
    hub.fetch()
    assert hub.one(Assign).base is None
    hub.push(seq=2, base=1)
    assert hub.one(Assign).base is None, "it does not say whether it holds the version whole"


def test_a_device_that_does_not_know_a_codec_is_given_what_it_knows(hub_bench):
    hub = hub_bench(**CHAIN)
    for known, push, model, held in (
        (("identity",), "identity", "identity", None),
        (("identity", "float16"), "identity", "float16", None),
        (("identity", "int8"), "int8", "identity", None),
        (KNOWN, "int8", "float16", 0),
    ):
        hub.hello(codecs=known)
        assert hub.one(SendToDevice).message.push_codec == push
        fetch_holding(hub, 0)
        assert (hub.one(Assign).codec, hub.one(Assign).base) == (model, held)


def test_where_every_update_is_a_version_it_is_published_now_and_then(hub_bench):
    settings = CodecSettings(push="int8", model="float16", delta="int8", publish_s=2.0)
    hub = hub_bench(codec=settings)
    hub.join(codecs=KNOWN)
    published = []
    for seq in range(1, 9):
        base = hub.core.publish_schedule.state.number
        hub.push(seq=seq, base=base, at_s=0.5 * seq)
        assert hub.one(Fold).number == seq
        assert hub.one(Assign).version.number == hub.core.publish_schedule.state.number
        published += [effect.number for effect in hub.all_of(Publish)]
    assert published == [4, 8]


def test_without_a_chain_nothing_is_published(hub_bench):
    hub = hub_bench(codec=CodecSettings(push="int8", model="float16", delta="off"))
    hub.join(codecs=KNOWN)
    hub.push(seq=1, base=0)
    assert hub.all_of(Publish) == []
    assert (hub.one(Assign).version.number, hub.one(Assign).base) == (1, None)


HERE = DeviceProfile(same_host=True)
AUTO = CodecSettings(push="auto", publish_s=1e-9)
LARGE = ParameterSpec((Parameter("weights", (100_000,)),))


def test_a_device_with_a_fast_link_gets_the_newest_version_plain_and_nothing_is_published(hub_bench):
    hub = hub_bench(codec=AUTO, spec=LARGE)
    hub.join(codecs=KNOWN, profile=HERE)
    hub.join("b", codecs=KNOWN)
    hub.push(seq=1, base=0, held_checksum=9, at_s=1.0)
    assert hub.all_of(Publish) == []
    assert hub.one(Assign) == msgspec.structs.replace(
        hub.one(Assign), version=ModelVersion(hub.lineage, 1), codec="identity", push_codec="identity",
        base=None, held=None, coarse=False, plain=True,
    )  # fmt: skip
    hub.push("b", seq=1, base=0, held_checksum=9, at_s=2.0)
    assert hub.one(Publish) == Publish(2)
    assert (hub.one(Assign).codec, hub.one(Assign).push_codec, hub.one(Assign).base) == ("float16", "int8", 0)
    assert not hub.one(Assign).plain


@pytest.mark.parametrize(
    ("settings", "profile"),
    [
        ({"codec": CodecSettings(push="int8")}, HERE),
        ({"codec": AUTO, "limits": {"device_bytes_per_day_max": ByteCount(10**9)}}, HERE),
        ({"codec": AUTO}, DeviceProfile(same_host=True, bytes_per_day_max=10**9, day_left_bytes=10**9)),
        ({"codec": AUTO}, DeviceProfile()),
    ],
    ids=["a codec was chosen", "the hub's quota", "the device's quota", "another machine"],
)
def test_otherwise_even_a_fast_link_is_spared(hub_bench, settings, profile):
    hub = hub_bench(**settings, spec=LARGE)
    hub.join(codecs=KNOWN, profile=profile)
    assert (hub.one(Assign).codec, hub.one(Assign).plain) == ("float16", False)
    assert hub.core.members.members["a"].codec_push == "int8"


def test_a_tunnel_is_found_out_and_led_along_the_chain(hub_bench):
    hub = hub_bench(codec=AUTO, spec=LARGE)
    hub.join(codecs=KNOWN, profile=HERE)
    plain = []
    for seq in range(1, SLOWER_CYCLES + 2):
        base, moved = hub.one(Assign).version.number, (400_000, 400_000)
        hub.push(seq=seq, base=base, moved=moved, step_s=0.0, at_s=float(seq))
        plain.append(hub.one(Assign).plain)
    assert plain == [True] * (SLOWER_CYCLES - 1) + [False] * 2
    assert (hub.one(Assign).codec, hub.one(Assign).push_codec) == ("float16", "int8")


def test_a_leap_back_is_published_at_once_and_whole(hub_bench):
    monitor = Monitor(detectors=(DisagreementDetector(remedy="rollback"),))
    settings = CodecSettings(push="int8", model="float16", delta="int8", publish_s=1000.0)
    hub = hub_bench(Policy(**STEADY, monitor=monitor), codec=settings)
    hub.join(codecs=KNOWN)
    hub.push(seq=1, base=0)
    assert hub.all_of(Publish) == []
    hub.core.policy_engine.state.fleet.agreement = -1.0
    hub.push(seq=2, base=0)
    assert "rolled_back" in repr(hub.one(Assign).ack)
    assert hub.one(Publish) == Publish(hub.core.version, whole=True)
    assert hub.one(Assign).version.number == hub.core.version
