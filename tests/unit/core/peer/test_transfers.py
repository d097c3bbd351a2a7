"""A payload between two members: its window, and what is sent again."""

import msgspec

from edgeasync.core.peer.settings import PeerSettings
from edgeasync.core.peer.transfers import IncomingPayload, OutgoingPayload
from edgeasync.protocol.peer_messages import Offer, PeerCredit, PeerPiece, RoundId

ROUND = RoundId(1, "a", 1)
SETTINGS = PeerSettings(piece_bytes=10, window_bytes=25, ping_s=2.0)


def outgoing(payload_bytes, **changes):
    settings = msgspec.structs.replace(SETTINGS, **changes)
    return OutgoingPayload("b", Offer(ROUND, 0, payload_bytes, 7), settings, 0.0)


def sent(payload, received_bytes, now_s=0.0, *, again=False):
    pieces = payload.credit(PeerCredit(ROUND, 0, received_bytes, again), now_s)
    return None if pieces is None else [(piece.offset, piece.length) for piece in pieces]


def test_no_more_than_a_window_is_in_flight():
    payload = outgoing(36)
    assert sent(payload, 0) == [(0, 10), (10, 10)]
    assert sent(payload, 10) == [(20, 10)]
    assert sent(payload, 20) == [(30, 6)]
    assert sent(payload, 30) == []
    assert not payload.finished
    assert sent(payload, 36) == []
    assert payload.finished


def test_a_window_shorter_than_a_piece_lets_one_piece_through():
    payload = outgoing(20, window_bytes=1)
    assert sent(payload, 0) == [(0, 10)]
    assert sent(payload, 10) == [(10, 10)]


def test_an_empty_payload_is_there_at_once():
    payload = outgoing(0)
    assert sent(payload, 0) == []
    assert payload.finished
    assert IncomingPayload(payload.offer, 10).whole


def test_the_sender_goes_back_once_for_each_time_it_is_asked():
    payload = outgoing(100)
    assert sent(payload, 0) == [(0, 10), (10, 10)]
    assert sent(payload, 0, again=True) == [(0, 10), (10, 10)]
    assert sent(payload, 0, 0.9, again=True) == []  # one copy of a message, or somebody who wants our bytes
    assert sent(payload, 0, 1.0, again=True) == [(0, 10), (10, 10)]
    assert sent(payload, 0, 2.9, again=True) == []  # on a slow link a copy is on its way
    assert sent(payload, 0, 3.0, again=True) == [(0, 10), (10, 10)]
    assert sent(payload, 20, 3.1, again=True) == [(20, 10), (30, 10)]
    assert sent(payload, 20, 4.1, again=True) == [(20, 10), (30, 10)]
    assert sent(payload, 10, 4.2) == []  # a late one
    assert sent(payload, 50, 4.2) is None


def test_pieces_are_accepted_in_order_whole_and_sound():
    payload = IncomingPayload(Offer(ROUND, 0, 24, 7), 10)

    def refusal(offset, length, *, sound=True):
        return payload.refusal(PeerPiece(ROUND, 0, offset, 0), length, sound=sound)

    assert refusal(0, 9) == refusal(0, 11) == refusal(0, 0) == "a piece of a wrong length"
    assert refusal(10, 10) == "a misplaced piece"
    assert refusal(0, 10, sound=False) == "a corrupt piece"
    assert not refusal(0, 10)
    payload.accept(10)
    assert refusal(0, 10) == "a repeated piece"
    payload.accept(10)
    assert refusal(20, 10) == "a piece of a wrong length"
    assert not refusal(20, 4)


def test_a_receiver_asks_again_once_until_there_is_progress():
    payload = IncomingPayload(Offer(ROUND, 0, 24, 7), 10)
    assert payload.credit_again() == PeerCredit(ROUND, 0, 0, again=True)
    assert payload.credit_again() is None
    payload.accept(10)
    assert payload.credit_again() == PeerCredit(ROUND, 0, 10, again=True)


def test_a_receiver_asks_again_for_what_was_sent_before_an_offer_and_is_not_here():
    sender = outgoing(30)
    receiver = IncomingPayload(sender.offer, 10)
    assert receiver.offered_again(sender.offer_again()) == PeerCredit(ROUND, 0, 0)  # nothing was sent
    sent(sender, 0)
    assert sender.offer_again().sent_bytes == 20
    receiver.accept(10)
    assert receiver.offered_again(sender.offer_again()) == PeerCredit(ROUND, 0, 10, again=True)
    receiver.accept(10)
    assert receiver.offered_again(sender.offer_again()) == PeerCredit(ROUND, 0, 20)  # the credit was lost
    assert receiver.offered_again(Offer(ROUND, 0, 30, 8)) is None


def test_nobody_holds_a_part_of_a_piece():
    """Who claims one byte more each time would otherwise get the whole window again for each credit."""
    payload = outgoing(100)
    assert sent(payload, 0) == [(0, 10), (10, 10)]
    assert [sent(payload, held, again=True) for held in (1, 2, 3)] == [None, None, None]
