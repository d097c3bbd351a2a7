"""Transfers of payloads that are too large for one message: pieces with credit flow control.

This module does no I/O. The receiver starts a transfer with `Credit(received_bytes=0)` and sends a
new credit after every piece. The sender never has more unacknowledged bytes in flight than its
window. It adapts the window to the number of bytes that the link transmits in one round trip plus a
tenth of a second. So a heartbeat never waits long behind a payload. An interrupted transfer is
resumed under a new transfer number. It continues at the byte in the first credit.
"""

from collections import deque
from typing import Literal

import xxhash

from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Credit, Piece
from edgeasync.states import Table, check_move

TransferState = Literal["announced", "moving", "suspended", "complete", "corrupt", "dropped"]

TRANSFER: Table[TransferState] = {
    "announced": ("moving", "corrupt", "dropped"),
    "moving": ("suspended", "complete", "corrupt", "dropped"),
    "suspended": ("moving", "dropped"),
    "complete": (),
    "corrupt": (),
    "dropped": (),
}
"""The states of a transfer and the states that may follow each of them, on both sides.

`announced`: no byte was sent. `suspended`: the transfer was interrupted and can be resumed; the
sender resumes it by starting a new transfer of the same payload. `corrupt`: a piece was invalid.
`dropped`: the transfer ended for another reason.
"""

PIECE_BYTES_MIN = 1 << 16
"""Minimum length of all pieces but the last. Shorter pieces are rejected.

The overhead of their headers would be too large.
"""

PIECE_BYTES_MAX = 1 << 24
"""Maximum length of a piece. The event loop is blocked while it verifies a piece."""

WINDOW_TARGET_S = 0.1
"""Target for the time that a byte waits behind bytes sent before it."""

WINDOW_BYTES_MAX = 4 << 20
"""Maximum window size with small pieces. It keeps the number of pieces within libzmq's queues."""

PIECES_MAX = 32
"""Maximum number of pieces per window, unless pieces would exceed their maximum length.

libzmq's queues hold 64 messages.
"""

BURST_GROWTH_MAX = 4.0
"""Maximum factor by which the window grows after the first window on an idle link.

That first window measures the rate of the link.
"""

BURSTS = 3
"""Number of recent windows on an idle link whose rates are stored. The highest rate is used."""

ROUND_TRIP_MAX_S = 2.0
"""Upper bound for a measured round trip.

Without it, a busy machine would enlarge the window too much.
"""

ROUND_TRIPS = 5
"""Number of recent round trips on an idle link that are stored; the shortest one is used."""


class CreditWindow:
    """Limits the number of bytes in flight on a link.

    The limit adapts to the time in which a full window is credited. `bytes_per_s` is the rate
    measured with the last full window. It is 0 before the first one.
    """

    def __init__(self, piece_bytes: int, start_bytes: int = 4 * PIECE_BYTES_MIN) -> None:
        self.piece_bytes = piece_bytes
        self.bytes_max = max(4 * piece_bytes, min(16 * piece_bytes, WINDOW_BYTES_MAX))
        self.bytes = start_bytes
        self.bytes_per_s = 0.0
        self._at_rest_s: deque[float] = deque(maxlen=ROUND_TRIPS)
        self.round_trip_s = 0.0
        self._bursts: deque[float] = deque(maxlen=BURSTS)
        self._measured = False

    @property
    def message_bytes_max(self) -> int:
        """The longest payload to send in one message: what the link transmits in `WINDOW_TARGET_S`."""
        return min(self.piece_bytes, self._target_bytes)

    @property
    def length_max(self) -> int:
        """The maximum length of a piece.

        It is short compared with the window, but long enough to limit the number of pieces per
        window.
        """
        length = max(PIECE_BYTES_MIN, self._target_bytes // 4, self.bytes // PIECES_MAX)
        return min(self.piece_bytes, length)

    @property
    def _target_bytes(self) -> int:
        """The number of bytes that the link transmits in `WINDOW_TARGET_S`, without the round trip.

        Before any measurement, it is the minimum length of a piece. On a very slow link, a longer
        piece would delay heartbeats by more than a lease. A payload that is sent in one message
        cannot be resumed.
        """
        if not self._measured:
            return PIECE_BYTES_MIN
        share = WINDOW_TARGET_S / (self.round_trip_s + WINDOW_TARGET_S)
        return max(PIECE_BYTES_MIN, int(self.bytes * share))

    def adapt(self, elapsed_s: float) -> None:
        """Scale the window by a factor of 0.5 to 2 so that a full window takes the target time.

        The target time is one round trip plus `WINDOW_TARGET_S`.
        """
        factor = (self.round_trip_s + WINDOW_TARGET_S) / max(elapsed_s, 1e-6)
        self._scale(min(2.0, factor))

    def _scale(self, factor: float) -> None:
        factor = max(0.5, factor)
        self.bytes = int(min(self.bytes_max, max(PIECE_BYTES_MIN, self.bytes * factor)))

    def observe_full(self, in_flight_bytes: int, elapsed_s: float) -> None:
        """Adapt to a full window. The credit for its last byte arrived after `elapsed_s`."""
        self._measured = True
        self.bytes_per_s = in_flight_bytes / max(elapsed_s, 1e-6)
        self.adapt(elapsed_s)

    def observe_burst(self, in_flight_bytes: int, elapsed_s: float, spread_s: float, spread_bytes: int) -> None:
        """Adapt to the first window on an idle link, and to the interval between its credits.

        The last credit arrived after one round trip plus the transmission time of the window. So
        this window measures the link's rate even if it is much smaller than the number of bytes
        that a long link can hold. The rate computed from `elapsed_s` is too high if the measured
        round trip is too long. The rate computed from `spread_s` and `spread_bytes` is too high if
        all credits arrived at once. Therefore the lower of these two rates is used. Of the rates of
        the last `BURSTS` windows, the highest is used, because a busy machine may have delayed some
        of the windows.
        """
        self._measured = True
        moving_s = max(elapsed_s - self.round_trip_s, 1e-6)
        self.bytes_per_s = min(in_flight_bytes / moving_s, spread_bytes / max(spread_s, 1e-6))
        self._bursts.append(self.bytes_per_s)
        wanted = max(self._bursts) * (self.round_trip_s + WINDOW_TARGET_S)
        self._scale(min(BURST_GROWTH_MAX, wanted / self.bytes))

    def observe_round_trip(self, sample_s: float, *, at_rest: bool) -> None:
        """Adapt to a round trip measured on an idle link (`at_rest`) or while payloads were sent.

        Only a measurement on an idle link may increase the estimated round trip. Otherwise the
        queue that the window causes would increase the estimate, which would enlarge the window
        again. If the round trip is longer than the window can explain, payloads that are sent in
        one message are too long.
        """
        sample_s = min(max(sample_s, 0.0), ROUND_TRIP_MAX_S)
        known = bool(self._at_rest_s)
        if at_rest or not known or sample_s < self.round_trip_s:
            self._at_rest_s.append(sample_s)
            self.round_trip_s = min(self._at_rest_s)
        if known and sample_s > self.round_trip_s + 2.0 * WINDOW_TARGET_S:
            self.adapt(sample_s)


class Transfer:
    """Base class of both sides of a transfer: its number on this connection, and its state."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: TransferState = "announced"

    def move(self, state: TransferState) -> None:
        """Change the state; raises `TransitionError` if `TRANSFER` does not allow it."""
        check_move(TRANSFER, self.state, state, "a transfer")
        self.state = state

    def suspend(self) -> bool:
        """Suspend the transfer, or drop it if no byte was sent; return whether it can be resumed."""
        self.move("dropped" if self.state == "announced" else "suspended")
        return self.state == "suspended"

    def drop(self) -> None:
        """End the transfer. It cannot be resumed."""
        self.move("dropped")


class OutgoingTransfer(Transfer):
    """The sending side of a transfer. It cuts a payload into pieces as credit arrives.

    `announced_s` is the time at which the transfer was announced. If it is set, the first credit
    measures the round trip.
    """

    def __init__(
        self,
        number: int,
        payload: wire.Buffer,
        window: CreditWindow,
        announced_s: float | None = None,
    ) -> None:
        super().__init__(number)
        self.payload = memoryview(payload).cast("B")
        self.window = window
        self._announced_s = announced_s
        self._sent = self._first_byte = 0
        self._received = 0
        self._mark: tuple[int, int, float] | None = None  # a full window: end, bytes, start time
        self._first_credit: tuple[int, float] | None = None  # in the first window: byte, time

    def note_announced(self, now_s: float) -> None:
        """Set the time of the announcement, if it was sent after the transfer was created."""
        self._announced_s = now_s

    def credit(self, credit: Credit, now_s: float) -> list[tuple[Piece, memoryview]]:
        """Return the pieces that a credit allows; raises `ProtocolError` for an impossible credit.

        The first credit may start at any byte of the payload, because an earlier transfer may have
        sent the bytes before it.
        """
        if self.state == "announced":
            self._open(credit, now_s)
        elif self.state != "moving":
            raise ProtocolError(f"unexpected credit for a transfer in state {self.state!r}")
        elif credit.transfer != self.number or not self._received <= credit.received_bytes <= self._sent:
            raise ProtocolError(
                f"invalid credit for byte {credit.received_bytes}: the transfer is at byte {self._sent}"
            )
        self._received = credit.received_bytes
        if self._received == len(self.payload):
            self.move("complete")
        if self._mark is not None and self._received >= self._mark[0]:
            self._measure(self._mark, now_s)
            self._mark = None
        elif self._mark is not None and self._first_credit is None and self._received > self._first_byte:
            self._first_credit = (self._received, now_s)
        return self._cut(now_s)

    def _measure(self, mark: tuple[int, int, float], now_s: float) -> None:
        """Adapt the window to the time in which a full window was credited."""
        end, in_flight, since_s = mark
        if end - in_flight == self._first_byte and self._first_credit is not None:
            first_bytes, first_s = self._first_credit
            self.window.observe_burst(in_flight, now_s - since_s, now_s - first_s, end - first_bytes)
        else:
            self.window.observe_full(in_flight, now_s - since_s)

    def _open(self, credit: Credit, now_s: float) -> None:
        if credit.transfer != self.number or not 0 <= credit.received_bytes < max(1, len(self.payload)):
            raise ProtocolError(f"invalid first credit for byte {credit.received_bytes} of a transfer")
        self.move("moving")
        self._sent = self._first_byte = credit.received_bytes
        if self._announced_s is not None:
            self.window.observe_round_trip(now_s - self._announced_s, at_rest=True)

    def _cut(self, now_s: float) -> list[tuple[Piece, memoryview]]:
        """Return the next pieces while the window has room for at least half a piece.

        If nothing is in flight, return at least one piece. Mark the byte at which the window is
        full or at which a short payload ends. The credit for that byte measures the link.
        """
        pieces: list[tuple[Piece, memoryview]] = []
        window_bytes = self.window.bytes
        length_max = self.window.length_max
        while self._sent < len(self.payload):
            part = self.payload[self._sent : self._sent + length_max]
            in_flight = self._sent - self._received
            if in_flight and in_flight + len(part) // 2 >= window_bytes:
                if pieces and self._mark is None:
                    self._mark = (self._sent, in_flight, now_s)
                break
            pieces.append((Piece(self.number, self._sent, wire.checksum(part)), part))
            self._sent += len(part)
        else:
            if len(pieces) > 2 and self._received == self._first_byte:
                # The whole payload was sent on an idle link, which also measures the rate. The last
                # credit may never arrive, so the last piece does not count. Two pieces or fewer
                # would measure delays, not the rate.
                end = self._sent - len(pieces[-1][1])
                self._mark = (end, end - self._first_byte, now_s)
        return pieces


class IncomingTransfer(Transfer):
    """The receiving side of a transfer. It fills a buffer of the announced size and verifies it."""

    def __init__(self, number: int, buffer: memoryview, checksum: int) -> None:
        super().__init__(number)
        self.buffer = buffer
        self.checksum = checksum
        self.payload_bytes = len(buffer)
        self._received = 0
        self._digest = xxhash.xxh3_64()

    def resume(self, number: int, checksum: int, payload_bytes: int) -> bool:
        """Resume under a new number if the payload is the same; otherwise drop the transfer.

        Return whether the transfer was resumed.
        """
        if (self.checksum, self.payload_bytes) != (checksum, payload_bytes):
            self.drop()
            return False
        self.move("moving")
        self.number = number
        return True

    def credit(self) -> Credit:
        """Return the credit for the bytes received so far."""
        return Credit(self.number, self._received)

    def accept(self, piece: Piece, part: wire.Buffer) -> None:
        """Copy the next piece into the buffer; raises `ProtocolError` if the piece is invalid.

        A piece is invalid if it is out of order, out of bounds or corrupt. An invalid piece ends
        the transfer, so the sender must announce the payload again.
        """
        if self.state not in {"announced", "moving"}:
            raise ProtocolError(f"unexpected piece of a transfer in state {self.state!r}")
        try:
            self._accept(piece, part)
        except ProtocolError:
            self.move("corrupt")
            raise

    def _accept(self, piece: Piece, part: wire.Buffer) -> None:
        end = piece.offset + len(part)
        if piece.transfer != self.number or piece.offset != self._received or end > self.payload_bytes:
            raise ProtocolError(f"piece at byte {piece.offset}, expected byte {self._received}")
        if len(part) < PIECE_BYTES_MIN and (end != self.payload_bytes or len(part) == 0):
            raise ProtocolError(f"piece of {len(part)} bytes is too small")
        if wire.checksum(part) != piece.checksum:
            raise ProtocolError(f"piece at byte {piece.offset} is corrupt")
        self._store(piece.offset, part)
        self._received = end
        self.move("moving")
        if end == self.payload_bytes:
            self._verify()
            self.move("complete")

    def _store(self, offset: int, part: wire.Buffer) -> None:
        self.buffer[offset : offset + len(part)] = part
        self._digest.update(part)

    def _verify(self) -> None:
        if self._digest.intdigest() != self.checksum:
            raise ProtocolError("the payload's checksum differs from the announced one")


class IncomingStream(IncomingTransfer):
    """The receiving side of a transfer whose pieces its owner stores, and verifies as a whole.

    It begins at the byte `received_bytes`. The owner, not this object, resumes after a cut.
    """

    def __init__(self, number: int, payload_bytes: int, checksum: int, received_bytes: int) -> None:
        super().__init__(number, memoryview(b""), checksum)
        self.payload_bytes = payload_bytes
        self._received = received_bytes

    def suspend(self) -> bool:
        """Drop the transfer; return `False`."""
        self.drop()
        return False

    def _store(self, offset: int, part: wire.Buffer) -> None:
        pass

    def _verify(self) -> None:
        pass
