"""A device's traffic: transfers in pieces, and the cap on its bandwidth.

Under a cap, a message waits in a queue if it has a payload or requests one. Credits wait in the
same queue, and so limit the rate of incoming payloads. Heartbeats and other small messages are sent
immediately, but delay the messages in the queue.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from edgeasync.core.engine.link_share import MEASURED_BYTES, TRAIN_BYTES, LinkShare
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    GraphHeader,
    Hello,
    Message,
    Piece,
    Push,
)
from edgeasync.protocol.pacing import Pacer
from edgeasync.protocol.transfers import (
    PIECE_BYTES_MIN,
    CreditWindow,
    IncomingStream,
    IncomingTransfer,
    OutgoingTransfer,
)

Send = Callable[[bytes, wire.Buffer | None], None]


class _Waiting(msgspec.Struct):
    """A queued message. `received_bytes` is the size of the piece that it credits.

    When the message is sent, this size is counted against the cap.
    """

    message: Message
    payload: wire.Buffer | None
    received_bytes: int


class Accepted(NamedTuple):
    """What a piece contributed to its transfer, which `message` announced.

    `payload` is the whole payload once it is complete. For a stream, `credit` is the credit to send
    once the piece is stored.
    """

    message: Assignment | GraphHeader
    payload: memoryview | None = None
    credit: Credit | None = None


class CountedHello:
    """Counts a device's `Hello` against its quota once the connection is established."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._nbytes = 0

    def send(self, nbytes: int) -> None:
        """Record that a `Hello` is sent."""
        self._nbytes = nbytes

    def settle(self, *, has_left: bool) -> None:
        """Count the `Hello` if it was transmitted; otherwise, drop it."""
        if self._nbytes and has_left:
            self._count(self._nbytes)
        self._nbytes = 0


class DeviceTransfers:
    """At most one transfer in each direction, over successive connections.

    `send` is the function with which the shell sends messages. `bandwidth_bytes_per_s_max` caps all
    traffic, in both directions together. `link_share` is the fraction of the measured bandwidth
    that all traffic may use.
    """

    def __init__(
        self,
        send: Send,
        now_s: Callable[[], float],
        bandwidth_bytes_per_s_max: int | None,
        link_share: float | None = None,
    ) -> None:
        self._send_frames = send
        self._now_s = now_s
        self._pacer = None if bandwidth_bytes_per_s_max is None else Pacer(bandwidth_bytes_per_s_max)
        self.share = None if link_share is None else LinkShare(link_share, bandwidth_bytes_per_s_max)
        self._waiting: deque[_Waiting] = deque()
        self._window: CreditWindow | None = None
        self._round_trip_s = math.inf
        self._message: Assignment | GraphHeader | None = None
        self._incoming: IncomingTransfer | None = None
        self._outgoing: OutgoingTransfer | None = None
        self._stream_number = 0
        """The number of the last transfer on this connection whose owner stores the pieces."""
        self._count = self._paid_bytes = 0

    # -- connection and time ---------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Process the loss of the connection.

        Suspend the incoming transfer, and drop the outgoing transfer and the queue.
        """
        self._message, self._stream_number = None, 0
        self._drop_outgoing()
        if self.share is not None:
            self.share.begin_train(0)
        if self._incoming is not None and not self._incoming.suspend():
            self._incoming = None
        self._drop_queued(lambda _: True)

    def next_deadline_s(self) -> float:
        """Return when the next queued message may be sent; infinity for an empty queue."""
        return self._pacer.due_s if self._pacer is not None and self._waiting else math.inf

    def tick(self) -> None:
        """Send the queued messages that are due."""
        while self._waiting and self._pacer is not None and self._now_s() >= self._pacer.due_s:
            first = self._waiting.popleft()
            self._pacer.spend(first.received_bytes, self._now_s())
            self._send_now(first.message, first.payload)

    @property
    def _is_narrow(self) -> bool:
        """Whether pieces have the minimum size, and the credit window starts with one piece."""
        return self._pacer is not None or self.share is not None

    def send(self, message: Message) -> None:
        """Send a message without a payload; queue it if it requests a payload."""
        match message:
            case Hello() if self._is_narrow:
                message = msgspec.structs.replace(message, piece_bytes_max=PIECE_BYTES_MIN)
            case Fetch() if self._incoming is not None and self._incoming.state in {"moving", "suspended"}:
                message = msgspec.structs.replace(message, partial=self._incoming.checksum)
        if isinstance(message, Fetch | FetchGraph):
            self._send_in_turn(message, None)
        else:
            self._send_now(message, None)

    def count_received(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Count a received message against the cap.

        The payload of a piece is counted later, when its credit is sent.
        """
        if self._pacer is not None:
            self._pacer.spend(len(header) + len(payload or b""), self._now_s())

    def observe_round_trip(self, round_trip_s: float) -> None:
        """Record a ping's round trip."""
        self._round_trip_s = min(self._round_trip_s, round_trip_s)
        if self._window is not None:
            at_rest = self._message is None and self._outgoing is None
            self._window.observe_round_trip(round_trip_s, at_rest=at_rest)

    # -- incoming payloads -----------------------------------------------------------------------------------

    def receive(self, message: Assignment | GraphHeader, stored_bytes: int | None = None) -> None:
        """Grant the first credit of an announced transfer.

        If the suspended transfer has the same payload, resume it. If `stored_bytes` is set, the
        caller stores the pieces, from this byte on.
        """
        self.drop_push()
        self._message, self._stream_number = message, 0
        before, self._incoming = self._incoming, None
        announced = message.transfer, message.checksum, message.payload_bytes
        if stored_bytes is not None:
            self._stream_number = message.transfer
            self._incoming = IncomingStream(
                message.transfer, message.payload_bytes, message.checksum, stored_bytes
            )
            self._measure_from(stored_bytes, message.payload_bytes)
        elif before is not None and before.suspend() and before.resume(*announced):
            self._incoming = before
        else:
            del before  # free its buffer before allocating another
            buffer = np.empty(message.payload_bytes, np.uint8).data
            self._incoming = IncomingTransfer(message.transfer, buffer, message.checksum)
            self._measure_from(0, message.payload_bytes)
        self._send_now(self._incoming.credit(), None)

    def _measure_from(self, start: int, end: int) -> None:
        """Measure the link with the next pieces of an incoming transfer, if it is long enough."""
        if self.share is not None and end - start >= TRAIN_BYTES:
            self.share.begin_train(start + MEASURED_BYTES)

    def accept(self, piece: Piece, part: wire.Buffer) -> Accepted | None:
        """Accept a piece, and credit it unless the caller stores it.

        Return `None` if the piece belongs to no transfer. Raises `ProtocolError` for an invalid
        piece; the caller must then call `drop_incoming`.
        """
        message, transfer = self._message, self._incoming
        if message is None or transfer is None or piece.transfer != transfer.number:
            return None
        self._incoming = None  # an invalid piece ends the transfer
        transfer.accept(piece, part)
        self._note_passed(piece.offset + len(part), up=False)
        is_complete = transfer.state == "complete"
        self._message, self._incoming = (None, None) if is_complete else (message, transfer)
        if isinstance(transfer, IncomingStream):
            return Accepted(message, credit=transfer.credit())
        self._send_in_turn(transfer.credit(), None, len(part))
        return Accepted(message, transfer.buffer if is_complete else None)

    def credit_stored(self, credit: Credit, nbytes: int) -> None:
        """Send the credit of a stored piece of this size, unless its connection was lost."""
        if credit.transfer == self._stream_number:
            self._send_in_turn(credit, None, nbytes)

    def drop_incoming(self) -> Assignment | GraphHeader | None:
        """Drop the incoming or suspended transfer; return the announcement of an incoming one."""
        message, transfer = self._message, self._incoming
        self._message, self._incoming, self._stream_number = None, None, 0
        if transfer is not None:
            transfer.drop()
        return message

    # -- outgoing payloads -----------------------------------------------------------------------------------

    def push(self, push: Push, payload: wire.Buffer, piece_bytes: int) -> None:
        """Drop the previous push; send this push whole, or announce it in pieces.

        Pieces are used if sending the whole payload would delay a heartbeat.
        """
        self.drop_push()
        window = self._window_of(piece_bytes)
        if len(payload) <= window.message_bytes_max:
            self._send_in_turn(push, payload)
            return
        if self.share is not None and self._pacer is not None:
            # Wait for half of the train's transfer time before sending it, and for the other half
            # afterwards.
            self._pacer.spend(TRAIN_BYTES // 2, self._now_s())
            self._paid_bytes = TRAIN_BYTES // 2
        self._count += 1
        self._outgoing = OutgoingTransfer(self._count, payload, window)
        self._send_in_turn(msgspec.structs.replace(push, transfer=self._count), None)

    def drop_push(self) -> None:
        """Drop the transfer and the queued messages of a push that was answered or is repeated."""
        self._drop_outgoing()
        self._drop_queued(lambda waiting: isinstance(waiting.message, Push | Piece))

    def credit(self, credit: Credit) -> bool:
        """Send the pieces that a credit allows.

        Return whether the credit belongs to the transfer.
        """
        transfer = self._outgoing
        if transfer is None or credit.transfer != transfer.number:
            return False
        self._note_passed(credit.received_bytes, up=True)
        is_train = self.share is not None and transfer.state == "announced"
        for piece, part in transfer.credit(credit, self._now_s()):
            if is_train:
                self._send_now(piece, part)
            else:
                self._send_in_turn(piece, part)
        if is_train and self._pacer is not None:
            self._pacer.give_back(self._paid_bytes)
            self._paid_bytes = 0
        if is_train and self.share is not None and len(transfer.payload) - credit.received_bytes >= TRAIN_BYTES:
            self.share.begin_train(credit.received_bytes + MEASURED_BYTES)
        if transfer.state == "complete":
            self._outgoing = None
        return True

    def _drop_outgoing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.drop()
        self._outgoing = None

    def _window_of(self, piece_bytes: int) -> CreditWindow:
        """Return the credit window for pieces of at most this size.

        Under a cap, pieces have the minimum size, and the window starts with one piece.
        """
        if self._is_narrow:
            piece_bytes = PIECE_BYTES_MIN
        if self._window is None or self._window.piece_bytes != piece_bytes or self.share is not None:
            start = {"start_bytes": PIECE_BYTES_MIN} if self._is_narrow else {}
            if self.share is not None:
                start = {"start_bytes": TRAIN_BYTES}
            self._window = CreditWindow(piece_bytes, **start)
            if self._round_trip_s < math.inf:
                self._window.observe_round_trip(self._round_trip_s, at_rest=False)
        return self._window

    def _note_passed(self, total_bytes: int, *, up: bool) -> None:
        """Record the progress of a train of pieces; adapt the pace if the measured rate changes."""
        if self.share is not None and self.share.note_passed(total_bytes, self._now_s(), up=up):
            self._pacer = self.share.pace(self._pacer, self._now_s())

    # -- the queue -------------------------------------------------------------------------------------------

    def _send_in_turn(self, message: Message, payload: wire.Buffer | None, received_bytes: int = 0) -> None:
        if self._pacer is None:
            self._send_now(message, payload)
            return
        self._waiting.append(_Waiting(message, payload, received_bytes))
        self.tick()

    def _send_now(self, message: Message, payload: wire.Buffer | None) -> None:
        header = wire.encode(message)
        if self._pacer is not None:
            self._pacer.spend(len(header) + len(payload or b""), self._now_s())
        if self._outgoing is not None and message.kind == Push.kind:
            self._outgoing.note_announced(self._now_s())
        self._send_frames(header, payload)

    def _drop_queued(self, is_over: Callable[[_Waiting], bool]) -> None:
        """Remove obsolete messages from the queue.

        The pieces that these messages credit are still counted against the cap.
        """
        kept: deque[_Waiting] = deque()
        for waiting in self._waiting:
            if not is_over(waiting):
                kept.append(waiting)
            elif self._pacer is not None:
                self._pacer.spend(waiting.received_bytes, self._now_s())
        self._waiting = kept
