"""What a peer takes over of what a hub says of the others, and what it refuses."""

import asyncio

import pytest

from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers, read_peers, write_peers
from edgeasync.net.credentials import Credentials
from edgeasync.net.network import ZmqNetwork
from edgeasync.net.peer_finder import PeerFinder
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PEERS_MAX, FoundPeers, ListedPeer, Refuse
from tests.support.formats.versions import in_version

KEYS = [KeyPair.make().public for _ in range(4)]


def listed(number, **changed):
    known = {"name": f"pi-{number}", "address": f"tcp://10.0.0.{number}:5600", "key": KEYS[number]}
    return ListedPeer(**known | changed)


def entry(number, **changed):
    each = listed(number, **changed)
    return PeerEntry(each.name, each.address, each.key.hex())


@pytest.fixture
def hear(tmp_path):
    """Let pi-0, which knows pi-1, hear messages of its hub; return its list then, and what it tells people."""

    async def run(messages):
        told, network = [], ZmqNetwork()
        finder = PeerFinder(
            Credentials(("tcp://127.0.0.1:9",)), network, entry(0), Peers((entry(0), entry(1))),
            tmp_path / "peers.toml", on_trouble=told.append, give_up=told.append,
        )  # fmt: skip
        finder.begin()
        for message in messages:
            finder._on_message(message if isinstance(message, bytes) else wire.encode(message), None)
        finder.close()
        network.close()
        return told

    def hear(*messages):
        told = asyncio.run(run(messages))
        file = tmp_path / "peers.toml"
        return read_peers(file).peer if file.exists() else None, told

    return hear


def test_what_is_new_is_written_and_counts_more_than_what_was_known(hear):
    moved, renamed = listed(1, address="tcp://10.0.0.9:5600"), listed(3, name="pi-4")
    found, told = hear(FoundPeers((listed(0), listed(2), listed(3))), FoundPeers((listed(0), moved, renamed)))
    assert told == []
    assert found == (entry(0), entry(1, address=moved.address), entry(2), entry(3, name="pi-4"))


def test_who_is_known_stays_when_the_hub_does_not_know_it_yet(hear):
    assert hear(FoundPeers((listed(0),))) == (None, [])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (FoundPeers((listed(1), listed(2))), "pi-0 is missing, or has another address or key than this device"),
        (FoundPeers((listed(0, key=KEYS[3]), listed(1))), "pi-0 is missing, or has another address or key"),
        (FoundPeers((listed(0), listed(2), listed(3, name="pi-2"))), "duplicate name pi-2"),
        (FoundPeers((listed(0), listed(2), listed(3, key=KEYS[2]))), "duplicate"),
        (FoundPeers((listed(0), listed(2), listed(3, address=listed(2).address))), "duplicate"),
        (FoundPeers((listed(0), listed(2, key=bytes(32)))), "this key is weak"),
        (FoundPeers((listed(0), listed(2, address="tcp://10.0.0.2:65536"))), "is not an address"),
        (FoundPeers((listed(0), listed(2, address="ipc:///run/x"))), "Expected `str` matching"),
        (FoundPeers((listed(0), listed(2, name='x", key = "'))), "Expected `str` matching"),
        (FoundPeers((listed(0),) * (PEERS_MAX + 1)), "length"),
        (b"nothing", "is invalid"),
        (Refuse("hub_full", "there are 64 peers"), "the hub refused this peer: there are 64 peers"),
        (in_version(wire.encode(FoundPeers(())), 2), "version"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_once_and_changes_nothing(hear, message, said):
    found, told = hear(message, message)
    assert found is None
    assert len(told) == 1
    assert said in told[0]


def test_more_peers_than_a_list_may_have_are_refused(hear):
    many = [listed(0, name=f"n-{number}", address=f"tcp://h:{number + 1}", key=KeyPair.make().public)
            for number in range(PEERS_MAX - 1)]  # fmt: skip
    found, told = hear(FoundPeers((listed(0), *many)))
    assert found is None
    assert "more than 64 peers, including those found earlier" in told[0]


def test_who_was_deleted_from_the_list_stays_out_when_others_come(tmp_path):
    file = tmp_path / "peers.toml"

    async def run():
        network = ZmqNetwork()
        finder = PeerFinder(
            Credentials(("tcp://127.0.0.1:9",)), network, entry(0), Peers((entry(0), entry(1))),
            file, on_trouble=print, give_up=print,
        )  # fmt: skip
        finder.begin()
        write_peers(file, Peers((entry(0),)))  # after its key was revoked
        finder._on_message(wire.encode(FoundPeers((listed(0), listed(2)))), None)
        finder.close()
        network.close()

    asyncio.run(run())
    assert [each.name for each in read_peers(file).peer] == ["pi-0", "pi-2"]
