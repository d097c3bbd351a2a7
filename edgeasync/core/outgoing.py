"""Payloads on their way out of the hub in pieces, one to a connection."""

from edgeasync.core.events import Peer
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Credit, Piece
from edgeasync.protocol.transfers import CreditWindow, OutgoingTransfer


class OutgoingTransfers:
    """The transfers under way, and what each link can take; those of the payload `shared` are counted."""

    def __init__(self, piece_bytes: int, shared: wire.Buffer | None) -> None:
        self.shared_count = 0
        self._piece_bytes = piece_bytes
        self._shared = shared
        self._transfers: dict[Peer, tuple[OutgoingTransfer, bool]] = {}
        self._windows: dict[Peer, CreditWindow] = {}
        self._count = 0

    def begin(self, peer: Peer, payload: wire.Buffer, now_s: float) -> int:
        """Return the number of a new transfer, which ends an older one; 0 if one message can hold the payload."""
        if len(payload) <= self._piece_bytes:
            return 0
        self.end(peer)
        self._count += 1
        window = self._windows.setdefault(peer, CreditWindow(self._piece_bytes))
        transfer = OutgoingTransfer(self._count, payload, self._piece_bytes, window)
        transfer.moved_s = now_s
        self._transfers[peer] = (transfer, payload is self._shared)
        self.shared_count += payload is self._shared
        return self._count

    def credit(self, peer: Peer, credit: Credit, now_s: float) -> list[tuple[Piece, memoryview]] | None:
        """Take in a credit, return the pieces to send now; `None` if it is for no transfer.

        Raises `ProtocolError` for a credit that cannot be.
        """
        transfer, _ = self._transfers.get(peer, (None, False))
        if transfer is None or transfer.transfer != credit.transfer:
            return None
        transfer.moved_s = now_s
        pieces = transfer.credit(credit, now_s)
        if transfer.complete:
            self.end(peer)
        return pieces

    def end(self, peer: Peer) -> None:
        """End the connection's transfer, if there is one."""
        _, shared = self._transfers.pop(peer, (None, False))
        self.shared_count -= shared

    def forget(self, peer: Peer) -> None:
        """Drop what is known of a connection that is over."""
        self.end(peer)
        self._windows.pop(peer, None)

    def end_stalled(self, since_s: float) -> None:
        """End the transfers that have not moved since then."""
        for peer in [peer for peer, (transfer, _) in self._transfers.items() if transfer.moved_s < since_s]:
            self.end(peer)
