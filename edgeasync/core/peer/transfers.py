"""Payloads in transfer between two members of a round.

A receiver grants credit for the bytes that follow the bytes that it has received. A sender without
progress repeats its offer, and reports how many bytes it has sent. Messages arrive in the order in
which they were sent, or not at all. So the receiver can determine which bytes are lost, and
requests them again. The receiver does not use a timer, because duplicates would fill a slow link.
"""

import math

import msgspec

from edgeasync.core.peer.effects import PeerEffect, ReleasePayload, SendPiece, SendToPeer
from edgeasync.core.peer.plan import RoundPlan
from edgeasync.core.peer.refusals import Refused
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.protocol.peer_messages import Offer, PeerCredit, PeerPiece


class OutgoingPayload:
    """A payload in transfer to one receiver; `finished` is set once the receiver has it.

    The offer is repeated after `ping_s` without progress, and the interval doubles each time,
    because duplicates would fill a slow link. The sender sends the same byte again at most once in
    half of `ping_s`, however often the receiver requests it.
    """

    def __init__(self, receiver: str, offer: Offer, settings: PeerCoreSettings, now_s: float) -> None:
        self.receiver = receiver
        self.offer = offer
        self.finished = False
        self._piece_bytes = settings.piece_bytes
        self._window_bytes = settings.window_bytes
        self._ping_s = settings.ping_s
        self._progressed(now_s)
        self._went_back = (-1, -math.inf)
        self._held_bytes = 0
        self._sent_bytes = 0

    def offer_again(self, now_s: float) -> Offer | None:
        """Return the offer if it must be repeated now."""
        if self.finished or now_s < self.progress_s + self._offer_after_s:
            return None
        self._offer_after_s *= 2.0
        return msgspec.structs.replace(self.offer, sent_bytes=self._sent_bytes)

    def _progressed(self, now_s: float) -> None:
        self.progress_s = now_s
        self._offer_after_s = self._ping_s

    def credit(self, credit: PeerCredit, now_s: float) -> list[SendPiece] | None:
        """Return the pieces to send now; return `None` for an impossible credit."""
        received_bytes = credit.received_bytes
        holds_part_of_a_piece = received_bytes % self._piece_bytes and received_bytes != self.offer.payload_bytes
        if received_bytes > self._sent_bytes or holds_part_of_a_piece:
            return None
        if self.finished or received_bytes < self._held_bytes:
            return []  # a later credit arrived before this one
        if received_bytes > self._held_bytes or not self._sent_bytes:
            self._progressed(now_s)
        self._held_bytes = received_bytes
        if credit.again and self._goes_back(received_bytes, now_s):
            self._sent_bytes = received_bytes
        self.finished = received_bytes == self.offer.payload_bytes
        return self._cut()

    def _goes_back(self, received_bytes: int, now_s: float) -> bool:
        to_bytes, since_s = self._went_back
        if received_bytes == to_bytes and now_s < since_s + self._ping_s / 2:
            return False
        self._went_back = (received_bytes, now_s)
        return True

    def _cut(self) -> list[SendPiece]:
        pieces = []
        end = min(self.offer.payload_bytes, self._held_bytes + max(self._window_bytes, self._piece_bytes))
        while self._sent_bytes < end:
            length = min(self._piece_bytes, self.offer.payload_bytes - self._sent_bytes)
            if self._sent_bytes + length > end:
                break
            pieces.append(SendPiece(self.receiver, self.offer.round, self.offer.step, self._sent_bytes, length))
            self._sent_bytes += length
        return pieces


class OutgoingPayloads:
    """All payloads that a member sends in a round, by receiver.

    `progress_s` is the time of the last progress of any receiver. `gone` contains the members that
    have abandoned the round, or have ended after completing it.
    """

    def __init__(self, plan: RoundPlan, settings: PeerCoreSettings) -> None:
        self.progress_s = -math.inf
        self.gone: set[str] = set()
        self._steps = {step.step: step for step in plan.outgoing}
        self._settings = settings
        self._offered: set[int] = set()
        self._payloads: dict[tuple[int, str], OutgoingPayload] = {}

    def offer(self, offer: Offer, now_s: float) -> list[PeerEffect]:
        """Offer a payload to its receivers."""
        self._offered.add(offer.step)
        effects: list[PeerEffect] = []
        for receiver in self._steps[offer.step].receivers:
            payload = OutgoingPayload(receiver, offer, self._settings, now_s)
            payload.finished = receiver in self.gone
            self._payloads[offer.step, receiver] = payload
            effects.append(SendToPeer(receiver, offer))
        return effects

    def has_offered(self, step: int) -> bool:
        """Return whether the payload of a step is ready to be sent."""
        return step in self._offered

    @property
    def all_offered(self) -> bool:
        """Whether all payloads are ready to be sent."""
        return len(self._offered) == len(self._steps)

    @property
    def served(self) -> bool:
        """Whether all receivers have received their payloads."""
        return all(payload.finished for payload in self._payloads.values())

    def credit(self, receiver: str, credit: PeerCredit, now_s: float) -> list[PeerEffect]:
        """Send the bytes that the receiver requests; raises `Refused`."""
        payload = self._payloads.get((credit.step, receiver))
        if payload is None:
            raise Refused("a credit for a payload that was not offered")
        before = payload.finished
        pieces = payload.credit(credit, now_s)
        if pieces is None:
            raise Refused("a credit for bytes that were not sent")
        self.progress_s = max(self.progress_s, payload.progress_s)
        return [*pieces, *(self._released(credit) if payload.finished and not before else [])]

    def _released(self, credit: PeerCredit) -> list[PeerEffect]:
        """Drop a payload that all receivers have, unless it must still be decoded here."""
        planned = self._steps[credit.step]
        if planned.source == "snapshot" or not all(
            self._payloads[credit.step, each].finished for each in planned.receivers
        ):
            return []
        return [ReleasePayload(credit.round, credit.step, incoming=False)]

    def offer_again(self, now_s: float) -> list[PeerEffect]:
        """Repeat the offers of payloads that have made no progress."""
        return [
            SendToPeer(payload.receiver, offer)
            for payload in self._payloads.values()
            if (offer := payload.offer_again(now_s)) is not None
        ]

    def leave_behind(self, name: str) -> None:
        """Stop sending to a member that has abandoned the round, or has ended."""
        self.gone.add(name)
        for payload in self._payloads.values():
            if payload.receiver == name:
                payload.finished = True


class IncomingPayload:
    """A payload in transfer from its sender. Its pieces are accepted in order."""

    def __init__(self, offer: Offer, piece_bytes: int) -> None:
        self.offer = msgspec.structs.replace(offer, sent_bytes=None)
        self.received_bytes = 0
        self._piece_bytes = piece_bytes
        self._asked_again = False

    @property
    def whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self.received_bytes == self.offer.payload_bytes

    def offered_again(self, offer: Offer) -> PeerCredit | None:
        """Return the credit for a repeated offer.

        Return `None` if the offer is for another payload.
        """
        if msgspec.structs.replace(offer, sent_bytes=None) != self.offer:
            return None
        return self.credit(again=offer.sent_bytes is None or offer.sent_bytes > self.received_bytes)

    def refusal(self, piece: PeerPiece, payload_bytes: int, *, sound: bool) -> str:
        """Return why a piece is refused, or ""."""
        if piece.offset < self.received_bytes:
            return "a repeated piece"
        if piece.offset > self.received_bytes:
            return "a misplaced piece"
        if payload_bytes != min(self._piece_bytes, self.offer.payload_bytes - piece.offset) or not payload_bytes:
            return "a piece of a wrong length"
        return "" if sound else "a corrupt piece"

    def accept(self, payload_bytes: int) -> None:
        """Count the bytes of the next piece."""
        self.received_bytes += payload_bytes
        self._asked_again = False

    def credit(self, *, again: bool = False) -> PeerCredit:
        """Return the credit for the next bytes."""
        return PeerCredit(self.offer.round, self.offer.step, self.received_bytes, again)

    def credit_again(self) -> PeerCredit | None:
        """Return the credit that requests lost bytes again.

        Return `None` if no bytes have been accepted since the last call.
        """
        if self._asked_again:
            return None
        self._asked_again = True
        return self.credit(again=True)
