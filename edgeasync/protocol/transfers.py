"""Payloads too large for one message travel in pieces, under a window of credit. No I/O in here.

The receiver opens a transfer with `Credit(received_bytes=0)` and repeats the credit after every piece. The
sender never has more than its window unacknowledged, and sizes the window to what the link moves in about a
tenth of a second, so that a heartbeat never waits long behind a payload.
"""

import xxhash

from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Credit, Piece

PIECE_BYTES_MIN = 1 << 16
"""Smaller pieces, except the last, are refused: their headers would cost more than they carry."""

PIECE_BYTES_MAX = 1 << 24
"""Larger pieces would hold up the loop that checks them."""

WINDOW_TARGET_S = 0.1


class CreditWindow:
    """How many bytes may be under way on one link; learnt from how long a full window takes."""

    def __init__(self, piece_bytes: int) -> None:
        self.bytes_max = 4 * piece_bytes
        self.bytes = min(4 * PIECE_BYTES_MIN, self.bytes_max)

    def adapt(self, elapsed_s: float) -> None:
        """Grow or shrink, at most twofold, towards what `WINDOW_TARGET_S` moves."""
        factor = min(2.0, max(0.5, WINDOW_TARGET_S / max(elapsed_s, 1e-6)))
        self.bytes = int(min(self.bytes_max, max(PIECE_BYTES_MIN, self.bytes * factor)))


class OutgoingTransfer:
    """The sending side: cuts a payload into pieces as credit comes in."""

    def __init__(self, transfer: int, payload: wire.Buffer, piece_bytes: int, window: CreditWindow) -> None:
        self.transfer = transfer
        self.payload = memoryview(payload).cast("B")
        self.piece_bytes = piece_bytes
        self.window = window
        self.moved_s = 0.0  # when the last credit came, for whoever keeps time
        self._sent = 0
        self._received = 0
        self._mark: tuple[int, float] | None = None

    @property
    def complete(self) -> bool:
        """Whether the receiver has credited the last byte."""
        return self._received == len(self.payload)

    def credit(self, credit: Credit, now_s: float) -> list[tuple[Piece, memoryview]]:
        """Take in a credit, return the pieces to send now; raises `ProtocolError` if it cannot be."""
        if credit.transfer != self.transfer or not self._received <= credit.received_bytes <= self._sent:
            raise ProtocolError(f"credit for byte {credit.received_bytes} of a transfer at {self._sent}")
        self._received = credit.received_bytes
        if self._mark is not None and self._received >= self._mark[0]:
            self.window.adapt(now_s - self._mark[1])
            self._mark = None
        pieces = []
        length_max = min(self.piece_bytes, max(PIECE_BYTES_MIN, self.window.bytes // 4))
        while self._sent < len(self.payload) and self._sent - self._received < self.window.bytes:
            part = self.payload[self._sent : self._sent + length_max]
            pieces.append((Piece(self.transfer, self._sent, wire.checksum(part)), part))
            self._sent += len(part)
        if pieces and self._mark is None:
            self._mark = (self._sent, now_s)
        return pieces


class IncomingTransfer:
    """The receiving side: one buffer of exactly the announced size, filled in order, checked when it is whole."""

    def __init__(self, transfer: int, buffer: memoryview, checksum: int) -> None:
        self.transfer = transfer
        self.buffer = buffer
        self.moved_s = 0.0  # when the last piece came, for whoever keeps time
        self._checksum = checksum
        self._received = 0
        self._digest = xxhash.xxh3_64()

    @property
    def complete(self) -> bool:
        """Whether every byte has come."""
        return self._received == len(self.buffer)

    def credit(self) -> Credit:
        """Return the credit that tells the sender how far we are."""
        return Credit(self.transfer, self._received)

    def accept(self, piece: Piece, part: wire.Buffer) -> None:
        """Take in the next piece; raises `ProtocolError` if it is out of order, out of bounds or corrupt."""
        end = piece.offset + len(part)
        if piece.transfer != self.transfer or piece.offset != self._received or end > len(self.buffer):
            raise ProtocolError(f"piece at byte {piece.offset} where {self._received} was due")
        if len(part) < PIECE_BYTES_MIN and (end != len(self.buffer) or len(part) == 0):
            raise ProtocolError(f"a piece of {len(part)} bytes is too small")
        if wire.checksum(part) != piece.checksum:
            raise ProtocolError(f"the piece at byte {piece.offset} is corrupt")
        self.buffer[piece.offset : end] = part
        self._received = end
        self._digest.update(part)
        if self.complete and self._digest.intdigest() != self._checksum:
            raise ProtocolError("the whole payload does not have the checksum it was announced with")
