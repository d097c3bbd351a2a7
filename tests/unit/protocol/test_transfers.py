from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeasync.errors import ProtocolError, TransitionError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Credit, Piece
from edgeasync.protocol.transfers import (
    PIECE_BYTES_MIN,
    CreditWindow,
    IncomingTransfer,
    OutgoingTransfer,
)

NOISE = np.random.default_rng(0).bytes(1 << 21)
OVERSIZED = memoryview(NOISE + b"x")
SIZES = st.one_of(
    st.integers(1, len(NOISE)),
    st.builds(
        lambda pieces, extra: max(1, pieces * PIECE_BYTES_MIN + extra), st.integers(0, 31), st.integers(-1, 1)
    ),
)
PIECE_BYTES = st.one_of(st.sampled_from([1 << 16, 1 << 17, 1 << 20]), st.integers(1 << 16, 1 << 21))
DELAYS_S = st.one_of(st.just(0.0), st.floats(0.0, 10.0))


def pair(size, piece_bytes=PIECE_BYTES_MIN):
    payload = memoryview(NOISE)[:size]
    sender = OutgoingTransfer(7, payload, CreditWindow(piece_bytes))
    return sender, IncomingTransfer(7, memoryview(bytearray(size)), wire.checksum(payload)), payload


def piece_of(part, offset=0, transfer=7):
    return Piece(transfer, offset, wire.checksum(part)), part


class TransferMachine(RuleBasedStateMachine):
    """Sender and receiver with a link between them that keeps the order, delays as it likes, and may be cut."""

    @initialize(size=SIZES, piece_bytes=PIECE_BYTES, grown=st.integers(0, 4))
    def start(self, size, piece_bytes, grown):
        self.sender, self.receiver, self.payload = pair(size, piece_bytes)
        for _ in range(grown):
            self.sender.window.adapt(0.0)
        self.now_s = 0.0
        self.credits = deque([self.receiver.credit()])
        self.pieces = deque()
        self.sent = self.credited = self.sent_in_all = self.lost = 0

    @precondition(lambda self: self.sender.state != "complete" != self.receiver.state)
    @rule(delay_s=DELAYS_S)
    def cut(self, delay_s):
        """Lose what is on its way; announce the same payload again, on another connection."""
        self.now_s += delay_s
        self.lost += self.sent - self.receiver.credit().received_bytes if self.sender.state == "moving" else 0
        self.pieces.clear()
        number, window = self.sender.number + 1, self.sender.window
        self.sender = OutgoingTransfer(number, self.payload, window, self.now_s)
        held = self.receiver.credit().received_bytes
        assert self.receiver.suspend() == (held > 0)
        if held:
            assert self.receiver.resume(number, wire.checksum(self.payload), len(self.payload))
        else:
            self.receiver = IncomingTransfer(number, self.receiver.buffer, self.receiver.checksum)
        assert self.receiver.credit() == Credit(number, held)
        self.credits = deque([self.receiver.credit()])

    def give_credit(self):
        credit = self.credits.popleft()
        first = self.sender.state == "announced"
        sent = self.sender.credit(credit, self.now_s)
        if first:
            self.sent = credit.received_bytes
        self.sent_in_all += sum(len(part) for _, part in sent)
        self.credited = credit.received_bytes
        for piece, part in sent:
            assert piece.offset == self.sent
            assert len(part) <= self.sender.window.piece_bytes
            self.sent += len(part)
            assert len(part) >= PIECE_BYTES_MIN or self.sent == len(self.payload)
        if sent:
            assert self.sent - self.credited < self.sender.window.bytes + self.sender.window.piece_bytes
        self.pieces.extend(sent)

    def give_piece(self):
        self.receiver.accept(*self.pieces.popleft())
        self.credits.append(self.receiver.credit())

    @precondition(lambda self: self.credits)
    @rule(delay_s=DELAYS_S)
    def credit_arrives(self, delay_s):
        self.now_s += delay_s
        self.give_credit()

    @precondition(lambda self: self.pieces)
    @rule(delay_s=DELAYS_S)
    def piece_arrives(self, delay_s):
        self.now_s += delay_s
        self.give_piece()

    @precondition(lambda self: self.credits and self.credits[0].received_bytes < len(self.payload))
    @rule()
    def credit_arrives_twice(self):
        self.credits.appendleft(self.credits[0])
        self.give_credit()

    @rule(offset=st.integers(1, 2**53))
    def credit_for_what_was_not_sent(self, offset):
        beyond = (len(self.payload) - 1 if self.sender.state == "announced" else self.sent) + offset
        with pytest.raises(ProtocolError):
            self.sender.credit(Credit(self.sender.number, min(2**53, beyond)), self.now_s)

    @rule(size=st.sampled_from([0, 1, len(OVERSIZED)]))
    def piece_that_does_not_fit(self, size):
        held = self.receiver.credit()
        intruder = IncomingTransfer(held.transfer, self.receiver.buffer, 0)
        intruder._received = held.received_bytes
        offered = piece_of(OVERSIZED[:size], held.received_bytes + (size == 1), held.transfer)
        with pytest.raises(ProtocolError):
            intruder.accept(*offered)
        assert self.receiver.credit() == held
        assert intruder.state == "corrupt"

    @invariant()
    def something_is_always_on_the_link(self):
        """Without loss a transfer cannot stall: a piece or a credit is on the link until all is there."""
        assert self.sender.state == "complete" or self.credits or self.pieces

    @invariant()
    def the_window_keeps_its_bounds(self):
        window = self.sender.window
        assert PIECE_BYTES_MIN <= window.bytes <= window.bytes_max

    def teardown(self):
        if not hasattr(self, "sender"):
            return
        while self.credits or self.pieces:
            if self.pieces:
                self.give_piece()
            else:
                self.give_credit()
        assert self.sender.state == self.receiver.state == "complete"
        assert self.receiver.buffer == self.payload
        assert self.sent_in_all == len(self.payload) + self.lost, "nothing twice but what was lost"


TransferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTransfers = TransferMachine.TestCase


def first_pieces(count):
    """Return a receiver, and the first pieces of a payload of four and a bit."""
    sender, receiver, _ = pair(4 * PIECE_BYTES_MIN + 100)
    pieces = sender.credit(receiver.credit(), 0.0)
    assert len(pieces) == 4
    return receiver, pieces[:count]


@pytest.mark.parametrize("size", [0, 99])
def test_a_piece_that_is_smaller_than_the_last_is_refused(size):
    receiver, pieces = first_pieces(4)
    for piece in pieces:
        receiver.accept(*piece)
    with pytest.raises(ProtocolError, match=f"piece of {size} bytes is too small"):
        receiver.accept(*piece_of(NOISE[4 * PIECE_BYTES_MIN :][:size], 4 * PIECE_BYTES_MIN))


@pytest.mark.parametrize(
    "offer",
    [
        lambda pieces: pieces[0],
        lambda pieces: pieces[2],
        lambda pieces: piece_of(NOISE, PIECE_BYTES_MIN),
        lambda pieces: piece_of(pieces[1][1], PIECE_BYTES_MIN, transfer=8),
        lambda pieces: piece_of(b"", PIECE_BYTES_MIN),
        lambda pieces: piece_of(pieces[1][1][:-1], PIECE_BYTES_MIN),
        lambda pieces: (pieces[1][0], bytes(PIECE_BYTES_MIN)),
        lambda pieces: (Piece(7, PIECE_BYTES_MIN, pieces[1][0].checksum ^ 1), pieces[1][1]),
        lambda pieces: piece_of(pieces[1][1], 2**53),
    ],
    ids=["duplicate", "ahead", "oversized", "foreign", "empty", "small", "corrupt", "checksum", "far"],
)
def test_a_bad_piece_ends_the_transfer_and_leaves_no_byte(offer):
    receiver, pieces = first_pieces(3)
    receiver.accept(*pieces[0])
    before = bytes(receiver.buffer)
    with pytest.raises(ProtocolError):
        receiver.accept(*offer(pieces))
    assert receiver.credit() == Credit(7, PIECE_BYTES_MIN)
    assert bytes(receiver.buffer) == before
    with pytest.raises(ProtocolError, match="piece of a transfer in state 'corrupt'"):
        receiver.accept(*pieces[1])


@pytest.mark.parametrize(
    "credit",
    [
        Credit(7, 1),
        Credit(7, PIECE_BYTES_MIN - 1),
        Credit(7, 5 * PIECE_BYTES_MIN + 1),
        Credit(8, 2 * PIECE_BYTES_MIN),
    ],
    ids=["backwards", "one byte backwards", "beyond what was sent", "foreign"],
)
def test_an_impossible_credit_is_refused_and_changes_nothing(credit):
    sender, _, _ = pair(len(NOISE))
    assert len(sender.credit(Credit(7, 0), 0.0)) == 4
    sender.credit(Credit(7, PIECE_BYTES_MIN), 0.0)
    with pytest.raises(ProtocolError, match="credit for byte"):
        sender.credit(credit, 0.0)
    assert sender.credit(Credit(7, PIECE_BYTES_MIN), 0.0) == []


def test_nothing_is_sent_before_the_first_credit_or_credited_before_it_is_sent():
    sender, _, _ = pair(100)
    with pytest.raises(ProtocolError, match="credit for byte 100"):
        sender.credit(Credit(7, 100), 0.0)
    ((piece, part),) = sender.credit(Credit(7, 0), 0.0)
    assert (piece.offset, len(part), sender.state) == (0, 100, "moving")
    assert sender.credit(Credit(7, 100), 0.0) == []
    with pytest.raises(ProtocolError, match="credit for a transfer in state 'complete'"):
        sender.credit(Credit(7, 100), 0.0)


@pytest.mark.parametrize(
    ("elapsed_s", "window_bytes"),
    [(0.1, 1 << 18), (0.2, 1 << 17), (100.0, 1 << 17), (0.05, 1 << 19), (0.0, 1 << 19), (0.08, 327_680)],
)
def test_the_window_moves_at_most_twofold_towards_a_tenth_of_a_second(elapsed_s, window_bytes):
    window = CreditWindow(1 << 20)
    assert window.bytes == 1 << 18
    window.adapt(elapsed_s)
    assert window.bytes == window_bytes


def test_the_window_of_a_long_way_holds_what_a_round_trip_moves_and_a_tenth_of_a_second():
    window = CreditWindow(1 << 20)
    bytes_per_s, round_trip_s = 2_000_000, 0.5
    window.observe_round_trip(round_trip_s, at_rest=True)
    for _ in range(40):
        window.observe_full(window.bytes, max(round_trip_s, window.bytes / bytes_per_s))
    assert window.bytes == pytest.approx(bytes_per_s * (round_trip_s + 0.1), rel=0.05)
    assert window.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)


def test_a_round_trip_behind_payloads_does_not_widen_the_window():
    window = CreditWindow(1 << 20)
    window.observe_round_trip(0.05, at_rest=True)
    for _ in range(20):
        window.observe_round_trip(0.15, at_rest=False)
    assert window.round_trip_s == 0.05
    assert window.bytes == 1 << 18
    window.observe_round_trip(0.04, at_rest=False)
    assert window.round_trip_s == 0.04


def test_a_way_that_has_become_longer_is_learnt_at_rest():
    window = CreditWindow(1 << 20)
    window.observe_round_trip(0.05, at_rest=True)
    for _ in range(5):
        window.observe_round_trip(0.2, at_rest=True)
    assert window.round_trip_s == 0.2


def test_pings_that_wait_behind_whole_payloads_narrow_the_window():
    window = CreditWindow(1 << 20)
    window.observe_round_trip(0.0, at_rest=True)
    window.observe_round_trip(1.0, at_rest=True)
    assert window.bytes == 1 << 17
    for _ in range(9):
        window.observe_round_trip(1.0, at_rest=False)
    assert window.bytes == PIECE_BYTES_MIN


def deliver(sender, receiver, round_trip_s, bytes_per_s):
    """Let a payload pass over a link with that round trip and rate, from its first credit on."""
    now_s = free_s = round_trip_s
    on_the_way = deque([(now_s, receiver.credit())])
    while on_the_way:
        now_s, credit = on_the_way.popleft()
        for piece, part in sender.credit(credit, now_s):
            free_s = max(free_s, now_s) + len(part) / bytes_per_s
            receiver.accept(piece, part)
            on_the_way.append((free_s + round_trip_s, receiver.credit()))


def test_payloads_of_two_pieces_tell_nothing_of_the_rate():
    window = CreditWindow(1 << 20)
    payload = memoryview(NOISE)[: 2 * PIECE_BYTES_MIN]
    for _ in range(9):
        sender = OutgoingTransfer(7, payload, window, 0.0)
        receiver = IncomingTransfer(7, memoryview(bytearray(len(payload))), wire.checksum(payload))
        deliver(sender, receiver, 0.01, 2.5e6)
    assert window.bytes == 1 << 18


@pytest.mark.parametrize("size", [3 * PIECE_BYTES_MIN, len(NOISE)], ids=["less than a window", "more"])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.05])
@pytest.mark.parametrize("bytes_per_s", [1e6, 2.5e6, 1e7])
def test_the_first_pieces_into_an_idle_link_tell_its_rate(size, round_trip_s, bytes_per_s):
    window = CreditWindow(1 << 20)
    payload = memoryview(NOISE)[:size]
    sender = OutgoingTransfer(7, payload, window, 0.0)
    deliver(
        sender, IncomingTransfer(7, memoryview(bytearray(size)), wire.checksum(payload)), round_trip_s, bytes_per_s
    )
    wanted = bytes_per_s * (round_trip_s + 0.1)
    if size < 1 << 18:
        wanted = max(1 << 17, min(1 << 20, wanted))
    assert window.bytes == pytest.approx(wanted, rel=0.3)


def test_a_payload_longer_than_the_first_window_soon_goes_in_one_message_on_a_fast_link():
    window = CreditWindow(1 << 20)
    payload = memoryview(NOISE)[:1_000_000]
    for number in range(3):
        sender = OutgoingTransfer(7, payload, window, 0.0)
        receiver = IncomingTransfer(7, memoryview(bytearray(len(payload))), wire.checksum(payload))
        deliver(sender, receiver, 0.02, 1e8)
        assert receiver.state == "complete", number
    assert window.message_bytes_max >= len(payload)


@pytest.mark.parametrize("spoil", ["corrupt", "gap", "wrong in the end"])
def test_a_transfer_with_a_wrong_piece_is_never_resumed(spoil):
    sender, receiver, payload = pair(2 * PIECE_BYTES_MIN)
    if spoil == "wrong in the end":
        receiver = IncomingTransfer(7, receiver.buffer, receiver.checksum ^ 1)
    first, (piece, part) = sender.credit(receiver.credit(), 0.0)
    receiver.accept(*first)
    assert receiver.state == "moving"
    if spoil == "gap":
        piece = Piece(7, piece.offset + 1, piece.checksum)
    with pytest.raises(ProtocolError):
        receiver.accept(piece, bytes(len(part)) if spoil == "corrupt" else part)
    assert receiver.state == "corrupt"
    for attempt in (receiver.suspend, lambda: receiver.resume(8, receiver.checksum, len(payload))):
        with pytest.raises(TransitionError):
            attempt()


@pytest.mark.parametrize(("checksum", "longer"), [(1, 0), (0, 1), (0, -1)])
def test_a_transfer_is_not_resumed_with_another_payload(checksum, longer):
    receiver, (first,) = first_pieces(1)
    receiver.accept(*first)
    assert receiver.suspend()
    assert not receiver.resume(8, receiver.checksum ^ checksum, len(receiver.buffer) + longer)
    assert receiver.state == "dropped"
