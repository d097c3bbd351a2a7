"""The hub's shell: a ROUTER socket, the core, the model, one worker for large folds, and the model's file.

Small models are folded on the loop, which takes microseconds. Large ones are measured and folded by one
worker thread, in order; whatever depends on a fold (answers, saving, the end) waits in line behind it, while
heartbeats are answered at once.
"""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from edgeasync.core.effects import (
    Assign,
    Discard,
    Fold,
    Forget,
    HubEffect,
    Receive,
    Report,
    Save,
    Send,
    SendStatus,
    Stop,
)
from edgeasync.core.events import Heard, HubEvent, Malformed, Peer, PushArrived, Received, StopRequested
from edgeasync.core.hub import HubCore
from edgeasync.core.model import Model, Snapshot, Update
from edgeasync.core.settings import HubCoreSettings
from edgeasync.errors import AddressError, ConfigError, ProtocolError, StorageError
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.policy import Judgement
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import CODECS, find_codec
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Fetch,
    Hello,
    Leave,
    Message,
    ModelVersion,
    Piece,
    Ping,
    Push,
    Refuse,
    Status,
    StatusRequest,
)
from edgeasync.protocol.transfers import CreditWindow, IncomingTransfer, OutgoingTransfer
from edgeasync.runtime.channel import Channel
from edgeasync.runtime.files import MODEL_FILE, load_model, save_model
from edgeasync.runtime.worker import Worker

INLINE_BYTES_MAX = 2 << 20
"""Models up to this size are folded on the loop: a fold then takes less time than handing it over and back."""

LINGER_MS = 500
"""How long a closing hub goes on sending its goodbyes."""

CLOSE_S = 60.0
"""How long a stopping hub waits for its last fold and for the disk."""

OnReport = Callable[[Report], None]


class Hub:
    """Holds the model and trains it with whatever devices come.

    `run` serves until the stop condition or `request_stop`; it returns why it ended. Raises `AddressError` if
    the address cannot be bound, `StorageError` or `ModelMismatchError` if the run folder's model is unusable.
    """

    def __init__(
        self,
        *,
        spec: ParameterSpec,
        initial: Callable[[], Vector],
        judgement: Judgement,
        bind: str,
        run: Path,
        settings: HubCoreSettings,
        training: dict[str, Any] | None = None,
        insecure: bool = False,
        on_report: OnReport | None = None,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        check_bind(bind, insecure=insecure)
        if spec.length > settings.limits.parameters_max:
            raise ConfigError(
                f"the model has {spec.length} parameters, over limits.parameters_max = "
                f"{settings.limits.parameters_max}; raise that limit"
            )
        for name in (settings.push_codec, settings.model_codec):
            if name not in CODECS:
                raise ConfigError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
        self.spec = spec
        self.address = bind
        self.model_file = run / MODEL_FILE
        self._initial = initial
        self._judgement = judgement
        self._training = training or {}
        self._settings = settings
        self._limits = settings.limits
        self._on_report = on_report or (lambda _: None)
        self._context = context
        self._incoming: dict[Peer, tuple[Push, IncomingTransfer]] = {}
        self._outgoing: dict[Peer, OutgoingTransfer] = {}
        self._windows: dict[Peer, CreditWindow] = {}
        self._transfers = 0
        self._measuring = 0
        self._ordered: deque[HubEffect] = deque()
        self._folding = False
        self._saving = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Serve until training is finished or a stop is requested; return the reason."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[str] = self._loop.create_future()
        self._started_s = time.monotonic()
        vector, number, resumed = self._restore()
        self._model = Model(self.spec, vector, number, self._judgement.optimizer)
        self.core = HubCore(
            spec=self.spec,
            training=self._training,
            judgement=self._judgement,
            settings=self._settings,
            version=ModelVersion(secrets.token_hex(8), number),
            make_session=lambda: secrets.token_bytes(16),
            now_s=self._started_s,
        )
        context = self._context or zmq.Context()
        try:
            socket = self._bind(context)
            self._channel = Channel(socket, self._loop, self._on_message, self._schedule_tick)
            self._channel.large_payloads = self.spec.nbytes >= wire.HEADER_BYTES_MIN * 1024
            self._worker = Worker("fold", self._fail_from_thread)
            self._saver = Worker("save", self._fail_from_thread)
            self._worker.start()
            self._saver.start()
            try:
                self._report(Report("listening", detail=self.address))
                if resumed:
                    self._report(Report("resumed", detail=f"{self.model_file}, version {number}"))
                self._schedule_tick()
                return await self._done
            finally:
                self._close()
        finally:
            if self._context is None:
                context.term()

    def request_stop(self) -> None:
        """Say goodbye to the devices, save the model, and let `run` return."""
        self._execute(self.core.handle(StopRequested(), time.monotonic()))

    def _restore(self) -> tuple[Vector, int, bool]:
        try:
            self.model_file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.model_file.parent}: cannot be made: {error.strerror}; choose another --run folder"
            ) from error
        if self.model_file.exists():
            return *load_model(self.model_file, self.spec), True
        return self._initial(), 0, False

    def _bind(self, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
        context.set(zmq.MAX_SOCKETS, 65535) if self._context is None else None
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.MAXMSGSIZE, max(wire.HEADER_BYTES_MAX, int(self._limits.piece_bytes)))
        socket.set(zmq.BACKLOG, 4096)
        socket.set(zmq.SNDHWM, 64)
        socket.set(zmq.RCVHWM, 64)
        socket.set(zmq.LINGER, 0)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise AddressError(
                f"{self.address}: cannot be bound: {error.strerror}; stop whatever uses it or give another --bind"
            ) from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._worker.close(CLOSE_S)
        if not self._saver.close(CLOSE_S):
            self._report(Report("warning", detail=f"{self.model_file}: not written in {CLOSE_S:g} s"))
        self._outgoing.clear()
        self._channel.close(LINGER_MS)

    # -- time ------------------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        due_s = self.core.next_deadline_s()
        if self._timer is not None:
            if due_s >= self._timer_at_s:
                return
            self._timer.cancel()
        self._timer_at_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._execute(self.core.tick(time.monotonic(), room=self._room_to_send()))
        if not self._done.done():
            self._schedule_tick()

    # -- messages in -----------------------------------------------------------------------------------------

    def _on_message(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        now_s = time.monotonic()
        try:
            message = wire.decode(header)
            event = self._event(peer, message, payload, now_s)
        except wire.UnsupportedVersionError as error:
            self._send(peer, Refuse("protocol_version", f"{error}; install the same edgeasync on both"))
            event = Malformed(peer, str(error), strike=False)
        except ProtocolError as error:
            event = Malformed(peer, str(error))
        if event is not None:
            self._execute(self.core.handle(event, now_s))

    def _event(self, peer: Peer, message: Message, payload: wire.Buffer | None, now_s: float) -> HubEvent | None:
        """Turn a message into the core's event; `None` where a worker makes it later."""
        if isinstance(message, Push):
            return self._push(peer, message, payload)
        if isinstance(message, Piece):
            return self._piece(peer, message, payload)
        if payload is not None:
            raise ProtocolError(f"a {type(message).__name__} has no payload")
        if isinstance(message, Credit):
            return self._credit(peer, message, now_s)
        if isinstance(message, Hello | Fetch | Ping | Leave | StatusRequest):
            return Received(peer, message, self._room_to_send())
        raise ProtocolError(f"a {type(message).__name__} is for devices, not for a hub")

    def _push(self, peer: Peer, push: Push, payload: wire.Buffer | None) -> HubEvent:
        codec = find_codec(push.codec, push.payload_bytes, self.spec.length)
        if push.transfer:
            if payload is not None:
                raise ProtocolError("a push in pieces carries its payload itself")
            room = self._room_to_receive() and len(self._incoming) < self._limits.transfers_max
            return Received(peer, push, room)
        if payload is None or len(payload) != push.payload_bytes:
            raise ProtocolError("the payload is not as long as its header says")
        if wire.checksum(payload) != push.checksum:
            raise ProtocolError("the payload does not have the checksum it was announced with")
        update = Update(codec, payload)
        norm = update.norm(self.spec.length)
        room = self._room_to_receive() and self._room_to_send()
        return PushArrived(peer, push, self._model.keep(update), norm, room)

    def _piece(self, peer: Peer, piece: Piece, payload: wire.Buffer | None) -> HubEvent | None:
        under_way = self._incoming.get(peer)
        if under_way is None or payload is None:
            return Malformed(peer, "a piece without a transfer", strike=False)
        push, transfer = under_way
        try:
            transfer.accept(piece, payload)
        except ProtocolError:
            del self._incoming[peer]
            raise
        if not transfer.complete:
            self._send(peer, transfer.credit())
            return Heard(peer, "piece")
        del self._incoming[peer]
        self._measuring += 1
        update = Update(CODECS[push.codec], transfer.buffer)
        self._worker.submit(partial(self._measure, peer, push, update))
        return None

    def _measure(self, peer: Peer, push: Push, update: Update) -> None:
        """In the worker: look at every value of a large update."""
        norm = update.norm(self.spec.length)
        self._loop.call_soon_threadsafe(self._measured, peer, push, update, norm)

    def _measured(self, peer: Peer, push: Push, update: Update, norm: float) -> None:
        self._measuring -= 1
        event = PushArrived(peer, push, self._model.keep(update), norm, self._room_to_send())
        self._execute(self.core.handle(event, time.monotonic()))

    def _credit(self, peer: Peer, credit: Credit, now_s: float) -> HubEvent:
        transfer = self._outgoing.get(peer)
        if transfer is None or transfer.transfer != credit.transfer:
            return Malformed(peer, "credit without a transfer", strike=False)
        for piece, part in transfer.credit(credit, now_s):
            self._send(peer, piece, part)
        if transfer.complete:
            del self._outgoing[peer]
        return Heard(peer, "credit")

    def _room_to_receive(self) -> bool:
        return self._model.updates_waiting + self._measuring < self._limits.queued_updates_max

    def _room_to_send(self) -> bool:
        return (
            self._model.snapshots_alive < self._limits.snapshots_max
            and len(self._outgoing) < self._limits.transfers_max
        )

    # -- effects out -----------------------------------------------------------------------------------------

    def _execute(self, effects: list[HubEffect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect.peer, effect.message)
                case Assign() | Fold() | Save() | Stop():
                    self._ordered.append(effect)
                case Discard():
                    self._model.release(effect.handle)
                case Receive():
                    self._receive(effect.peer, effect.push)
                case SendStatus():
                    self._send_status(effect.peer)
                case Forget():
                    self._incoming.pop(effect.peer, None)
                    self._outgoing.pop(effect.peer, None)
                    self._windows.pop(effect.peer, None)
                case Report():
                    self._report(effect)
        self._advance()

    def _advance(self) -> None:
        """Carry out what is in line, up to a fold that the worker is busy with."""
        while self._ordered and not self._folding:
            effect = self._ordered.popleft()
            match effect:
                case Fold():
                    self._fold(effect)
                case Assign():
                    self._assign(effect)
                case Save():
                    self._save()
                case Stop() if not self._done.done():
                    self._done.set_result(effect.reason)

    def _fold(self, fold: Fold) -> None:
        updates = [self._model.release(handle) for handle in fold.handles]
        if self.spec.nbytes <= INLINE_BYTES_MAX:
            self._model.advance(self._model.fold(fold, updates))
            return
        self._folding = True

        def work() -> None:
            snapshot = self._model.fold(fold, updates)
            snapshot.payload(self._settings.model_codec)
            self._loop.call_soon_threadsafe(self._folded, snapshot)

        self._worker.submit(work)

    def _fail_from_thread(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """End the hub: what fails in a thread is our fault, and never silent."""
        if not self._done.done():
            self._done.set_exception(error)

    def _folded(self, snapshot: Snapshot) -> None:
        self._folding = False
        self._model.advance(snapshot)
        self._advance()

    def _assign(self, effect: Assign) -> None:
        payload, checksum = self._model.current.payload(effect.codec)
        piece_bytes = int(self._limits.piece_bytes)
        transfer = 0
        if len(payload) > piece_bytes:
            self._transfers += 1
            transfer = self._transfers
            window = self._windows.setdefault(effect.peer, CreditWindow(piece_bytes))
            self._outgoing[effect.peer] = OutgoingTransfer(transfer, payload, piece_bytes, window)
        message = Assignment(
            version=effect.version,
            local_steps=effect.local_steps,
            codec=effect.codec,
            checksum=checksum,
            payload_bytes=len(payload),
            transfer=transfer,
            ack=effect.ack,
        )
        self._send(effect.peer, message, None if transfer else payload)

    def _receive(self, peer: Peer, push: Push) -> None:
        transfer = IncomingTransfer(push.transfer, push.payload_bytes, push.checksum)
        self._incoming[peer] = (push, transfer)
        self._send(peer, transfer.credit())

    def _send(self, peer: Peer, message: Message, payload: wire.Buffer | None = None) -> None:
        # A peer that is gone, or takes nothing in, is left to its lease: it will say again what it needs.
        self._channel.send(peer, wire.encode(message), payload)

    def _send_status(self, peer: Peer) -> None:
        now_s = time.monotonic()
        status = self.core.status(now_s) | {
            "address": self.address,
            "pid": os.getpid(),
            "uptime_s": round(now_s - self._started_s, 3),
            "model_file": str(self.model_file.resolve()),
            "parameters": self.spec.length,
        }
        self._send(peer, Status(), msgspec.json.encode(status))

    def _save(self) -> None:
        """Write the current snapshot in the saver's thread; one at a time, in order."""
        snapshot, lineage = self._model.current, self.core.lineage

        def work() -> None:
            try:
                save_model(self.model_file, self.spec, snapshot.vector, lineage=lineage, version=snapshot.number)
            except StorageError as error:
                self._loop.call_soon_threadsafe(self._report, Report("warning", detail=str(error)))
            finally:
                self._saving = False

        if not self._saving or self.core.stopped:
            self._saving = True
            self._saver.submit(work)

    def _report(self, report: Report) -> None:
        self._on_report(report)


def check_bind(address: str, *, insecure: bool) -> None:
    """Raise `AddressError` unless the address can be bound without keys: loopback only, or told `insecure`."""
    transport, _, place = address.partition("://")
    if transport in ("ipc", "inproc") and place:
        return
    host, _, port = place.rpartition(":")
    if transport != "tcp" or not host or not (port.isdigit() or port == "*"):
        raise AddressError(f"{address!r} is not an address; write tcp://HOST:PORT, such as tcp://127.0.0.1:5555")
    loopback = host in ("localhost", "[::1]") or host.startswith("127.")
    if not loopback and not insecure:
        raise AddressError(
            f"{address}: anybody on that network could join; bind to 127.0.0.1, or say --insecure if you trust it"
        )
