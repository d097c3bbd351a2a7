"""Connects frames to `HubCore`: messages, payloads and effects.

The engine does no I/O. A `HubShell`, in the daemon or the simulator, sends messages, runs
background work and writes checkpoints.

The engine measures updates and folds small models on the event loop. For large models, the shell's
background worker does this, in order. Effects that depend on a fold (answers, checkpoints, the end)
wait for it, but heartbeats are answered immediately.

If the hub has a log, every event is logged before its outcome is sent or shown. While the log
cannot be written, the core halts: the engine refuses requests with a time to retry, and no lease
expires.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, assert_never

import msgspec

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.model_executor import ModelExecutor
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.engine.capacity import Capacity
from edgeasync.core.engine.deliveries import Deliveries
from edgeasync.core.engine.fold_queue import MAY_WAIT, FoldQueue
from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.hub_transfers import IncomingTransfers, OutgoingTransfers
from edgeasync.core.engine.log_writer import LogWriter
from edgeasync.core.engine.message_bounds import HEADER_BYTES_MAX, MessageBounds
from edgeasync.core.engine.outbox import Outbox
from edgeasync.core.engine.push_intake import PushIntake, moved_by
from edgeasync.core.engine.recorder import Recorder
from edgeasync.core.engine.roster import Roster
from edgeasync.core.engine.sender import ANYBODY, NotAllowedError, Sender, check_allowed
from edgeasync.core.engine.status_answers import StatusAnswers
from edgeasync.core.hub.digests import with_digests
from edgeasync.core.hub.effects import (
    Discard,
    Expel,
    HubEffect,
    HubReport,
    Receive,
    Save,
    SendGraph,
    SendStatus,
    SendToDevice,
    SuspendTransfers,
)
from edgeasync.core.hub.events import (
    Heard,
    HubEvent,
    HubReceived,
    HubReceivedMalformed,
    HubStopRequested,
    Moved,
    Peer,
    Resumed,
    Revoked,
    Ticked,
)
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member
from edgeasync.core.recovery.log import Log
from edgeasync.core.recovery.replay import Sessions
from edgeasync.core.recovery.state import note
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Ack,
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    FindPeers,
    Goodbye,
    Hello,
    Key,
    Message,
    Order,
    Piece,
    Ping,
    Pong,
    Push,
    Refuse,
    StatusRequest,
    Wake,
    Welcome,
)

_AtOnce = SendToDevice | Discard | Receive | SendGraph | SendStatus | SuspendTransfers | Expel | HubReport | Save
"""The effects that never wait for a fold."""

Observe = Callable[[HubEvent, list[HubEffect], float], None]
"""Called with every event, its effects, and the core's time of the decision. It must not block."""


class HubEngine:
    """Converts frames to events, and effects to frames. No call blocks for long."""

    def __init__(
        self,
        core: HubCore,
        model: HubModel,
        shell: HubShell,
        *,
        sessions: Sessions,
        publisher: Publisher | None = None,
        log: Log | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.core = core
        self.model = model
        self._shell = shell
        self._sessions = sessions
        self._log_writer = LogWriter(log, core, model)
        self.outbox = Outbox(shell.send, log)
        self._observe = observe
        self.recorder = Recorder()
        self.bounds = MessageBounds()
        limits = core.settings.limits
        incoming = IncomingTransfers()
        outgoing = OutgoingTransfers(int(limits.piece_bytes), limits.snapshots_max)
        publisher = publisher or Publisher(core.spec, model, core.settings.codec)
        self._deliveries = Deliveries(core, publisher, outgoing, self._send, self._now)
        self._fold_queue = FoldQueue(
            ModelExecutor(model, publisher),
            core.settings.codec,
            shell,
            self.outbox,
            send=self._send,
            assign=self._deliveries.assign,
            prepare=self._deliveries.prepare,
            handle=self._handle,
            restored=outgoing.drop_all_suspended,
        )
        self._capacity = Capacity(
            core.settings,
            model=model,
            publisher=publisher,
            incoming=incoming,
            outgoing=outgoing,
            fold_queue=self._fold_queue,
            log_writer=self._log_writer,
        )
        self._intake = PushIntake(
            core, model, shell, incoming, self._capacity, now_s=self._now, measured=self._on_measured
        )
        self._roster = Roster()
        self.status_answers = StatusAnswers(core, shell, self.outbox)
        self._now_s = 0.0
        self._sender = ANYBODY
        self._revoked: list[Key] = []
        self.halted = self._failed = False

    def _now(self) -> float:
        return self._now_s

    def next_deadline_s(self) -> float:
        """Return when `tick` is next due; infinity while the core halts or has stopped."""
        return math.inf if self.halted else self.core.next_deadline_s()

    def tick(self, now_s: float) -> None:
        """Process what is due."""
        if self.halted:
            return
        self._now_s = now_s
        self._intake.incoming.drop_expired(now_s)
        self._deliveries.outgoing.drop_expired(now_s)
        self._handle(Ticked(self._capacity.for_snapshot(now_s)))

    def resume(self, lineage: str, now_s: float) -> None:
        """Resume the recovered run as a new branch. A run that has finished ends immediately."""
        self._now_s = now_s
        self._handle(Resumed(lineage))
        self.save()  # so that the next start need not replay the same entries
        self.tick(now_s)

    def save(self) -> None:
        """Write a checkpoint, unless one is already being written."""
        self._note_state()
        self._fold_queue.advance()

    def saved(self) -> None:
        """Allow the next checkpoint; call this when the last write has succeeded or failed."""
        self._log_writer.saving = False

    # -- the log ---------------------------------------------------------------------------------------------

    def on_durable(self, now_s: float) -> None:
        """Send the answers that waited for the log, because more of its entries are durable."""
        if self.halted:
            self.halted = False
            self.status_answers.resume()
            self._now_s = now_s
            self._shell.report(HubReport("writing", detail="the run's folder is writable again"))
            self._handle(Resumed())
            revoked, self._revoked = self._revoked, []
            for key in revoked:
                self._handle(Revoked(key))
        self.outbox.release()
        self.status_answers.refresh(now_s)
        if self._log_writer.wants_checkpoint:
            self.save()

    def on_failing(self, reason: str) -> None:
        """Halt until the log can be written again; call this when a write has failed."""
        self._stand_still(reason)
        if self.core.stopped:
            self.outbox.abandon()

    def _stand_still(self, reason: str) -> None:
        self.halted = True
        self.status_answers.stand_still()
        detail = f"the run's folder cannot be written: {reason}; the hub accepts no updates until it is writable"
        self._shell.report(HubReport("not_writing", detail=detail))

    def _stand_still_if_overfull(self) -> None:
        """Halt while a disk does not respond and too much data waits to be written."""
        if self.halted or self.core.stopped:
            return
        if reason := self._log_writer.overfull(len(self.outbox)):
            self._stand_still(reason)

    def _handle(self, event: HubEvent) -> None:
        """Let the core decide on an event, log the event, and execute the effects.

        After an exception, for example in a plugin, the core's state may be inconsistent. From then
        on, the engine decides and logs nothing, and the shell ends the hub.
        """
        if self._failed:
            return
        self.status_answers.begin(self._now_s)
        version = self.core.version
        try:
            self.recorder.begin(self._now_s, event)
            effects = self.core.handle(event, self._now_s)
            self.recorder.end(effects)
            self._log_writer.write(event, self._now_s, effects, at_once=self.core.version != version)
            if self._observe is not None:
                self._observe(event, effects, self._now_s)
            self._execute(effects)
            self.status_answers.learning_curve.observe(self._now_s)
        except BaseException:
            self._failed = True
            raise

    def _answer_standing(self, peer: Peer, message: Message, payload: wire.Buffer | None) -> None:
        """Answer a message while the core halts."""
        match message:
            case Ping():
                self._shell.send(peer, wire.encode(Pong(message.sent_s)), None)
            case StatusRequest() if not self._is_too_often(peer, message):
                self._answer_status(SendStatus(peer, events_after=message.events_after))
            case Wake() if not self._is_too_often(peer, message):
                self._answer_status(SendStatus(peer))
            case Credit() if payload is None:
                self._deliveries.send_pieces(peer, message, self._now_s)
            case Order() if not self._is_too_often(peer, message):
                self._refuse_busy(peer)
            case Push() | Fetch() | FetchGraph() | Hello() | Piece():
                self._intake.incoming.suspend(peer, self._now_s)
                self._refuse_busy(peer)

    def _refuse_busy(self, peer: Peer) -> None:
        retry_s = self.core.settings.limits.retry_after_s
        refuse = Refuse("busy", "the hub cannot write to its disk; try again later", retry_s)
        self._shell.send(peer, wire.encode(refuse), None)

    def request_stop(self, now_s: float, *, finished: bool = False) -> None:
        """Send `Goodbye`, save, and stop; if `finished` is set, the devices end, too."""
        self._now_s = now_s
        self._handle(HubStopRequested(finished))
        if self.halted:
            self.outbox.abandon()

    def revoke(self, key: Key, now_s: float) -> None:
        """Expel the devices of a revoked key. The shell must pass no more of its messages."""
        self._now_s = now_s
        self._roster.forget(key)
        if self.halted:
            self._revoked.append(key)
        else:
            self._handle(Revoked(key))

    # -- incoming messages -----------------------------------------------------------------------------------

    def on_message(
        self,
        peer: Peer,
        header: bytes,
        payload: wire.Buffer | None,
        now_s: float,
        sender: Sender = ANYBODY,
    ) -> None:
        """Process one message with arbitrary content; `sender` owns its connection."""
        self._now_s, self._sender = now_s, sender
        nbytes = len(header) if payload is None else len(header) + len(payload)
        member = self.core.members.by_peer(peer)
        if member is not None and member.key != sender.key:
            # A routing id proves nothing. If it belongs to another key's device, ignore the
            # message, but do not count a strike.
            self._handle(
                HubReceivedMalformed(
                    peer, "routing id belongs to another key's device", strike=False, key=sender.key
                )
            )
            return
        if member is not None:
            member.link.bytes_up += nbytes
        decoded: Message | None = None
        event: HubEvent | None
        try:
            decoded = wire.decode(header, HEADER_BYTES_MAX)
            message = with_digests(decoded)
            if sender is not ANYBODY:
                check_allowed(sender, message)
            self._stand_still_if_overfull()
            if self.halted:
                self._answer_standing(peer, message, payload)
                return
            event = self._event(peer, member, message, payload)
        except wire.UnsupportedVersionError as error:
            self._shell.send(peer, wire.encode(error.to_refuse()), None)
            event = self._malformed(peer, str(error), strike=False)
        except NotAllowedError as error:
            self._shell.send(peer, wire.encode(Refuse("not_allowed", str(error))), None)
            event = self._malformed(peer, str(error), strike=False)
        except ProtocolError as error:
            event = self._malformed(peer, str(error))
        if event is not None and not self.halted:
            self._handle(event)
        self._note_sender(peer, member, decoded, nbytes)

    def _note_sender(self, peer: Peer, member: Member | None, message: Message | None, nbytes: int) -> None:
        """Record the connection of a member that sent its first message on it, or the clock in a ping."""
        if member is not None and isinstance(message, Ping):
            member.link.observe_clock(message, self._shell.wall_s())
        elif member is None and (member := self.core.members.by_peer(peer)) is not None:
            member.link.bytes_up += nbytes
            member.link.address = self._shell.address_of(peer)

    def _is_too_often(self, peer: Peer, message: Message) -> bool:
        return self.bounds.is_too_often(message, peer, self._sender, self._now_s)

    def _event(
        self, peer: Peer, member: Member | None, message: Message, payload: wire.Buffer | None
    ) -> HubEvent | None:
        """Convert a message to an event of the core.

        Return `None` if the message creates no event, or creates it later. A request first ends the
        transfer that it replaces. The event reports whether the hub has the capacity to answer it.
        """
        if isinstance(message, Push):
            return self._intake.take(peer, member, message, payload, sender=self._sender, now_s=self._now_s)
        if isinstance(message, Piece):
            return self._piece(peer, message, payload)
        if payload is not None:
            raise ProtocolError(f"unexpected payload of {type(message).__name__}")
        if isinstance(message, Credit):
            if not self._deliveries.send_pieces(peer, message, self._now_s):
                return self._malformed(peer, "credit without a transfer", strike=False)
            return self._heard(peer, "credit")
        if isinstance(message, FindPeers):
            return self._answer_peer(peer, message)
        if isinstance(message, FetchGraph):
            self._deliveries.restart_graph(peer, message)
            return HubReceived(peer, message, self._capacity.for_graph(self._now_s, member), *self._stamp(member))
        if isinstance(message, Fetch):
            # A connection without a member has no transfers.
            resumes = member is not None and self._deliveries.restart(peer, member, message, self._now_s)
            has_capacity = resumes or self._capacity.for_snapshot(self._now_s, member)
            return HubReceived(peer, message, has_capacity, *self._stamp(member))
        if isinstance(message, (Ping, Hello, Goodbye, StatusRequest, Wake, Order)):
            # Status requests are not logged, so their bytes count with the sender's next event.
            counted = None if isinstance(message, StatusRequest) else member
            too_often = self._is_too_often(peer, message)
            return None if too_often else HubReceived(peer, message, True, *self._stamp(counted))
        raise ProtocolError(f"unexpected {type(message).__name__}: only a hub sends it")

    def _answer_peer(self, peer: Peer, message: FindPeers) -> HubReceivedMalformed | None:
        """Answer a peer with the roster; a refusal becomes an event of the core."""
        if self._is_too_often(peer, message):
            return None
        answer = self._roster.answer(message, self._sender)
        self._send(peer, answer)
        return self._malformed(peer, answer.sentence, strike=False) if isinstance(answer, Refuse) else None

    def _piece(self, peer: Peer, piece: Piece, payload: wire.Buffer | None) -> HubEvent | None:
        """Accept and credit a piece; if it completes a push, let the worker measure the push."""
        arriving = None if payload is None else self._intake.incoming.accept(peer, piece, payload, self._now_s)
        if arriving is None:
            return self._malformed(peer, "piece without a transfer", strike=False)
        push, transfer = arriving.push, arriving.transfer
        if transfer.state != "complete":
            self._send(peer, transfer.credit())
            return self._heard(peer, "piece")
        self._intake.measure(peer, push, transfer.buffer, self._sender)
        return None

    def _on_measured(self, peer: Peer, make_event: Callable[[], HubEvent]) -> None:
        """Pass the event of an update to the core, after the worker has measured the update."""
        if self.halted:
            self._refuse_busy(peer)
        else:
            self._handle(make_event())

    def _heard(self, peer: Peer, kind: Literal["piece", "credit"]) -> Heard | None:
        """Return the event of a piece or a credit, or `None` if no event is needed."""
        member = self._member(peer)
        if member is not None and self.core.accept_silently(member, kind, self._now_s):
            return None
        return Heard(peer, kind, *self._stamp(member))

    def _stamp(self, member: Member | None) -> tuple[Key, Moved]:
        """Return the key of the message, and the bytes to count for its sender."""
        return self._sender.key, moved_by(member)

    def _malformed(self, peer: Peer, reason: str, *, strike: bool = True) -> HubReceivedMalformed:
        """Return the event of a malformed message, which is not logged and so counts no bytes."""
        return HubReceivedMalformed(peer, reason, strike, self._sender.key)

    def _member(self, peer: Peer) -> Member | None:
        return self.core.members.by_peer(peer)

    # -- outgoing effects ------------------------------------------------------------------------------------

    def _execute(self, effects: list[HubEffect]) -> None:
        """Execute effects immediately, but queue those that may depend on a fold."""
        for effect in effects:
            if isinstance(effect, MAY_WAIT):
                self._fold_queue.put(effect)
            else:
                self._carry_out(effect)
        self._fold_queue.advance()

    def _carry_out(self, effect: _AtOnce) -> None:
        match effect:
            case SendToDevice():
                self._send(effect.peer, effect.message)
            case Discard():
                self.model.release(effect.handle)
            case Receive():
                if (member := self._member(effect.peer)) is not None:
                    self._send(effect.peer, self._intake.receive(effect.peer, member, effect.push, self._now_s))
            case SendGraph():
                self._deliveries.send_graph(effect.peer, base=effect.base)
            case SendStatus():
                self._answer_status(effect)
            case SuspendTransfers() | Expel():
                self._end_transfers(effect)
            case HubReport():
                report = msgspec.structs.replace(effect, decided_s=self._now_s)
                self.outbox.show(partial(self._shell.report, report))
            case Save():
                self._note_state()
            case _:
                assert_never(effect)

    def _answer_status(self, effect: SendStatus) -> None:
        busy = partial(self._refuse_busy, effect.peer)
        self.status_answers.answer(effect, self._sender, self._now_s, busy)

    def _end_transfers(self, effect: SuspendTransfers | Expel) -> None:
        """Suspend the transfers of a connection, or drop those of an expelled device."""
        self._intake.incoming.suspend(effect.peer, self._now_s)
        self._deliveries.outgoing.suspend(effect.peer, self._now_s)
        if isinstance(effect, Expel):
            self._intake.incoming.drop_suspended(effect.owner)
            self._deliveries.outgoing.drop_suspended(effect.owner)

    def _note_state(self) -> None:
        """Capture the core's state for a checkpoint, unless a checkpoint is being written."""
        if self._failed or (self._log_writer.saving and not self.core.stopped):
            return
        entry = self._log_writer.begin_checkpoint()
        self._fold_queue.put(note(self.core, self.model, entry, self._now_s))

    def _send(self, peer: Peer, message: Message, payload: wire.Buffer | None = None) -> None:
        if isinstance(message, Welcome):
            message = msgspec.structs.replace(message, session=self._sessions.token(message.session))
        member = self._member(peer)
        header = wire.encode(message)
        if member is not None:
            member.link.bytes_down += len(header) if payload is None else len(header) + len(payload)
        if isinstance(message, (Assignment, Ack, Welcome, Goodbye)):
            self.outbox.send(peer, header, payload, confirms=True)
        elif isinstance(message, (Pong, Piece, Credit)) or _shuts_out(message):
            self._shell.send(peer, header, payload)
        else:
            self.outbox.send(peer, header, payload, confirms=False)


def _shuts_out(message: Message) -> bool:
    """Return whether the message ends the connection, and so must be sent immediately."""
    return isinstance(message, Refuse) and message.code == "not_allowed"
