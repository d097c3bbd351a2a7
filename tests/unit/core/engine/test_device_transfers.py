"""A device's transfers by themselves: what it sends, when, and what it keeps of what was cut off."""

import math

import numpy as np
import pytest

from edgeasync.core.engine.device_transfers import DeviceTransfers
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Fetch,
    GraphHeader,
    Hello,
    ModelVersion,
    Piece,
    Ping,
    Push,
)

PIECE = 1 << 16
PAYLOAD = bytes(range(256)) * 1024  # four pieces
SESSION = bytes(16)
VERSION = ModelVersion("0" * 16, 0)
CAP = 100_000


class Bench:
    """Transfers with a clock to turn and everything they send noted."""

    def __init__(self, cap=None):
        self.now_s = 0.0
        self.sent = []
        self.transfers = DeviceTransfers(self._note, lambda: self.now_s, cap)

    def _note(self, header, payload):
        self.sent.append((self.now_s, wire.decode(header), payload))

    @property
    def last(self):
        return self.sent[-1][1]

    def of_kind(self, kind):
        return [message for _, message, _ in self.sent if isinstance(message, kind)]

    def receive(self, transfer=1, payload=PAYLOAD, kind=Assignment):
        checksum = wire.checksum(payload)
        if kind is GraphHeader:
            message = GraphHeader("0" * 64, checksum, len(payload), transfer)
        else:
            message = Assignment(VERSION, 1, "identity", checksum, len(payload), transfer)
        self.transfers.receive(message)
        return message

    def piece(self, number, transfer=1, payload=PAYLOAD):
        part = payload[number * PIECE : (number + 1) * PIECE]
        return self.transfers.accept(Piece(transfer, number * PIECE, wire.checksum(part)), part)

    def fetch(self):
        self.transfers.send(Fetch(SESSION))
        return self.of_kind(Fetch)[-1]

    def push(self, payload=PAYLOAD):
        push = Push(SESSION, 1, VERSION, 1, 1, 0.0, 0.0, 0.1, "identity", wire.checksum(payload), len(payload))
        self.transfers.push(push, payload, 1 << 20)

    def pass_time(self, until_s):
        while self.transfers.next_deadline_s() <= until_s:
            self.now_s = max(self.now_s, self.transfers.next_deadline_s())
            self.transfers.tick()
        self.now_s = until_s


@pytest.mark.parametrize("kind", [Assignment, GraphHeader])
def test_what_was_cut_off_is_resumed_under_another_number(kind):
    bench = Bench()
    bench.receive(kind=kind)
    bench.piece(0)
    bench.transfers.suspend()
    assert bench.fetch().partial == wire.checksum(PAYLOAD)
    announced = bench.receive(2, kind=kind)
    assert bench.last == Credit(2, PIECE)
    assert bench.piece(1, 1) is None, "of the number that is over"
    bench.piece(1, 2)
    bench.piece(2, 2)
    accepted = bench.piece(3, 2)
    assert accepted.message is announced
    assert accepted.payload == PAYLOAD
    assert bench.fetch().partial is None


def test_another_payload_begins_at_its_beginning():
    bench = Bench()
    bench.receive()
    bench.piece(0)
    bench.transfers.suspend()
    other = PAYLOAD[::-1]
    bench.receive(2, other)
    assert bench.last == Credit(2, 0)
    for number in range(4):
        taken = bench.piece(number, 2, other)
    assert taken[1] == other


def test_nothing_is_asked_for_before_a_piece_is_here():
    bench = Bench()
    bench.receive()
    bench.transfers.suspend()
    assert bench.fetch().partial is None


def test_a_transfer_with_a_corrupt_piece_is_dropped():
    bench = Bench()
    bench.receive()
    bench.piece(0)
    with pytest.raises(ProtocolError):
        bench.transfers.accept(Piece(1, PIECE, 0), bytes(PIECE))
    assert bench.transfers.drop_incoming() is not None
    assert bench.fetch().partial is None
    bench.receive(2)
    assert bench.last == Credit(2, 0)


def test_a_whole_payload_with_another_checksum_is_not_resumed():
    bench = Bench()
    checksum = wire.checksum(PAYLOAD) ^ 1
    bench.transfers.receive(Assignment(VERSION, 1, "identity", checksum, len(PAYLOAD), 1))
    for number in range(3):
        bench.piece(number)
    with pytest.raises(ProtocolError, match="the payload's checksum differs"):
        bench.piece(3)
    assert bench.fetch().partial is None


def test_a_push_is_announced_under_a_new_number_each_time():
    bench = Bench()
    payload = PAYLOAD * 2
    bench.push(payload)
    bench.push(payload)
    assert [push.transfer for push in bench.of_kind(Push)] == [1, 2]
    assert not bench.transfers.credit(Credit(1, 0)), "a credit of the number that is over"
    assert bench.transfers.credit(Credit(2, PIECE))
    assert bench.of_kind(Piece)[0].offset == PIECE


def test_without_a_cap_nothing_waits():
    bench = Bench()
    bench.push(bytes(10))
    assert (bench.last.transfer, bench.sent[-1][2]) == (0, bytes(10))
    assert bench.transfers.next_deadline_s() == math.inf
    bench.transfers.send(Hello("a", bytes(16), 1))
    assert bench.last.piece_bytes_max == 0


def test_with_a_cap_the_hub_is_told_to_send_short_pieces():
    bench = Bench(CAP)
    bench.transfers.send(Hello("a", bytes(16), 1))
    assert bench.last.piece_bytes_max == PIECE


def test_heartbeats_do_not_wait_for_the_cap_and_others_pay_for_them():
    bench = Bench(CAP)
    bench.push(bytes(PIECE))
    for _ in range(100):
        bench.transfers.send(Ping(SESSION, 0.0, 0))
    assert len(bench.of_kind(Ping)) == 100
    bench.transfers.send(Fetch(SESSION))
    assert not bench.of_kind(Fetch)
    assert bench.transfers.next_deadline_s() >= (PIECE + 6400) / CAP - 0.02
    bench.pass_time(1.0)
    assert len(bench.of_kind(Fetch)) == 1


def test_pings_before_the_first_push_tell_the_round_trip_better_than_a_hub_that_makes_room_slowly():
    bench = Bench()
    for round_trip_s in (0.03, 0.02, 0.05):
        bench.transfers.observe_round_trip(round_trip_s)
    bench.push(PAYLOAD * 4)
    bench.now_s = 0.5
    bench.transfers.credit(Credit(1, 0))
    assert bench.transfers._window.round_trip_s == 0.02


def test_pieces_that_go_out_keep_to_the_cap():
    bench = Bench(CAP)
    bench.push(PAYLOAD)
    bench.transfers.credit(Credit(1, 0))
    credited = 0
    while credited < len(PAYLOAD):
        bench.pass_time(bench.now_s + 0.1)
        sent = len(bench.of_kind(Piece)) * PIECE
        assert sent <= CAP * bench.now_s + PIECE + 1000
        if sent > credited:
            credited = sent
            bench.transfers.credit(Credit(1, credited))
    assert bench.now_s == pytest.approx(3 * PIECE / CAP, abs=0.5)


def test_a_lost_connection_empties_the_line_but_not_the_debt():
    bench = Bench(CAP)
    bench.receive()
    for number in range(3):
        bench.piece(number)
    bench.transfers.suspend()
    assert bench.transfers.next_deadline_s() == math.inf
    bench.transfers.send(Fetch(SESSION))
    assert bench.transfers.next_deadline_s() == pytest.approx(3 * PIECE / CAP, abs=0.05)


def test_pieces_that_come_in_are_credited_at_the_rate_of_the_cap():
    bench = Bench(CAP)
    bench.receive()
    for number in range(3):
        bench.piece(number)
    bench.pass_time(10.0)
    times = [time_s for time_s, message, _ in bench.sent if isinstance(message, Credit)][1:]
    assert len(times) == 3
    assert list(np.diff(times)) == pytest.approx([PIECE / CAP] * 2, rel=0.01)
