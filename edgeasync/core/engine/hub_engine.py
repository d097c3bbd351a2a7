"""Connects frames to `HubCore`: decodes messages, keeps payloads and transfers, carries effects out.

Still no I/O: a `HubShell` sends, runs work in the background, and saves. The ZeroMQ daemon and the simulator
are two such shells around this one engine.

Small models are measured and folded at once, which takes microseconds. The shell's background worker measures and
folds large ones in order. Nothing is measured for a push that the core would refuse or has answered. Effects that
depend on a fold (answers, checkpoints, the end) wait for it, while heartbeats are answered at once.

With a log every event is written down before its outcome is sent or shown to anybody, and each version is made
durable at once. While the log cannot be written the core stands still: devices that ask for something are told to
try again, and no lease ends.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal, assert_never

import msgspec
import numpy as np

from edgeasync.core.arrays.buffers import BufferPool
from edgeasync.core.arrays.hub_model import HubModel, WaitingUpdate
from edgeasync.core.arrays.model_executor import ModelExecutor
from edgeasync.core.arrays.published_model import PublishedPayload, Publisher
from edgeasync.core.engine.capacity import Capacity
from edgeasync.core.engine.fold_queue import INLINE_BYTES_MAX, MAY_WAIT, FoldQueue
from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.hub_transfers import IncomingTransfers, OutgoingTransfers
from edgeasync.core.engine.log_writer import LogWriter
from edgeasync.core.engine.message_bounds import HEADER_BYTES_MAX, MessageBounds
from edgeasync.core.engine.outbox import Outbox
from edgeasync.core.engine.recorder import Recorder
from edgeasync.core.engine.roster import Roster
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.engine.status_answers import StatusAnswers
from edgeasync.core.hub.digests import with_digests
from edgeasync.core.hub.effects import (
    Assign,
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
    PushArrived,
    Resumed,
    Revoked,
    Ticked,
)
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.membership import Member, Owner
from edgeasync.core.recovery.log import Log
from edgeasync.core.recovery.replay import Sessions
from edgeasync.core.recovery.state import note
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import (
    Source,
    VectorCodec,
    VectorSource,
    find_codec,
    make_codec,
    payload_bytes_limit,
)
from edgeasync.protocol.messages import (
    Ack,
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    FindPeers,
    Goodbye,
    GraphHeader,
    Hello,
    Key,
    Message,
    Order,
    Piece,
    Ping,
    Pong,
    Push,
    Refuse,
    Status,
    StatusRequest,
    Wake,
    Welcome,
)

_NOT_OPENED = VectorSource(np.empty(0, np.float32))
"""Stands for the values of an update that the core will not decide about."""


_AtOnce = SendToDevice | Discard | Receive | SendGraph | SendStatus | SuspendTransfers | Expel | HubReport | Save
"""The effects that wait for no fold."""

Observe = Callable[[HubEvent, list[HubEffect], float], None]
"""Called with every event that the core has decided about, its effects, and the core's time; it must not block."""


class _NotAllowedError(ProtocolError):
    """A key says what is not its to say."""


class HubEngine:
    """Frames in, frames out. Every call is given the time; no call blocks for longer than a small fold."""

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
        self._outbox = Outbox(shell.send, log)
        self._observe = observe
        self.recorder = Recorder()
        self.bounds = MessageBounds()
        self._spec = core.spec
        self._limits = core.settings.limits
        self._buffers = BufferPool(payload_bytes_limit(core.spec))
        self._incoming = IncomingTransfers()
        self._outgoing = OutgoingTransfers(int(self._limits.piece_bytes), self._limits.snapshots_max)
        self._publisher = publisher or Publisher(core.spec, model, core.settings.codec)
        self._takes_models = core.policy_engine.policy.aggregate.update == "model"
        self._fold_queue = FoldQueue(
            ModelExecutor(model, self._publisher),
            core.settings.codec,
            shell,
            self._outbox,
            send=self._send,
            assign=self._assign,
            prepare=self._prepare,
            handle=self._handle,
            restored=self._outgoing.drop_all_suspended,
        )
        self._capacity = Capacity(
            core.settings,
            model=model,
            publisher=self._publisher,
            incoming=self._incoming,
            outgoing=self._outgoing,
            fold_queue=self._fold_queue,
            log_writer=self._log_writer,
        )
        self._roster = Roster()
        self._status_answers = StatusAnswers(core, shell, self._outbox)
        self._measuring: Counter[Owner | None] = Counter()
        """Whose updates the worker measures: nobody gets another measured meanwhile."""
        self._now_s = 0.0
        self._sender = ANYBODY
        self._revoked: list[Key] = []
        self._standing_still = self._saving = self._failed = False

    def next_deadline_s(self) -> float:
        """Return when `tick` is next due; infinity once stopped or while the core stands still."""
        return math.inf if self._standing_still else self.core.next_deadline_s()

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        if self._standing_still:
            return
        self._now_s = now_s
        self._incoming.drop_expired(now_s)
        self._outgoing.drop_expired(now_s)
        self._handle(Ticked(self._capacity.for_snapshot(now_s)))

    def resume(self, lineage: str, now_s: float) -> None:
        """Resume the recovered run as a new branch. A finished run ends at once."""
        self._now_s = now_s
        self._handle(Resumed(lineage))
        self.save()  # the next start then need not replay the same entries
        self.tick(now_s)

    def ask_status(self, tell: Callable[[bytes], None], now_s: float, sender: Sender = ANYBODY) -> None:
        """Call `tell` with the status as JSON, as soon as everything in it is durable; see `StatusAnswers`."""
        if self._standing_still:
            self._status_answers.tell_standing(tell, sender)
        else:
            standing = partial(self._status_answers.tell_standing, tell, sender)
            self._status_answers.ask(tell, sender, now_s, standing)

    @property
    def status_shown(self) -> bytes:
        """The newest status of everything that was durable when somebody asked, as JSON."""
        return self._status_answers.shown

    def show(self, action: Callable[[], None]) -> None:
        """Call `action`, which shows something, once everything that has happened is durable."""
        self._outbox.show(action)

    def save(self) -> None:
        """Write a checkpoint, unless one is being written."""
        self._note_state()
        self._fold_queue.advance()

    def saved(self) -> None:
        """Allow the next checkpoint; call this when the one before was written, or could not be."""
        self._saving = False

    # -- the log ---------------------------------------------------------------------------------------------

    def on_durable(self, now_s: float) -> None:
        """Send the answers that waited for the log; call this when more of the log is durable."""
        if self._standing_still:
            self._standing_still = False
            self._now_s = now_s
            self._shell.report(HubReport("writing", detail="the run's folder can be written again"))
            self._handle(Resumed())
            revoked, self._revoked = self._revoked, []
            for key in revoked:
                self._handle(Revoked(key))
        self._outbox.release()
        self._status_answers.refresh(now_s)
        if self._log_writer.wants_checkpoint:
            self.save()

    def on_failing(self, reason: str) -> None:
        """Stand still until the log can be written again; call this when it cannot."""
        self._stand_still(reason)
        if self.core.stopped:
            self._outbox.abandon()

    def _stand_still(self, reason: str) -> None:
        self._standing_still = True
        self._status_answers.stand_still()
        detail = f"the run's folder cannot be written: {reason}; no update is taken until it can be"
        self._shell.report(HubReport("not_writing", detail=detail))

    def _stand_still_if_overfull(self) -> None:
        """Accept nothing more while too much waits for a disk that hangs."""
        if self._standing_still or self.core.stopped:
            return
        if reason := self._log_writer.overfull(len(self._outbox)):
            self._stand_still(reason)

    def _handle(self, event: HubEvent) -> None:
        """Let the core decide about an event, write the event to the log, and carry out the effects.

        An exception, a plugin's for example, leaves the core half-way: then nothing more is decided or written, so
        that the log leads to the state before. The shell ends the hub.
        """
        if self._failed:
            return
        self._status_answers.begin(self._now_s)
        version = self.core.version
        try:
            self.recorder.begin(self._now_s, event)
            effects = self.core.handle(event, self._now_s)
            self.recorder.end(effects)
            self._log_writer.write(event, self._now_s, effects, at_once=self.core.version != version)
            if self._observe is not None:
                self._observe(event, effects, self._now_s)
            self._execute(effects)
        except BaseException:
            self._failed = True
            raise

    def _answer_standing(self, peer: Peer, message: Message, payload: wire.Buffer | None) -> None:
        """Answer a message while the core stands still."""
        match message:
            case Ping():
                self._shell.send(peer, wire.encode(Pong(message.sent_s)), None)
            case StatusRequest() | Wake() if not self._is_too_often(peer, message):
                self._send_status(peer)
            case Credit() if payload is None:
                self._send_pieces(peer, message)
            case Order() if not self._is_too_often(peer, message):
                self._refuse_busy(peer)
            case Push() | Fetch() | FetchGraph() | Hello() | Piece():
                self._incoming.suspend(peer, self._now_s)
                self._refuse_busy(peer)

    def _refuse_busy(self, peer: Peer) -> None:
        refuse = Refuse("busy", "the hub's disk cannot be written; try again", self._limits.retry_after_s)
        self._shell.send(peer, wire.encode(refuse), None)

    def request_stop(self, now_s: float, *, finished: bool = False) -> None:
        """Say goodbye, save, and stop once everything before is done; if `finished`, the devices end, too."""
        self._now_s = now_s
        self._handle(HubStopRequested(finished))
        if self._standing_still:
            self._outbox.abandon()

    def revoke(self, key: Key, now_s: float) -> None:
        """End what a key has here; no message of it is to come. While the core stands still, that waits."""
        self._now_s = now_s
        self._roster.forget(key)
        if self._standing_still:
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
        """Handle one message, whatever its bytes are; `sender` is whose connection it came on."""
        self._now_s, self._sender = now_s, sender
        nbytes = len(header) if payload is None else len(header) + len(payload)
        member = self.core.members.by_peer(peer)
        if member is not None and member.key != sender.key:
            # A routing id proves nothing: who claims another's is nobody, and costs that one no strike.
            self._handle(
                HubReceivedMalformed(peer, "on a routing id of another key's device", strike=False, key=sender.key)
            )
            return
        if member is not None:
            member.link.bytes_up += nbytes
        event: HubEvent | None
        try:
            message = with_digests(wire.decode(header, HEADER_BYTES_MAX))
            if sender is not ANYBODY:
                _check_allowed(sender, message)
            self._stand_still_if_overfull()
            if self._standing_still:
                self._answer_standing(peer, message, payload)
                return
            event = self._event(peer, member, message, payload)
        except wire.UnsupportedVersionError as error:
            self._shell.send(peer, wire.encode(error.to_refuse()), None)
            event = self._malformed(peer, str(error), strike=False)
        except _NotAllowedError as error:
            self._shell.send(peer, wire.encode(Refuse("not_allowed", str(error))), None)
            event = self._malformed(peer, str(error), strike=False)
        except ProtocolError as error:
            event = self._malformed(peer, str(error))
        if event is not None and not self._standing_still:
            self._handle(event)
        if member is None and (member := self.core.members.by_peer(peer)) is not None:
            member.link.bytes_up += nbytes  # this message made its sender a member

    def _is_too_often(self, peer: Peer, message: Message) -> bool:
        """Return whether the sender says this more often than it may: then nothing is answered."""
        sender, who = self._sender, self._sender.key or peer
        if isinstance(message, Hello):
            return not self.bounds.allows_hello(who, self._now_s)
        if isinstance(message, (StatusRequest, Wake, Order)):
            return not self.bounds.allows_status(who, self._now_s, operator=sender.role == "operator")
        return False

    def _event(
        self, peer: Peer, member: Member | None, message: Message, payload: wire.Buffer | None
    ) -> HubEvent | None:
        """Turn a message into the core's event; return `None` if the worker makes the event later, or nobody.

        A request first ends the transfer that it replaces. The event then says whether there is room to answer.
        """
        if isinstance(message, Push):
            return self._push(peer, member, message, payload)
        if isinstance(message, Piece):
            return self._piece(peer, message, payload)
        if payload is not None:
            raise ProtocolError(f"a {type(message).__name__} has no payload")
        if isinstance(message, Credit):
            return self._credit(peer, message)
        if isinstance(message, FindPeers):
            return self._answer_peer(peer, message)
        if isinstance(message, FetchGraph):
            self._outgoing.drop(peer)  # a device that asks again has given up the transfer
            return HubReceived(peer, message, self._capacity.for_graph(self._now_s, member), *self._stamp(member))
        if isinstance(message, Fetch):
            return self._fetch(peer, member, message)
        if isinstance(message, (Ping, Hello, Goodbye, StatusRequest, Wake, Order)):
            # The log leaves out requests for the status: their bytes come with the sender's next event.
            counted = None if isinstance(message, StatusRequest) else member
            too_often = self._is_too_often(peer, message)
            return None if too_often else HubReceived(peer, message, True, *self._stamp(counted))
        raise ProtocolError(f"a {type(message).__name__} is for devices, not for a hub")

    def _fetch(self, peer: Peer, member: Member | None, fetch: Fetch) -> HubEvent:
        if member is not None:  # strangers have no transfers
            self._outgoing.suspend(peer, self._now_s)  # a device that asks again has given up the transfer
            if fetch.partial is not None:
                self._outgoing.note_partial(peer, fetch.partial)
        resumes = member is not None and self._outgoing.can_resume(member)
        has_capacity = resumes or self._capacity.for_snapshot(self._now_s, member)
        return HubReceived(peer, fetch, has_capacity, *self._stamp(member))

    def _answer_peer(self, peer: Peer, message: FindPeers) -> HubReceivedMalformed | None:
        """Tell a peer, which is no member, of the others; that is an event of the core only if it is refused."""
        if not self.bounds.allows_hello(self._sender.key or peer, self._now_s):
            return None
        answer = self._roster.answer(message, self._sender)
        self._send(peer, answer)
        return self._malformed(peer, answer.sentence, strike=False) if isinstance(answer, Refuse) else None

    def _push(self, peer: Peer, member: Member | None, push: Push, payload: wire.Buffer | None) -> HubEvent | None:
        """Return the event of a whole or announced push; raises `ProtocolError` unless the payload is sound.

        The core decides only about updates whose payload was checked, opened and measured. That may take long for
        a few bytes: so nobody gets it done for a push that the core refuses or has answered, and the worker does
        it for a large model. Then the event comes later, and this returns `None`.
        """
        if push.metrics is not None and not all(map(math.isfinite, push.metrics.values())):
            raise ProtocolError("a metric is not finite")
        codec = find_codec(push.codec, push.payload_bytes, self._spec)
        if self._takes_models and not codec.elementwise:
            raise ProtocolError(f"a whole model does not bear {push.codec}")
        if push.transfer:
            if payload is not None:
                raise ProtocolError("a push in pieces carries its payload itself")
            self._incoming.suspend(peer, self._now_s)  # a device that announces again has given up the transfer
            return HubReceived(peer, push, self._capacity.for_update(self._now_s, member), *self._stamp(member))
        if payload is None or len(payload) != push.payload_bytes:
            raise ProtocolError("the payload is not as long as its header says")
        if wire.checksum(payload) != push.checksum:
            raise ProtocolError("the payload does not have the checksum it was announced with")
        owner = None if member is None else member.owner
        can_answer = (
            owner not in self._measuring
            and self._capacity.for_update(self._now_s)
            and self._capacity.for_snapshot(self._now_s, member)
        )
        if not self.core.decides(push, self._sender.key, self._now_s, can_answer=can_answer):
            handle = self.model.keep(WaitingUpdate(_NOT_OPENED, push.codec, payload))
            return PushArrived(peer, push, handle, math.nan, can_answer, *self._stamp(member))
        if owner is not None:
            self._incoming.drop_suspended(owner)  # a whole push replaces it
        if self._spec.nbytes > INLINE_BYTES_MAX:
            self._measure_in_background(peer, push, payload, owner)
            return None
        update = codec.open(payload)
        norm = self.model.norm(update)
        handle = self.model.keep(WaitingUpdate(update, push.codec, payload))
        return PushArrived(peer, push, handle, norm, can_answer, *self._stamp(member))

    def _piece(self, peer: Peer, piece: Piece, payload: wire.Buffer | None) -> HubEvent | None:
        """Accept a piece and credit it; return `None` if it completes a push.

        A payload in pieces is large: the worker measures it, and then gives the core the event of the push.
        """
        arriving = None if payload is None else self._incoming.accept(peer, piece, payload, self._now_s)
        if arriving is None:
            return self._malformed(peer, "a piece without a transfer", strike=False)
        push, transfer = arriving.push, arriving.transfer
        if transfer.state != "complete":
            self._send(peer, transfer.credit())
            return self._heard(peer, "piece")
        self._measure_in_background(peer, push, transfer.buffer, self._owner(peer))
        return None

    def _measure_in_background(self, peer: Peer, push: Push, payload: wire.Buffer, owner: Owner | None) -> None:
        """Let the worker open and measure a payload, then give the core the event of its push."""
        self._capacity.measuring += 1
        self._measuring[owner] += 1
        sender = self._sender
        codec = make_codec(push.codec, self._spec)

        def measured(result: tuple[Source, float] | ProtocolError) -> None:
            self._capacity.measuring -= 1
            self._measuring -= Counter({owner: 1})
            if self._standing_still:
                self._refuse_busy(peer)
                return
            self._sender = sender
            if isinstance(result, ProtocolError):
                self._handle(self._malformed(peer, str(result)))
                return
            update, norm = result
            member = self._member(peer)
            handle = self.model.keep(WaitingUpdate(update, push.codec, payload))
            can_answer = self._capacity.for_snapshot(self._now_s, member)
            self._handle(PushArrived(peer, push, handle, norm, can_answer, *self._stamp(member)))

        self._shell.run_in_background(partial(self._measure, codec, payload), measured)

    def _measure(self, codec: VectorCodec, payload: wire.Buffer) -> tuple[Source, float] | ProtocolError:
        """Open a payload, and take its norm; runs in the background."""
        try:
            update = codec.open(payload)
        except ProtocolError as error:
            return error
        return update, self.model.norm(update)

    def _credit(self, peer: Peer, credit: Credit) -> HubEvent | None:
        if not self._send_pieces(peer, credit):
            return self._malformed(peer, "credit without a transfer", strike=False)
        return self._heard(peer, "credit")

    def _send_pieces(self, peer: Peer, credit: Credit) -> bool:
        """Send the pieces that a device has room for; return false if it awaits none."""
        credited = self._outgoing.credit(peer, credit, self._now_s)
        if credited is None:
            return False
        transfer, pieces = credited
        if (member := self._member(peer)) is not None:
            member.link.observe_window(transfer.window)
        for piece, part in pieces:
            self._send(peer, piece, part)
        return True

    def _heard(self, peer: Peer, kind: Literal["piece", "credit"]) -> Heard | None:
        """Return the event of a piece or a credit, or `None`: then its bytes come with the sender's next event."""
        member = self._member(peer)
        if member is not None and self.core.accept_silently(member, kind, self._now_s):
            return None
        return Heard(peer, kind, *self._stamp(member))

    def _stamp(self, member: Member | None) -> tuple[Key, Moved]:
        """Return the key that the message came under, and the bytes to count for its sender."""
        return self._sender.key, (0, 0) if member is None else member.link.take_uncounted()

    def _malformed(self, peer: Peer, reason: str, *, strike: bool = True) -> HubReceivedMalformed:
        """Return the event of a message that cannot be read; the log may leave it out, so it counts no bytes."""
        return HubReceivedMalformed(peer, reason, strike, self._sender.key)

    def _member(self, peer: Peer) -> Member | None:
        return self.core.members.by_peer(peer)

    def _owner(self, peer: Peer) -> Owner | None:
        member = self._member(peer)
        return None if member is None else member.owner

    # -- outgoing effects ------------------------------------------------------------------------------------

    def _execute(self, effects: list[HubEffect]) -> None:
        """Carry out effects at once, but queue those that may depend on an earlier fold."""
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
                self._receive(effect.peer, effect.push)
            case SendGraph():
                self._send_graph(effect.peer)
            case SendStatus():
                self._send_status(effect.peer, confirms=effect.confirms)
            case SuspendTransfers() | Expel():
                self._end_transfers(effect)
            case HubReport():
                report = msgspec.structs.replace(effect, decided_s=self._now_s)
                self._outbox.show(partial(self._shell.report, report))
            case Save():
                self._note_state()
            case _:
                assert_never(effect)

    def _end_transfers(self, effect: SuspendTransfers | Expel) -> None:
        """End a connection's transfers; those of a device that is shut out are not kept."""
        self._incoming.suspend(effect.peer, self._now_s)
        self._outgoing.suspend(effect.peer, self._now_s)
        if isinstance(effect, Expel):
            self._incoming.drop_suspended(effect.owner)
            self._outgoing.drop_suspended(effect.owner)

    def _note_state(self) -> None:
        """Note the core's state for a checkpoint, unless the one before is still being written."""
        if self._failed or (self._saving and not self.core.stopped):
            return
        self._saving = True
        entry = self._log_writer.begin_checkpoint()
        self._fold_queue.put(note(self.core, self.model, entry, self._now_s))

    def _assign(self, effect: Assign) -> None:
        """Send an assignment of the published model, or the rest of one that was cut off.

        On a bad link a device that was sent the newest model each time might never receive a whole one.
        """
        member = self.core.members.by_peer(effect.peer)
        if member is None:
            return  # the device has gone while the assignment waited for a fold
        kept = self._outgoing.resume(member)
        if kept is None:
            version = effect.version
            offer = self._publisher.offer(
                effect.base, effect.codec, held=effect.held, owner=member.owner, coarse=effect.coarse
            )
        else:
            # The device holds the beginning of an older version.
            before, payload = kept
            version, offer = (
                before.version,
                PublishedPayload(payload, before.checksum, before.codec, before.deltas),
            )
        message = Assignment(
            version=version,
            local_steps=effect.local_steps,
            codec=offer.codec,
            checksum=offer.checksum,
            payload_bytes=len(offer.payload),
            ack=effect.ack,
            deltas=offer.deltas,
            push_codec=effect.push_codec,
            learning_rate_factor=effect.learning_rate_factor,
        )
        self._announce(member, message, offer.payload)

    def _prepare(self, effect: Assign) -> Callable[[], None] | None:
        """Return the coding that an assignment needs, and that takes long with a large model."""
        member = self.core.members.by_peer(effect.peer)
        if member is None or self._outgoing.can_resume(member):
            return None
        device = effect.base, effect.held, member.owner
        if not self._publisher.needs_coding(*device, coarse=effect.coarse):
            return None
        return partial(self._publisher.prepare, *device)

    def _send_graph(self, peer: Peer) -> None:
        graph, member = self.core.graph, self.core.members.by_peer(peer)
        assert graph is not None
        if member is not None:
            message = GraphHeader(graph.fingerprint, graph.checksum, len(graph.payload))
            self._announce(member, message, graph.payload)

    def _announce(self, member: Member, message: Assignment | GraphHeader, payload: wire.Buffer) -> None:
        """Send a message with its payload, or begin to send that in pieces."""
        message = self._outgoing.announce(member, message, payload, self._now_s)
        self._send(member.peer, message, None if message.transfer else payload)

    def _receive(self, peer: Peer, push: Push) -> None:
        member = self._member(peer)
        if member is None:
            return
        transfer = self._incoming.resume(peer, member.owner, push, self._now_s)
        if transfer is None:
            buffer = self._buffers.take()[: push.payload_bytes].data
            transfer = self._incoming.receive(peer, member, push, buffer, self._now_s)
        self._send(peer, transfer.credit())

    def _send(self, peer: Peer, message: Message, payload: wire.Buffer | None = None) -> None:
        if isinstance(message, Welcome):
            message = msgspec.structs.replace(message, session=self._sessions.token(message.session))
        member = self._member(peer)
        header = wire.encode(message)
        if member is not None:
            member.link.bytes_down += len(header) if payload is None else len(header) + len(payload)
        if isinstance(message, (Assignment, Ack, Welcome, Goodbye)):
            self._outbox.send(peer, header, payload, confirms=True)
        elif isinstance(message, (Pong, Piece, Credit)) or _shuts_out(message):
            self._shell.send(peer, header, payload)
        else:
            self._outbox.send(peer, header, payload, confirms=False)

    def _send_status(self, peer: Peer, *, confirms: bool = False) -> None:
        header = wire.encode(Status())

        def tell(text: bytes) -> None:
            self._shell.send(peer, header, text)

        if confirms:  # what was durable before says nothing of it
            self._status_answers.ask(tell, self._sender, self._now_s, partial(self._refuse_busy, peer))
        else:
            self.ask_status(tell, self._now_s, self._sender)


def _shuts_out(message: Message) -> bool:
    """Return whether a device may not stay: it is told at once, since its connection is shut in a moment."""
    return isinstance(message, Refuse) and message.code == "not_allowed"


def _check_allowed(sender: Sender, message: Message) -> None:
    """Raise `_NotAllowedError` for what a key must not say: an operator's asks, wakes and gives orders."""
    if isinstance(message, StatusRequest):
        return
    if isinstance(message, Wake | Order):
        if sender.role != "operator":
            raise _NotAllowedError(f"the key of {sender.name} is a device's; operators alone may do this")
        return
    if sender.role != "device":
        raise _NotAllowedError(f"the key of {sender.name} is an operator's, not a device's")
    if isinstance(message, Hello) and not sender.speaks_for(message.device_id):
        raise _NotAllowedError(
            f"this device's key speaks for {sender.name}, {sender.name}/0 and so on, not for {message.device_id}"
        )
