"""Payloads on their way out of the hub in pieces, one to a connection; and those cut off, which may go on later.

An assignment that was cut off is kept by device and state, with its payload: on a bad link a device that is sent
the newest model each time, from its beginning, would never have one whole. The graph need not be kept.
"""

import msgspec

from edgeasync.core.engine.incoming import SUSPENDED_S
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.membership import Member, Owner
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Credit, Graph, Piece
from edgeasync.protocol.transfers import PIECE_BYTES_MIN, OutgoingTransfer


class OutgoingPayload(msgspec.Struct):
    """A payload that is partly sent, with the message that announced it."""

    owner: Owner
    message: Assignment | Graph
    payload: wire.Buffer
    transfer: OutgoingTransfer


class OutgoingTransfers:
    """The transfers under way and the suspended ones; `shared_count` is that of graphs under way."""

    def __init__(self, piece_bytes: int, suspended_max: int) -> None:
        self.shared_count = 0
        self._piece_bytes = piece_bytes
        self._suspended_max = suspended_max
        self._under_way: dict[Peer, OutgoingPayload] = {}
        self._suspended: dict[Owner, OutgoingPayload] = {}  # the one suspended first comes first
        self._wanted: dict[Peer, int] = {}
        self._count = 0

    def begin(
        self, member: Member, message: Assignment | Graph, payload: wire.Buffer, now_s: float
    ) -> Assignment | Graph:
        """Return the message to send; with `transfer` 0 the payload goes with it, else in pieces.

        In pieces goes what is longer than the link moves while a heartbeat may wait, or than the device allows.
        A new transfer ends an older one.
        """
        self.end(member.peer)
        if len(payload) <= PIECE_BYTES_MIN:
            return message
        piece_bytes_max = member.piece_bytes_max
        piece_bytes = self._piece_bytes
        if piece_bytes_max:
            piece_bytes = min(piece_bytes, max(PIECE_BYTES_MIN, piece_bytes_max))
        window = member.link.window(piece_bytes, narrow=piece_bytes_max > 0)
        if len(payload) <= min(piece_bytes, window.message_bytes_max):
            return message
        self._count += 1
        transfer = OutgoingTransfer(self._count, payload, piece_bytes, window, now_s)
        message = msgspec.structs.replace(message, transfer=self._count)
        self._under_way[member.peer] = OutgoingPayload(member.owner, message, payload, transfer)
        self.shared_count += isinstance(message, Graph)
        return message

    def credit(
        self, peer: Peer, credit: Credit, now_s: float
    ) -> tuple[OutgoingTransfer, list[tuple[Piece, memoryview]]] | None:
        """Take in a credit, return its transfer and the pieces to send now; `None` if it is for no transfer.

        Raises `ProtocolError` for a credit that cannot be.
        """
        leaving = self._under_way.get(peer)
        if leaving is None or leaving.transfer.number != credit.transfer:
            return None
        transfer = leaving.transfer
        transfer.moved_s = now_s
        pieces = transfer.credit(credit, now_s)
        if transfer.state == "complete":
            self.end(peer)
        return transfer, pieces

    def ask(self, peer: Peer, partial: int | None, now_s: float) -> None:
        """Note of which payload, by checksum, a device that wants an assignment holds the beginning."""
        self.suspend(peer, now_s)  # who asks again has given up what was under way
        self._wanted.pop(peer, None)
        if partial is not None:
            self._wanted[peer] = partial

    def can_resume(self, peer: Peer, owner: Owner | None) -> bool:
        """Whether the payload that the device has begun to take in is kept: it needs no room then."""
        kept = None if owner is None else self._suspended.get(owner)
        return kept is not None and kept.message.checksum == self._wanted.get(peer)

    def take_suspended(self, peer: Peer, member: Member) -> tuple[Assignment, wire.Buffer] | None:
        """Return the assignment to go on with, and its payload; else drop what is kept and return `None`."""
        if not self._suspended and not self._wanted:
            return None
        resumable = self.can_resume(peer, member.owner)
        kept = self._suspended.pop(member.owner, None)
        self._wanted.pop(peer, None)
        if kept is None or not resumable or not isinstance(kept.message, Assignment):
            return None
        return kept.message, kept.payload

    def suspend(self, peer: Peer, now_s: float) -> None:
        """End the connection's transfer, and keep the payload of an assignment that was begun."""
        leaving = self._under_way.get(peer)
        self.end(peer)
        if leaving is not None and isinstance(leaving.message, Assignment) and leaving.transfer.suspend():
            leaving.transfer.moved_s = now_s
            self._suspended.pop(leaving.owner, None)
            self._suspended[leaving.owner] = leaving
            if len(self._suspended) > self._suspended_max:
                self.make_room()

    def end(self, peer: Peer) -> None:
        """End the connection's transfer, if there is one, for good."""
        leaving = self._under_way.pop(peer, None)
        if leaving is not None:
            self.shared_count -= isinstance(leaving.message, Graph)

    def forget(self, peer: Peer, now_s: float) -> None:
        """Take in that a connection is over."""
        self.suspend(peer, now_s)
        self._wanted.pop(peer, None)

    def make_room(self) -> bool:
        """Drop the one that has been suspended longest; return whether there was one."""
        oldest = next(iter(self._suspended), None)
        return oldest is not None and self._suspended.pop(oldest) is not None

    def drop_suspended(self) -> None:
        """Drop all that are suspended: nobody should train from those versions any more."""
        self._suspended.clear()

    def end_stalled(self, since_s: float) -> None:
        """End the transfers that have not moved since then."""
        for peer in [peer for peer, one in self._under_way.items() if one.transfer.moved_s < since_s]:
            self.end(peer)

    def expire(self, now_s: float) -> None:
        """Drop what nobody has come back for."""
        limit_s = now_s - SUSPENDED_S
        for owner in [owner for owner, one in self._suspended.items() if one.transfer.moved_s < limit_s]:
            del self._suspended[owner]
