"""The clients of the exchange benchmark, which are the same for every server.

They push, wait for the model and push again. So that clients do not limit the rate, they create
payloads once, unpack headers without checks, and count and discard each model.
"""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgpack
import msgspec
import numpy as np
import zmq

from edgeasync.net.channel import COPY_BELOW_BYTES
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Assignment,
    Credit,
    Fetch,
    Goodbye,
    Hello,
    Message,
    ModelVersion,
    Piece,
    Push,
    Refuse,
    Welcome,
)
from edgeasync.protocol.transfers import CreditWindow, OutgoingTransfer

SILENCE_MS = 30_000
"""How long a server may be silent before it counts as failed."""

LINGER_MS = 500
TRANSFER = 1
"""Transfer number of every push; it is constant so that `bare` can prepare its credits."""

SEQ = Push.__struct_fields__.index("seq")
BASE = Push.__struct_fields__.index("base")
ASSIGNED_TRANSFER = Assignment.__struct_fields__.index("transfer")
ASSIGNED_VERSION = Assignment.__struct_fields__.index("version")

_pack = msgpack.Packer(autoreset=True).pack


@dataclass(frozen=True)
class Round:
    """What a process's clients do next: join `address` as `names`."""

    address: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """When to count, on the clock that all processes share."""

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Counted:
    """What a process's clients did within the window."""

    updates: int
    updates_per_s: float
    refusals: int


def run_clients(length: int, pipe: "Connection[Counted | None, Round | Window | None]") -> None:
    """Take part in rounds until the pipe sends `None`.

    In each round: join, report ready, exchange within a window, leave.
    """
    payload = Payload(length)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    while isinstance(task := pipe.recv(), Round):
        clients = [Client(_connect(context, task.address), name, payload) for name in task.names]
        for client in clients:
            client.join()
        pipe.send(None)
        window = pipe.recv()
        assert isinstance(window, Window)
        _exchange(clients, window)
        for client in clients:
            client.leave()
        pipe.send(
            Counted(
                sum(client.updates for client in clients),
                sum(client.updates_per_s() for client in clients),
                sum(client.refusals for client in clients),
            )
        )


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    """Open a DEALER with the options of our agent."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.RCVHWM, 64)
    socket.set(zmq.RCVTIMEO, SILENCE_MS)
    socket.connect(address)
    return socket


def _exchange(clients: "list[Client]", window: Window) -> None:
    """Keep every client busy until the window closes and its last answer has arrived.

    A single client does not need a poller, because it waits only for its own answers.
    """
    for client in clients:
        client.start(window)
    if len(clients) == 1:
        (client,) = clients
        while client.busy:
            client.on_message()
        return
    poller = zmq.Poller()
    by_socket = {client.socket: client for client in clients}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    busy = len(clients)
    while busy:
        ready = poller.poll(SILENCE_MS)
        if not ready:
            raise TimeoutError("the server fell silent")
        for socket, _ in ready:
            client = by_socket[socket]
            client.on_message()
            if not client.busy:
                poller.unregister(socket)
                busy -= 1


class Payload:
    """The payload of a push, created once for all clients of a process."""

    def __init__(self, length: int) -> None:
        vector = np.random.default_rng(1).normal(0.0, 1e-3, length).astype(np.float32)
        self.buffer: wire.Buffer = vector.data.cast("B")
        self.copied = len(self.buffer) < COPY_BELOW_BYTES
        if self.copied:
            self.buffer = bytes(self.buffer)
        self.checksum = wire.checksum(self.buffer)


class Client:
    """One device: a connection with a push always in flight."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str, payload: Payload) -> None:
        self.socket = socket
        self.busy = False
        self.updates = self.refusals = 0
        self._name = name
        self._payload = payload
        self._window = Window(0.0, 0.0)
        self._first_s = self._last_s = 0.0
        self._received = 0
        self._transfer = 0
        self._acknowledged = False
        self._outgoing: OutgoingTransfer | None = None

    def join(self) -> None:
        """Join, agree on the piece size, and fetch the first model."""
        self._send(Hello(self._name, self._name.encode().ljust(16, b".")[:16], 1))
        welcome = wire.decode(self.socket.recv())
        if not isinstance(welcome, Welcome):
            raise TypeError(f"{welcome} instead of a welcome")
        self._session = welcome.session
        self._credit_window = CreditWindow(welcome.piece_bytes)
        self._in_pieces = len(self._payload.buffer) > welcome.piece_bytes
        push = Push(
            session=welcome.session,
            seq=1,
            base=ModelVersion("0" * 16, 0),
            local_steps=16,
            examples=512,
            loss_mean=1.0,
            loss_variance=0.1,
            step_s=0.01,
            codec="identity",
            checksum=self._payload.checksum,
            payload_bytes=len(self._payload.buffer),
            transfer=TRANSFER if self._in_pieces else 0,
        )
        self._push = msgspec.to_builtins(push, builtin_types=(bytes,))
        self._push[SEQ] = welcome.seq_last
        self._send(Fetch(welcome.session))
        self.busy = True
        while self.busy:
            self.on_message()

    def start(self, window: Window) -> None:
        """Start to exchange, and count within `window`."""
        self._window = window
        self.busy = True
        self._push_next()

    def leave(self) -> None:
        """Send a goodbye."""
        self._send(Goodbye("stopping", self._session))
        self.socket.close()

    def updates_per_s(self) -> float:
        """Return the rate between the first and the last answer in the window.

        Thus no fraction of an update is lost.
        """
        if self.updates < 2:
            return self.updates / (self._window.end_s - self._window.begin_s)
        return (self.updates - 1) / (self._last_s - self._first_s)

    def on_message(self) -> None:
        """Handle the next message."""
        _, kind, fields, _ = msgpack.unpackb(self.socket.recv())
        if kind == Assignment.kind:
            self._assigned(fields)
        elif kind == Piece.kind:
            self._piece()
        elif kind == Credit.kind:
            self._credit(fields)
        elif kind == Ack.kind:
            self._acknowledged = True
        elif kind == Refuse.kind:
            self._refused(fields)
        else:
            raise ValueError(f"a message of kind {kind} was not expected")

    def _assigned(self, fields: list[object]) -> None:
        self._push[BASE] = fields[ASSIGNED_VERSION]
        transfer = fields[ASSIGNED_TRANSFER]
        if not transfer:
            self.socket.recv(copy=self._payload.copied)
            self._complete()
            return
        assert isinstance(transfer, int)
        self._transfer, self._received = transfer, 0
        self._send(Credit(transfer, 0))

    def _piece(self) -> None:
        self._received += len(self.socket.recv(copy=False).buffer)
        self._send(Credit(self._transfer, self._received))
        if self._received == len(self._payload.buffer):
            self._complete()

    def _complete(self) -> None:
        """Count an answer within the window, and push again until the window closes."""
        now_s = time.monotonic()
        window = self._window
        if now_s >= window.end_s:
            self.busy = False
            return
        if now_s >= window.begin_s:
            if not self.updates:
                self._first_s = now_s
            self.updates += 1
            self._last_s = now_s
        self._push_next()

    def _push_next(self) -> None:
        self._push[SEQ] += 1
        self._send_push()

    def _send_push(self) -> None:
        self._acknowledged = False
        # Like `wire.encode`, without the checks. A push is long enough to need no padding.
        header = _pack((PROTOCOL_VERSION, Push.kind, self._push, b""))
        payload = self._payload
        if self._in_pieces:
            self._outgoing = OutgoingTransfer(TRANSFER, payload.buffer, self._credit_window)
            self.socket.send(header)
        else:
            self.socket.send(header, zmq.SNDMORE)
            self.socket.send(payload.buffer, 0, payload.copied)

    def _credit(self, fields: list[int]) -> None:
        assert self._outgoing is not None
        for piece, part in self._outgoing.credit(Credit(*fields), time.monotonic()):
            self.socket.send(wire.encode(piece), zmq.SNDMORE)
            self.socket.send(part, copy=False)

    def _refused(self, fields: list[object]) -> None:
        """Wait as the refusal asks, then request what is missing."""
        refuse = msgspec.convert(fields, Refuse)
        if refuse.code != "busy":
            raise ValueError(f"refused: {refuse.sentence}")
        self.refusals += 1
        time.sleep(refuse.retry_after_s or 0.0)
        if self._acknowledged or not self._push[SEQ]:
            self._send(Fetch(self._session))
        else:
            self._send_push()

    def _send(self, message: Message) -> None:
        self.socket.send(wire.encode(message))
