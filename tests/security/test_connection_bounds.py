"""Limits on connections per address and per key, and on unread bytes."""

import pytest

from edgeasync.core.hub.settings import Limits
from edgeasync.net import connection_bounds, failing_addresses, unread_bytes
from edgeasync.net.connection_bounds import ConnectionBounds
from edgeasync.net.unread_bytes import Connection

KEY, OTHER = b"k" * 32, b"o" * 32

LIMITS = Limits(devices_max=1000)


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
    assert [*bounds.failing.held_off] == ["10.0.0.1"]
    assert bounds.denied["address"] == 1
    crowd.now_s += failing_addresses.HOLD_OFF_S
    bounds.failing.release(crowd.now_s)
    assert not bounds.failing.held_off
    crowd.end(crowd.accept())
    crowd.now_s += 600.0
    for _ in range(50):
        crowd.end(crowd.accept())
        crowd.now_s += 1.0
    assert not bounds.failing.held_off


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
    books = [bounds._strangers, bounds._strangers_of, bounds._spoken, bounds._of_key, bounds.unread.connections]
    assert not any(books)
    assert bounds.unread._total_bytes == 0


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
    assert sum(each.unread_bytes for each in many if not each.shut) <= unread_bytes.unread_bytes_max(LIMITS)
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
