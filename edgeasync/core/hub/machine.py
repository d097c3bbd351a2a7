"""`HubCore`: the hub as a deterministic state machine. Events in, effects out; scalars only.

It reads no clock (every call is given `now_s`, which never goes back), draws no randomness (`make_session` is
given), touches no array and never raises for what a peer sent: that becomes a `Refuse`, a counter and, in the end,
a quarantine.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.effects import (
    Assign,
    Discard,
    Disconnect,
    Evaluate,
    HubEffect,
    Receive,
    Report,
    Save,
    Send,
    SendGraph,
    SendStatus,
    Stop,
)  # fmt: skip
from edgeasync.core.hub.events import (
    Evaluated,
    Folded,
    Heard,
    HubEvent,
    Malformed,
    Peer,
    PushArrived,
    Received,
    Resumed,
    StopRequested,
    Ticked,
)  # fmt: skip
from edgeasync.core.hub.handshake import check_hello, make_welcome
from edgeasync.core.hub.membership import MALFORMED, Member, Membership, RefusalError, Strangers
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.publish_schedule import PublishSchedule
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.aggregation import Contribution
from edgeasync.policies.monitor import Observation
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Buffered,
    Duplicate,
    Fetch,
    FetchGraph,
    FirstOutcome,
    Hello,
    Leave,
    ModelVersion,
    Ping,
    Pong,
    Push,
    Rejected,
    StatusRequest,
)  # fmt: skip


class HubCore:
    """The hub's decisions. `handle` and `tick` return effects to carry out in order."""

    def __init__(
        self,
        *,
        spec: ParameterSpec,
        training: dict[str, Any],
        policy: PolicySet,
        settings: HubCoreSettings,
        version: ModelVersion,
        graph: ShippedGraph | None = None,
        make_session: Callable[[], bytes],
        now_s: float,
    ) -> None:
        self.spec = spec
        self.training = training
        self.policy_engine = PolicyEngine(policy, version, settings.limits.updates_held_max, settings.stop)
        self.settings = settings
        self.graph = graph
        self.members = Membership(settings.liveness.lease_s, settings.limits.devices_max)
        self.updates_applied = self.updates_rejected = self.duplicates = self.messages_refused = 0
        self.messages_accepted: Counter[str] = Counter()
        self.stopped = False
        self.publish_schedule = PublishSchedule(settings.codec, version.number, now_s)
        self.codecs = CodecAgreement(settings.codec, policy, spec.length)
        self._make_session = make_session
        self._strangers = Strangers()
        self._checkpoint_every_s = settings.checkpoint.every_s
        self._checkpoint_every_updates = settings.checkpoint.every_updates
        self.save_at_s = now_s + self._checkpoint_every_s
        self.saved_version, self.saved_updates = version.number, 0
        minutes = settings.stop.minutes
        self.stop_at_s = math.inf if minutes is None else now_s + 60.0 * minutes

    @property
    def lineage(self) -> str:
        """What new versions belong to."""
        return self.policy_engine.ancestry.lineage

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self.policy_engine.version

    # -- time ------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float:
        """Return when `tick` is next due, never once stopped; it may be called at any time."""
        if self.stopped:
            return math.inf
        due = [self.stop_at_s]
        if self.version != self.saved_version:
            due.append(self.save_at_s)
        if (lease := self.members.next_deadline_s()) is not None:
            due.append(lease)
        if (fold := self.policy_engine.due_s(math.inf, self.members.live_count)) is not None:
            due.append(fold)
        return min(due)

    def tick(self, now_s: float, *, room: bool = True) -> list[HubEffect]:
        """Do what is due: ended leases, flushes, saving, the end of training."""
        effects: list[HubEffect] = []
        if self.stopped:
            return effects
        for member in self.members.expired(now_s):
            silence = now_s - member.seen_s
            self._lose(member, f"nothing heard for {silence:.1f} s", effects)
        self._fold_if_due(now_s, effects)
        self._answer_waiting(now_s, effects, room=room)
        # What a tick does without an effect is not written down, so without a new version this stays as it is.
        if now_s >= self.save_at_s and self.version != self.saved_version:
            self.save_at_s = now_s + self._checkpoint_every_s
            self._save(effects)
        self._stop_if_enough(now_s, effects)
        if now_s >= self.stop_at_s and not self.stopped:
            self._stop("finished", "the time to train is over", now_s, effects)
        return effects

    def _save(self, effects: list[HubEffect]) -> None:
        """Have the state written if there is a version that was not."""
        if self.version != self.saved_version:
            self.saved_version, self.saved_updates = self.version, self.updates_applied
            effects.append(Save())

    # -- events ----------------------------------------------------------------------------------------------

    def handle(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Take in one event; return the effects to carry out in order. Never raises for a peer's fault."""
        effects: list[HubEffect] = []
        if self.stopped and not isinstance(event, Resumed):
            return [Discard(event.handle)] if isinstance(event, PushArrived) else effects
        match event:
            case Folded():
                self.policy_engine.folded(event.number, event.norm)
            case Evaluated():
                self.policy_engine.evaluations.evaluated(event, effects)
                self._stop_if_enough(now_s, effects)
            case Ticked():
                return self.tick(now_s, room=event.room)
            case Resumed():
                self._resume(event, now_s)
            case StopRequested():
                self._stop("stopping", "asked to stop", now_s, effects)
            case Malformed():
                self.messages_refused += 1
                if event.strike and self._strike(event.peer, event.reason, now_s, effects):
                    effects.append(Send(event.peer, RefusalError("malformed", event.reason).refuse))
            case _:
                self._message(event, now_s, effects)
        return effects

    def _message(self, event: Received | PushArrived | Heard, now_s: float, effects: list[HubEffect]) -> None:
        """Take in what could be read; answer with a refusal what must not be."""
        try:
            kind = self._accept(event, now_s, effects)
        except RefusalError as refusal:
            self.messages_refused += 1
            if isinstance(event, PushArrived):
                effects.append(Discard(event.handle))
            effects.append(Send(event.peer, refusal.refuse))
            if refusal.refuse.code in ("sequence", "malformed"):
                self._strike(event.peer, str(refusal), now_s, effects)
        else:
            self.messages_accepted[kind] += 1

    def _accept(self, event: Received | PushArrived | Heard, now_s: float, effects: list[HubEffect]) -> str:
        """Handle what could be read; return the kind to count it under. Raises `RefusalError`."""
        if isinstance(event, PushArrived):
            self._push_arrived(event, now_s, effects)
            return "piece" if event.push.transfer else "push"
        if isinstance(event, Heard):
            if (member := self.members.by_peer(event.peer)) is not None:
                self._touch(member, event.peer, now_s, effects)
            return event.kind
        self._received(event, now_s, effects)
        return type(event.message).__name__.lower()

    def _received(self, event: Received, now_s: float, effects: list[HubEffect]) -> None:
        peer, message = event.peer, event.message
        match message:
            case Ping():
                self._ping(peer, message, now_s, effects)
            case Fetch():
                member = self._member(peer, message.session, now_s, effects)
                member.held = message.held
                if member.waiting:
                    return  # its answer comes with the next version
                if not event.room:
                    raise self._busy()
                self._assign(member, None, now_s, effects)
            case FetchGraph():
                self._send_graph(peer, message, now_s, effects, room=event.room)
            case Push():
                self._push_offered(peer, message, now_s, effects, room=event.room)
            case Hello():
                self._hello(peer, message, now_s, effects)
            case Leave():
                self._leave(peer, message, now_s, effects)
            case StatusRequest():
                effects.append(SendStatus(peer))

    # -- joining and leaving ---------------------------------------------------------------------------------

    def _hello(self, peer: Peer, hello: Hello, now_s: float, effects: list[HubEffect]) -> None:
        # What is noted of strangers is not written down, so it must not decide what becomes of a member.
        stranger = self.members.by_peer(peer) is None
        if stranger and self._strangers.strikes(peer) >= self.settings.limits.strikes_max:
            raise RefusalError("quarantined", "this connection sent too much that is malformed")
        protocol_version = check_hello(hello, self.spec)
        known = self.members.members.get(hello.device_id)
        was_live, peer_before = (known.live, known.peer) if known is not None else (False, b"")
        member, event = self.members.greet(hello, peer, self._make_session(), now_s)
        member.protocol_version = protocol_version
        if peer_before not in (b"", peer):
            effects.append(Disconnect(peer_before))
        if was_live and event == "rejoined":
            effects.append(Report("lost", member.device_id, f"replaced by its start {member.start}"))
        effects.append(Report(event, member.device_id, f"start {member.start}"))
        self.codecs.greet(member, hello.codecs)
        welcome = make_welcome(
            member, self.spec, self.training, self.settings, graph=self.graph, policy=self.policy_engine.policy
        )
        effects.append(Send(peer, welcome))

    def _leave(self, peer: Peer, leave: Leave, now_s: float, effects: list[HubEffect]) -> None:
        member = self._member(peer, leave.session or b"", now_s, effects)
        self._retire(member, "left")
        effects += [Disconnect(peer), Report("left", member.device_id, leave.reason)]

    def _lose(self, member: Member, cause: str, effects: list[HubEffect]) -> None:
        self._retire(member, "lost")
        if member.peer:
            effects.append(Disconnect(member.peer))
        effects.append(Report("lost", member.device_id, cause))

    def _retire(self, member: Member, state: Literal["lost", "left", "quarantined"]) -> None:
        self.members.retire(member, state)
        self.policy_engine.forget(member.device_id)

    def _stop_if_enough(self, now_s: float, effects: list[HubEffect]) -> None:
        updates = self.settings.stop.updates
        if updates is not None and self.updates_applied >= updates and not self.stopped:
            self._stop("finished", f"{self.updates_applied} updates applied", now_s, effects)
        elif (reached := self.policy_engine.evaluations.reached) and not self.stopped:
            self._stop("finished", reached, now_s, effects)

    def _stop(
        self, reason: Literal["finished", "stopping"], detail: str, now_s: float, effects: list[HubEffect]
    ) -> None:
        self.stopped = True
        goodbye = Leave("finished" if reason == "finished" else "stopping")
        effects.append(Report(reason, detail=detail))
        effects += [Send(m.peer, goodbye) for m in self.members.members.values() if m.live and m.peer]
        if self.policy_engine:
            self._fold(now_s, effects)
        effects += [Save(), Stop(reason)]

    def _resume(self, resumed: Resumed, now_s: float) -> None:
        """Go on: nobody could be heard meanwhile, so nobody is lost yet; after a start all connections are new."""
        self.stopped = False
        if resumed.lineage:
            self.messages_accepted.clear()  # these are counted from the start on
            self.messages_refused = 0
            self.policy_engine.ancestry.branch(resumed.lineage, self.version)
        self.members.resume(now_s, connected=not resumed.lineage)

    # -- liveness --------------------------------------------------------------------------------------------

    def _member(self, peer: Peer, session: bytes, now_s: float, effects: list[HubEffect]) -> Member:
        member = self.members.by_session(session)
        self._touch(member, peer, now_s, effects)
        return member

    def _touch(self, member: Member, peer: Peer, now_s: float, effects: list[HubEffect]) -> None:
        if member.state == "quarantined":
            if now_s < member.quarantined_until_s:
                raise RefusalError(
                    "quarantined",
                    MALFORMED.format(member.device_id),
                    member.quarantined_until_s - now_s,
                )
            member.strikes = 0
        if (replaced := self.members.bind(member, peer)) is not None:
            effects.append(Disconnect(replaced))
        self.members.renew(member, now_s)
        if not member.live:
            self.members.revive(member)
            effects.append(Report("rejoined", member.device_id, "spoke again"))

    def _ping(self, peer: Peer, ping: Ping, now_s: float, effects: list[HubEffect]) -> None:
        member = self._member(peer, ping.session, now_s, effects)
        member.link.observe_ping(ping.round_trip_s)
        if ping.steps_total != member.steps_total:
            member.steps_total = ping.steps_total
            self._progress(member, now_s, effects)
        elif member.state != "paused" and now_s - member.progress_s > self.settings.liveness.progress_s:
            member.move("paused")
            stalled_s = now_s - member.progress_s
            effects.append(Report("paused", member.device_id, f"no local step for {stalled_s:.0f} s"))
        effects.append(Send(peer, Pong(ping.sent_s)))

    def _progress(self, member: Member, now_s: float, effects: list[HubEffect]) -> None:
        member.progress_s = now_s
        if member.state == "paused":
            effects.append(Report("training", member.device_id, "takes local steps again"))
        member.move("training")

    def _strike(self, peer: Peer, reason: str, now_s: float, effects: list[HubEffect]) -> bool:
        """Count a fault against whoever is on the connection; return whether it still deserves an answer."""
        limits = self.settings.limits
        member = self.members.by_peer(peer)
        if member is None:
            return self._strangers.strike(peer) <= limits.strikes_max
        if member.state == "quarantined":
            return False
        member.strikes += 1
        if member.strikes >= limits.strikes_max:
            self._retire(member, "quarantined")
            member.quarantined_until_s = now_s + limits.quarantine_s
            effects += [Disconnect(peer), Report("quarantined", member.device_id, reason)]
        return True

    # -- updates ---------------------------------------------------------------------------------------------

    def _push_offered(self, peer: Peer, push: Push, now_s: float, effects: list[HubEffect], *, room: bool) -> None:
        """Answer the announcement of a push in pieces: grant it, or spare the device the transfer."""
        member = self._member(peer, push.session, now_s, effects)
        member.held = push.base
        if push.seq <= member.seq_last:
            self._duplicate(member, push, now_s, effects, room=room)
            return
        self._check_sequence(member, push)
        if not room:
            raise self._busy()
        effects.append(Receive(peer, push))

    def _push_arrived(self, event: PushArrived, now_s: float, effects: list[HubEffect]) -> None:
        push = event.push
        member = self._member(event.peer, push.session, now_s, effects)
        member.held = push.base
        if push.seq <= member.seq_last:
            effects.append(Discard(event.handle))
            self._duplicate(member, push, now_s, effects, room=event.room)
            return
        self._check_sequence(member, push)
        if not event.room and not push.transfer:
            raise self._busy()
        self._progress(member, now_s, effects)
        outcome = self._decide(member, push, event, now_s, effects)
        member.seq_last = push.seq
        member.outcome_last, member.checksum_last = outcome, push.checksum
        ack = Ack(push.seq, outcome, self.policy_engine.divergence.quarantine_of(member.device_id))
        if isinstance(outcome, Buffered) and self.policy_engine.aggregate.answer == "at_flush":
            member.waiting = True
            effects.append(Send(member.peer, ack))
        else:
            self._assign_or_defer(member, ack, now_s, effects, room=event.room)
            self._answer_waiting(now_s, effects, room=event.room)
        self._stop_if_enough(now_s, effects)

    def _decide(
        self, member: Member, push: Push, event: PushArrived, now_s: float, effects: list[HubEffect]
    ) -> FirstOutcome:
        """Weigh an update; buffer and perhaps fold it, or reject it."""
        member.observe(push, event.norm, now_s)
        observation = Observation(
            member.device_id, event.norm, push.local_steps, push.loss_mean, member.history.not_finite_run
        )
        waiting = len(self.policy_engine)
        weighed = self.policy_engine.weigh(
            push, observation, member.history, effects, now_s=now_s, devices_live=self.members.live_count
        )
        member.history.counted = not isinstance(weighed, Rejected)
        if self.policy_engine.count_update():
            self.policy_engine.retune(self.members.live_histories(), self.members.live_count)
        if isinstance(weighed, Rejected):
            self.updates_rejected += 1 + waiting - len(self.policy_engine)  # a rollback drops those that wait
            effects.append(Discard(event.handle))
            self.policy_engine.refuse(member.device_id, weighed)
            self._fold_if_due(now_s, effects)
            return weighed
        member.strikes = 0
        history = member.history
        self.policy_engine.add(
            Contribution(
                handle=event.handle,
                device_id=member.device_id,
                weight=weighed,
                norm=event.norm,
                examples=history.examples or push.examples,
                local_steps=push.local_steps,
                staleness=history.staleness,
                base=push.base.number,
                score=history.score,
                arrived_s=now_s,
            )
        )
        self.policy_engine.count_examples(push.examples)
        if self._fold_if_due(now_s, effects):
            return Applied(self.version)
        return Buffered(len(self.policy_engine))

    def _fold_if_due(self, now_s: float, effects: list[HubEffect]) -> bool:
        due_s = self.policy_engine.due_s(now_s, self.members.live_count)
        if due_s is None or due_s > now_s:
            return False
        self._fold(now_s, effects)
        return True

    def _fold(self, now_s: float, effects: list[HubEffect]) -> None:
        """Make the next version of all updates that wait, and have it evaluated if it is time."""
        contributions = self.policy_engine.fold(now_s, self.members.live_count, effects)
        every = self.settings.evaluate_every_updates
        due = (self.updates_applied + len(contributions)) // every > self.updates_applied // every
        self.updates_applied += len(contributions)
        if due and self.settings.held_out:
            effects.append(Evaluate())
        elif due and (loss := self.members.loss_by_examples()) is not None:
            self.policy_engine.evaluations.evaluated(Evaluated(self.version, loss, None), effects)
        elif due and self.members.silent_on_loss:
            self.policy_engine.evaluations.not_evaluated(effects)
        for contribution in contributions:
            if (member := self.members.members.get(contribution.device_id)) is not None:
                member.updates_applied += 1
        if self.updates_applied - self.saved_updates >= self._checkpoint_every_updates:
            self._save(effects)

    def _check_sequence(self, member: Member, push: Push) -> None:
        if push.seq != member.seq_last + 1:
            raise RefusalError("sequence", f"push {push.seq} where {member.seq_last + 1} was due")
        if member.waiting:
            raise RefusalError("sequence", f"push {push.seq} before push {member.seq_last} is part of a version")

    def _duplicate(
        self, member: Member, push: Push, now_s: float, effects: list[HubEffect], *, room: bool
    ) -> None:
        """Repeat the recorded outcome; an older one than the last is only counted."""
        self.duplicates += 1
        if push.seq != member.seq_last or member.outcome_last is None:
            return
        quarantine = self.policy_engine.divergence.quarantine_of(member.device_id)
        ack = Ack(push.seq, Duplicate(member.outcome_last), quarantine)
        if member.waiting:
            effects.append(Send(member.peer, ack))
        else:
            self._assign_or_defer(member, ack, now_s, effects, room=room)

    # -- assignments -----------------------------------------------------------------------------------------

    def _assign_or_defer(
        self, member: Member, ack: Ack | None, now_s: float, effects: list[HubEffect], *, room: bool
    ) -> None:
        """Answer with the newest model, or, without room to send it, say when to fetch it."""
        if room:
            self._assign(member, ack, now_s, effects)
            return
        if ack is not None:
            effects.append(Send(member.peer, ack))
        effects.append(Send(member.peer, self._busy().refuse))

    def _assign(self, member: Member, ack: Ack | None, now_s: float, effects: list[HubEffect]) -> None:
        self.publish_schedule.follow(self.policy_engine, now_s, effects)
        local_steps = self.policy_engine.interval(member.history).local_steps
        version = ModelVersion(self.lineage, self.publish_schedule.number)
        held = member.held if member.follows else None
        number = held.number if held is not None and self.policy_engine.ancestry.knows(held) else None
        member.waiting = False
        member.assigned, member.assigned_s = version, now_s
        member.link.begin_cycle()
        push_codec = self.codecs.choose(member)
        effects.append(Assign(member.peer, version, local_steps, member.codec_model, ack, number, push_codec))

    def _send_graph(
        self, peer: Peer, message: FetchGraph, now_s: float, effects: list[HubEffect], *, room: bool
    ) -> None:
        self._member(peer, message.session, now_s, effects)
        if self.graph is None:
            raise RefusalError("malformed", "this hub ships no graph, and its welcome named none")
        if not room:
            raise self._busy()
        effects.append(SendGraph(peer))

    def _answer_waiting(self, now_s: float, effects: list[HubEffect], *, room: bool) -> None:
        if self.policy_engine or not self.policy_engine.may_keep_waiting:
            return
        for member in self.members.members.values():
            if member.waiting:
                member.waiting = False
                self._assign_or_defer(member, None, now_s, effects, room=room)

    def _busy(self) -> RefusalError:
        return RefusalError("busy", "the hub is busy; try again", self.settings.limits.retry_after_s)

    # -- looking in ------------------------------------------------------------------------------------------

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the hub's state for people and scripts; the keys are a contract (docs/wire.md)."""
        return {
            "lineage": self.lineage,
            "version": self.version,
            "updates_applied": self.updates_applied,
            "updates_rejected": self.updates_rejected,
            "updates_buffered": len(self.policy_engine),
            "duplicates": self.duplicates,
            "messages_accepted": dict(sorted(self.messages_accepted.items())),
            "messages_refused": self.messages_refused,
            **self.policy_engine.describe(self.members.live_histories()),
            "devices": self.members.describe(now_s, self.policy_engine.divergence.shuts_out),
        }

    def check(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; for tests and simulation."""
        self.members.check()
        self.policy_engine.check(self.updates_applied)
        self._strangers.check()
        for member in self.members.members.values():
            assert member.seq_last >= 0
            assert not (member.waiting and not member.live)
