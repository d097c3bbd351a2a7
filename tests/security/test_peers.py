"""Who talks to a peer: strangers get no message in and no memory, and a key of the list cannot end it."""

import contextlib
import socket
import struct

import psutil
import pytest
import zmq

from edgeasync.core.engine.peer_engine import HEADER_BYTES_MAX
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import KeyPair
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSION, StatusRequest
from edgeasync.protocol.peer_messages import Offer, PeerPiece, PeerPing, Propose, RoundId, RoundMember
from tests.support.formats.versions import in_version
from tests.support.programs.peers import FILE, name_of, write_list
from tests.support.programs.processes import free_address
from tests.support.security.keyed import FAILURES, client

pytestmark = pytest.mark.process

PEERS = ("-m", "tests.support.programs.peers")
MEMORY_BYTES_MAX = 48 << 20
"""What a flood may cost a peer: pieces that wait to be read, and what the allocator keeps."""

ANY = zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILURES


class Listed:
    """Peers 1 and 2 of a list. Peer 1 is a process; peer 2 is the test, under its key."""

    def __init__(self, commands, folder):
        self.folder = folder
        self.address = free_address()
        self.port = int(self.address.rpartition(":")[2])
        self.write([1, 2])
        self.process = commands.start(folder, 1, "ring", 2.0, program=PEERS)
        self.process.wait_for("alone")
        self.key = DeviceKeys(folder / name_of(1)).own().public

    def write(self, numbers):
        write_list(self.folder, numbers, f"tcp://127.0.0.{{number}}:{self.port}")  # nobody listens at 127.0.0.2

    def pair(self, number=2):
        return DeviceKeys(self.folder / name_of(number)).own()

    def alive(self):
        """A peer that lives refuses what cannot be read, and says so."""
        with client(self.address, self.pair(), self.key, events=ANY) as friend:
            friend.let_in()
            friend.socket.send(b"no header")
            self.process.wait_for("refused", peer=name_of(2))
        return not self.process.ended


@pytest.fixture
def listed(commands, tmp_path):
    return Listed(commands, tmp_path)


def test_nobody_else_gets_a_message_in(listed):
    """A plain client, an unknown key, and a peer's key for another peer."""
    for pair, key in ((KeyPair.make(), listed.key), (listed.pair(), KeyPair.make().public)):
        with client(listed.address, pair, key) as stranger:
            stranger.say(StatusRequest())
            stranger.ended()
    with socket.create_connection(("127.0.0.1", listed.port)) as plain:
        plain.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0") + b"\x04\x19\x05READY")
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(4096):
                pass
    assert "refused" not in listed.process.names()
    assert listed.alive()


def test_a_stranger_uses_no_memory(listed):
    """Many connections that send without end, and never a whole handshake."""
    before = psutil.Process(listed.process.pid).memory_info().rss
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE".ljust(64, b"\0")
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", listed.port)) as stranger:
            stranger.sendall(greeting + b"\x06" + struct.pack(">Q", 1 << 40))
            with contextlib.suppress(OSError):
                for _ in range(64):
                    stranger.sendall(bytes(1 << 16))
    assert psutil.Process(listed.process.pid).memory_info().rss < before + MEMORY_BYTES_MAX
    assert listed.alive()


def ping(number, **changed):
    fields = {"incarnation": 1, "count": number, "fingerprint": "", "number": 0, "ready": True, "heard": ()}
    return PeerPing(**(fields | changed))


ROUND = RoundId(1, name_of(2), 1)
HOSTILE = {
    "bytes": [b"\xff" * 64],
    "deep": [b"\x91" * 4000],
    "a hub's message": [wire.encode(StatusRequest())],
    "three frames": [wire.encode(ping(1)), b"", b""],
    "a payload where none belongs": [wire.encode(ping(1)), bytes(1000)],
    "a piece without bytes": [wire.encode(PeerPiece(ROUND, 0, 0, 0))],
    "a piece of no round": [wire.encode(PeerPiece(ROUND, 0, 0, 0)), bytes(1 << 16)],
    "an offer of no round": [wire.encode(Offer(ROUND, 0, 2**53, 0))],
    "another model": [wire.encode(ping(1, fingerprint="ab" * 32))],
    "a round of strangers": [
        wire.encode(Propose(ROUND, "ring", "identity", 1 << 16, (RoundMember("x", 1), RoundMember("y", 1))))
    ],
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_a_key_of_the_list_cannot_end_a_peer(listed, frames):
    with client(listed.address, listed.pair(), listed.key, events=ANY) as enemy:
        enemy.let_in()
        enemy.socket.send_multipart(frames)
        enemy.socket.send(b"no header")
        listed.process.wait_for("refused", peer=name_of(2))
    assert not listed.process.ended


def test_another_version_of_the_protocol_is_told_with_what_to_do(listed):
    with client(listed.address, listed.pair(), listed.key, events=ANY) as other:
        other.let_in()
        other.socket.send(in_version(wire.encode(ping(1)), PROTOCOL_VERSION - 1))
        told = f"got protocol version {PROTOCOL_VERSION - 1}, expected {PROTOCOL_VERSION}"
        cure = "install the same version of edgeasync on both sides"
        listed.process.wait_for("refused", peer=name_of(2), detail=f"{told}; {cure}")


def test_a_frame_longer_than_any_ends_the_connection(listed):
    before = psutil.Process(listed.process.pid).memory_info().rss
    for frame in (bytes(1 << 26), bytes(HEADER_BYTES_MAX + 1)):
        with client(listed.address, listed.pair(), listed.key, events=ANY) as enemy:
            enemy.let_in()
            enemy.socket.send(frame)
            enemy.ended()
    assert psutil.Process(listed.process.pid).memory_info().rss < before + MEMORY_BYTES_MAX
    assert listed.alive()


def test_a_key_that_is_taken_out_of_the_list_is_shut_out(listed):
    with client(listed.address, listed.pair(), listed.key, events=ANY) as friend:
        friend.let_in()
        listed.write([1])
        friend.ended()
    with client(listed.address, listed.pair(), listed.key) as friend:
        friend.ended()


def test_while_the_list_cannot_be_read_the_one_before_counts(listed):
    (listed.folder / FILE).write_text("peer = [")
    listed.process.wait_for("warning")
    assert listed.alive()
