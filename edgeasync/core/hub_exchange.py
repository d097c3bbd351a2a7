"""Between frames and `HubCore`: decodes what comes in, keeps payloads and transfers, carries effects out.

Still no I/O: a `HubShell` sends, runs work in the background, and saves. The ZeroMQ daemon and the simulator
are two such shells around this one exchange.

Small models are measured and folded at once, which takes microseconds. Large ones are given to the shell's
background worker, in order; whatever depends on a fold (answers, saving, the end) waits in line behind it,
while heartbeats are answered at once.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from edgeasync.core.buffers import BufferPool
from edgeasync.core.effects import (
    Assign,
    Discard,
    Evaluate,
    Fold,
    Forget,
    HubEffect,
    Keep,
    Publish,
    Receive,
    Report,
    Restore,
    Save,
    SaveBest,
    Send,
    SendGraph,
    SendStatus,
    Stop,
)
from edgeasync.core.events import (
    Evaluated,
    Folded,
    Heard,
    HubEvent,
    Malformed,
    Peer,
    PushArrived,
    Received,
    StopRequested,
)  # fmt: skip
from edgeasync.core.hub import HubCore
from edgeasync.core.incoming import IncomingTransfers
from edgeasync.core.membership import Member, Owner
from edgeasync.core.model import Model, Snapshot, Update
from edgeasync.core.outgoing import OutgoingTransfers
from edgeasync.core.published import Offer, Publisher
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import Codec, Source, find_codec, make_codec, payload_bytes_limit
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    Graph,
    Hello,
    Leave,
    Message,
    Piece,
    Ping,
    Push,
    Refuse,
    Status,
    StatusRequest,
)

INLINE_BYTES_MAX = 2 << 20
"""Models up to this size are folded at once: that takes less time than handing them over and back."""

Result = TypeVar("Result")


class HubShell(Protocol):
    """What the exchange needs done in the world."""

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message, or drop it if the peer is gone or takes nothing in: its lease will tell."""

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the background, one after the other, then call `then` with its result."""

    def save(self, snapshot: Snapshot, *, last: bool) -> None:
        """Write the model to disk in the background; the `last` time for certain."""

    def save_best(self, snapshot: Snapshot, loss: float, accuracy: float | None) -> None:
        """Write the best model so far to disk in the background."""

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate a version on held-out data in the background, then call `then`; skip it if one is under way."""

    def report(self, report: Report) -> None:
        """Tell people."""

    def describe(self) -> dict[str, Any]:
        """Return what only the shell knows, to be added to the status."""

    def stop(self, reason: str) -> None:
        """End: everything before has been done."""


class HubExchange:
    """Frames in, frames out. Every call is given the time; none blocks for longer than a small fold."""

    def __init__(self, core: HubCore, model: Model, shell: HubShell) -> None:
        self.core = core
        self.model = model
        self._shell = shell
        self._spec = core.spec
        self._limits = core.settings.limits
        self._inline = core.spec.nbytes <= INLINE_BYTES_MAX
        self._buffers = BufferPool(payload_bytes_limit(core.spec))
        self._incoming = IncomingTransfers()
        self._outgoing = OutgoingTransfers(int(self._limits.piece_bytes), self._limits.snapshots_max)
        self._publisher = Publisher(core.spec, model, core.settings.codec)
        self._takes_models = core.judge.judgement.aggregate.update == "model"
        self._measuring = 0
        self._ordered: deque[HubEffect] = deque()
        self._assigning = 0
        self._folding = False
        self._evaluated: Snapshot | None = None
        self._now_s = 0.0

    def tick(self, now_s: float) -> None:
        """Do what is due; `core.next_deadline_s` says when that is."""
        self._now_s = now_s
        self._incoming.expire(now_s)
        self._outgoing.expire(now_s)
        self._execute(self.core.tick(now_s, room=self._room_to_send()))

    def request_stop(self, now_s: float) -> None:
        """Say goodbye, save, and stop once everything before is done."""
        self._now_s = now_s
        self._execute(self.core.handle(StopRequested(), now_s))

    # -- messages in -----------------------------------------------------------------------------------------

    def on_message(self, peer: Peer, header: bytes, payload: wire.Buffer | None, now_s: float) -> None:
        """Take in one message, whatever it is."""
        self._now_s = now_s
        nbytes = len(header) if payload is None else len(header) + len(payload)
        if (member := self.core.members.by_peer(peer)) is not None:
            member.link.bytes_up += nbytes
        try:
            event = self._event(peer, wire.decode(header), payload)
        except wire.UnsupportedVersionError as error:
            sentence = f"{error}; install the same edgeasync on both"
            self._shell.send(peer, wire.encode(Refuse("protocol_version", sentence)), None)
            event = Malformed(peer, str(error), strike=False)
        except ProtocolError as error:
            event = Malformed(peer, str(error))
        if event is not None:
            self._execute(self.core.handle(event, now_s))
        if member is None and (member := self.core.members.by_peer(peer)) is not None:
            member.link.bytes_up += nbytes  # the message has made it one

    def _event(self, peer: Peer, message: Message, payload: wire.Buffer | None) -> HubEvent | None:
        """Turn a message into the core's event; `None` where the worker makes it later."""
        if isinstance(message, Push):
            return self._push(peer, message, payload)
        if isinstance(message, Piece):
            return self._piece(peer, message, payload)
        if payload is not None:
            raise ProtocolError(f"a {type(message).__name__} has no payload")
        if isinstance(message, Credit):
            return self._credit(peer, message)
        if isinstance(message, FetchGraph):
            self._outgoing.end(peer)  # who asks again has given up what was under way
            return Received(peer, message, self._room_for_graph())
        if isinstance(message, Fetch):
            if (owner := self._owner(peer)) is not None:  # nothing is noted of strangers
                self._outgoing.ask(peer, message.partial, self._now_s)
            return Received(peer, message, self._outgoing.can_resume(peer, owner) or self._room_to_send())
        if isinstance(message, Hello | Ping | Leave | StatusRequest):
            return Received(peer, message)
        raise ProtocolError(f"a {type(message).__name__} is for devices, not for a hub")

    def _push(self, peer: Peer, push: Push, payload: wire.Buffer | None) -> HubEvent:
        codec = find_codec(push.codec, push.payload_bytes, self._spec)
        if self._takes_models and not codec.elementwise:
            raise ProtocolError(f"a whole model does not bear {push.codec}")
        if push.transfer:
            if payload is not None:
                raise ProtocolError("a push in pieces carries its payload itself")
            self._incoming.suspend(peer, self._now_s)  # who announces again has given up what was under way
            return Received(peer, push, self._room_to_receive(self._owner(peer)))
        if payload is None or len(payload) != push.payload_bytes:
            raise ProtocolError("the payload is not as long as its header says")
        if wire.checksum(payload) != push.checksum:
            raise ProtocolError("the payload does not have the checksum it was announced with")
        update = codec.open(payload)
        if self._incoming and (owner := self._owner(peer)) is not None:
            self._incoming.drop(owner)  # it sends the whole, or something else
        norm = self.model.norm(update)
        room = self._room_to_receive() and self._room_to_send()
        return PushArrived(peer, push, self.model.keep(Update(update, push.codec, payload)), norm, room)

    def _piece(self, peer: Peer, piece: Piece, payload: wire.Buffer | None) -> HubEvent | None:
        arriving = None if payload is None else self._incoming.accept(peer, piece, payload, self._now_s)
        if arriving is None:
            return Malformed(peer, "a piece without a transfer", strike=False)
        push, transfer = arriving.push, arriving.transfer
        if not transfer.complete:
            self._send(peer, transfer.credit())
            return Heard(peer, "piece")
        self._measuring += 1
        codec = make_codec(push.codec, self._spec)

        def measured(result: tuple[Source, float] | ProtocolError) -> None:
            self._measuring -= 1
            event: HubEvent
            if isinstance(result, ProtocolError):
                event = Malformed(peer, str(result))
            else:
                update, norm = result
                handle = self.model.keep(Update(update, push.codec, transfer.buffer))
                event = PushArrived(peer, push, handle, norm, self._room_to_send())
            self._execute(self.core.handle(event, self._now_s))

        self._shell.run_in_background(partial(self._measure, codec, transfer.buffer), measured)
        return None

    def _measure(self, codec: Codec, payload: wire.Buffer) -> tuple[Source, float] | ProtocolError:
        """Check a payload that came in pieces, and take its norm; in the background."""
        try:
            update = codec.open(payload)
        except ProtocolError as error:
            return error
        return update, self.model.norm(update)

    def _credit(self, peer: Peer, credit: Credit) -> HubEvent:
        credited = self._outgoing.credit(peer, credit, self._now_s)
        if credited is None:
            return Malformed(peer, "credit without a transfer", strike=False)
        transfer, pieces = credited
        if (member := self.core.members.by_peer(peer)) is not None:
            member.link.observe_window(transfer.window)
        for piece, part in pieces:
            self._send(peer, piece, part)
        return Heard(peer, "credit")

    def _owner(self, peer: Peer) -> Owner | None:
        member = self.core.members.by_peer(peer)
        return None if member is None else member.owner

    def _room_to_receive(self, owner: Owner | None = None) -> bool:
        # What is kept of this device's own push is its place, or is dropped before another takes it.
        held_max = self._limits.updates_held_max + self._incoming.is_suspended(owner)
        if self._held() >= held_max:
            self._drop_stalled()
        while self._held() >= held_max and self._incoming.make_room(spare=owner):
            pass
        return self._held() < held_max

    def _held(self) -> int:
        return len(self._incoming) + self._measuring + self.model.updates_waiting

    def _room_to_send(self) -> bool:
        if self._sending() < self._limits.snapshots_max:
            return True
        self._drop_stalled()
        while self._sending() >= self._limits.snapshots_max:
            if not self._outgoing.make_room():
                return False
        return True

    def _sending(self) -> int:
        # Each assignment in line behind a fold is about to hold one more.
        return self.model.snapshots_alive + self._publisher.outdated_alive + self._assigning

    def _room_for_graph(self) -> bool:
        # They share one payload; what each costs is what libzmq has of it in its queue.
        if self._outgoing.shared_count >= self._limits.snapshots_max:
            self._drop_stalled()
        return self._outgoing.shared_count < self._limits.snapshots_max

    def _drop_stalled(self) -> None:
        """End transfers that have not moved for a lease: a member that only pings must not keep their places."""
        limit_s = self._now_s - self.core.settings.liveness.lease_s
        self._incoming.end_stalled(limit_s)
        self._outgoing.end_stalled(limit_s)

    # -- effects out -----------------------------------------------------------------------------------------

    def _execute(self, effects: list[HubEffect]) -> None:
        for effect in effects:
            match effect:
                case (
                    Assign() | Fold() | Publish() | Keep() | Restore() | Evaluate() | SaveBest() | Save() | Stop()
                ):
                    self._put_in_line(effect)
                case Send():
                    self._send(effect.peer, effect.message)
                case Discard():
                    self.model.release(effect.handle)
                case Receive():
                    self._receive(effect.peer, effect.push)
                case SendGraph():
                    self._send_graph(effect.peer)
                case SendStatus():
                    status = self.core.status(self._now_s) | self._shell.describe()
                    self._shell.send(effect.peer, wire.encode(Status()), msgspec.json.encode(status))
                case Forget():
                    self._incoming.suspend(effect.peer, self._now_s)
                    self._outgoing.forget(effect.peer, self._now_s)
                case Report():
                    self._shell.report(effect)
        self._advance()

    def _put_in_line(self, effect: HubEffect) -> None:
        if isinstance(effect, SaveBest) and self._evaluated is not None:
            self._shell.save_best(self._evaluated, effect.loss, effect.accuracy)  # it need not wait for a fold
            return
        self._assigning += isinstance(effect, Assign)
        self._ordered.append(effect)

    def _advance(self) -> None:
        """Carry out what is in line, up to a fold that the worker is busy with."""
        while self._ordered and not self._folding:
            effect = self._ordered.popleft()
            match effect:
                case Fold() | Publish() | Keep() | Restore():
                    self._move(effect)
                case Evaluate():
                    self._shell.evaluate(self.model.current, partial(self._on_evaluated, self.model.current))
                case SaveBest():
                    self._shell.save_best(self.model.current, effect.loss, effect.accuracy)
                case Assign():
                    self._assigning -= 1
                    self._assign(effect)
                case Save():
                    self._shell.save(self.model.current, last=self.core.stopped)
                case Stop():
                    self._shell.stop(effect.reason)

    def _move(self, effect: Fold | Publish | Keep | Restore) -> None:
        match effect:
            case Fold():
                self._fold(effect)
            case Publish():
                self._publish(effect)
            case Keep():
                self.model.keep_current()
            case Restore():
                self._outgoing.drop_suspended()
                self.model.advance(self.model.restore(effect.number))

    def _fold(self, fold: Fold) -> None:
        updates = [self.model.release(handle) for handle in fold.handles]
        if self._inline:
            self._folded(fold, self.model.fold(fold, updates))
            return
        self._folding = True

        def work() -> tuple[Snapshot, float]:
            result = self.model.fold(fold, updates)
            codec = self.core.settings.codec
            if codec.delta == "off" and codec.model != "identity":
                self._publisher.fits(result[0], codec.model)  # so that it is coded here, once
            return result

        def folded(result: tuple[Snapshot, float]) -> None:
            self._folding = False
            self._folded(fold, result)
            self._advance()

        self._shell.run_in_background(work, folded)

    def _publish(self, publish: Publish) -> None:
        if self._inline:
            self._publisher.publish(anew=publish.anew)
            return
        self._folding = True

        def work() -> None:
            self._publisher.publish(anew=publish.anew)
            self._publisher.offer(None, self.core.settings.codec.model)  # so that it is coded here, once

        def published(_: None) -> None:
            self._folding = False
            self._advance()

        self._shell.run_in_background(work, published)

    def _folded(self, fold: Fold, result: tuple[Snapshot, float]) -> None:
        snapshot, norm = result
        self.model.advance(snapshot)
        if fold.measure:
            self._execute(self.core.handle(Folded(fold.number, norm), self._now_s))

    def _on_evaluated(self, snapshot: Snapshot, result: Evaluated) -> None:
        """Let the core judge an evaluation; the version it was of is the one it may want saved."""
        self._evaluated = snapshot
        self._execute(self.core.handle(result, self._now_s))
        self._evaluated = None

    def _assign(self, effect: Assign) -> None:
        member = self.core.members.by_peer(effect.peer)
        if member is None:
            return  # it has gone while this waited for a fold
        kept = self._outgoing.take_suspended(effect.peer, member)
        if kept is None:
            version, offer = effect.version, self._publisher.offer(effect.held, effect.codec)
        else:
            # The device holds the beginning of an older version: it goes on with that, or might never have one.
            before, payload = kept
            version, offer = before.version, Offer(payload, before.checksum, before.codec, before.deltas)
        message = Assignment(
            version=version,
            local_steps=effect.local_steps,
            codec=offer.codec,
            checksum=offer.checksum,
            payload_bytes=len(offer.payload),
            ack=effect.ack,
            deltas=offer.deltas,
            push_codec=effect.push_codec,
        )
        self._announce(member, message, offer.payload)

    def _send_graph(self, peer: Peer) -> None:
        graph, member = self.core.graph, self.core.members.by_peer(peer)
        assert graph is not None
        if member is not None:
            message = Graph(graph.fingerprint, graph.checksum, len(graph.payload))
            self._announce(member, message, graph.payload)

    def _announce(self, member: Member, message: Assignment | Graph, payload: wire.Buffer) -> None:
        """Send a message with its payload, or begin to send that in pieces."""
        message = self._outgoing.begin(member, message, payload, self._now_s)
        self._send(member.peer, message, None if message.transfer else payload)

    def _receive(self, peer: Peer, push: Push) -> None:
        owner = self._owner(peer)
        if owner is None:
            return
        transfer = self._incoming.resume(peer, owner, push, self._now_s)
        if transfer is None:
            buffer = self._buffers.take()[: push.payload_bytes].data
            transfer = self._incoming.begin(peer, owner, push, buffer, self._now_s)
        self._send(peer, transfer.credit())

    def _send(self, peer: Peer, message: Message, payload: wire.Buffer | None = None) -> None:
        header = wire.encode(message)
        if (member := self.core.members.by_peer(peer)) is not None:
            member.link.bytes_down += len(header) if payload is None else len(header) + len(payload)
        self._shell.send(peer, header, payload)
