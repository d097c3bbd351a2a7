"""What a hub tells peers of one another, and whom it does not note."""

import pytest

from edgeasync.core.engine.roster import Roster
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PEERS_MAX, FindPeers, FoundPeers, ListedPeer, Refuse
from tests.support.parts.engine_bench import Bench


def key_of(number):
    return bytes([number]) * 32


def sender(number):
    return Sender(key_of(number), f"pi-{number}", "device")


def find(number, **changed):
    return FindPeers(**{"name": f"pi-{number}", "address": f"tcp://10.0.0.{number}:5600"} | changed)


@pytest.fixture
def roster():
    """A roster of two peers."""
    roster = Roster()
    for number in (2, 1):
        assert isinstance(roster.answer(find(number), sender(number)), FoundPeers)
    return roster


def names(roster):
    return [each.name for each in roster.answer(find(1), sender(1)).peers]


def test_all_that_have_asked_are_told_in_order_with_their_keys(roster):
    listed = [ListedPeer(f"pi-{number}", f"tcp://10.0.0.{number}:5600", key_of(number)) for number in (1, 2, 3)]
    assert roster.answer(find(3), sender(3)) == FoundPeers(tuple(listed))
    assert roster.answer(find(3, address="tcp://h:1"), sender(3)).peers[2].address == "tcp://h:1"


@pytest.mark.parametrize(
    ("request_", "who", "code", "said"),
    [
        (find(3), ANYBODY, "not_allowed", "peers need a hub with keys"),
        (find(1), sender(3), "not_allowed", "key belongs to pi-3, not to pi-1"),
        (find(3, name="pi-3/1"), sender(3), "not_allowed", "not to pi-3/1"),
        (find(3, address="tcp://10.0.0.1:5600"), sender(3), "not_allowed", "already used by pi-1"),
        (find(3, address="tcp://10.0.0.3:65536"), sender(3), "malformed", "the port must be at most 65535"),
    ],
)
def test_who_is_not_noted(roster, request_, who, code, said):
    refused = roster.answer(request_, who)
    assert isinstance(refused, Refuse)
    assert refused.code == code
    assert said in refused.sentence
    assert names(roster) == ["pi-1", "pi-2"]


def test_a_full_roster_takes_no_other_until_a_key_counts_no_more(roster):
    for number in range(3, PEERS_MAX + 1):
        roster.answer(find(number), sender(number))
    assert roster.answer(find(99), sender(99)).code == "hub_full"
    assert len(roster.answer(find(1), sender(1)).peers) == PEERS_MAX
    roster.forget(key_of(2))
    found = roster.answer(find(99), sender(99))
    assert len(found.peers) == PEERS_MAX
    assert "pi-2" not in [each.name for each in found.peers]


def test_another_key_of_a_name_takes_its_place(roster):
    assert roster.answer(find(2), Sender(key_of(9), "pi-2", "device")).peers[1].key == key_of(9)
    roster.forget(key_of(2))  # the former key, revoked a moment later
    assert names(roster) == ["pi-1", "pi-2"]


def test_a_hub_answers_peers_and_forgets_whose_key_it_revokes():
    bench = Bench()

    def ask(number, who):
        bench.engine.on_message(b"%d" % number, wire.encode(find(number)), None, 0.0, who)
        return bench.notes.sent[-1][1]

    assert isinstance(ask(1, ANYBODY), Refuse)
    ask(2, sender(2))
    assert [each.name for each in ask(1, sender(1)).peers] == ["pi-1", "pi-2"]
    assert ask(3, Sender(key_of(3), "pi-3", "operator")).code == "not_allowed"
    bench.engine.revoke(key_of(2), 0.0)
    assert [each.name for each in ask(1, sender(1)).peers] == ["pi-1"]
