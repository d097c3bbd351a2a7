"""A claimed routing id harms nobody: not the process, and not another member.

libzmq aborts the process when a peer has claimed the id that it gives next. Its ids are a zero byte and a counter.
"""

import contextlib
import socket
import struct
import subprocess
import sys

import pytest
import zmq

from edgeasync.net.status import fetch_status
from edgeasync.protocol.messages import Hello, Ping, Pong
from tests.support.programs.processes import PATIENCE_S
from tests.support.security.keyed import ask, client, denied, enrolled, is_welcome, start_hub

pytestmark = pytest.mark.process

NEXT = 256
UNSEEDED = (0x6B8B4567, 0xE43C9869)
"""Where libzmq's counter begins if nobody seeds libc's `rand`: without a ZAP handler, and with one."""

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def claim(address, routing_id):
    """Return a connection on the level of ZMTP that claims a routing id, its handshake done."""
    connection = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), PATIENCE_S)
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id))
    )
    ready = b"\x05READY" + properties
    connection.sendall(GREETING + bytes([4, len(ready)]) + ready)
    answer = b""
    while len(answer) < 64 or b"READY" not in answer:
        more = connection.recv(4096)
        assert more, "the hub closed the connection"
        answer += more
    return connection


def test_what_a_claim_does_to_libzmq():
    """The defect is there: without a seed the first peer after a claim ends the process."""
    program = """
import sys, zmq
sys.path.insert(0, ".")
from tests.security.test_routing_ids import NEXT, UNSEEDED, claim
context = zmq.Context()
hub = context.socket(zmq.ROUTER)
hub.bind("tcp://127.0.0.1:*")
address = hub.get_string(zmq.LAST_ENDPOINT)
claims = [claim(address, b"\\0" + (UNSEEDED[0] + n).to_bytes(4, "big")) for n in range(4)]
hub.poll(0)
device = context.socket(zmq.DEALER)
device.connect(address)
device.send(b"hello")
hub.poll(10_000)
hub.recv_multipart()
print("alive")
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "alive" not in ended.stdout
    assert "Assertion failed" in ended.stderr


@pytest.mark.parametrize("start", UNSEEDED)
def test_a_stranger_who_claims_the_next_ids_ends_nobody(commands, start):
    """A hub without keys, and all the next ids that an unseeded libzmq would give."""
    hub, address = commands.hub(commands.settings())
    with contextlib.ExitStack() as claims:
        for number in range(NEXT):
            claims.enter_context(claim(address, b"\0" + (start + number).to_bytes(4, "big")))
        for number in range(4):
            with client(address) as device:
                assert is_welcome(device.join(f"pi-{number}"))
    assert len(fetch_status(address, PATIENCE_S)["devices"]) == 4
    assert hub.names().count("joined") == 4


def test_an_enrolled_key_that_claims_the_next_ids_ends_nobody(commands, keys):
    honest, thief, hub_key = enrolled(keys, "honest"), enrolled(keys, "thief"), keys.pair().public
    _, address = start_hub(commands, keys)
    context, claims = zmq.Context(), []
    with client(address, honest, hub_key) as device:
        welcome = device.join("honest")
        for start in UNSEEDED:
            for number in range(NEXT // 8):
                one = context.socket(zmq.DEALER)
                one.set(zmq.ROUTING_ID, b"\0" + (start + number).to_bytes(4, "big"))
                one.set(zmq.CURVE_SERVERKEY, hub_key)
                one.set(zmq.CURVE_PUBLICKEY, thief.public)
                one.set(zmq.CURVE_SECRETKEY, thief.secret)
                one.connect(address)
                claims.append(one)
        with client(address, honest, hub_key) as other:
            assert is_welcome(other.join("honest/1"))
        device.say(Ping(welcome.session, 1.0, 0))
        assert device.hear() == Pong(1.0)
    for one in claims:
        one.close(0)
    context.term()
    assert len(ask(address, keys)["devices"]) == 2


@pytest.mark.parametrize("routing_id", [b"a", b"\0\1\2\3\4", b"x" * 255])
def test_who_claims_an_id_is_not_heard(commands, keys, routing_id):
    pair = enrolled(keys)
    _, address = start_hub(commands, keys)
    with client(address, pair, keys.pair().public, routing_id) as device:
        device.say(Hello("pi-1", b"s" * 16, 1))
        device.ended()
        assert not device.socket.poll(0)
    assert denied(address, keys, "routing_id")["routing_id"] >= 1
    assert ask(address, keys)["devices"] == []


def test_two_hubs_do_not_count_from_the_same_number(tmp_path):
    """The counter begins elsewhere in every process, though nobody tells a peer where."""
    program = """
import zmq
from edgeasync.net import routing_ids
context = zmq.Context()
routing_ids.seed()
hub, device = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
hub.bind("tcp://127.0.0.1:*")
device.connect(hub.get_string(zmq.LAST_ENDPOINT))
device.send(b"hello")
print(hub.recv_multipart()[0].hex())
context.destroy(linger=0)
"""
    seen = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(seen) == 3
    assert not any(first.startswith(f"00{start:08x}"[:8]) for first in seen for start in UNSEEDED)
