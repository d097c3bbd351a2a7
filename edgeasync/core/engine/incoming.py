"""Pushes on their way into the hub in pieces, one to a connection; and those cut off, which may go on later.

What was cut off is kept by device and state, for it goes on over another connection. It is kept for a while only,
and gives way first where there is no room.
"""

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.membership import Owner
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Piece, Push
from edgeasync.protocol.transfers import IncomingTransfer

SUSPENDED_S = 600.0
"""How long the beginning of a payload is kept for a device that does not come back for the rest."""


class IncomingPush(msgspec.Struct):
    """A push that is partly here."""

    owner: Owner
    push: Push
    transfer: IncomingTransfer


class IncomingTransfers:
    """The transfers under way and the suspended ones; `len` counts both, each holds a buffer."""

    def __init__(self) -> None:
        self._under_way: dict[Peer, IncomingPush] = {}
        self._suspended: dict[Owner, IncomingPush] = {}  # the one suspended first comes first

    def __len__(self) -> int:
        return len(self._under_way) + len(self._suspended)

    def begin(self, peer: Peer, owner: Owner, push: Push, buffer: memoryview, now_s: float) -> IncomingTransfer:
        """Open the transfer of an announced push."""
        transfer = IncomingTransfer(push.transfer, buffer, push.checksum)
        return self._put(peer, IncomingPush(owner, push, transfer), now_s)

    def resume(self, peer: Peer, owner: Owner, push: Push, now_s: float) -> IncomingTransfer | None:
        """Go on with what was cut off, if that was this very push; else drop it and return `None`."""
        before = self._suspended.pop(owner, None)
        if before is None or (before.push.seq, before.push.codec) != (push.seq, push.codec):
            return None
        if not before.transfer.resume(push.transfer, push.checksum, push.payload_bytes):
            return None
        return self._put(peer, IncomingPush(owner, push, before.transfer), now_s)

    def accept(self, peer: Peer, piece: Piece, part: wire.Buffer, now_s: float) -> IncomingPush | None:
        """Take in a piece; return what it belongs to, which is over if it is complete; `None` if to nothing.

        Raises `ProtocolError` for a piece that cannot be; that ends the transfer for good.
        """
        arriving = self._under_way.pop(peer, None)
        if arriving is None:
            return None
        arriving.transfer.accept(piece, part)
        arriving.transfer.moved_s = now_s
        if arriving.transfer.state != "complete":
            self._under_way[peer] = arriving
        return arriving

    def suspend(self, peer: Peer, now_s: float) -> None:
        """Keep what a connection had brought so far; it is over, or the device announces anew."""
        arriving = self._under_way.pop(peer, None)
        if arriving is not None and arriving.transfer.suspend():
            arriving.transfer.moved_s = now_s
            self._suspended.pop(arriving.owner, None)
            self._suspended[arriving.owner] = arriving

    def drop(self, owner: Owner) -> None:
        """Drop what a device had begun to send before: it sends something else."""
        self._suspended.pop(owner, None)

    def make_room(self, spare: Owner | None = None) -> bool:
        """Drop the one that has been suspended longest, but not that of `spare`; return whether there was one."""
        oldest = next((owner for owner in self._suspended if owner != spare), None)
        return oldest is not None and self._suspended.pop(oldest) is not None

    def is_suspended(self, owner: Owner | None) -> bool:
        """Whether something of this device is kept."""
        return owner in self._suspended

    def end_stalled(self, since_s: float) -> None:
        """End the transfers that have not moved since then."""
        for peer in [peer for peer, arriving in self._under_way.items() if arriving.transfer.moved_s < since_s]:
            del self._under_way[peer]

    def expire(self, now_s: float) -> None:
        """Drop what nobody has come back for."""
        limit_s = now_s - SUSPENDED_S
        for owner in [owner for owner, one in self._suspended.items() if one.transfer.moved_s < limit_s]:
            del self._suspended[owner]

    def _put(self, peer: Peer, arriving: IncomingPush, now_s: float) -> IncomingTransfer:
        arriving.transfer.moved_s = now_s
        self._under_way[peer] = arriving
        return arriving.transfer
