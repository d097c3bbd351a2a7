"""Nobody takes a hub from the others: bounds for each connection, key and address.

Decisions are driven with a turned clock; what the kernel and libzmq must do is done over real sockets.
"""

import contextlib
import ipaddress
import socket
import struct

import msgpack
import pytest

from edgeasync.core.engine.message_bounds import (
    HEADER_BYTES_MAX,
    HELLOS,
    MESSAGES,
    STATUS_REQUESTS,
    MessageBounds,
)
from edgeasync.core.engine.token_bucket import Rate, TokenBucket
from edgeasync.core.hub.settings import Limits
from edgeasync.net import connection_bounds
from edgeasync.net.connection_bounds import Connection, ConnectionBounds
from edgeasync.net.listener_filter import ADDRESSES_MAX, ListenerFilter, make_program
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
from tests.support.keyed import ask, client, denied, enrolled, is_welcome, start_hub
from tests.support.processes import PATIENCE_S, until
from tests.support.zmtp import Peer, greeting, tcp

LIMITS = Limits(devices_max=1000)
KEY, OTHER = b"k" * 32, b"o" * 32


# -- rates --------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_at_once_and_its_rate_for_ever():
    bucket = TokenBucket(Rate(2.0, 5.0), 0.0)
    assert sum(bucket.take(0.0) for _ in range(100)) == 5
    assert sum(bucket.take(step / 1000) for step in range(10_000)) == 19
    assert bucket.tokens(1e9) == 5.0


def test_one_key_says_so_much_and_another_is_not_held_to_it():
    bounds = MessageBounds()
    said = sum(bounds.allows(KEY, step / 20_000) for step in range(200_000))  # for 10 s
    assert said == pytest.approx(MESSAGES.burst + 10 * MESSAGES.per_s, abs=2)
    assert bounds.allows(OTHER, 10.0)


def test_a_long_header_counts_for_many():
    """Red before: a header of 16 KiB of empty arrays takes 5 ms to read, and one key could say 10,000 a second."""
    bounds = MessageBounds()
    said = sum(bounds.allows(KEY, step / 20_000, HEADER_BYTES_MAX) for step in range(200_000))  # for 10 s
    assert said <= 500
    assert all(bounds.allows(OTHER, step / 4000, 400) for step in range(40_000)), "a device that exchanges"


def test_hellos_and_status_requests_have_bounds_of_their_own():
    bounds = MessageBounds()
    assert sum(bounds.allows_hello(KEY, 0.0) for _ in range(10_000)) == HELLOS.burst
    assert sum(bounds.allows_status(KEY, 0.0, operator=False) for _ in range(1000)) == STATUS_REQUESTS.burst
    assert bounds.allows(KEY, 0.0)
    assert sum(bounds.allows_status(OTHER, 0.0, operator=True) for _ in range(100)) == 100
    assert bounds.denied == {"hellos": 10_000 - HELLOS.burst, "status": 1000 - STATUS_REQUESTS.burst}


# -- connections --------------------------------------------------------------------------------------------------


class Crowd:
    """Connections of a hub that is not there, and a clock to turn."""

    def __init__(self, **options):
        defaults = {"files_max": 10_000, "by_address": True}
        self.bounds = ConnectionBounds(LIMITS, lease_s=15.0, **defaults | options)
        self.now_s = 0.0
        self.open = {}

    def accept(self, address="10.0.0.1"):
        descriptor = next(number for number in range(3, 100_000) if number not in self.open)
        connection = self.open[descriptor] = Connection(descriptor, address, self.now_s)
        for doomed in self.bounds.accepted(connection, self.now_s):
            self._close(doomed)
        return connection

    def speak(self, connection, key=KEY):
        self._close(self.bounds.spoke(connection, key))
        connection.heard = True

    def end(self, connection):
        del self.open[connection.descriptor]
        self.bounds.closed(connection, self.now_s)

    def wait(self, seconds):
        self.now_s += seconds
        for doomed in [*self.bounds.silent(self.now_s), *self.bounds.idle(self.now_s)]:
            self._close(doomed)

    def _close(self, doomed):
        if doomed is not None:
            self.end(doomed[0])

    def left(self, address):
        return sum(one.address == address for one in self.open.values())


def test_an_address_that_says_nothing_holds_few_connections_and_then_fewer():
    crowd = Crowd()
    for _ in range(2500):
        crowd.accept()
    assert crowd.left("10.0.0.1") == connection_bounds.STRANGERS_OF_FAILING_MAX
    crowd = Crowd()
    for _ in range(connection_bounds.STRANGERS_OF_ADDRESS_MAX):
        crowd.accept()
    assert crowd.left("10.0.0.1") == connection_bounds.STRANGERS_OF_ADDRESS_MAX
    crowd.wait(connection_bounds.SILENT_S + 1)
    assert not crowd.open
    for _ in range(1000):
        crowd.accept()
    assert crowd.left("10.0.0.1") == connection_bounds.STRANGERS_OF_FAILING_MAX
    crowd.accept("10.0.0.2")
    assert crowd.left("10.0.0.2") == 1


def test_among_a_flood_from_its_own_address_a_device_still_gets_through_its_handshake():
    """The oldest are shut, so what is shut is what does not get on."""
    crowd = Crowd()
    for _ in range(2000):
        crowd.end(crowd.accept())  # the address fails
    for _ in range(100):
        device = crowd.accept()
        for _ in range(connection_bounds.STRANGERS_OF_FAILING_MAX - 1):
            crowd.accept()
        crowd.speak(device)
        assert device.descriptor in crowd.open
        crowd.end(device)


def test_an_address_that_fails_and_comes_too_often_is_held_off_for_a_while():
    crowd = Crowd()
    for _ in range(500):
        crowd.end(crowd.accept())
    bounds = crowd.bounds
    assert [*bounds.held_off] == ["10.0.0.1"]
    assert bounds.denied["address"] == 1
    crowd.now_s += connection_bounds.HOLD_OFF_S
    bounds.release(crowd.now_s)
    assert not bounds.held_off
    crowd.end(crowd.accept())
    crowd.now_s += 600.0
    for _ in range(50):
        crowd.end(crowd.accept())
        crowd.now_s += 1.0
    assert not bounds.held_off


def test_a_fleet_behind_one_router_that_rejoins_is_no_flood():
    crowd = Crowd()
    for round_ in range(3):
        fleet = []
        for number in range(1000):
            fleet.append(crowd.accept())
            if number >= 100:  # a hundred handshakes at a time
                crowd.speak(fleet[-100], b"%032d" % (number - 100))
        for number in range(900, 1000):
            crowd.speak(fleet[number], b"%032d" % number)
        assert len(crowd.open) == 1000, round_
        for one in fleet:
            crowd.end(one)
    assert not crowd.bounds.denied


def test_a_key_has_no_more_connections_than_agents_could_need():
    crowd = Crowd()
    for _ in range(1000):
        crowd.speak(crowd.accept())
    assert len(crowd.open) == LIMITS.connections_per_key_max
    other = crowd.accept()
    crowd.speak(other, OTHER)
    assert other.descriptor in crowd.open
    assert crowd.bounds.denied == {"connections": 1000 - LIMITS.connections_per_key_max}


def test_descriptors_are_kept_back():
    crowd = Crowd(files_max=100, by_address=False)
    for number in range(300):
        crowd.speak(crowd.accept(), b"%032d" % number)
    assert len(crowd.open) == 100
    assert crowd.bounds.denied == {"files": 200}
    crowd = Crowd(files_max=100, by_address=False)
    strangers = [crowd.accept() for _ in range(100)]
    device = crowd.accept()
    assert device.descriptor in crowd.open
    assert strangers[0] not in crowd.open.values()


def test_the_silent_go_and_those_who_ping_stay():
    crowd = Crowd()
    silent, pinging = crowd.accept(), crowd.accept()
    crowd.speak(silent)
    crowd.speak(pinging, OTHER)
    for _ in range(20):
        pinging.heard = True
        crowd.wait(10.0)
    assert [*crowd.open.values()] == [pinging]
    assert crowd.bounds.denied == {"silent": 1}


def test_handshakes_of_a_key_are_counted():
    crowd = Crowd()
    allowed = sum(crowd.bounds.allows_handshake(KEY, second / 100) for second in range(6000))
    assert allowed == pytest.approx(
        connection_bounds.HANDSHAKES.burst + 60 * connection_bounds.HANDSHAKES.per_s, abs=2
    )
    assert crowd.bounds.allows_handshake(OTHER, 60.0)


def test_every_book_is_empty_when_all_have_gone():
    crowd = Crowd()
    for number in range(500):
        one = crowd.accept(f"10.0.{number % 7}.1")
        if number % 3:
            crowd.speak(one, b"%032d" % (number % 5))
        crowd.bounds.weigh(one, number << 16, 0, 0.0)
    for one in [*crowd.open.values()]:
        crowd.end(one)
    bounds = crowd.bounds
    books = [bounds._strangers, bounds._strangers_of, bounds._spoken, bounds._of_key, bounds._unread]
    assert not any(books)
    assert bounds._unread_bytes == 0


def test_what_lies_unread_is_bounded_for_one_and_for_all():
    crowd = Crowd()
    one = crowd.accept()
    crowd.speak(one)
    most = 0
    for received in range(0, 1 << 28, 1 << 16):
        if crowd.bounds.weigh(one, received, 0, 0.0) is not None:
            break
        most = received
    assert most <= 16 << 20
    crowd = Crowd()
    many = [crowd.accept() for _ in range(200)]
    for number, each in enumerate(many):
        crowd.speak(each, b"%032d" % number)
    doomed = [found for each in many if (found := crowd.bounds.weigh(each, 2 << 20, 0, 0.0))]
    assert sum(each.unread_bytes for each in many if not each.shut) <= connection_bounds.unread_bytes_max(LIMITS)
    assert all(reason == "unread" for _, reason in doomed)
    assert crowd.bounds.denied == {"unread": len(doomed)}


def test_one_message_that_is_not_whole_is_no_longer_than_a_message():
    """An empty frame is 2 bytes on the wire and 64 in memory: 16 MiB of them are half a GiB."""
    crowd = Crowd()
    one = crowd.accept()
    crowd.speak(one)
    assert crowd.bounds.weigh(one, 2 << 20, 0, 0.0, taken_bytes=2 << 20, emptied=1) is None
    assert crowd.bounds.weigh(one, 2 << 20, 0, 0.0, taken_bytes=2 << 20, emptied=1) is None, (
        "the hub may not have read it yet"
    )
    one.delivered_bytes = 1 << 20
    assert crowd.bounds.weigh(one, 9 << 20, 0, 0.0, taken_bytes=9 << 20, emptied=2) is None, (
        "a piece that is half there"
    )
    assert crowd.bounds.weigh(one, 9 << 20, 0, 0.0, taken_bytes=9 << 20, emptied=3) == (one, "unread")


def test_who_reads_what_it_is_sent_and_sends_whole_messages_is_left_alone():
    crowd = Crowd()
    device = crowd.accept()
    crowd.speak(device)
    for exchange in range(1, 10_000):
        device.delivered_bytes += 250_000
        device.sent_bytes += 250_000
        device.copied_bytes += 50_000
        assert crowd.bounds.weigh(device, exchange * 250_020, exchange * 250_000, float(exchange)) is None
    assert not crowd.bounds.denied


# -- in the kernel ------------------------------------------------------------------------------------------------


def connects(server, source):
    """Return whether an address of this machine gets a connection."""
    with contextlib.suppress(TimeoutError), socket.create_connection(server, 0.3, (source, 0)):
        return True
    return False


def test_an_address_that_is_held_off_cannot_connect_and_what_it_has_stays():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        with socket.create_connection(where, 1.0, ("127.0.0.2", 0)) as before, server.accept()[0] as accepted:
            listener = ListenerFilter(server.fileno())
            listener.drop(["127.0.0.3", "::1", "127.0.0.2"])
            assert not connects(where, "127.0.0.2")
            assert not connects(where, "127.0.0.3")
            assert connects(where, "127.0.0.1")
            before.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
            listener.drop([])
            assert connects(where, "127.0.0.2")


@pytest.mark.parametrize("count", [1, 2, ADDRESSES_MAX])
def test_a_program_has_as_many_addresses_as_there_are(count):
    """Run by an interpreter of its own: every jump ends where it should."""
    old = [ipaddress.ip_address((10 << 24) + number) for number in range(count)]
    new = [ipaddress.ip_address((0xFD << 120) + number) for number in range(count)]
    program = make_program([*map(str, (*old, *new)), "::ffff:192.0.2.1"])
    for address in (*old, *new, ipaddress.ip_address("192.0.2.1")):
        assert not keeps(program, address)
    for other in ("10.1.0.0", "192.0.2.2", "fd00:1::", "fe00::", "::1"):
        assert keeps(program, ipaddress.ip_address(other))


def keeps(program, source):
    """Run a filter on a packet from an address."""
    header = bytearray(40)
    header[0] = source.version << 4
    place = 12 if source.version == 4 else 8
    header[place : place + len(source.packed)] = source.packed
    network = 0x100000000 - 0x100000
    instructions = [*struct.iter_unpack("=HBBI", program)]
    at = register = 0
    while True:
        code, when_equal, otherwise, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                register = int.from_bytes(header[value - network : value - network + 4], "big")
            case 0x30:
                register = header[value - network]
            case 0x54:
                register &= value
            case 0x15:
                at += when_equal if register == value else otherwise
            case 0x06:
                return value != 0


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
        length = sum(_size(each.shape) for each in welcome.spec.parameters)
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


def _size(shape):
    size = 1
    for length in shape:
        size *= length
    return size
