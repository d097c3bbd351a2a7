"""The device's shell: a DEALER socket, the core, and one worker thread that trains.

The event loop talks while the worker computes: onnxruntime and numpy release the interpreter's lock, so pings
leave on time however long a step takes.
"""

import asyncio
import os
import platform
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version as installed_version
from random import Random

import msgspec
import zmq

from edgeasync.core.device import (
    Adopt,
    Adopted,
    AdoptionFailed,
    Arrived,
    Close,
    DeviceCore,
    DeviceEffect,
    DeviceEvent,
    Finish,
    Join,
    Open,
    Say,
    SendPush,
    StopRequested,
    Tell,
    Train,
    Trained,
    TransferMoved,
)
from edgeasync.errors import AddressError, ModelMismatchError, ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import CODECS, find_codec
from edgeasync.protocol.messages import Assignment, Credit, DeviceProfile, Message, Piece, Push, Welcome
from edgeasync.protocol.transfers import CreditWindow, IncomingTransfer, OutgoingTransfer
from edgeasync.runtime.channel import Channel
from edgeasync.runtime.files import DeviceIdentity
from edgeasync.runtime.worker import Worker
from edgeasync.training.device_model import DeviceModel
from edgeasync.training.trainer import Trainer, TrainingResult, take_local_steps

CLOSE_S = 1.0
"""How long a stopping agent waits for the local step under way; a longer one is abandoned."""

LINGER_MS = 300
"""How long a closing agent goes on sending its goodbye."""

PARAMETERS_MAX = 250_000_000
"""A hub that describes a larger model is not believed."""

OnTell = Callable[[Tell], None]
MakeTrainer = Callable[[Welcome], Trainer]


class Agent:
    """Trains on this device for the hub at `address`, for as long as it takes.

    `make_trainer` is called once, when the hub has described its model; `fingerprint` pins a model that the
    device insists on. `run` returns why it ended; it raises what waiting does not mend: `ModelMismatchError`,
    `RefusedError`, `AddressError`, and whatever `make_trainer` or the trainer raises.
    """

    def __init__(
        self,
        address: str,
        *,
        identity: DeviceIdentity,
        make_trainer: MakeTrainer,
        examples: int = 0,
        fingerprint: str | None = None,
        step_s_min: float = 0.0,
        on_tell: OnTell | None = None,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self.address = address
        self.steps_total = 0
        self._make_trainer = make_trainer
        self._step_s_min = step_s_min
        self._on_tell = on_tell or (lambda _: None)
        self._given_context = context
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._trainer: Trainer | None = None
        self._model: DeviceModel | None = None
        self._arrived: tuple[Assignment, wire.Buffer | None] | None = None
        self._incoming: tuple[Assignment, IncomingTransfer] | None = None
        self._outgoing: OutgoingTransfer | None = None
        self._window: CreditWindow | None = None
        self._payload: wire.Buffer = b""
        self._checksum = 0
        self._times_sent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._core = DeviceCore(
            device_id=identity.device_id,
            state_id=bytes.fromhex(identity.state_id),
            start=identity.start,
            profile=describe_machine(examples),
            codecs=tuple(CODECS),
            fingerprint=fingerprint,
            random=Random(identity.state_id + str(identity.start)),
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Train until the hub has finished or a stop is requested; return the reason."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[str] = self._loop.create_future()
        self._context = self._given_context or zmq.Context()
        self._worker = Worker("train", self._fail_from_thread)
        self._worker.start()
        try:
            self._execute(self._core.begin(time.monotonic()))
            return await self._done
        finally:
            self._stopping.set()
            if self._timer is not None:
                self._timer.cancel()
            self._worker.close(CLOSE_S)
            if self._channel is not None:
                self._channel.close(LINGER_MS)
            if self._given_context is None:
                self._context.term()

    def request_stop(self) -> None:
        """Say goodbye to the hub and let `run` return; a local step that takes long is abandoned."""
        self._handle(StopRequested())

    def _handle(self, event: DeviceEvent) -> None:
        self._execute(self._core.handle(event, time.monotonic()))

    def _tick(self) -> None:
        self._execute(self._core.tick(time.monotonic(), self.steps_total))

    def _execute(self, effects: list[DeviceEffect]) -> None:
        try:
            for effect in effects:
                self._carry_out(effect)
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._core.next_deadline_s()
        if due_s is not None and not self._done.done():
            self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._tick)

    def _fail_from_thread(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    # -- effects ---------------------------------------------------------------------------------------------

    def _carry_out(self, effect: DeviceEffect) -> None:
        match effect:
            case Open():
                self._open()
            case Close():
                self._close()
            case Say():
                self._send(effect.message)
            case SendPush():
                self._push(effect.push)
            case Join():
                self._join(effect.welcome)
            case Adopt():
                self._adopt(effect.assignment)
            case Train():
                self._submit(partial(self._train, effect.local_steps))
            case Tell():
                self._on_tell(effect)
            case Finish():
                self._finish(effect)

    def _open(self) -> None:
        self._close()
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, 64)
        socket.set(zmq.MAXMSGSIZE, 1 << 30)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise AddressError(
                f"{self.address!r} is not an address to connect to ({error.strerror}); write tcp://HOST:PORT"
            ) from error
        self._channel = Channel(socket, self._loop, self._on_message)
        self._channel.large_payloads = True

    def _close(self) -> None:
        self._incoming = self._outgoing = self._arrived = None
        if self._channel is not None:
            self._channel.close(0)
            self._channel = None

    def _send(self, message: Message, payload: wire.Buffer | None = None) -> None:
        if self._channel is not None:
            self._channel.send(b"", wire.encode(message), payload)

    def _join(self, welcome: Welcome) -> None:
        if welcome.spec.length > PARAMETERS_MAX:
            raise ModelMismatchError(f"the hub's model has {welcome.spec.length} parameters: too many to believe")
        self._trainer = self._make_trainer(welcome)
        if self._trainer.spec != welcome.spec:
            raise ModelMismatchError(
                "the trainer's parameters are not the hub's: give both the same model, names and shapes included"
            )
        self._model = DeviceModel(welcome.spec)
        self._window = CreditWindow(welcome.piece_bytes)

    def _push(self, push: Push) -> None:
        assert self._core.welcome is not None
        assert self._window is not None
        piece_bytes = self._core.welcome.piece_bytes
        in_pieces = len(self._payload) > piece_bytes
        push = msgspec.structs.replace(
            push,
            checksum=self._checksum,
            payload_bytes=len(self._payload),
            transfer=push.seq if in_pieces else 0,
        )
        self._times_sent += 1
        if in_pieces:
            self._outgoing = OutgoingTransfer(push.transfer, self._payload, piece_bytes, self._window)
            self._send(push)
        else:
            self._send(push, self._payload)

    def _adopt(self, assignment: Assignment) -> None:
        """Take the assignment's payload from the message that brought it, or open its transfer."""
        assert self._arrived is not None
        assert self._core.welcome is not None
        payload = self._arrived[1]
        self._incoming = self._outgoing = None
        try:
            find_codec(assignment.codec, assignment.payload_bytes, self._core.welcome.spec.length)
        except ProtocolError as error:
            self._handle(AdoptionFailed(str(error)))
            return
        if assignment.transfer:
            transfer = IncomingTransfer(assignment.transfer, assignment.payload_bytes, assignment.checksum)
            self._incoming = (assignment, transfer)
            self._send(transfer.credit())
        elif payload is None or wire.checksum(payload) != assignment.checksum:
            self._handle(AdoptionFailed("the model's payload does not have its checksum"))
        else:
            self._submit(partial(self._decode, assignment, payload))

    def _finish(self, finish: Finish) -> None:
        self._stopping.set()
        if self._done.done():
            return
        if finish.error is not None:
            self._done.set_exception(finish.error)
        else:
            self._done.set_result(finish.reason)

    # -- messages in -----------------------------------------------------------------------------------------

    def _on_message(self, _: bytes, header: bytes, payload: wire.Buffer | None) -> None:
        try:
            message = wire.decode(header)
            match message:
                case Piece():
                    self._piece(message, payload)
                case Credit():
                    self._credit(message)
                case Assignment():
                    self._arrived = (message, payload)
                    self._handle(Arrived(message))
                    self._arrived = None
                case _:
                    self._handle(Arrived(message))
        except ProtocolError as error:
            self._on_tell(Tell("warning", f"from the hub: {error}"))

    def _piece(self, piece: Piece, payload: wire.Buffer | None) -> None:
        if self._incoming is None or payload is None:
            return
        assignment, transfer = self._incoming
        if piece.transfer != transfer.transfer:
            return
        try:
            transfer.accept(piece, payload)
        except ProtocolError as error:
            self._incoming = None
            self._handle(AdoptionFailed(str(error)))
            return
        self._send(transfer.credit())
        self._handle(TransferMoved())
        if transfer.complete:
            self._incoming = None
            self._submit(partial(self._decode, assignment, transfer.buffer))

    def _credit(self, credit: Credit) -> None:
        if self._outgoing is None or credit.transfer != self._outgoing.transfer:
            return
        for piece, part in self._outgoing.credit(credit, time.monotonic()):
            self._send(piece, part)
        self._handle(TransferMoved())

    # -- the worker ------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], DeviceEvent | None]) -> None:
        """Do `work` in the worker's thread and hand the event it returns to the core."""

        def work_and_tell() -> None:
            if (event := work()) is not None:
                self._loop.call_soon_threadsafe(self._handle, event)

        self._worker.submit(work_and_tell)

    def _decode(self, assignment: Assignment, payload: wire.Buffer) -> DeviceEvent:
        assert self._model is not None
        if self._times_sent > 1:
            # A repeated push may still be on its way out of the very memory the model is to go into.
            self._model.release()
        try:
            self._model.adopt(payload, CODECS[assignment.codec])
        except ProtocolError as error:
            return AdoptionFailed(str(error))
        return Adopted(assignment)

    def _train(self, local_steps: int) -> DeviceEvent | None:
        assert self._trainer is not None
        assert self._model is not None
        assert self._core.welcome is not None
        self._trainer.begin(self._model.parameters)
        result: TrainingResult | None = take_local_steps(
            self._trainer,
            local_steps,
            should_stop=self._stopping.is_set,
            on_step=self._count_step,
            step_s_min=self._step_s_min,
            wait=self._stopping.wait,
        )
        if result is None:
            return None
        self._payload = self._model.encode_delta(CODECS[self._core.welcome.push_codec])
        self._checksum = wire.checksum(self._payload)
        self._times_sent = 0
        return Trained(
            local_steps=result.local_steps,
            examples=result.examples,
            loss_mean=result.loss_mean,
            loss_variance=result.loss_variance,
            step_s=result.step_s,
        )

    def _count_step(self) -> None:
        self.steps_total += 1


def describe_machine(examples: int) -> DeviceProfile:
    """Return what a hub may know about this machine."""
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory_bytes = 0
    return DeviceProfile(
        machine=platform.machine()[:64],
        cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        examples=examples,
        software=f"edgeasync {installed_version('edgeasync')}",
    )
