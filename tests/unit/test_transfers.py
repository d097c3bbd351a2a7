from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Credit, Piece
from edgeasync.protocol.transfers import PIECE_BYTES_MIN, CreditWindow, IncomingTransfer, OutgoingTransfer

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
    sender = OutgoingTransfer(7, payload, piece_bytes, CreditWindow(piece_bytes))
    return sender, IncomingTransfer(7, memoryview(bytearray(size)), wire.checksum(payload)), payload


def piece_of(part, offset=0, transfer=7):
    return Piece(transfer, offset, wire.checksum(part)), part


class TransferMachine(RuleBasedStateMachine):
    """Sender and receiver with a link between them that keeps the order and delays as it likes."""

    @initialize(size=SIZES, piece_bytes=PIECE_BYTES, grown=st.integers(0, 4))
    def start(self, size, piece_bytes, grown):
        self.sender, self.receiver, self.payload = pair(size, piece_bytes)
        for _ in range(grown):
            self.sender.window.adapt(0.0)
        self.now_s = 0.0
        self.credits = deque([self.receiver.credit()])
        self.pieces = deque()
        self.sent = self.credited = 0

    def give_credit(self):
        credit = self.credits.popleft()
        sent = self.sender.credit(credit, self.now_s)
        self.credited = credit.received_bytes
        for piece, part in sent:
            assert piece.offset == self.sent
            assert len(part) <= self.sender.piece_bytes
            self.sent += len(part)
            assert len(part) >= PIECE_BYTES_MIN or self.sent == len(self.payload)
        if sent:
            assert self.sent - self.credited < self.sender.window.bytes + self.sender.piece_bytes
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

    @precondition(lambda self: self.credits)
    @rule()
    def credit_arrives_twice(self):
        self.credits.appendleft(self.credits[0])
        self.give_credit()

    @rule(offset=st.integers(1, 2**53))
    def credit_for_what_was_not_sent(self, offset):
        with pytest.raises(ProtocolError):
            self.sender.credit(Credit(7, min(2**53, self.sent + offset)), self.now_s)

    @rule(size=st.sampled_from([0, 1, len(OVERSIZED)]))
    def piece_that_does_not_fit(self, size):
        held = self.receiver.credit()
        with pytest.raises(ProtocolError):
            self.receiver.accept(*piece_of(OVERSIZED[:size], held.received_bytes + (size == 1)))
        assert self.receiver.credit() == held

    @invariant()
    def something_is_always_under_way(self):
        """Without loss a transfer cannot stall: a piece or a credit is on the link until all is there."""
        assert self.sender.complete or self.credits or self.pieces

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
        assert self.sender.complete
        assert self.receiver.complete
        assert self.receiver.buffer == self.payload


TransferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTransfers = TransferMachine.TestCase


def first_pieces(count):
    """Return a receiver, and the first pieces of a payload of four and a bit."""
    sender, receiver, _ = pair(4 * PIECE_BYTES_MIN + 100)
    pieces = sender.credit(receiver.credit(), 0.0)
    assert len(pieces) == 4
    return receiver, pieces[:count]


def test_last_piece_may_be_small_but_no_other():
    receiver, pieces = first_pieces(4)
    for piece in pieces:
        receiver.accept(*piece)
    with pytest.raises(ProtocolError, match="a piece of 99 bytes is too small"):
        receiver.accept(*piece_of(NOISE[4 * PIECE_BYTES_MIN :][:99], 4 * PIECE_BYTES_MIN))
    receiver.accept(*piece_of(NOISE[4 * PIECE_BYTES_MIN :][:100], 4 * PIECE_BYTES_MIN))
    assert receiver.complete
    with pytest.raises(ProtocolError, match="a piece of 0 bytes is too small"):
        receiver.accept(*piece_of(b"", 4 * PIECE_BYTES_MIN + 100))


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
def test_a_bad_piece_is_refused_and_changes_nothing(offer):
    receiver, pieces = first_pieces(3)
    receiver.accept(*pieces[0])
    before = bytes(receiver.buffer)
    with pytest.raises(ProtocolError):
        receiver.accept(*offer(pieces))
    assert receiver.credit() == Credit(7, PIECE_BYTES_MIN)
    assert bytes(receiver.buffer) == before
    receiver.accept(*pieces[1])
    assert receiver.credit() == Credit(7, 2 * PIECE_BYTES_MIN)


@given(
    transfer=st.sampled_from([7, 8]),
    offset=st.sampled_from([0, 1, PIECE_BYTES_MIN, 2**53]),
    checksum=st.integers(0, 2**64 - 1),
    part=st.sampled_from([0, 1, PIECE_BYTES_MIN - 1, PIECE_BYTES_MIN, 1 << 19]).map(lambda size: NOISE[:size]),
)
def test_arbitrary_pieces_raise_only_protocol_errors(transfer, offset, checksum, part):
    receiver, pieces = first_pieces(1)
    receiver.accept(*pieces[0])
    with pytest.raises(ProtocolError):
        receiver.accept(Piece(transfer, offset, checksum), part)


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
    assert (piece.offset, len(part), sender.complete) == (0, 100, False)


def test_a_wrong_announced_checksum_is_found_at_the_end():
    sender, _, payload = pair(PIECE_BYTES_MIN + 1)
    receiver = IncomingTransfer(7, memoryview(bytearray(len(payload))), wire.checksum(payload) ^ 1)
    first, last = sender.credit(receiver.credit(), 0.0)
    receiver.accept(*first)
    with pytest.raises(ProtocolError, match="checksum it was announced with"):
        receiver.accept(*last)


@pytest.mark.parametrize(
    ("elapsed_s", "window_bytes"),
    [(0.1, 1 << 18), (0.2, 1 << 17), (100.0, 1 << 17), (0.05, 1 << 19), (0.0, 1 << 19), (0.08, 327_680)],
)
def test_the_window_moves_at_most_twofold_towards_a_tenth_of_a_second(elapsed_s, window_bytes):
    window = CreditWindow(1 << 20)
    assert window.bytes == 1 << 18
    window.adapt(elapsed_s)
    assert window.bytes == window_bytes


def test_vectors_travel_as_their_bytes():
    vector = np.arange(5, dtype=np.float32)
    sender = OutgoingTransfer(1, vector.data, PIECE_BYTES_MIN, CreditWindow(PIECE_BYTES_MIN))
    receiver = IncomingTransfer(1, memoryview(bytearray(vector.nbytes)), wire.checksum(vector.tobytes()))
    (piece,) = sender.credit(receiver.credit(), 0.0)
    receiver.accept(*piece)
    np.testing.assert_array_equal(np.frombuffer(receiver.buffer, np.float32), vector)
