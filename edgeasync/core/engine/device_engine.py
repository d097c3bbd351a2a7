"""Between frames and `DeviceCore`: decodes what comes in, keeps vectors and transfers, carries effects out.

Still no I/O: a `DeviceShell` connects, sends, trains, and runs work in the background. The ZeroMQ agent and
the simulator are two such shells around this one engine.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from edgeasync.core.arrays.delta_chain import is_finite
from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import Spool
from edgeasync.core.device.effects import (
    Connect,
    DeviceEffect,
    Disconnect,
    FindGraph,
    InstallModel,
    Join,
    PutAside,
    Report,
    ResolvePush,
    Send,
    SendPush,
    Stop,
    TakeGraph,
    Train,
)
from edgeasync.core.device.events import (
    DeviceEvent,
    Disconnected,
    GraphBroken,
    GraphForged,
    GraphHeld,
    GraphMissing,
    InstallFailed,
    Kept,
    Malformed,
    ModelInstalled,
    OverlapTrained,
    Received,
    Trained,
    TransferMoved,
)
from edgeasync.core.device.machine import DeviceCore
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.core.engine.device_shell import DeviceShell
from edgeasync.core.engine.device_transfers import DeviceTransfers
from edgeasync.core.engine.recorder import Recorder, shown
from edgeasync.errors import ModelMismatchError, ProtocolError
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import ELEMENTWISE, Codec, Source, find_codec, make_codec
from edgeasync.protocol.graph import fingerprint_of
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Deltas,
    Duplicate,
    Graph,
    Outcome,
    Piece,
    Pong,
    Push,
    Rejected,
    Welcome,
)  # fmt: skip

Result = TypeVar("Result")


class DeviceEngine:
    """Frames in, frames out. `now_s` is asked for the time; no call blocks for longer than a copy.

    `bandwidth_bytes_per_s_max` caps all traffic of the device, both directions together. With `keeps` every update
    is given to the shell to keep before it leaves.
    """

    def __init__(
        self,
        core: DeviceCore,
        shell: DeviceShell,
        now_s: Callable[[], float],
        bandwidth_bytes_per_s_max: int | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self.core = core
        self.recorder = Recorder()
        self._shell = shell
        self._now_s = now_s
        self._model: DeviceModel | None = None
        self._transfers = DeviceTransfers(self._to_shell, now_s, bandwidth_bytes_per_s_max)
        self._inline_payload: wire.Buffer | None = None
        self._payload: wire.Buffer = b""
        self._codec: Codec | None = None
        self._random = np.random.Generator(np.random.PCG64(core.random_seed))
        self._keeps = keeps
        self._kept_seq = self._keeping_seq = 0
        self._recalled: Spool | None = None

    def recall(self, spool: Spool) -> None:
        """Before `begin`: go on with what was kept before this start."""
        self._recalled = spool
        self._payload, self._kept_seq = spool.payload, spool.push.seq
        self.core.recall(spool.push, spool.model)

    def begin(self) -> None:
        """Connect for the first time."""
        now_s = self._now_s()
        self.recorder.begin(now_s, "begin")
        self._execute(self.core.begin(now_s))

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is next due; `None` once the device has finished."""
        due_s = self.core.next_deadline_s()
        return None if due_s is None else min(due_s, self._transfers.next_deadline_s())

    def disconnected(self) -> None:
        """Take in that the connection has broken, where the shell can tell."""
        self.handle(Disconnected())

    def tick(self, steps_total: int) -> None:
        """Do what is due; `next_deadline_s` says when that is."""
        self._transfers.tick()
        now_s = self._now_s()
        self.recorder.begin(now_s, "tick")
        self._execute(self.core.tick(now_s, steps_total))

    def handle(self, event: DeviceEvent) -> None:
        """Give the core an event and carry out what follows."""
        now_s = self._now_s()
        self.recorder.begin(now_s, shown(event))
        self._execute(self.core.handle(event, now_s))

    def on_message(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Take in one message from the hub."""
        try:
            message = wire.decode(header)
            self._transfers.count_received(header, None if isinstance(message, Piece) else payload)
            match message:
                case Piece():
                    self._piece(message, payload)
                case Credit():
                    if self._transfers.credit(message):
                        self.handle(TransferMoved())
                case Pong():
                    self.handle(Received(message))
                    self._transfers.observe_round_trip(self.core.round_trip_s or 0.0)
                case _:
                    self._inline_payload = payload
                    self.handle(Received(message))
                    self._inline_payload = None
        except ProtocolError as error:
            self.handle(Malformed(str(error)))

    def _piece(self, piece: Piece, payload: wire.Buffer | None) -> None:
        if payload is None:
            return
        try:
            taken = self._transfers.accept(piece, payload)
        except ProtocolError as error:
            if (broken := self._transfers.drop_incoming()) is not None:
                self._broken(broken, str(error))
            return
        if taken is not None:
            self.handle(TransferMoved())
            message, whole = taken
            if whole is not None:
                self._whole(message, whole)

    # -- effects out -----------------------------------------------------------------------------------------

    def _execute(self, effects: list[DeviceEffect]) -> None:
        self.recorder.end([shown(effect) for effect in effects])
        self.core.check()
        if self.core.welcome is not None:
            self._transfers.protocol_version = self.core.welcome.protocol_version
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: DeviceEffect) -> None:
        match effect:
            case Connect() | Disconnect():
                self._transfers.suspend()
                (self._shell.connect if isinstance(effect, Connect) else self._shell.disconnect)()
            case Send():
                self._transfers.send(effect.message)
            case SendPush():
                self._push(effect.push)
            case Report():
                self._shell.report(effect)
            case PutAside():
                self._forget_recalled()
                self._shell.put_aside(effect.reason)
            case Stop():
                self._shell.stop(effect)
            case _:
                self._prepare(effect)

    def _prepare(self, effect: FindGraph | TakeGraph | Join | InstallModel | ResolvePush | Train) -> None:
        match effect:
            case FindGraph():
                self._shell.run_in_background(partial(_find_graph, self._shell, effect.fingerprint), self.handle)
            case TakeGraph(message) | InstallModel(message):
                self._take_in(message)
            case Join():
                self._join(effect.welcome)
            case ResolvePush():
                self._settle(effect.outcome)
            case Train() if self._model is not None:
                then = self._trained_ahead if effect.ahead else self._trained
                self._shell.train(self._model, effect.local_steps, then, ahead=effect.ahead)

    def _join(self, welcome: Welcome) -> None:
        if welcome.spec.length > PARAMETERS_MAX:
            raise ModelMismatchError(f"the hub's model has {welcome.spec.length} parameters: too many to believe")
        self._shell.prepare(welcome)
        if self._model is None:
            self._model = DeviceModel(welcome.spec)
            if self._recalled is not None:
                self._codec = make_codec(self._recalled.push.codec, welcome.spec)
                if self._recalled.residual is not None:
                    self._model.restore_residual(self._recalled.residual)

    def _forget_recalled(self) -> None:
        self._recalled, self._payload, self._codec, self._kept_seq = None, b"", None, 0

    def _take_in(self, message: Assignment | Graph) -> None:
        """Take a payload from the message that brought it, or open its transfer."""
        assert self.core.welcome is not None
        payload = self._inline_payload
        try:
            if isinstance(message, Assignment):
                _check_assignment(message, self.core.welcome)
            if not message.transfer:
                _check_inline(message, payload)
        except ProtocolError as error:
            self._transfers.drop_incoming()
            self._broken(message, str(error))
            return
        if message.transfer:
            self._transfers.receive(message)
        elif payload is not None:
            self._transfers.drop_incoming()
            self._transfers.drop_push()
            self._whole(message, payload)

    def _broken(self, message: Assignment | Graph, reason: str) -> None:
        if isinstance(message, Graph):
            self.handle(GraphBroken(f"the hub's graph came in broken: {reason}"))
        else:
            self.handle(InstallFailed(f"the hub's model came in broken: {reason}"))

    def _whole(self, message: Assignment | Graph, payload: wire.Buffer) -> None:
        """Take over what has all its bytes and its checksum, in the background."""
        if isinstance(message, Graph):
            work = partial(_take_graph, self._shell, message.fingerprint, payload)
        else:
            assert self._model is not None
            assert self.core.welcome is not None
            self._shell.pause()
            work = partial(_adopt_into, self._model, message, payload, self.core.welcome)
        self._shell.run_in_background(work, self.handle)

    def _trained(self, trained: Trained) -> None:
        """Code the update in the background, then let the core decide when it is sent."""
        assert self._model is not None
        assert self.core.welcome is not None
        welcome, model = self.core.welcome, self._model
        try:
            codec = make_codec(self.core.push_codec, welcome.spec)
        except ValueError:  # a hub should name only what the device knows; float32 is understood by every hub
            codec = make_codec("identity", welcome.spec)
        # Behind `auto` a codec that drops little takes over what one that dropped much had left.
        going_on = self.core.goes_on
        auto = True if codec.needs_feedback else None
        feedback = {"always": True, "never": False}.get(welcome.error_feedback, auto)

        def encode() -> tuple[Codec, wire.Buffer, int]:
            used = codec
            payload = model.encode_update(
                used, welcome.update, feedback=feedback, going_on=going_on, random=self._random
            )
            if welcome.update == "model" and used.name != "identity" and not is_finite(used.open(payload)):
                used = make_codec("identity", welcome.spec)  # a sound model may outgrow float16
                payload = model.encode_update(used, welcome.update, going_on=going_on)
            return used, payload, wire.checksum(payload)

        def encoded(coded: tuple[Codec, wire.Buffer, int]) -> None:
            self._codec, self._payload, checksum = coded
            self._kept_seq, self._recalled = 0, None
            payload_bytes = len(self._payload)
            self.handle(
                msgspec.structs.replace(
                    trained, codec=self._codec.name, checksum=checksum, payload_bytes=payload_bytes
                )
            )

        self._shell.run_in_background(encode, encoded)

    def _trained_ahead(self, trained: Trained) -> None:
        self.handle(OverlapTrained(trained))

    def _settle(self, outcome: Outcome) -> None:
        """Let go of an answered payload; what it carried of earlier ones goes back if it will never count."""
        payload, codec, model = self._payload, self._codec, self._model
        self._payload, self._codec = b"", None
        first = outcome.first if isinstance(outcome, Duplicate) else outcome
        if isinstance(first, Rejected) and model is not None and codec is not None:
            assert self.core.welcome is not None
            decay: float | None = self.core.welcome.residual_decay
            if first.reason == "not_finite" or self._recalled is not None:  # there is nothing to take back from
                decay = None
            self._shell.run_in_background(partial(model.settle, codec, payload, decay), lambda _: None)

    def _push(self, push: Push) -> None:
        assert self.core.welcome is not None
        if self._keeps and self._kept_seq != push.seq:
            self._keep(push, ModelKey.of(self.core.welcome))
            return
        self._transfers.push(push, self._payload, self.core.welcome.piece_bytes)

    def _keep(self, push: Push, key: ModelKey) -> None:
        """Have an update kept under its number, which may have changed, and let the core say it again."""
        if self._keeping_seq == push.seq:
            return
        self._keeping_seq = push.seq
        payload, model = self._payload, self._model
        residual = None if model is None else model.residual

        def keep() -> None:
            self._shell.keep(Spool(key, push, payload, residual))

        def kept(_: None) -> None:
            self._keeping_seq, self._kept_seq = 0, push.seq
            self.handle(Kept(push.seq))

        self._shell.run_in_background(keep, kept)

    def _to_shell(self, header: bytes, payload: wire.Buffer | None) -> None:
        self._shell.send(header, payload)


def _check_inline(message: Assignment | Graph, payload: wire.Buffer | None) -> None:
    if payload is None or len(payload) != message.payload_bytes:
        raise ProtocolError("the payload is not as long as its header says")
    if wire.checksum(payload) != message.checksum:
        raise ProtocolError("the payload does not have its checksum")


def _check_assignment(assignment: Assignment, welcome: Welcome) -> None:
    """Raise `ProtocolError` for a payload that cannot be what it is said to be."""
    if assignment.deltas is None:
        find_codec(assignment.codec, assignment.payload_bytes, welcome.spec)
        return
    if assignment.deltas.rounding not in ELEMENTWISE:
        raise ProtocolError(f"{assignment.deltas.rounding!r} does not round value by value")
    if sum(assignment.deltas.lengths) != assignment.payload_bytes:
        raise ProtocolError("the differences are not as long as their payload")
    for length in assignment.deltas.lengths:
        find_codec(assignment.codec, length, welcome.spec)


def _steps_of(deltas: Deltas, payload: wire.Buffer, codec: Codec) -> Iterator[Source]:
    """Open the differences of a payload, each when it is asked for."""
    start = 0
    for length in deltas.lengths:
        yield codec.open(memoryview(payload)[start : start + length])
        start += length


def _adopt_into(model: DeviceModel, assignment: Assignment, payload: wire.Buffer, welcome: Welcome) -> DeviceEvent:
    deltas, held = assignment.deltas, model.version
    model.version = None
    try:
        if deltas is None:
            model.adopt(make_codec(assignment.codec, welcome.spec).open(payload))
        elif held == assignment.version:  # it came in after all, when the hub did not know
            model.lead_on((), make_codec(deltas.rounding, welcome.spec), deltas.checksum)
        elif held is None or held.number != deltas.held:  # the lineage may be new; the checksum tells
            model.version = held
            return InstallFailed("the hub leads on from a version that is not held; it is asked again")
        else:
            rounding = make_codec(deltas.rounding, welcome.spec)
            codec = make_codec(assignment.codec, welcome.spec)
            model.lead_on(_steps_of(deltas, payload, codec), rounding, deltas.checksum)
    except ProtocolError as error:
        return InstallFailed(f"the hub's model is refused: {error}", spoilt=True)
    model.version = assignment.version
    if held is not None and held.lineage == assignment.version.lineage:
        model.decay_residual(welcome.residual_decay ** max(0, assignment.version.number - held.number))
    return ModelInstalled(assignment)


def _find_graph(shell: DeviceShell, fingerprint: str) -> DeviceEvent:
    return GraphHeld(fetched=False) if shell.has_graph(fingerprint) else GraphMissing()


def _take_graph(shell: DeviceShell, fingerprint: str, payload: wire.Buffer) -> DeviceEvent:
    if fingerprint_of(payload) != fingerprint:
        return GraphForged()
    shell.keep_graph(fingerprint, bytes(payload))
    return GraphHeld(fetched=True)
