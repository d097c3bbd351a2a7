"""Nobody takes a hub from the others: bounds for each connection, key and address.

Decisions are driven with a turned clock; what the kernel and libzmq must do is done over real sockets.
"""

import contextlib
import math

import msgpack
import pytest

from edgeasync.core.engine.message_bounds import HEADER_BYTES_MAX, STATUS_REQUESTS
from edgeasync.net import connection_bounds
from edgeasync.net.status import fetch_status
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Credit,
    Fetch,
    Hello,
    ModelVersion,
    Ping,
    Pong,
    Push,
    Refuse,
    Status,
    StatusRequest,
)
from tests.support.programs.processes import PATIENCE_S, until
from tests.support.security.keyed import ask, client, denied, enrolled, is_welcome, start_hub
from tests.support.security.zmtp import Peer, greeting, tcp

# -- over real sockets --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def raw(*arguments, **options):
    peer = Peer(*arguments, **options)
    try:
        yield peer
    finally:
        peer.close()


def send_until_cut(peer, frames, bytes_max):
    """Send frames again and again until the connection is cut; return how many bytes went."""
    peer.tcp.settimeout(10.0)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < bytes_max:
            for one in frames():
                peer.tcp.sendall(one)
                sent += len(one)
    return sent


@pytest.mark.process
@pytest.mark.parametrize("encrypted", [True, False], ids=["keys", "plain"])
def test_a_message_that_never_ends_is_cut(commands, keys, encrypted):
    """Red before: the hub kept all of it, until memory was full."""
    pair, hub_key = enrolled(keys), keys.pair().public
    _, address = start_hub(commands, keys) if encrypted else commands.hub(commands.settings())
    with raw(address, *((pair, hub_key) if encrypted else ())) as peer:
        sent = send_until_cut(peer, lambda: [peer.frame(bytes(1 << 16), more=True) for _ in range(16)], 1 << 30)
    assert sent < 1 << 28
    with client(address, *((pair, hub_key) if encrypted else ())) as device:
        assert is_welcome(device.join("pi-1"))


@pytest.mark.process
@pytest.mark.parametrize("encrypted", [True, False], ids=["keys", "plain"])
def test_a_message_longer_than_any_is_cut_although_little_lies_unread(commands, keys, encrypted):
    """Red before: 16 MiB of empty frames are half a GiB in libzmq, and at their end seconds of the loop."""
    pair, hub_key = enrolled(keys), keys.pair().public
    _, address = start_hub(commands, keys) if encrypted else commands.hub(commands.settings())
    with raw(address, *((pair, hub_key) if encrypted else ())) as peer:
        body = bytes(1 << 15) if encrypted else b""
        frames = b"".join(peer.frame(body, more=True) for _ in range(128))
        assert send_until_cut(peer, lambda: [frames * (1 if encrypted else 16384)], 4 << 20) >= 4 << 20
        until(
            lambda: fetch_status(address, PATIENCE_S, keys.folder if encrypted else None)["denied"].get("unread"),
            "the message is cut",
        )


@pytest.mark.process
def test_a_message_of_a_few_frames_too_many_ends_its_connection(commands, keys):
    pair, hub_key = enrolled(keys), keys.pair().public
    _, address = start_hub(commands, keys)
    with client(address, pair, hub_key) as device:
        device.join("pi-1")
        device.socket.send_multipart([b""] * 10)
        assert device.hear().code == "malformed"
        device.socket.send_multipart([b""] * 20)
        device.ended()
    assert denied(address, keys, "frames")["frames"] == 1


@pytest.mark.process
def test_a_long_header_ends_the_connection_unread(commands, keys):
    pair, hub_key = enrolled(keys), keys.pair().public
    _, address = start_hub(commands, keys)
    with client(address, pair, hub_key) as device:
        welcome = device.join("pi-1")
        ping = wire.encode(Ping(welcome.session, 1.0, 0))
        device.socket.send(ping[:-1] + bytes(HEADER_BYTES_MAX))
        device.ended()
    assert denied(address, keys, "header")["header"] == 1


@pytest.mark.process
def test_who_says_too_much_is_cut_off_and_another_is_not(commands, keys):
    pair, other, hub_key = enrolled(keys), enrolled(keys, "pi-2"), keys.pair().public
    _, address = start_hub(commands, keys)
    with raw(address, pair, hub_key) as flood, client(address, other, hub_key) as device:
        welcome = device.join("pi-2")
        # Each counts for 16 messages, so that a hub at a tenth of the usual speed reads too many of them, too.
        ping = msgpack.packb([*msgpack.unpackb(wire.encode(Ping(bytes(16), 1.0, 0)))[:3], bytes(1000)])
        said = b"".join(flood.frame(ping) for _ in range(8_000))  # made before: making them takes longer
        send_until_cut(flood, lambda: [said], len(said))
        denied(address, keys, "messages")
        device.say(Ping(welcome.session, 1.0, 0))
        assert device.hear() == Pong(1.0)


@pytest.mark.process
def test_status_and_hellos_are_answered_so_often(commands, keys):
    pair, hub_key = enrolled(keys), keys.pair().public
    _, address = start_hub(commands, keys)
    with client(address, pair, hub_key) as device:
        for _ in range(50):
            device.say(StatusRequest())
        answers = [device.hear() for _ in range(int(STATUS_REQUESTS.burst))]
        assert all(isinstance(each, Status) for each in answers)
        for number in range(2000):
            device.say(Hello(f"pi-1/{number % 1000}", b"s" * 16, 1))
        counts = denied(address, keys, "hellos", 1600)
    assert 30 <= counts["status"] <= 40
    assert len(ask(address, keys)["devices"]) < 400


@pytest.mark.process
def test_a_stranger_holds_few_connections_and_a_device_comes_in_beside_them(commands, keys):
    pair, hub_key = enrolled(keys), keys.pair().public
    _, address = start_hub(commands, keys)
    with contextlib.ExitStack() as strangers:
        for number in range(1200):
            one = strangers.enter_context(tcp(address))
            if number % 2:
                one.sendall(greeting(b"CURVE")[: number % 64])
        denied(address, keys, "connections", 1200 - connection_bounds.STRANGERS_OF_ADDRESS_MAX)
        with client(address, pair, hub_key) as device:
            assert is_welcome(device.join("pi-1"))


@pytest.mark.process
def test_files_are_kept_back_for_the_journal(commands, keys):
    """Red before: 300 connections against 256 files, and nobody could reach the hub."""
    pair, hub_key = enrolled(keys), keys.pair().public
    few = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    _, address = start_hub(commands, keys, under=few)
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(tcp(address))
        denied(address, keys, "files")
        with client(address, pair, hub_key) as device:
            assert is_welcome(device.join("pi-1"))


# -- places -------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_one_key_leaves_places_for_the_others(commands, keys):
    """64 members of one key announce updates and send none; red before: the other was told to wait for ever."""
    pairs = {name: enrolled(keys, name) for name in ("holder", "honest")}
    hub_key = keys.pair().public
    model = 'kind = "mlp"\ninputs = 400\nhidden = [400]\nclasses = 10'
    _, address = commands.hub(commands.settings(model=model), "--keys", keys.folder)

    def announce(device, name):
        welcome = device.join(name)
        device.say(Fetch(welcome.session))
        version = ModelVersion("0" * 16, 0)
        length = sum(math.prod(each.shape) for each in welcome.spec.parameters)
        device.say(Push(welcome.session, 1, version, 1, 1, 0.0, 0.0, 0.1, "identity", 1, 4 * length, transfer=1))
        while not isinstance(answer := device.hear(), Credit) and not (
            isinstance(answer, Refuse) and answer.code == "busy"
        ):
            pass
        return answer

    with contextlib.ExitStack() as devices:
        answers = [
            announce(devices.enter_context(client(address, pairs["holder"], hub_key)), f"holder/{number}")
            for number in range(64)
        ]
        assert sum(isinstance(answer, Credit) for answer in answers) == 32
        honest = devices.enter_context(client(address, pairs["honest"], hub_key))
        assert isinstance(announce(honest, "honest"), Credit)
