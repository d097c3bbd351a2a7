"""Tables of the hub's transitions: what comes in, what goes out, and what has changed."""

import math

import pytest

from edgeasync.core.hub.effects import (
    Assign,
    Broadcast,
    Discard,
    Evaluate,
    Fold,
    Publish,
    Report,
    Save,
    SaveBest,
    Send,
    SendGraph,
    SendStatus,
    Stop,
)
from edgeasync.core.hub.events import (
    Evaluated,
    Heard,
    Malformed,
    PushArrived,
    Received,
    Resumed,
    StopRequested,
)
from edgeasync.core.hub.settings import CheckpointSettings, CodecSettings
from edgeasync.policies.aggregation import BufferedAggregator, ImmediateAggregator, QuorumAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import DisagreementWatch, Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import PolynomialStaleness
from edgeasync.protocol import wire
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Duplicate,
    Fetch,
    Hello,
    Leave,
    ModelVersion,
    Ping,
    Pong,
    Rejected,
    StatusRequest,
    Welcome,
)

LEASE_S = 15.0
STEADY = {"aggregate": ImmediateAggregator(), "optimizer": (SGD(),), "frequency": FixedFrequency()}

# -- joining -------------------------------------------------------------------------------------------------


def test_a_new_device_is_welcomed(hub_bench):
    hub = hub_bench()
    hub.hello("pi-1", seq_answered=4, codecs=("identity", "float16"))
    assert hub.reports == ["joined"]
    send = hub.one(Send)
    assert send.peer == hub.peers["pi-1"]
    assert send.message == Welcome(
        session=hub.sessions["pi-1"], spec=hub.spec, settings={"learning_rate": 0.1}, seq_last=4,
        push_codec="identity", heartbeat_s=5.0, lease_s=LEASE_S, piece_bytes=1 << 20,
        residual_decay=0.9, checksum_last=0,
    )  # fmt: skip
    assert hub.state_of("pi-1") == "joining"
    hub.fetch("pi-1")
    assert hub.one(Assign) == Assign(
        hub.peers["pi-1"], ModelVersion(hub.lineage, 0), FixedFrequency().local_steps, "identity", None
    )


TRAINS = "ping"
HELD, NONE, BOGUS = "the session it holds", None, b"\xff" * 16
DUPLICATE = "duplicate_device_id"

# Each row: what came before, as hellos of (time, state id, start, session, peer) or a ping that shows steps;
# then the last hello and the reports, or the code, that answer it.
HELLOS = {
    "same start with its session": ([(0, 1, 1, NONE, b"x"), TRAINS], (1, 1, 1, HELD, b"y"), ["reconnected"]),
    "same start, same connection": ([(0, 1, 1, NONE, b"x"), TRAINS], (1, 1, 1, NONE, b"x"), ["reconnected"]),
    "same start, welcome was lost": ([(0, 1, 1, NONE, b"x")], (1, 1, 1, NONE, b"y"), ["reconnected"]),
    "same start, no session, live": ([(0, 1, 1, NONE, b"x"), TRAINS], (1, 1, 1, NONE, b"y"), DUPLICATE),
    "same start, bogus session": ([(0, 1, 1, NONE, b"x"), TRAINS], (1, 1, 1, BOGUS, b"y"), DUPLICATE),
    "same start, no session, lost": ([(0, 1, 1, NONE, b"x"), TRAINS], (16, 1, 1, NONE, b"y"), ["rejoined"]),
    "higher start while live": ([(0, 1, 1, NONE, b"x"), TRAINS], (1, 1, 2, NONE, b"y"), ["lost", "rejoined"]),
    "higher start after the lease": ([(0, 1, 1, NONE, b"x"), TRAINS], (16, 1, 2, NONE, b"y"), ["rejoined"]),
    "lower start": ([(0, 1, 3, NONE, b"x")], (1, 1, 2, HELD, b"y"), "superseded"),
    "lower start after the lease": ([(0, 1, 3, NONE, b"x")], (60, 1, 2, HELD, b"y"), "superseded"),
    "new state while live": ([(0, 1, 1, NONE, b"x")], (1, 2, 1, NONE, b"y"), DUPLICATE),
    "new state after the lease": ([(0, 1, 1, NONE, b"x")], (16, 2, 1, NONE, b"y"), ["rejoined"]),
    "the old state then": (
        [(0, 1, 1, NONE, b"x"), (16, 2, 1, NONE, b"y")], (17, 1, 9, NONE, b"x"), "retired_state"
    ),
    "the old state, both silent": (
        [(0, 1, 1, NONE, b"x"), (16, 2, 1, NONE, b"y")], (60, 1, 9, NONE, b"x"), "retired_state"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "last", "expected"), HELLOS.values(), ids=HELLOS)
def test_who_is_who(hub_bench, before, last, expected):
    hub = hub_bench(checkpoint=CheckpointSettings(every="1000 hours"))

    def hello(at_s, state, start, session, peer):
        hub.tick(at_s)
        held = hub.sessions.get("a")
        hub.hello(state=state, start=start, session=held if session == HELD else session, peer=peer)

    for step in before:
        hub.ping(steps=5) if step == TRAINS else hello(*step)
    session_before, peer_before = hub.sessions["a"], hub.peers["a"]
    hello(*last)
    if isinstance(expected, str):
        assert hub.refused == expected
        assert hub.sessions["a"] == session_before
        assert hub.peers["a"] == peer_before
        return
    assert hub.refused is None
    assert hub.reports == expected
    assert hub.forgotten == ([peer_before] if last[4] != peer_before else [])
    assert hub.sessions["a"] != session_before
    hub.ping(session=session_before)
    assert hub.refused == "unknown_session"
    hub.ping()
    assert hub.one(Send).message == Pong(123.0)


def test_a_duplicate_is_told_when_the_other_lease_ends(hub_bench):
    hub = hub_bench()
    hub.hello(state=1)
    hub.ping(at_s=4.0)
    hub.hello(state=2, at_s=10.0)
    assert hub.refusal.retry_after_s == LEASE_S + 4.0 - 10.0
    hub.tick(19.0)
    hub.hello(state=2, at_s=19.0)
    assert hub.reports == ["rejoined"]


def test_a_new_state_begins_a_new_sequence(hub_bench):
    hub = hub_bench()
    hub.join(state=1)
    hub.push(seq=1)
    hub.push(seq=2)
    hub.leave()
    hub.hello(state=2, seq_answered=2)
    assert hub.one(Send).message.seq_last == 2
    hub.push(seq=2)
    assert [type(effect) for effect in hub.effects] == [Discard]
    hub.push(seq=3)
    assert hub.ack == Ack(3, Applied(3))


def greeted(hub, **fields):
    """Return what the hub says is the last update of a device that greets it again."""
    hub.hello(session=hub.sessions["a"], **fields)
    welcome = hub.one(Send).message
    return welcome.seq_last, welcome.checksum_last


def test_a_welcome_names_the_last_update_by_number_and_checksum(hub_bench):
    hub = hub_bench()
    hub.join(seq_answered=4)
    assert greeted(hub) == (4, 0), "the number is the device's word; no update had it here"
    hub.push(seq=5, checksum=55)
    assert greeted(hub) == (5, 55)
    hub.push(seq=6, checksum=66, norm=math.nan)
    assert greeted(hub) == (6, 66)
    hub.push(seq=6, checksum=67)
    assert greeted(hub) == (6, 66)
    hub.leave()
    assert greeted(hub, state=2, seq_answered=1) == (1, 0)


def test_eight_retired_states_are_remembered(hub_bench):
    hub = hub_bench()
    for state in range(1, 11):
        hub.hello(state=state)
        hub.leave()
    for state in range(2, 10):
        hub.hello(state=state)
        assert hub.refused == "retired_state", state
    hub.hello(state=1)
    assert hub.refused is None


@pytest.mark.parametrize(("fingerprint", "code"), [("0" * 32, "model_mismatch"), (None, None), ("own", None)])
def test_what_a_device_must_share(hub_bench, fingerprint, code):
    hub = hub_bench()
    fingerprint = hub.spec.fingerprint if fingerprint == "own" else fingerprint
    hub.give(Received(b"x", Hello("a", b"s" * 16, 1, fingerprint=fingerprint)))
    assert hub.refused == code
    assert bool(hub.sessions) == (code is None)


def test_a_hub_uses_only_codecs_that_the_device_named(hub_bench):
    hub = hub_bench(codec=CodecSettings(push="float16", model="float16", delta="off"))
    hub.hello("plain")
    assert hub.one(Send).message.push_codec == "identity"
    hub.fetch("plain")
    assert hub.one(Assign).codec == "identity"
    hub.hello("able", codecs=("identity", "float16"))
    assert hub.one(Send).message.push_codec == "float16"
    hub.fetch("able")
    assert hub.one(Assign).codec == "float16"


def test_a_full_hub_evicts_whom_it_has_not_heard_for_longest(hub_bench):
    hub = hub_bench(limits={"devices_max": 2})
    hub.hello("a", at_s=0.0)
    hub.hello("b", at_s=1.0)
    hub.hello("c", at_s=2.0)
    assert hub.refused == "hub_full"
    assert hub.refusal.retry_after_s == LEASE_S
    hub.ping("a", at_s=3.0)
    hub.tick(40.0)
    hub.hello("c", at_s=40.0)
    assert set(hub.core.members.members) == {"a", "c"}
    hub.ping("b")
    assert hub.refused == "unknown_session"
    hub.ping("a")
    assert hub.reports == ["rejoined"]
    hub.hello("b", peer=b"b again")
    assert hub.refused == "hub_full"
    hub.leave("a")
    hub.hello("b", peer=b"b again")
    assert hub.reports == ["joined"]


def test_a_quarantine_that_is_over_holds_no_place(hub_bench):
    hub = hub_bench(limits={"devices_max": 1, "strikes_max": 1, "quarantine_s": 30.0})
    hub.hello("a")
    hub.give(Malformed(hub.peers["a"], "nonsense"))
    hub.tick(29.0)
    hub.hello("b")
    assert hub.refused == "hub_full"
    hub.tick(30.0)
    hub.hello("b")
    assert hub.reports == ["joined"]


# -- the graph -----------------------------------------------------------------------------------------------


def test_a_graph_is_offered_to_everybody_and_sent_to_members_who_ask(hub_bench):
    graph = ShippedGraph(b"a graph")
    hub = hub_bench(graph=graph)
    hub.hello()
    welcome = hub.one(Send).message
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
    assert (hub.one(Send).message.graph, hub.one(Send).message.graph_bytes) == (None, 0)
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
        assert hub.core.members.histories["a"].staleness == seq - 1 - base
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
    sends = [send.message for send in hub.all_of(Send)]
    assert sends[0] == Ack(1, Applied(1))
    assert (sends[1].code, len(sends)) == ("busy", 2)
    assert not hub.all_of(Assign)
    hub.fetch(capacity=False)
    assert hub.refused == "busy"
    hub.fetch()
    assert hub.one(Assign).version.number == 1
    assert hub.core.messages_accepted["piece"] == 1
    hub.push(seq=1, capacity=False)
    assert hub.all_of(Send)[0].message == Ack(1, Duplicate(Applied(1)))
    assert hub.refused == "busy"


@pytest.mark.parametrize("event", ["ping", "fetch", "push", "offer", "leave"])
def test_a_session_nobody_has(hub_bench, event):
    hub = hub_bench()
    hub.sessions["a"], hub.peers["a"] = b"?" * 16, b"x"
    getattr(hub, event)("a")
    assert hub.refused == "unknown_session"
    assert len(hub.all_of(Discard)) == (event == "push")


# -- liveness ------------------------------------------------------------------------------------------------


def test_exactly_the_silent_are_lost_at_the_deadline(hub_bench):
    hub = hub_bench(checkpoint=CheckpointSettings(every="1000 hours"))
    for at_s, name in enumerate("abc"):
        hub.hello(name, at_s=float(at_s))
    hub.ping("b", at_s=10.0)
    lost = []
    while (deadline_s := hub.core.next_deadline_s()) < 100.0:
        hub.tick(deadline_s)
        lost += [(deadline_s, report.device_id) for report in hub.all_of(Report) if report.event == "lost"]
        lost_peers = [hub.peers[report.device_id] for report in hub.all_of(Report)]
        assert hub.forgotten == lost_peers
    assert lost == [(15.0, "a"), (17.0, "c"), (25.0, "b")]
    assert hub.core.members.live_count == 0


TRAFFIC = {
    "ping": lambda hub: hub.ping(),
    "fetch": lambda hub: hub.fetch(),
    "refused fetch": lambda hub: hub.fetch(capacity=False),
    "push": lambda hub: hub.push(),
    "refused push": lambda hub: hub.push(capacity=False),
    "offer": lambda hub: hub.offer(),
    "piece": lambda hub: hub.give(Heard(hub.peers["a"], "piece")),
    "credit": lambda hub: hub.give(Heard(hub.peers["a"], "credit")),
    "hello": lambda hub: hub.hello(session=hub.sessions["a"]),
}


@pytest.mark.parametrize("say", TRAFFIC.values(), ids=TRAFFIC)
def test_any_traffic_renews_the_lease_and_revives_the_lost(hub_bench, say):
    hub = hub_bench(checkpoint=CheckpointSettings(every="1000 hours"))
    hub.hello()
    hub.tick(14.0)
    say(hub)
    hub.tick(28.9)
    assert hub.reports == []
    hub.tick(29.0)
    assert hub.reports == ["lost"]
    hub.tick(500.0)
    say(hub)
    assert "rejoined" in hub.reports
    assert hub.core.members.live_count == 1
    hub.tick(514.9)
    assert hub.reports == []
    hub.tick(515.0)
    assert hub.reports == ["lost"]


def test_a_new_connection_takes_over_and_the_old_is_forgotten(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.ping(peer=b"second")
    assert hub.forgotten == [b"a 1"]
    hub.push(seq=1, peer=b"second")
    assert hub.forgotten == []
    assert hub.one(Assign).peer == b"second"


def test_a_connection_that_becomes_another_device_is_never_mistaken_for_the_first(hub_bench):
    hub = hub_bench()
    hub.join("a", peer=b"x")
    hub.hello("b", peer=b"x")
    hub.tick(1000.0)
    assert hub.reports == ["lost", "lost"]
    assert b"" not in hub.forgotten


def test_a_trainer_that_hangs_is_paused_until_it_steps_again(hub_bench):
    hub = hub_bench(liveness={"progress_s": 20.0})
    hub.join()
    hub.ping(steps=3, at_s=1.0)
    assert hub.state_of() == "training"
    for at_s in (11.0, 21.0):
        hub.ping(steps=3, at_s=at_s)
        assert hub.reports == []
    hub.ping(steps=3, at_s=21.5)
    assert (hub.reports, hub.state_of()) == (["paused"], "paused")
    hub.ping(steps=3, at_s=31.0)
    assert hub.reports == []
    hub.ping(steps=4, at_s=32.0)
    assert (hub.reports, hub.state_of()) == (["training"], "training")
    hub.ping(steps=4, at_s=60.0)
    hub.push(seq=1, at_s=61.0)
    assert "training" in hub.reports


def test_who_left_is_not_lost_and_may_come_back(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.leave()
    assert (hub.reports, hub.state_of(), hub.forgotten) == (["left"], "left", [b"a 1"])
    hub.tick(100.0)
    assert hub.reports == []
    hub.hello(start=2)
    assert hub.reports == ["rejoined"]


# -- faults --------------------------------------------------------------------------------------------------


def test_a_quarantine_for_ever_is_told_as_long_as_the_wire_can(hub_bench):
    hub = hub_bench(limits={"strikes_max": 1, "quarantine_s": math.inf})
    hub.join()
    hub.give(Malformed(hub.peers["a"], "nonsense"))
    hub.hello(start=2)
    told = wire.decode(wire.encode(hub.refusal))
    assert (told.code, told.retry_after_s) == ("quarantined", 1e9)


def test_strikes_quarantine_a_member_and_time_heals_it(hub_bench):
    hub = hub_bench(limits={"strikes_max": 3, "quarantine_s": 30.0})
    hub.join()
    for strikes in (1, 2, 3):
        hub.give(Malformed(hub.peers["a"], "nonsense"))
        assert hub.refused == "malformed"
        assert (hub.reports == ["quarantined"]) == (strikes == 3)
    assert hub.forgotten == [hub.peers["a"]]
    hub.give(Malformed(hub.peers["a"], "nonsense"))
    assert hub.effects == []
    hub.give(Malformed(hub.peers["a"], "a piece too late", strike=False))
    assert hub.effects == []
    for say in (hub.ping, hub.push, hub.fetch, lambda: hub.hello(start=2), lambda: hub.hello(state=2)):
        say()
        assert (hub.refused, hub.refusal.retry_after_s) == ("quarantined", 30.0)
    hub.give(Heard(hub.peers["a"], "piece"))
    assert hub.refused == "quarantined"
    hub.tick(31.0)
    hub.hello(start=2)
    assert hub.reports == ["rejoined"]
    for _ in range(2):
        hub.give(Malformed(hub.peers["a"], "nonsense"))
        assert hub.reports == []
    assert hub.state_of() == "joining"


def test_what_a_connection_did_as_a_strangers_does_not_decide_about_the_member_it_became(hub_bench):
    """Strikes of strangers are not written down: a hub that was restarted would decide in another way."""
    hub = hub_bench(limits={"strikes_max": 2})
    hub.join("a")
    for _ in range(3):
        hub.give(Malformed(b"x", "nonsense"))
    hub.hello("b", peer=b"x")
    assert "b" not in hub.core.members.members
    hub.give(Received(b"x", Ping(hub.sessions["a"], 0.0, 1)))
    hub.hello("b", peer=b"x")
    assert hub.core.members.members["b"].peer == b"x"


def test_a_ping_after_the_quarantine_clears_the_strikes(hub_bench):
    hub = hub_bench(limits={"strikes_max": 2, "quarantine_s": 5.0})
    hub.join()
    for _ in range(2):
        hub.give(Malformed(hub.peers["a"], "nonsense"))
    hub.ping(at_s=5.0)
    assert hub.reports == ["rejoined"]
    hub.give(Malformed(hub.peers["a"], "nonsense"))
    assert hub.state_of() == "joining"


def test_a_stranger_is_answered_until_it_has_too_many_strikes(hub_bench):
    hub = hub_bench(limits={"strikes_max": 3})
    for _ in range(3):
        hub.give(Malformed(b"x", "nonsense"))
        assert hub.refused == "malformed"
    for _ in range(5):
        hub.give(Malformed(b"x", "nonsense"))
        assert hub.effects == []
    hub.hello(peer=b"x")
    assert (hub.refused, hub.refusal.retry_after_s) == ("quarantined", 300.0)
    hub.hello(peer=b"y")
    assert hub.reports == ["joined"]


def test_strangers_are_remembered_within_bounds(hub_bench):
    hub = hub_bench()
    for number in range(5000):
        hub.give(Malformed(number.to_bytes(4, "big"), "nonsense"))


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "reason", "trigger"),
    [
        ({"updates": 3}, "finished", lambda hub: hub.push("a", 3)),
        ({"minutes": 0.5}, "finished", lambda hub: hub.tick(30.0)),
        ({}, "stopping", lambda hub: hub.give(StopRequested())),
        ({}, "finished", lambda hub: hub.give(StopRequested(finished=True))),
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
    assert hub.all_of(Broadcast) == [Broadcast((hub.peers["a"], hub.peers["b"]), Leave(reason))]
    assert hub.reports == [reason]
    assert isinstance(hub.effects[-2], Save)
    assert hub.effects[-1] == Stop(reason)
    assert hub.core.next_deadline_s() == math.inf
    accepted = dict(hub.core.messages_accepted)
    hub.hello("d")
    assert hub.effects == []
    hub.give(PushArrived(b"x", hub.make_push("a", 9), 7, 1.0))
    assert hub.effects == [Discard(7)]
    hub.give(StopRequested())
    assert hub.effects == []
    hub.tick(1e6)
    assert hub.effects == []
    assert dict(hub.core.messages_accepted) == accepted
    assert hub.core.messages_ignored == 2


def test_the_last_version_is_evaluated_before_the_end(hub_bench):
    hub = hub_bench(held_out=True)
    hub.join()
    hub.push(seq=1)
    hub.give(StopRequested(finished=True))
    assert [type(effect) for effect in hub.effects[-2:]] == [Save, Evaluate]
    hub.give(Evaluated(0, 2.0, None))
    assert hub.effects[-1] == Evaluate(), "one that was begun before the end"
    hub.hello("d")
    assert hub.effects == []
    hub.give(Evaluated(1, 1.0, None))
    assert hub.effects[-3:] == [SaveBest(1.0, None), Save(), Stop("finished")]
    assert hub.core.policy_engine.state.evaluations.best == Evaluated(1, 1.0, None)
    hub.give(Evaluated(1, 0.5, None))
    assert hub.effects == []


def test_a_stop_ends_the_last_evaluation(hub_bench):
    hub = hub_bench(held_out=True)
    hub.give(StopRequested(finished=True))
    assert hub.effects[-1] == Evaluate()
    hub.give(StopRequested())
    assert hub.effects == [Stop("finished")]
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
    hub.give(StopRequested(finished=True))
    assert hub.effects[-1] == (Evaluate() if evaluates else Stop("finished"))


def test_a_stop_is_not_held_up_by_an_evaluation(hub_bench):
    hub = hub_bench(held_out=True)
    hub.give(StopRequested())
    assert hub.effects[-1] == Stop("stopping")


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


# -- paces ---------------------------------------------------------------------------------------------------

PAUSED = {"pace_percent": 0, "pace_reason": "85 C", "temperature_c": 85.0}
QUORUM = Policy(
    aggregate=QuorumAggregator(share=1.0, patience=100.0), optimizer=(SGD(),), frequency=FixedFrequency()
)


def test_a_device_that_pauses_is_paused_with_its_reason_until_it_says_otherwise(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.ping(steps=3, **PAUSED)
    assert hub.one(Report) == Report("paused", "a", "85 C")
    assert hub.state_of() == "paused"
    hub.ping(steps=4, pace_percent=0, pace_reason="86 C", temperature_c=86.0)
    assert (hub.state_of(), hub.reports) == ("paused", []), "the running step ended"
    (device,) = hub.core.status(0.0)["devices"]
    assert [device[key] for key in ("state", "pace_reason", "temperature_c")] == ["paused", "86 C", 86.0]
    hub.ping(steps=4, pace_percent=50, pace_reason="76 C", temperature_c=76.0)
    assert hub.one(Report) == Report("training", "a", "takes local steps again")
    (device,) = hub.core.status(0.0)["devices"]
    assert [device[key] for key in ("state", "pace_percent", "pace_reason")] == ["training", 50, "76 C"]


def test_a_quorum_does_not_wait_for_a_device_that_pauses(hub_bench):
    hub = hub_bench(QUORUM)
    for name in ("a", "b", "c"):
        hub.join(name)
    for name in ("a", "b"):
        hub.push(name, 1, at_s=1.0)
        assert hub.all_of(Fold) == []
    hub.ping("c", at_s=2.0, **PAUSED)
    assert hub.core.next_deadline_s() == 1.0, "the fold is due at once"
    hub.tick()
    assert len(hub.one(Fold).handles) == 2
    assert [effect.peer for effect in hub.all_of(Assign)] == [hub.peers["a"], hub.peers["b"]]


def test_a_device_that_pauses_after_its_update_still_counts_with_it(hub_bench):
    hub = hub_bench(QUORUM)
    for name in ("a", "b", "c"):
        hub.join(name)
    hub.push("a", 1)
    hub.ping("a", **PAUSED)
    hub.push("b", 1)
    assert hub.all_of(Fold) == [], "c is still awaited"
    hub.push("c", 1)
    assert len(hub.one(Fold).handles) == 3
    hub.push("b", 2, base=1)
    hub.push("c", 2, base=1)
    assert len(hub.one(Fold).handles) == 2, "a has no vote in the next version"
    hub.push("a", 2, base=1)  # of steps from before the pause
    assert hub.state_of("a") == "paused"
    hub.ping("a")
    hub.push("b", 3, base=2)
    hub.push("c", 3, base=2)
    assert len(hub.one(Fold).handles) == 3


@pytest.mark.parametrize("end", ["leave", "lost", "hello"])
def test_a_pause_ends_with_the_session(hub_bench, end):
    hub = hub_bench()
    hub.join()
    hub.ping(**PAUSED)
    {
        "leave": hub.leave,
        "lost": lambda: hub.tick(LEASE_S),
        "hello": lambda: hub.hello(session=hub.sessions["a"]),
    }[end]()
    assert hub.core.members.members["a"].pace_percent == 100
    assert hub.state_of() == {"leave": "left", "lost": "lost", "hello": "joining"}[end]


def shown(hub):
    (device,) = hub.core.status(hub.now_s)["devices"]
    return device["state"], device["pace_percent"], device["pace_reason"]


def test_a_device_that_says_goodbye_for_a_pause_is_shown_as_paused_and_holds_no_lease(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.leave(reason="paused")
    assert hub.one(Report) == Report("left", "a", "paused")
    assert shown(hub) == ("paused", 0, "its program asked for a pause")
    assert (hub.core.members.live_count, hub.core.members.voters) == (0, {})
    hub.tick(10 * LEASE_S)
    assert shown(hub)[0] == "paused", "not lost"


BACK = {
    "hello": (lambda hub: hub.hello(start=2), "joining"),
    "the same session": (lambda hub: hub.ping(steps=1), "training"),
    "goodbye": (lambda hub: (hub.hello(start=2), hub.leave()), "left"),
    "lost": (lambda hub: (hub.hello(start=2), hub.tick(hub.now_s + 2 * LEASE_S)), "lost"),
    "revoked": (lambda hub: hub.core.members.expel(hub.core.members.members["a"]), "left"),
}


@pytest.mark.parametrize("back", BACK)
def test_a_pause_with_a_goodbye_ends_when_the_device_is_heard_again(hub_bench, back):
    hub = hub_bench()
    hub.join()
    hub.leave(reason="paused")
    act, state = BACK[back]
    act(hub)
    assert shown(hub) == (state, 100, "")
    hub.core.check()


def test_a_hub_that_comes_back_still_shows_who_had_paused(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.leave(reason="paused")
    hub.core.members.resume(hub.now_s, connected=False)
    assert shown(hub)[0] == "paused"


# -- looking in ----------------------------------------------------------------------------------------------


def test_status_is_the_contract(hub_bench):
    hub = hub_bench()
    hub.join("a")
    hub.push("a", 1, at_s=2.0, examples=64, step_s=0.25)
    hub.push("a", 1)
    hub.push("a", 2, base=9)
    hub.give(Malformed(b"x", "nonsense"))
    hub.give(Received(b"y", StatusRequest()))
    assert hub.effects == [SendStatus(b"y")]
    assert hub.core.status(3.5) == {
        "lineage": hub.lineage,
        "version": 1,
        "pushes_answered": 3,
        "updates_applied": 1,
        "updates_rejected": 1,
        "updates_buffered": 0,
        "duplicates": 1,
        "messages_accepted": {"fetch": 1, "hello": 1, "push": 3, "statusrequest": 1},
        "messages_refused": 1,
        "messages_ignored": 0,
        "devices": [
            {
                "id": "a",
                "state": "training",
                "quarantine": None,
                "staleness": 0,
                "local_steps": 8,
                "last_seen_s": 1.5,
                "examples_per_s": 32.0,
                "pushes_answered": 3,
                "updates_applied": 1,
                "updates_buffered": 0,
                "duplicates": 1,
                "updates_rejected": {"future_version": 1},
                "updates_shortened": 0,
                "weight_kept": 1.0,
                "loss": 0.5,
                "pace_percent": 100,
                "pace_reason": "",
                "temperature_c": None,
                "assigned_steps": 16,
                "why": "fixed",
                "bound": "",
                "step_s": 0.25,
                "talk_s": 0.0,
                "talk_share": 0.0,
                "period_s": 4.0,
                "rest_s": 0.0,
                "push_codec": "identity",
                "bytes_up": 0,
                "bytes_down": 0,
                "round_trip_s": 0.0,
                "bandwidth_bytes_per_s": 0,
                "day_bytes": 0,
                "bytes_per_day_max": None,
                "day_left_bytes": None,
            }
        ],
        "traffic": {
            "bytes_up": 0,
            "bytes_down": 0,
            "day_bytes": 0,
            "day_remaining_s": 86_396.5,
            "bytes_per_day_max": None,
            "day_left_bytes": None,
        },
        "tempo": {
            "period_s": 4.0,
            "aim_s": 4.0,
            "bound": "",
            "gain": 1.0,
            "cause": "",
            "warming_up": False,
            "resting": False,
            "rest_period_s": 0.0,
            "still_s": 0.0,
            "rest_cause": "",
        },
        "fleet": {"staleness_mean": 0.0, "agreement": None, "loss": 0.5, "loss_variance": 0.25},
        "learning_rate_factor": 1.0,
        "rollbacks": 0,
        "alarms": [],
        "alarms_past": [],
        "evaluation": None,
        "best": None,
    }


def test_nothing_is_ever_sent_to_no_one(hub_bench):
    """A member whose connection became another's has none until it speaks again."""
    hub = hub_bench()
    hub.join("a", peer=b"x")
    hub.hello("b", peer=b"x")
    hub.give(StopRequested())
    assert [sent.peers for sent in hub.all_of(Broadcast)] == [(b"x",)]


def test_a_fetch_of_a_lost_device_is_answered(hub_bench):
    hub = hub_bench()
    hub.join()
    hub.tick(20.0)
    hub.give(Received(b"a 1", Fetch(hub.sessions["a"])))
    assert hub.reports == ["rejoined"]
    assert hub.one(Assign).version.number == 0


# -- what is published ---------------------------------------------------------------------------------------

CHAIN = {"codec": CodecSettings(push="int8", model="float16", delta="int8")}
KNOWN = ("identity", "float16", "int8")


def fetch_holding(hub, number, *, lineage=None, device_id="a"):
    held = ModelVersion(lineage or hub.lineage, number)
    return hub.give(Received(hub.peers[device_id], Fetch(hub.sessions[device_id], held, held_checksum=9)))


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
        assert hub.one(Send).message.push_codec == push
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


def test_a_leap_back_is_published_at_once_and_whole(hub_bench):
    monitor = Monitor(watch=(DisagreementWatch(remedy="rollback"),))
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
