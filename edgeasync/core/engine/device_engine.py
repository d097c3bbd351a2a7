"""Connects frames to `DeviceCore`: messages, vectors and effects.

The engine does no I/O. A `DeviceShell` connects to the hub and sends messages. A `DeviceTraining`
trains, and runs the jobs of `device_jobs.py` in the background. Both interfaces are implemented by
the ZeroMQ agent and by the simulator.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device import effects, events
from edgeasync.core.device.bounds import HEADER_BYTES_MAX, check_welcome
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.core.engine.device_jobs import CodedUpdate, code_update, install_model
from edgeasync.core.engine.device_shell import DeviceShell, DeviceSpool, DeviceTraining
from edgeasync.core.engine.device_transfers import CountedHello, DeviceTransfers
from edgeasync.core.engine.graph_intake import GraphIntake
from edgeasync.core.engine.kept_work import KeptWork
from edgeasync.core.engine.recorder import Recorder, shown
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import (
    ELEMENTWISE,
    FLOAT16,
    SixteenBits,
    VectorCodec,
    find_codec,
    payload_bytes_limit,
)
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Duplicate,
    GraphHeader,
    Outcome,
    Piece,
    Pong,
    Push,
    Rejected,
    Welcome,
)  # fmt: skip

ObserveDevice = Callable[[events.DeviceEvent], None]
"""A function that is called with every event after the core has handled it. It must not block."""


BRIEF_BYTES_MAX = 1 << 18
"""Models up to this size are installed and encoded in less time than two handovers to a thread and back."""


class DeviceEngine:
    """Converts frames to events, and effects to frames. The shell creates it.

    It reads the time from `now_s`, and no call blocks for longer than it takes to copy a model. The
    core's limits cap the engine's traffic. If a `spool` is passed, every update is written to disk
    before it is sent, and the model is written at intervals. `observe` is called with every event.
    """

    def __init__(
        self,
        core: DeviceCore,
        shell: DeviceShell,
        training: DeviceTraining,
        now_s: Callable[[], float],
        *,
        spool: DeviceSpool | None = None,
        observe: ObserveDevice | None = None,
        float16: SixteenBits = FLOAT16,
    ) -> None:
        self.core = core
        self.recorder = Recorder()
        self._shell = shell
        self._training = training
        self._now_s = now_s
        self._observe = observe
        self._float16 = float16
        self._model: DeviceModel | None = None
        self.transfers = DeviceTransfers(
            self._send, now_s, core.limits.bandwidth_bytes_per_s_max, core.limits.link_share
        )
        self._graphs = GraphIntake(shell, training, self.transfers, self.handle)
        self._hello = CountedHello(self._count)
        self._inline_payload: wire.Buffer | None = None
        self._arrived: wire.Buffer | None = None
        """The payload of a model that arrived before the device has taken the steps of a fixed
        delay.
        """
        self._payload: wire.Buffer = b""
        self._codec: VectorCodec | None = None
        """The codec that encoded the payload of the unanswered update."""
        self._random = np.random.Generator(np.random.PCG64(core.random_seed))
        self._kept = KeptWork(spool)

    def recall(self, spool: Spool | None, held: HeldModel | None = None) -> None:
        """Resume with the update and the model saved before a restart; call before `begin`."""
        if spool is not None:
            self._payload = spool.payload
        self._kept.recall(spool, held, self.core.work)

    @property
    def _hub(self) -> Welcome:
        """The latest `Welcome`."""
        assert self.core.welcome is not None
        return self.core.welcome

    @property
    def _is_small(self) -> bool:
        return self._hub.spec.nbytes <= BRIEF_BYTES_MAX

    def held_model(self) -> HeldModel | None:
        """Return the device's copy of the hub's model, if any.

        The caller must not change its values.
        """
        model, welcome = self._model, self.core.welcome
        version = None if model is None else model.version
        if model is None or version is None or welcome is None:
            return None
        return HeldModel(ModelKey.of(welcome), version, model.checksum, model.base)

    def begin(self) -> None:
        """Connect for the first time."""
        now_s = self._now_s()
        self.recorder.begin(now_s, "begin")
        self._execute(self.core.begin(now_s))

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is next due; `None` once the device has finished."""
        due_s = self.core.next_deadline_s()
        if due_s is None:
            return None
        return min(due_s, self.transfers.next_deadline_s(), self.core.data_quota.record_at_s)

    def tick(self, steps_total: int) -> None:
        """Process everything that is due. Call it at the time returned by `next_deadline_s`."""
        self.transfers.tick()
        now_s = self._now_s()
        self.recorder.begin(now_s, "tick")
        self._execute(self.core.tick(now_s, steps_total, self._shell.wall_s()))

    def handle(self, event: events.DeviceEvent) -> None:
        """Pass an event to the core, and execute the effects."""
        now_s = self._now_s()
        if isinstance(event, events.Sensed):
            self._sense(event, now_s)
            return
        self.recorder.begin(now_s, _to_record(event))
        decided = self.core.handle(event, now_s)
        if self._observe is not None:
            self._observe(event)
        self._execute(decided)

    def _sense(self, sensed: events.Sensed, now_s: float) -> None:
        """Pass sensor readings to the core; record the event only if the pace changes."""
        if decided := self.core.handle(sensed, now_s):
            self.recorder.begin(now_s, sensed)
            self._execute(decided)

    def on_message(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Handle one message from the hub."""
        self._hello.settle(has_left=True)
        self._count(len(header) + len(payload or b""))
        self._read(header, payload)
        if self.core.data_quota.is_spent(self._now_s()) and self.core.link in ("handshake", "joined"):
            self.handle(events.DaySpent())
        self._keep_quota()

    def _read(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Decode a message, and dispatch it."""
        try:
            joined = self.core.link == "joined"
            message = wire.decode(header, HEADER_BYTES_MAX if joined else wire.HEADER_BYTES_MAX)
            self.transfers.count_received(header, None if isinstance(message, Piece) else payload)
            match message:
                case Piece():
                    self._piece(message, payload)
                case Credit():
                    if self.transfers.credit(message):
                        self.handle(events.TransferMoved())
                case Pong():
                    self.handle(events.DeviceReceived(message))
                    self.transfers.observe_round_trip(self.core.round_trip_s or 0.0)
                case _:
                    if isinstance(message, Welcome):
                        check_welcome(message)
                    self._inline_payload = payload
                    self.handle(events.DeviceReceived(message))
                    self._inline_payload = None
        except wire.UnsupportedVersionError as error:
            # A hub of another version refuses every message of this device.
            self.handle(events.DeviceReceived(error.to_refuse()))
        except ProtocolError as error:
            self.handle(events.DeviceReceivedMalformed(str(error)))

    def _piece(self, piece: Piece, payload: wire.Buffer | None) -> None:
        if payload is None:
            raise ProtocolError("a piece has no payload")
        try:
            taken = self.transfers.accept(piece, payload)
        except ProtocolError as error:
            if (broken := self.transfers.drop_incoming()) is not None:
                self._reject_payload(broken, str(error))
            return
        if taken is not None:
            self.handle(events.TransferMoved())
            if taken.credit is not None and isinstance(taken.message, GraphHeader):
                self._graphs.store(taken.message, payload, taken.credit)
            elif taken.payload is not None:
                self._process_payload(taken.message, taken.payload)

    # -- daily quota -----------------------------------------------------------------------------------------

    def _send(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message and count its bytes.

        Count a `Hello` only once the connection is established.
        """
        nbytes = len(header) + len(payload or b"")
        if self.core.link == "handshake":
            self._hello.send(nbytes)
        else:
            self._count(nbytes)
        self._shell.send(header, payload)

    def _count(self, nbytes: int) -> None:
        if self.core.data_quota.is_set:
            self.core.data_quota.count(nbytes, self._now_s())

    def _end_connection(self) -> None:
        """Process a closed connection.

        Count an unanswered `Hello` if it was sent, and suspend the transfers.
        """
        self._hello.settle(has_left=self._shell.has_connected())
        self.transfers.suspend()

    def _keep_quota(self) -> None:
        if not self.core.data_quota.is_set:
            return
        record = self.core.data_quota.take_due_record(self._now_s())
        if record is not None:
            self._shell.keep_quota(record)

    # -- effects out -----------------------------------------------------------------------------------------

    def _execute(self, decided: list[effects.DeviceEffect]) -> None:
        self.recorder.end([_to_record(effect) for effect in decided])
        self.core.check()
        for effect in decided:
            self._carry_out(effect)
        self._keep_quota()

    def _carry_out(self, effect: effects.DeviceEffect) -> None:
        """Execute an effect; do its slow work in the background."""
        match effect:
            case effects.Connect():
                self._end_connection()
                self._shell.connect()
            case effects.CloseConnection():
                self._end_connection()
                self._shell.disconnect(goodbye=effect.goodbye)
            case effects.SendToHub():
                self.transfers.send(effect.message)
            case effects.SendPush():
                self._push(effect.push)
            case effects.SetPace():
                self._training.set_pace(effect.pace)
            case effects.DeviceReport():
                self._shell.report(effect)
            case effects.PutAside():
                self._put_aside(effect.reason)
            case effects.EndAgent():
                self._shell.stop(effect)
            case _:
                self._begin_work(effect)

    def _begin_work(self, effect: effects.WorkEffect) -> None:
        match effect:
            case effects.TakeGraph(base=False):
                self._receive_payload(effect.graph)
            case effects.FindGraph() | effects.FindBase() | effects.TakeGraph():
                self._graphs.carry_out(effect)
            case effects.PrepareTraining():
                self._join(effect.welcome)
            case effects.InstallModel():
                self._receive_payload(effect.assignment)
            case effects.UseModel():
                payload, self._arrived = self._arrived, None
                assert payload is not None
                self._install(effect.assignment, payload)
            case effects.ScaleLearningRate():
                self._training.submit(partial(self._training.scale_learning_rate, effect.factor))
            case effects.Train():
                assert self._model is not None
                if effect.overlap and not self._model.overlaps:
                    self._training.submit(self._model.begin_overlap)
                then = self._overlap_trained if effect.overlap else self._trained
                first = self.core.work.pending.seq_last == 0
                self._training.train(self._model, effect.local_steps, then, overlap=effect.overlap, first=first)
            case effects.ResolvePush():
                self._resolve(effect.outcome)

    def _join(self, welcome: Welcome) -> None:
        self._shell.prepare(welcome)
        if self._model is None:
            self._model = DeviceModel(welcome.spec, self._float16)
            if (recalled := self._kept.recalled) is not None:
                self._codec = self._model.codecs.make(recalled.push.codec)
                if recalled.residual is not None:
                    self._model.restore_residual(recalled.residual)
            try:
                self._kept.restore(self._model, ModelKey.of(welcome))
            except ValueError as error:
                self.handle(events.InstallFailed(f"the saved model cannot be used: {error}", spoilt=True))

    def _put_aside(self, reason: str) -> None:
        """Drop the update from before a restart, and rename its file."""
        self._kept.forget()
        self._payload, self._codec = b"", None
        if self._kept.spool is not None:
            self._training.submit(partial(self._kept.spool.put_aside, reason))

    def _receive_payload(self, message: Assignment | GraphHeader) -> None:
        """Process the payload that was sent with the message, or open its transfer."""
        try:
            if isinstance(message, Assignment):
                _check_assignment(message, self._hub)
            payload = None if message.transfer else _checked(message, self._inline_payload)
        except ProtocolError as error:
            self.transfers.drop_incoming()
            self._reject_payload(message, str(error))
            return
        if payload is None:
            self.transfers.receive(message)
        else:
            self.transfers.drop_incoming()
            self.transfers.drop_push()
            self._process_payload(message, payload)

    def _reject_payload(self, message: Assignment | GraphHeader, reason: str) -> None:
        if isinstance(message, GraphHeader):
            self.handle(events.GraphBroken(f"the hub's graph arrived damaged: {reason}"))
        else:
            self.handle(events.InstallFailed(f"the hub's model arrived damaged: {reason}"))

    def _process_payload(self, message: Assignment | GraphHeader, payload: wire.Buffer) -> None:
        """Install the model or store the graph of a verified payload, in the background."""
        if isinstance(message, GraphHeader):
            self._graphs.keep(message, payload)
        else:
            self._arrived = payload
            self.handle(events.ModelArrived(message))

    def _install(self, assignment: Assignment, payload: wire.Buffer) -> None:
        assert self._model is not None
        self._training.pause()
        install = partial(install_model, self._model, assignment, payload, self._hub)
        self._training.run(install, self._processed, brief=self._is_small)

    def _processed(self, event: events.DeviceEvent) -> None:
        """Pass the event to the core.

        If a model was installed and the copy on disk is old, write the new model.
        """
        self.handle(event)
        if isinstance(event, events.ModelInstalled) and self._kept.is_model_due(self._now_s()):
            self._training.submit(self.keep_model)

    def keep_model(self) -> None:
        """Write the hub's model to disk, if the device has a model and a spool.

        Runs in the background.
        """
        held = self.held_model()
        if held is not None and self._kept.spool is not None:
            self._kept.spool.keep_model(held)

    def _trained(self, trained: events.Trained) -> None:
        """Encode the update in the background; then the core decides when to send it.

        If the trainer has no more steps, the agent ends once all its steps are part of an update.
        """
        work = self.core.work
        if not trained.local_steps and not work.overlap.steps_done:
            self.handle(events.DeviceStopRequested())
            return
        assert self._model is not None
        code = partial(
            code_update,
            self._model,
            self._hub,
            work.push_codec,
            self._random,
            overlap=work.overlap.is_allowed,
        )
        self._training.run(code, partial(self._coded, trained), brief=self._is_small)

    def _coded(self, trained: events.Trained, update: CodedUpdate) -> None:
        self._codec, self._payload = update.codec, update.payload
        self._kept.forget()
        self.handle(
            msgspec.structs.replace(
                trained,
                codec=update.codec.name,
                checksum=update.checksum,
                payload_bytes=len(update.payload),
            )
        )

    def _overlap_trained(self, trained: events.Trained) -> None:
        self.handle(events.OverlapTrained(trained))

    def _resolve(self, outcome: Outcome) -> None:
        """Drop the payload of an answered update.

        If the update was rejected, undo its effect on the residual.
        """
        payload, codec, model = self._payload, self._codec, self._model
        self._payload, self._codec = b"", None
        first = outcome.first if isinstance(outcome, Duplicate) else outcome
        if isinstance(first, Rejected) and model is not None and codec is not None:
            decay: float | None = self._hub.residual_decay
            spoilt = first.reason == "not_finite" or first.preempted
            if spoilt or self._kept.recalled is not None:  # the update's effect on the residual cannot be undone
                decay = None
            self._training.submit(partial(model.resolve, codec, payload, decay))
        if isinstance(first, Rejected) and first.preempted:
            self._training.submit(self._training.reset)

    def _push(self, push: Push) -> None:
        if self._kept.needs_write(push):
            self._keep(push, ModelKey.of(self._hub))
            return
        self.transfers.push(push, self._payload, self._hub.piece_bytes)

    def _keep(self, push: Push, key: ModelKey) -> None:
        """Write an update to disk, then report `Kept`, so that the core sends the update."""
        if not self._kept.begin_write(push):
            return
        assert self._kept.spool is not None
        residual = None if self._model is None else self._model.residual
        spool = Spool(key, push, self._payload, residual)

        def kept(_: None) -> None:
            self._kept.end_write(push)
            self.handle(events.Kept(push.seq))

        self._training.pause()  # overlap steps may last for hours without a hub; do not wait for them
        self._training.run(partial(self._kept.spool.keep, spool), kept)


def _to_record(what: events.DeviceEvent | effects.DeviceEffect) -> object:
    """Return an event or effect to record, as a short text if it contains a `Welcome`.

    A `Welcome` from the hub may be large.
    """
    if isinstance(what, effects.PrepareTraining) or (
        isinstance(what, events.DeviceReceived) and isinstance(what.message, Welcome)
    ):
        return shown(what)
    return what


def _checked(message: Assignment | GraphHeader, payload: wire.Buffer | None) -> wire.Buffer:
    """Return the payload of a message.

    Raises `ProtocolError` if the message did not announce it.
    """
    if payload is None or len(payload) != message.payload_bytes:
        raise ProtocolError("the payload's length differs from its header")
    if wire.checksum(payload) != message.checksum:
        raise ProtocolError("the payload's checksum differs from its header")
    return payload


def _check_assignment(assignment: Assignment, welcome: Welcome) -> None:
    """Raise `ProtocolError` if an assignment announces an impossible payload."""
    if assignment.deltas is None:
        find_codec(assignment.codec, assignment.payload_bytes, welcome.spec)
        return
    if assignment.deltas.rounding not in ELEMENTWISE:
        raise ProtocolError(f"codec {assignment.deltas.rounding!r} cannot round values one by one")
    if sum(assignment.deltas.lengths) != assignment.payload_bytes:
        raise ProtocolError("the lengths of the differences do not add up to the payload's length")
    if assignment.payload_bytes > payload_bytes_limit(welcome.spec):
        raise ProtocolError("the differences are longer than a whole model")
    for length in assignment.deltas.lengths:
        find_codec(assignment.codec, length, welcome.spec)
