"""The three servers of the exchange benchmark: our hub and two blocking baselines.

`fair` does all of the hub's work on a model (decode, checksum, norm, fold, snapshot, checksum,
encode) in a plain blocking loop, without sessions, membership or an event loop. `bare` only moves
bytes and is therefore the ceiling. All use the same frames.
"""

import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import zmq

from benchmarks.hub_process import ADDRESS, POLICY, make_spec, serve_hub
from edgeasync.core.arrays.buffers import BufferPool
from edgeasync.core.arrays.combine import norm_of
from edgeasync.core.arrays.hub_model import HubModel, Snapshot
from edgeasync.core.hub.effects import Fold
from edgeasync.core.hub.settings import Limits
from edgeasync.net.channel import COPY_BELOW_BYTES
from edgeasync.net.hub_listener import QUEUED_MESSAGES_MAX
from edgeasync.parameters import Vector
from edgeasync.policies.staleness import Staleness
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Assignment,
    Credit,
    Fetch,
    Hello,
    Message,
    ModelVersion,
    Piece,
    Push,
    Welcome,
)
from edgeasync.protocol.transfers import CreditWindow, IncomingTransfer, OutgoingTransfer

LINEAGE = "0" * 16
PIECE_BYTES = int(Limits().piece_bytes)
WINDOW_PIECES = 4
"""Pieces in flight with a fully open credit window, as on a loopback link."""

Socket = zmq.Socket[bytes]
Frames = tuple[bytes, bytes, wire.Buffer | None]


def serve_fair(length: int, run: str, pipe: "Connection[str, None]") -> None:  # noqa: ARG001
    """Run the baseline that does our work in a blocking loop."""
    FairServer(_bind(pipe), length).serve()


def serve_bare(length: int, run: str, pipe: "Connection[str, None]") -> None:  # noqa: ARG001
    """Run the baseline that only moves bytes."""
    BareServer(_bind(pipe), length).serve()


Serve = Callable[[int, str, "Connection[str, None]"], None]

SERVERS: dict[str, Serve] = {
    "ours": serve_hub,
    "fair": serve_fair,
    "bare": serve_bare,
}


def _bind(pipe: "Connection[str, None]") -> Socket:
    """Create a ROUTER with the options of our hub and send its address."""
    context: zmq.Context[Socket] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.MAXMSGSIZE, max(wire.HEADER_BYTES_MAX, PIECE_BYTES))
    socket.set(zmq.BACKLOG, 4096)
    socket.set(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
    socket.set(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    socket.set(zmq.LINGER, 0)
    socket.bind(ADDRESS)
    pipe.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket


class BlockingServer:
    """A blocking loop around a ROUTER, with the copy modes of our `Channel`."""

    def __init__(self, socket: Socket, length: int) -> None:
        self.spec = make_spec(length)
        self._socket = socket
        self._large = self.spec.nbytes >= COPY_BELOW_BYTES

    def serve(self) -> NoReturn:
        """Answer messages one after the other until the process is killed."""
        while True:
            self.on_message(*self._receive())

    def on_message(self, peer: bytes, header: bytes, payload: wire.Buffer | None) -> None:
        """Answer a message."""
        raise NotImplementedError

    def send(self, peer: bytes, header: bytes, payload: wire.Buffer | None = None) -> None:
        """Send a message; drop it if the peer has gone."""
        send = self._socket.send
        try:
            send(peer, zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return
            raise
        if payload is None:
            send(header)
        else:
            send(header, zmq.SNDMORE)
            send(payload, 0, len(payload) < COPY_BELOW_BYTES)

    def make_welcome(self) -> bytes:
        """Return the answer to every `Hello`."""
        return wire.encode(
            Welcome(
                session=bytes(16),
                spec=self.spec,
                settings={},
                seq_last=0,
                push_codec="identity",
                heartbeat_s=5.0,
                lease_s=15.0,
                piece_bytes=PIECE_BYTES,
            )
        )

    def _receive(self) -> Frames:
        receive = self._socket.recv
        peer, header = receive(), receive()
        if not self._socket.getsockopt(zmq.RCVMORE):
            return peer, header, None
        if not self._large:
            return peer, header, receive()
        frame = self._socket.recv(copy=False)
        return peer, header, frame.bytes if len(frame.buffer) < COPY_BELOW_BYTES else frame.buffer


class FairServer(BlockingServer):
    """Do all of the hub's work on a model, with its own functions, message by message."""

    def __init__(self, socket: Socket, length: int) -> None:
        super().__init__(socket, length)
        self._policy = POLICY
        self._model = HubModel(self.spec, np.zeros(length, np.float32), 0, self._policy)
        self._buffers = BufferPool(self.spec.nbytes)
        self._incoming: dict[bytes, tuple[Push, IncomingTransfer]] = {}
        self._outgoing: dict[bytes, OutgoingTransfer] = {}
        self._windows: dict[bytes, CreditWindow] = {}
        self._transfers = itertools.count(1)

    def on_message(self, peer: bytes, header: bytes, payload: wire.Buffer | None) -> None:
        """Fold the pushed update and answer with the new model."""
        match wire.decode(header):
            case Push() as push:
                self._push(peer, push, payload)
            case Piece() as piece:
                self._piece(peer, piece, payload)
            case Credit() as credit:
                self._credit(peer, credit)
            case Hello():
                self.send(peer, self.make_welcome())
            case Fetch():
                self._assign(peer, None)
            case _:
                self._forget(peer)

    def _push(self, peer: bytes, push: Push, payload: wire.Buffer | None) -> None:
        if push.transfer:
            buffer = self._buffers.take()[: push.payload_bytes].data
            transfer = IncomingTransfer(push.transfer, buffer, push.checksum)
            self._incoming[peer] = (push, transfer)
            self._send(peer, transfer.credit())
            return
        if payload is None or wire.checksum(payload) != push.checksum:
            raise ValueError("the payload is missing or damaged")
        self._fold(peer, push, payload)

    def _piece(self, peer: bytes, piece: Piece, payload: wire.Buffer | None) -> None:
        push, transfer = self._incoming[peer]
        assert payload is not None
        transfer.accept(piece, payload)
        if transfer.state != "complete":
            self._send(peer, transfer.credit())
            return
        del self._incoming[peer]
        self._fold(peer, push, transfer.buffer)

    def _fold(self, peer: bytes, push: Push, payload: wire.Buffer) -> None:
        model, policy = self._model, self._policy
        update = make_codec(push.codec, self.spec).open(payload)
        norm = norm_of(update)
        weight = policy.staleness(Staleness(model.current.number - push.base.number))
        assert weight is not None
        number = model.current.number + 1
        plan = plan_chain(policy.optimizer, Conditions(weight * norm, number))
        model.advance(model.fold(Fold(number, (0,), (weight,), plan), [update])[0])
        self._assign(peer, Ack(push.seq, Applied(number)))

    def _assign(self, peer: bytes, ack: Ack | None) -> None:
        snapshot = self._model.current
        payload, checksum = snapshot.payload(make_codec("identity", self.spec))
        transfer = 0
        if len(payload) > PIECE_BYTES:
            transfer = next(self._transfers)
            window = self._windows.setdefault(peer, CreditWindow(PIECE_BYTES))
            self._outgoing[peer] = OutgoingTransfer(transfer, payload, window)
        self._send(
            peer,
            make_assignment(snapshot, checksum, len(payload), transfer, ack),
            None if transfer else payload,
        )

    def _credit(self, peer: bytes, credit: Credit) -> None:
        transfer = self._outgoing[peer]
        for piece, part in transfer.credit(credit, time.monotonic()):
            self._send(peer, piece, part)
        if transfer.state == "complete":
            del self._outgoing[peer]

    def _forget(self, peer: bytes) -> None:
        tables: tuple[dict[bytes, Any], ...] = (self._incoming, self._outgoing, self._windows)
        for table in tables:
            table.pop(peer, None)

    def _send(self, peer: bytes, message: Message, payload: wire.Buffer | None = None) -> None:
        self.send(peer, wire.encode(message), payload)


class BareServer(BlockingServer):
    """Move bytes only: read a header's kind and lengths, and answer with prepared frames."""

    def __init__(self, socket: Socket, length: int) -> None:
        super().__init__(socket, length)
        vector: Vector = np.zeros(length, np.float32)
        self._payload = make_codec("identity", self.spec).encode(VectorSource(vector))
        self._in_pieces = len(self._payload) > PIECE_BYTES
        transfer = int(self._in_pieces)
        checksum = wire.checksum(self._payload)
        ack = Ack(1, Applied(1))
        snapshot = Snapshot(1, vector)
        self._assignment = wire.encode(make_assignment(snapshot, checksum, len(self._payload), transfer, ack))
        self._welcome = self.make_welcome()
        self._pieces = self._make_pieces() if self._in_pieces else []
        self._credits: dict[int, bytes] = {}
        self._received: dict[bytes, int] = {}
        self._sent: dict[bytes, int] = {}

    def _make_pieces(self) -> list[tuple[bytes, memoryview]]:
        view = memoryview(self._payload)
        parts = [(start, view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES)]
        return [(wire.encode(Piece(1, start, wire.checksum(part))), part) for start, part in parts]

    def on_message(self, peer: bytes, header: bytes, payload: wire.Buffer | None) -> None:
        """Answer with the right number of bytes."""
        kind = header[2]  # after the byte of the array and the protocol version
        if kind == Push.kind:
            if self._in_pieces:
                self._received[peer] = 0
                self.send(peer, self._credit(0))
            else:
                self.send(peer, self._assignment, self._payload)
        elif kind == Piece.kind:
            self._piece(peer, payload)
        elif kind == Credit.kind:
            self._send_pieces(peer)
        elif kind == Hello.kind:
            self.send(peer, self._welcome)
        elif kind == Fetch.kind:
            self._assign(peer)
        else:
            self._received.pop(peer, None)
            self._sent.pop(peer, None)

    def _piece(self, peer: bytes, payload: wire.Buffer | None) -> None:
        assert payload is not None
        received = self._received[peer] = self._received[peer] + len(payload)
        if received == len(self._payload):
            self._assign(peer)
        else:
            self.send(peer, self._credit(received))

    def _assign(self, peer: bytes) -> None:
        self._sent[peer] = 0
        self.send(peer, self._assignment, None if self._in_pieces else self._payload)

    def _send_pieces(self, peer: bytes) -> None:
        """Open the window on a transfer's first credit; each later credit releases one piece."""
        sent = self._sent[peer]
        for header, part in self._pieces[sent : sent + (1 if sent else WINDOW_PIECES)]:
            self.send(peer, header, part)
            self._sent[peer] += 1

    def _credit(self, received: int) -> bytes:
        header = self._credits.get(received)
        if header is None:
            header = self._credits[received] = wire.encode(Credit(1, received))
        return header


def make_assignment(
    snapshot: Snapshot, checksum: int, payload_bytes: int, transfer: int, ack: Ack | None
) -> Assignment:
    """Return the answer that carries a snapshot."""
    return Assignment(
        version=ModelVersion(LINEAGE, snapshot.number),
        local_steps=16,
        codec="identity",
        checksum=checksum,
        payload_bytes=payload_bytes,
        transfer=transfer,
        ack=ack,
    )
