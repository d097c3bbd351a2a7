"""The hub's handshake: which devices it welcomes, and with which session and state."""

import math

import pytest

from edgeasync.core.hub.effects import Assign, Discard, SendToDevice
from edgeasync.core.hub.events import HubReceived
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.policies.aggregation import BufferedAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import Ack, Applied, Hello, ModelVersion, Pong, Welcome

LEASE_S = 15.0


def test_a_new_device_is_welcomed(hub_bench):
    hub = hub_bench()
    hub.hello("pi-1", seq_answered=4, codecs=("identity", "float16"))
    assert hub.reports == ["joined"]
    send = hub.one(SendToDevice)
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
    assert hub.one(SendToDevice).message == Pong(123.0)


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
    assert hub.one(SendToDevice).message.seq_last == 2
    hub.push(seq=2)
    assert [type(effect) for effect in hub.effects] == [Discard]
    hub.push(seq=3)
    assert hub.ack == Ack(3, Applied(3))


def greeted(hub, **fields):
    """Return what the hub says is the last update of a device that greets it again."""
    hub.hello(session=hub.sessions["a"], **fields)
    welcome = hub.one(SendToDevice).message
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
    hub.give(HubReceived(b"x", Hello("a", b"s" * 16, 1, fingerprint=fingerprint)))
    assert hub.refused == code
    assert bool(hub.sessions) == (code is None)


def test_a_device_that_was_evicted_while_its_update_waited_comes_back_with_it(hub_bench):
    """Red before: its answered pushes and their outcomes were no longer the same number."""
    policy = Policy(aggregate=BufferedAggregator(count=2), frequency=FixedFrequency(local_steps=4))
    hub = hub_bench(policy=policy, limits={"devices_max": 1})
    hub.join("a")
    hub.push("a", 1)
    hub.leave("a")
    hub.join("b")
    assert set(hub.core.members.members) == {"b"}
    hub.core.check()
    hub.leave("b")
    hub.join("a", seq_answered=1)
    assert hub.core.members.members["a"].updates_buffered == 1
    hub.core.check()
    hub.push("a", 2)
    assert hub.core.members.members["a"].updates_applied == 2
    hub.core.check()


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
