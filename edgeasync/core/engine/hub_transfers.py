"""The hub's transfers in pieces: incoming pushes, outgoing assignments and graphs.

A connection has at most one transfer in each direction. If a push or an assignment is interrupted,
its transfer is suspended. It is then identified by the device id and the state id, since the device
may resume it on another connection. It is dropped after `SUSPENDED_S`, or earlier if the hub needs
the memory.

A suspended assignment keeps its payload. If every interrupted assignment restarted with the newest
model, a device on a bad link might never receive a complete model. A suspended transfer of the
graph or its base is not stored, because the payload is always the same.
"""

from typing import Generic, TypeVar

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.member import Member, Owner
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Credit, GraphHeader, Piece, Push
from edgeasync.protocol.transfers import PIECE_BYTES_MIN, IncomingTransfer, OutgoingTransfer, Transfer

SUSPENDED_S = 600.0
"""Time in seconds for which a suspended transfer is kept for its device."""


class _HubTransfer(msgspec.Struct, kw_only=True):
    """A transfer, its owner, the `voter` whose slot it uses, and the time of its last progress."""

    owner: Owner
    voter: str
    transfer: Transfer
    moved_s: float


class IncomingPush(_HubTransfer, kw_only=True):
    """A push of which some pieces have arrived."""

    push: Push
    transfer: IncomingTransfer


class AnnouncedPayload(_HubTransfer, kw_only=True):
    """A payload of which some pieces were sent, and the message that announced it."""

    message: Assignment | GraphHeader
    transfer: OutgoingTransfer


AnyTransfer = TypeVar("AnyTransfer", bound=_HubTransfer)


class _HubTransfers(Generic[AnyTransfer]):
    """Active transfers by connection, and suspended ones by device and state id."""

    def __init__(self) -> None:
        self._active: dict[Peer, AnyTransfer] = {}
        self._suspended: dict[Owner, AnyTransfer] = {}  # in the order of suspension

    def held_by(self, member: Member) -> int:
        """Return how many transfers belong to other members of the member's key."""
        voter, owner = member.voter, member.owner
        transfers = (*self._active.values(), *self._suspended.values())
        return sum(transfer.voter == voter and transfer.owner != owner for transfer in transfers)

    def suspend(self, peer: Peer, now_s: float) -> None:
        """Interrupt the transfer of a connection; keep the transfer if it can be resumed."""
        cut_off = self._active.pop(peer, None)
        if cut_off is not None and cut_off.transfer.suspend():
            cut_off.moved_s = now_s
            self.drop_suspended(cut_off.owner)
            self._suspended[cut_off.owner] = cut_off

    def drop(self, peer: Peer) -> None:
        """Drop the transfer of a connection, if any."""
        active = self._active.pop(peer, None)
        if active is not None:
            active.transfer.drop()

    def drop_suspended(self, owner: Owner) -> None:
        """Drop a device's suspended transfer, if any."""
        suspended = self._suspended.pop(owner, None)
        if suspended is not None:
            suspended.transfer.drop()

    def drop_oldest_suspended(self, spare: Owner | None = None) -> bool:
        """Drop the oldest suspended transfer that does not belong to `spare`.

        Return whether there was one.
        """
        oldest = next((owner for owner in self._suspended if owner != spare), None)
        if oldest is None:
            return False
        self.drop_suspended(oldest)
        return True

    def drop_stalled(self, since_s: float) -> None:
        """Drop the active transfers that have made no progress since `since_s`."""
        for peer in [peer for peer, active in self._active.items() if active.moved_s < since_s]:
            self.drop(peer)

    def drop_expired(self, now_s: float) -> None:
        """Drop the transfers that have been suspended for too long."""
        limit_s = now_s - SUSPENDED_S
        for owner in [owner for owner, suspended in self._suspended.items() if suspended.moved_s < limit_s]:
            self.drop_suspended(owner)


class IncomingTransfers(_HubTransfers[IncomingPush]):
    """Incoming pushes.

    `len` includes suspended pushes, since each of them has a buffer, too.
    """

    def __len__(self) -> int:
        return len(self._active) + len(self._suspended)

    def receive(
        self, peer: Peer, member: Member, push: Push, buffer: memoryview, now_s: float
    ) -> IncomingTransfer:
        """Open the transfer of an announced push."""
        transfer = IncomingTransfer(push.transfer, buffer, push.checksum)
        self._active[peer] = IncomingPush(
            owner=member.owner, voter=member.voter, push=push, transfer=transfer, moved_s=now_s
        )
        return transfer

    def resume(self, peer: Peer, owner: Owner, push: Push, now_s: float) -> IncomingTransfer | None:
        """Resume the suspended transfer of a device if it is a transfer of this push.

        Otherwise, drop it and return `None`.
        """
        suspended = self._suspended.pop(owner, None)
        if suspended is None:
            return None
        if (suspended.push.seq, suspended.push.codec) != (push.seq, push.codec):
            suspended.transfer.drop()
            return None
        if not suspended.transfer.resume(push.transfer, push.checksum, push.payload_bytes):
            return None
        suspended.push, suspended.moved_s = push, now_s
        self._active[peer] = suspended
        return suspended.transfer

    def accept(self, peer: Peer, piece: Piece, part: wire.Buffer, now_s: float) -> IncomingPush | None:
        """Pass a piece to the transfer of its connection; return the transfer's push.

        Return `None` if the connection has no transfer. Once a transfer is complete, it is no
        longer active. Raises `ProtocolError` for an invalid piece, which ends the transfer.
        """
        active = self._active.pop(peer, None)
        if active is None:
            return None
        active.transfer.accept(piece, part)
        active.moved_s = now_s
        if active.transfer.state != "complete":
            self._active[peer] = active
        return active

    def is_suspended(self, owner: Owner | None) -> bool:
        """Return whether a push of this device is suspended."""
        return owner in self._suspended


class OutgoingTransfers(_HubTransfers[AnnouncedPayload]):
    """Outgoing payloads. At most `suspended_max` suspended assignments are kept."""

    def __init__(self, piece_bytes: int, suspended_max: int) -> None:
        super().__init__()
        self._piece_bytes = piece_bytes
        self._suspended_max = suspended_max
        self._partials: dict[Peer, int] = {}
        self._count = 0

    @property
    def graphs(self) -> int:
        """The number of active transfers of the graph, which share one payload."""
        return sum(isinstance(active.message, GraphHeader) for active in self._active.values())

    def announce(
        self,
        member: Member,
        message: Assignment | GraphHeader,
        payload: wire.Buffer,
        now_s: float,
        *,
        resumable: bool = False,
    ) -> Assignment | GraphHeader:
        """Return the message to send; if its `transfer` is 0, send the payload with it.

        Otherwise, the payload is sent in pieces. This happens if it is `resumable`, larger than the
        device allows, or so large that sending it at once would delay a heartbeat. An earlier
        transfer on this connection is dropped.
        """
        self.drop(member.peer)
        if len(payload) <= PIECE_BYTES_MIN and not resumable:
            return message
        piece_bytes = max(PIECE_BYTES_MIN, min(self._piece_bytes, member.piece_bytes_max or self._piece_bytes))
        window = member.link.window(piece_bytes, narrow=member.piece_bytes_max > 0)
        if len(payload) <= window.message_bytes_max and not resumable:
            return message
        self._count += 1
        message = msgspec.structs.replace(message, transfer=self._count)
        transfer = OutgoingTransfer(self._count, payload, window, now_s)
        self._active[member.peer] = AnnouncedPayload(
            owner=member.owner, voter=member.voter, message=message, transfer=transfer, moved_s=now_s
        )
        return message

    def credit(
        self, peer: Peer, credit: Credit, now_s: float
    ) -> tuple[OutgoingTransfer, list[tuple[Piece, memoryview]]] | None:
        """Return the transfer of a credit and the pieces to send.

        Return `None` if the credit belongs to no transfer. Raises `ProtocolError` for an impossible
        credit.
        """
        active = self._active.get(peer)
        if active is None or active.transfer.number != credit.transfer:
            return None
        active.moved_s = now_s
        pieces = active.transfer.credit(credit, now_s)
        if active.transfer.state == "complete":
            del self._active[peer]
        return active.transfer, pieces

    def note_partial(self, peer: Peer, checksum: int) -> None:
        """Record the checksum of a payload that the device has partially downloaded."""
        self._partials[peer] = checksum

    def can_resume(self, member: Member) -> bool:
        """Return whether the partial download of a device can be resumed."""
        suspended = self._suspended.get(member.owner)
        return suspended is not None and suspended.message.checksum == self._partials.get(member.peer)

    def resume(self, member: Member) -> tuple[Assignment, wire.Buffer] | None:
        """Return the suspended assignment, to be announced again, and its payload.

        Return `None` if the assignment cannot be resumed. The suspended transfer is dropped in
        either case.
        """
        suspended, partial = self._suspended.pop(member.owner, None), self._partials.pop(member.peer, None)
        if suspended is None:
            return None
        suspended.transfer.drop()
        if suspended.message.checksum != partial:
            return None
        assert isinstance(suspended.message, Assignment)
        return suspended.message, suspended.transfer.payload

    def suspend(self, peer: Peer, now_s: float) -> None:
        """Interrupt the transfer of a connection.

        Keep it if it is an assignment that can be resumed.
        """
        self._partials.pop(peer, None)
        active = self._active.get(peer)
        if active is not None and isinstance(active.message, GraphHeader):
            self.drop(peer)
        super().suspend(peer, now_s)
        if len(self._suspended) > self._suspended_max:
            self.drop_oldest_suspended()

    def drop_all_suspended(self) -> None:
        """Drop all suspended transfers, because a rollback has made their versions invalid."""
        while self.drop_oldest_suspended():
            pass
