"""A payload between two members: its window, and what is sent again."""

import msgspec

from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.core.peer.transfers import IncomingPayload, OutgoingPayload
from edgeasync.protocol.peer_messages import Offer, PeerCredit, PeerPiece, RoundId

ROUND = RoundId(1, "a", 1)
SETTINGS = PeerCoreSettings(piece_bytes=10, window_bytes=25, ping_s=2.0)


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
    assert sent(payload, 20, 1.1) == [(20, 10), (30, 10)]
    assert sent(payload, 10, 1.2) == []  # a late one
    assert sent(payload, 50, 1.2) is None


def test_an_offer_is_repeated_after_twice_as_long_each_time_until_there_is_progress():
    payload = outgoing(100)

    def offered_again_at(*times_s):
        return [now_s for now_s in times_s if payload.offer_again(now_s) is not None]

    assert offered_again_at(1.9, 2.0, 3.9, 4.0, 7.9, 8.0) == [2.0, 4.0, 8.0]
    sent(payload, 0, 10.0)
    assert offered_again_at(11.9, 12.0, 13.9, 14.0) == [12.0, 14.0]
    sent(payload, 0, 15.0)  # says nothing new
    assert offered_again_at(15.0, 18.0) == [18.0]
    sent(payload, 100, 19.0)
    sent(payload, 20, 20.0)
    assert offered_again_at(21.9, 22.0) == [22.0]


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
    receiver = IncomingPayload(Offer(ROUND, 0, 30, 7, 10), 10)
    assert receiver.offered_again(sender.offer_again(2.0)) == PeerCredit(ROUND, 0, 0)  # nothing was sent
    sent(sender, 0, 2.0)
    assert sender.offer_again(4.0) == Offer(ROUND, 0, 30, 7, 20)
    again = Offer(ROUND, 0, 30, 7, 20)
    receiver.accept(10)
    assert receiver.offered_again(again) == PeerCredit(ROUND, 0, 10, again=True)
    receiver.accept(10)
    assert receiver.offered_again(again) == PeerCredit(ROUND, 0, 20)  # the credit was lost
    assert receiver.offered_again(sender.offer) == PeerCredit(ROUND, 0, 20, again=True)  # it does not say
    assert receiver.offered_again(Offer(ROUND, 0, 30, 8, 20)) is None


def test_nobody_holds_a_part_of_a_piece():
    """Who claims one byte more each time would otherwise get the whole window again for each credit."""
    payload = outgoing(100)
    assert sent(payload, 0) == [(0, 10), (10, 10)]
    assert [sent(payload, held, again=True) for held in (1, 2, 3)] == [None, None, None]
