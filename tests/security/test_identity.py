"""Whose a message is: the key it came under decides, never a routing id, a session or what it says."""

import json

import pytest

from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.effects import SendToDevice
from edgeasync.core.hub.events import HubReceived, HubReceivedMalformed, PushArrived
from edgeasync.durable.keys import operator_keys
from edgeasync.net.status import give_order
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Fetch, Goodbye, Hello, Order, Ping, Status, StatusRequest, Wake
from tests.support.parts.hub_bench import HubBench
from tests.support.programs.processes import PATIENCE_S
from tests.support.security.keyed import ask, client, enrolled, is_welcome, start_hub

ALICE, MALLORY = b"a" * 32, b"m" * 32


def hello(device_id, key, *, state=1, start=1, session=None, peer=None):
    message = Hello(device_id, bytes((state,)) * 16, start, session)
    return HubReceived(peer or key[:5], message, key=key)


@pytest.fixture
def hub():
    """A hub where Alice's device `a` and Mallory's `m` are members."""
    hub = HubBench()
    hub.give(hello("a", ALICE))
    hub.give(hello("m", MALLORY))
    return hub


def codes(hub):
    return [effect.message.code for effect in hub.all_of(SendToDevice) if hasattr(effect.message, "code")]


# -- the core -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Fetch, lambda s: Ping(s, 0.0, 0), lambda s: Goodbye("stopping", s)])
def test_a_session_is_worth_nothing_under_another_key(hub, make):
    hub.give(HubReceived(b"other", make(hub.sessions["a"]), key=MALLORY))
    assert codes(hub) == ["unknown_session"]
    member = hub.core.members.members["a"]
    assert (member.live, member.peer, member.strikes) == (True, ALICE[:5], 0)


def test_a_push_under_another_key_counts_for_nobody(hub):
    push = hub.make_push("a", 1)
    hub.give(PushArrived(MALLORY[:5], push, next(hub.handles), 1.0, key=MALLORY))
    assert codes(hub) == ["unknown_session"]
    assert hub.core.members.members["a"].seq_last == 0
    hub.push("a", 1)
    assert codes(hub) == ["unknown_session"], "and without a key neither"
    hub.give(PushArrived(ALICE[:5], push, next(hub.handles), 1.0, key=ALICE))
    assert hub.core.members.members["a"].seq_last == 1


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize(("state", "start"), [(1, 1), (1, 9), (2, 1)])
def test_another_key_takes_no_place(hub, gone, state, start):
    """Neither by the same state, nor by a later start, nor by a new state while the device is away."""
    if gone:
        hub.give(HubReceived(ALICE[:5], Goodbye("stopping", hub.sessions["a"]), key=ALICE))
    before = hub.core.members.members["a"]
    known = (before.state_id, before.incarnation, list(before.retired), before.session)
    hub.give(hello("a", MALLORY, state=state, start=start, session=hub.sessions["a"]))
    assert codes(hub) == ["not_allowed"]
    after = hub.core.members.members["a"]
    assert (after.state_id, after.incarnation, after.retired, after.session) == known
    hub.give(hello("a", ALICE, start=2))
    assert codes(hub) == []


def test_strikes_stick_to_the_key(hub):
    """A key that has sent too much that is malformed gets no further by another connection."""
    key = b"n" * 32
    for number in range(hub.core.settings.limits.strikes_max):
        hub.give(HubReceivedMalformed(b"peer %d" % number, "no message", key=key))
    hub.give(hello("n", key, peer=b"fresh"))
    assert codes(hub) == ["quarantined"]
    hub.give(hello("o", b"o" * 32, peer=b"peer 0"))
    assert codes(hub) == []


def test_a_key_that_was_struck_out_comes_in_once_it_has_been_calm_for_a_while():
    hub, key = HubBench(limits={"strikes_max": 2, "quarantine_s": 30.0}), b"n" * 32
    hub.give(HubReceivedMalformed(b"peer 1", "no message", key=key), at_s=0.0)
    hub.give(HubReceivedMalformed(b"peer 2", "no message", key=key), at_s=10.0)
    hub.give(hello("n", key), at_s=39.0)
    assert hub.refusal.code == "quarantined"
    assert hub.refusal.retry_after_s == 1.0, "an agent ends if it is not told when to come again"
    hub.give(hello("n", key), at_s=40.0)
    assert hub.reports == ["joined"]


def test_strikes_of_long_ago_put_nobody_out():
    hub, key = HubBench(limits={"strikes_max": 2, "quarantine_s": 30.0}), b"n" * 32
    hub.give(HubReceivedMalformed(b"peer", "no message", key=key), at_s=0.0)
    hub.give(HubReceivedMalformed(b"peer", "no message", key=key), at_s=30.0)
    hub.give(hello("n", key), at_s=31.0)
    assert hub.reports == ["joined"]


def leave(hub, device_id, key):
    hub.give(HubReceived(hub.peers[device_id], Goodbye("stopping", hub.sessions[device_id]), key=key))


def test_one_key_does_not_take_all_places_of_a_small_fleet():
    """It has a fourth of them. Above that, its own silent names make way for its new ones."""
    hub = HubBench(limits={"devices_max": 8})
    for number in range(20):
        hub.give(hello(f"m/{number}", MALLORY, peer=b"m%d" % number))
    assert set(hub.core.members.members) == {"m/0", "m/1"}
    assert hub.refusal.code == "hub_full"
    assert "one key" in hub.refusal.sentence
    for name in "abcdef":
        hub.give(hello(name, name.encode() * 32))
    leave(hub, "a", ALICE)
    leave(hub, "m/0", MALLORY)
    hub.give(hello("m/7", MALLORY, peer=b"m7"))
    assert set(hub.core.members.members) == {*"abcdef", "m/1", "m/7"}


def test_of_a_full_hub_the_key_with_the_most_names_gives_a_place():
    hub = HubBench(limits={"devices_max": 8})
    for name in ("a", "m/0", "m/1", *"bcdef"):
        hub.give(hello(name, name[0].encode() * 32, peer=name.encode()), at_s=hub.now_s + 0.1)
    for name in ("a", "m/0", "m/1"):
        leave(hub, name, name[0].encode() * 32)
    hub.give(hello("g", b"g" * 32))
    assert set(hub.core.members.members) == {*"abcdefg", "m/1"}, "though `a` has been silent for longer"
    hub.give(hello("h", b"h" * 32))
    assert set(hub.core.members.members) == {*"bcdefgh", "m/1"}, "and then each has one name"


def test_an_update_counts_once_though_its_device_was_forgotten_before_it_was_answered():
    """Also of an agent that names the last number which was answered, and repeats the push after it."""
    hub = HubBench(limits={"devices_max": 1})
    hub.join("a")
    push = hub.make_push("a", 1)
    hub.push("a", 1)
    hub.leave("a")
    hub.join("b")
    hub.leave("b")
    hub.hello("a", session=push.session, seq_answered=0)
    assert hub.one(SendToDevice).message.seq_last == 1, "so it drops the push"
    hub.push("a", 1)
    assert hub.core.updates_applied == 1
    hub.push("a", 2)
    assert hub.core.updates_applied == 2


def test_a_number_that_leaves_none_for_the_next_update_is_answered_by_one_that_can_be_read():
    hub = HubBench()
    hub.hello("a", session=bytes(16), seq_answered=2**53)
    assert wire.decode(wire.encode(hub.one(SendToDevice).message)).seq_last == 2**53


@pytest.mark.parametrize("key", [b"n" * 32, b""], ids=["key", "no key"])
def test_another_name_forgives_no_strikes(hub, key):
    """Red before: a device with another name began with none, on the same connection and under the same key."""
    most = hub.core.settings.limits.strikes_max
    hub.give(hello("n", key, peer=b"peer"))
    for _ in range(most - 1):
        hub.give(HubReceivedMalformed(b"peer", "no message", key=key))
    hub.give(hello("n/1", key, peer=b"peer"))
    assert hub.core.members.members["n/1"].strikes == most - 1
    hub.give(HubReceivedMalformed(b"peer", "no message", key=key))
    assert hub.core.members.members["n/1"].state == "quarantined"
    hub.give(hello("n/2", key, peer=b"peer"))
    assert codes(hub) == ["quarantined"]
    hub.give(hello("o", b"o" * 32, peer=b"another"))
    assert codes(hub) == []


def test_a_run_without_keys_can_be_given_keys():
    hub = HubBench()
    hub.join("a")
    hub.leave("a")
    hub.give(hello("a", ALICE, start=2))
    assert codes(hub) == []
    assert hub.core.members.members["a"].key == ALICE
    hub.give(hello("a", MALLORY, start=3))
    assert codes(hub) == ["not_allowed"]


@pytest.mark.parametrize(
    ("device_id", "speaks"),
    [("pi-1", True), ("pi-1/0", True), ("pi-1/999", True), ("pi-1/1000", False), ("pi-1/", False),
     ("pi-10", False), ("pi", False), ("pi-1/0/1", False), ("PI-1", False), ("pi-1\n", False), ("", False)],
)  # fmt: skip
def test_what_a_name_speaks_for(device_id, speaks):
    assert Sender(b"k" * 32, "pi-1", "device").speaks_for(device_id) == speaks
    assert not Sender(b"k" * 32, "pi-1", "operator").speaks_for(device_id)
    assert ANYBODY.speaks_for(device_id)


# -- over real sockets --------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_right_key_with_what_is_anothers(commands, keys):
    """Another's name, session, state id or routing id: refused, and the other loses nothing."""
    alice, mallory, hub_key = enrolled(keys, "alice"), enrolled(keys, "mallory"), keys.pair().public
    _, address = start_hub(commands, keys)
    with client(address, alice, hub_key) as honest:
        welcome = honest.join("alice", b"a" * 16)
        assert is_welcome(welcome)
        with client(address, mallory, hub_key) as thief:
            assert thief.join("alice", b"a" * 16, 1, welcome.session).code == "not_allowed"
            assert thief.join("alice", b"m" * 16, 9).code == "not_allowed"
            assert is_welcome(thief.join("mallory/1", b"a" * 16))
            for message in (Fetch(welcome.session), Goodbye("stopping", welcome.session)):
                thief.say(message)
                assert thief.hear().code == "unknown_session"
        honest.say(Ping(welcome.session, 1.0, 0))
        assert honest.hear().sent_s == 1.0


@pytest.mark.process
def test_an_operator_asks_wakes_and_orders_and_no_more(commands, keys):
    pair, hub_key = operator_keys(keys.folder)
    _, address = start_hub(commands, keys)
    with client(address, pair, hub_key) as operator:
        assert operator.join("owner").code == "not_allowed"
        operator.say(Fetch(b"s" * 16))
        assert operator.hear().code == "not_allowed"
        operator.say(Wake())
        assert operator.hear() == Status()
        operator.say(Order("alice", "quarantine"))
        assert operator.hear().code == "unknown_device"


@pytest.mark.process
@pytest.mark.parametrize(
    "message", [Wake(), Order("alice", "quarantine"), Order("alice", "release")], ids=lambda one: str(one)[:24]
)
def test_a_devices_key_wakes_no_fleet_and_gives_no_order(commands, keys, message):
    alice, hub_key = enrolled(keys, "alice"), keys.pair().public
    _, address = start_hub(commands, keys)
    with client(address, alice, hub_key) as device:
        assert is_welcome(device.join("alice"))
        device.say(message)
        assert device.hear().sentence == "the key of alice belongs to a device; only operators may do this"
    (shown,) = ask(address, keys)["devices"]
    assert shown["quarantine"] is None


@pytest.mark.process
def test_an_order_holds_for_all_names_of_a_key_and_for_those_to_come(commands, keys):
    alice, bob, hub_key = enrolled(keys, "alice"), enrolled(keys, "bob"), keys.pair().public
    _, address = start_hub(commands, keys)

    def excluded():
        return {one["id"] for one in ask(address, keys)["devices"] if one["state"] == "quarantined"}

    with client(address, alice, hub_key) as one, client(address, bob, hub_key) as other:
        for device, name in ((one, "alice"), (one, "alice/2"), (other, "bob")):
            assert is_welcome(device.join(name, name.encode().ljust(16, b".")))
        give_order(address, "alice/2", "quarantine", PATIENCE_S, keys.folder)
        assert is_welcome(one.join("alice/3", b"alice/3".ljust(16, b".")))
        assert excluded() == {"alice", "alice/2", "alice/3"}
        give_order(address, "alice", "release", PATIENCE_S, keys.folder)
        assert excluded() == set()


@pytest.mark.process
def test_a_device_sees_its_own_status(commands, keys):
    alice, bob, hub_key = enrolled(keys, "alice"), enrolled(keys, "bob"), keys.pair().public
    _, address = start_hub(commands, keys)
    with client(address, alice, hub_key) as one, client(address, bob, hub_key) as other:
        for device, name in ((one, "alice"), (one, "alice/2"), (other, "bob")):
            assert is_welcome(device.join(name, name.encode().ljust(16, b".")))
        other.say(StatusRequest())
        status = json.loads(other.socket.recv_multipart()[1])
    assert [device["id"] for device in status["devices"]] == ["bob"]
