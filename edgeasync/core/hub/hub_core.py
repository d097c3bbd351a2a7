"""`HubCore`: the hub as a deterministic state machine. Events in, effects out; scalars only.

It reads no clock: every call is given `now_s`, which never goes back. It draws no randomness: `make_session` is
given. It touches no array. It never raises for a peer's fault: it answers with a `Refuse`, counts the fault and,
after too many, puts the device into quarantine.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from edgeasync.core.hub.admission import Admission
from edgeasync.core.hub.budgets import REST_S_MIN, Budgets
from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.effects import (
    Assign,
    Broadcast,
    Discard,
    EndHub,
    Evaluate,
    HubEffect,
    HubReport,
    Receive,
    Save,
    SendGraph,
    SendStatus,
    SendToDevice,
)  # fmt: skip
from edgeasync.core.hub.events import (
    Evaluated,
    Folded,
    Heard,
    HubEvent,
    HubReceived,
    HubReceivedMalformed,
    HubStopRequested,
    PushArrived,
    Resumed,
    Revoked,
    Ticked,
)  # fmt: skip
from edgeasync.core.hub.frozen_arrays import FrozenArrays
from edgeasync.core.hub.handshake import Handshake
from edgeasync.core.hub.membership import SAMPLE, Member, Membership, RefusalError
from edgeasync.core.hub.outcomes import REVOKED
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.publish_schedule import PublishSchedule
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    Ack,
    Buffered,
    Duplicate,
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    Key,
    ModelVersion,
    Order,
    Outcome,
    Ping,
    Push,
    Rejected,
    StatusRequest,
    Wake,
)  # fmt: skip

RENEWALS_PER_LEASE = 8
"""A piece or a credit makes an event only if the lease was last renewed this part of a lease ago, or earlier."""

UNCOUNTED_BYTES_MAX = 4 << 20
"""It also makes one once the core has yet to count this number of bytes: a hub that ends leaves them uncounted."""


class HubCoreState(msgspec.Struct):
    """The durable fields of `HubCore`; its parts have their own.

    With `evaluates_last` training has finished, and the hub evaluates the last version before it ends.
    """

    save_at_s: float
    saved_version: int
    stop_at_s: float
    saved_updates: int = 0
    duplicates: int = 0
    stopped: bool = False
    pushes_answered: int = 0
    evaluates_last: bool = False


class HubCore:
    """The hub's decisions. `handle` returns effects to carry out in order."""

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
        self.settings = settings
        self.graph = graph
        self.members = Membership(settings.liveness.lease_s, settings.limits.devices_max)
        self.policy_engine = PolicyEngine(policy, version, self.members, settings)
        self.publish_schedule = PublishSchedule(settings.codec, version.number, now_s)
        self.codecs = CodecAgreement(settings.codec, policy, spec.length)
        self.budgets = Budgets(settings, self.members, spec.length)
        self.frozen_arrays = FrozenArrays(spec, settings)
        self.messages_refused = 0
        self.messages_accepted: Counter[str] = Counter()
        self.messages_ignored = 0
        """How many messages came after the end, while the last version was made and written."""
        self.admission = Admission(
            self.members,
            self.policy_engine,
            self.codecs,
            Handshake(spec, training, settings, self.frozen_arrays, graph=graph, policy=policy),
            settings,
            make_session=make_session,
        )
        self._renewal_s = settings.liveness.lease_s / RENEWALS_PER_LEASE
        self._checkpoint_every_s = settings.checkpoint.every_s
        self._checkpoint_every_updates = settings.checkpoint.every_updates
        minutes = settings.stop.minutes
        self.state = HubCoreState(
            save_at_s=now_s + self._checkpoint_every_s,
            saved_version=version.number,
            stop_at_s=math.inf if minutes is None else now_s + 60.0 * minutes,
        )

    @property
    def lineage(self) -> str:
        """The lineage of new versions."""
        return self.policy_engine.state.ancestry.lineage

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self.policy_engine.state.version

    @property
    def stopped(self) -> bool:
        """Whether training has ended; only `Resumed` starts it again."""
        return self.state.stopped

    @property
    def updates_applied(self) -> int:
        """How many updates are part of the model, over the whole run."""
        return self.policy_engine.state.updates_applied

    @property
    def updates_rejected(self) -> int:
        """How many updates will never count, over the whole run."""
        return self.policy_engine.state.updates_rejected

    @property
    def duplicates(self) -> int:
        """How many pushes had been answered before, over the whole run."""
        return self.state.duplicates

    def next_deadline_s(self) -> float:
        """Return when a `Ticked` is next due, infinity once stopped; an earlier one does no harm."""
        if self.stopped:
            return math.inf
        due = [self.state.stop_at_s]
        if self.version != self.state.saved_version:
            due.append(self.state.save_at_s)
        if (lease := self.members.next_deadline_s()) is not None:
            due.append(lease)
        if (fold := self.policy_engine.gathering.due_s()) is not None:
            due.append(fold)
        elif self.members.waiters and not self.policy_engine.gathering.count:
            due.append(-math.inf)  # their version is made, or nothing is left that it could be made of
        return min(due)

    # -- events ----------------------------------------------------------------------------------------------

    def handle(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Decide about one event; return the effects to carry out in order. Never raises for a peer's fault."""
        if self.state.stopped and not isinstance(event, Resumed):
            return self._after_training(event, now_s)
        match event:
            case PushArrived() | HubReceived() | Heard():
                effects = self._on_message(event, now_s)
            case HubReceivedMalformed():
                effects = self._on_malformed(event, now_s)
            case Ticked():
                effects = self._on_tick(event, now_s)
            case Folded():
                self.policy_engine.gathering.observe_sum(event.number, event.norm)
                effects = []
            case Evaluated():
                effects = self.policy_engine.observe_evaluation(event, now_s)
            case Resumed():
                self._resume(event, now_s)
                return []
            case Revoked():
                effects = self._on_revoked(event, now_s)
            case HubStopRequested():
                effects = self._stop("finished" if event.finished else "stopping", "asked to stop", now_s)
        return effects + self._save_or_stop(event, now_s)

    def accept_silently(self, member: Member, kind: str, now_s: float) -> bool:
        """Accept a piece or a credit that would only renew a new lease; return false if it takes an event."""
        if self.stopped or not member.live or now_s >= member.seen_s + self._renewal_s:
            return False
        if sum(member.link.uncounted) >= UNCOUNTED_BYTES_MAX:
            return False
        self.messages_accepted[kind] += 1
        return True

    def _after_training(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Wait for the last evaluation; count a message that came after the end that its sender was told of."""
        if self.state.evaluates_last and isinstance(event, Evaluated | HubStopRequested):
            return self._end_evaluated(event, now_s)
        self.messages_ignored += isinstance(event, HubReceived | PushArrived | Heard | HubReceivedMalformed)
        return [Discard(event.handle)] if isinstance(event, PushArrived) else []

    def _on_message(self, event: HubReceived | PushArrived | Heard, now_s: float) -> list[HubEffect]:
        """Answer a message that could be read, or refuse it."""
        effects: list[HubEffect] = []
        if event.moved != (0, 0) and (known := self.members.by_peer(event.peer)) is not None:
            self.budgets.count(known, event.moved, now_s)
        try:
            member = self._sender(event)
            if member is None:
                effects += self._answer_anybody(event, now_s)
            else:
                effects += self.admission.renew_lease(member, event.peer, now_s)
                effects += self._answer(event, member, now_s)
        except RefusalError as refusal:
            return effects + self._refuse(event, refusal, now_s)
        self.messages_accepted[_kind_of(event)] += 1
        return effects

    def _sender(self, event: HubReceived | PushArrived | Heard) -> Member | None:
        """Return the member that a message is from; raises `RefusalError` for an unknown session."""
        if isinstance(event, PushArrived):
            return self.members.by_session(event.push.session, event.key)
        if isinstance(event, Heard):
            return self.members.by_peer(event.peer)
        message = event.message
        if isinstance(message, (Hello, StatusRequest, Wake, Order)):
            return None
        return self.members.by_session(message.session or b"", event.key)

    def _answer_anybody(self, event: HubReceived | PushArrived | Heard, now_s: float) -> list[HubEffect]:
        """Return the effects of a message that needs no session; raises `RefusalError` like `_answer`."""
        message = event.message if isinstance(event, HubReceived) else None
        match message:
            case Hello():
                effects = self.admission.hello(event.peer, message, now_s, event.key)
                return effects + self.budgets.judge_shares(self.members.members[message.device_id])
            case Wake():
                return [*self.policy_engine.pacing.wake("an operator said so", now_s), SendStatus(event.peer)]
            case Order():
                return [*self._obey(message, event.key, now_s), SendStatus(event.peer, confirms=True)]
            case StatusRequest():
                return [SendStatus(event.peer)]
        return []  # a sign of life of a connection that is no member's

    def _obey(self, order: Order, key: Key, now_s: float) -> list[HubEffect]:
        """Carry an operator's order out; raises `RefusalError` for a device that the hub does not know."""
        if not key and self.policy_engine.policy.trust == "open":
            raise RefusalError("not_allowed", "a hub that is open to all knows no operator: give it keys")
        voter = self.policy_engine.voter_of(order.device_id)
        if voter is None:
            raise RefusalError("unknown_device", f"no device here is named {order.device_id}")
        obey = (
            self.policy_engine.quarantine if order.order == "quarantine" else self.policy_engine.divergence.release
        )
        return obey(voter, order.device_id, now_s)

    def _answer(self, event: HubReceived | PushArrived | Heard, member: Member, now_s: float) -> list[HubEffect]:
        """Return the effects of a member's message.

        Raises `RefusalError` before anything has changed, so that a refused message has no other effect.
        """
        if isinstance(event, PushArrived):
            return self._on_push_arrived(member, event, now_s)
        if isinstance(event, Heard):
            return []
        message = event.message
        assert not isinstance(message, (Hello, StatusRequest, Wake, Order)), "they have no member"
        match message:
            case Ping():
                return self.admission.ping(member, message, now_s)
            case Push():
                return self._on_push_offered(member, message, now_s, has_capacity=event.has_capacity)
            case Fetch():
                return self._on_fetch(member, message, now_s, has_capacity=event.has_capacity)
            case FetchGraph():
                return self._on_fetch_graph(member, has_capacity=event.has_capacity)
            case Goodbye():
                return self.admission.leave(member, message)

    def _refuse(
        self, event: HubReceived | PushArrived | Heard, refusal: RefusalError, now_s: float
    ) -> list[HubEffect]:
        self.messages_refused += 1
        effects: list[HubEffect] = [Discard(event.handle)] if isinstance(event, PushArrived) else []
        effects.append(SendToDevice(event.peer, refusal.refuse))
        if refusal.refuse.code in ("sequence", "malformed"):
            effects += self.admission.strike(event.peer, str(refusal), now_s, event.key)
        if isinstance(event, HubReceived) and refusal.refuse.code == "model_mismatch":
            assert isinstance(event.message, Hello), "who is a member has the hub's model"
            effects += self.admission.warn_once(event.message.device_id, f"refused: {refusal}")
        return effects

    def _on_malformed(self, event: HubReceivedMalformed, now_s: float) -> list[HubEffect]:
        """Count a message that could not be read, and refuse it unless its sender has sent too many."""
        self.messages_refused += 1
        if not event.strike:
            return []
        muted = self.admission.is_muted(event.peer, now_s, event.key)
        effects = self.admission.strike(event.peer, event.reason, now_s, event.key)
        return (
            effects
            if muted
            else [*effects, SendToDevice(event.peer, RefusalError("malformed", event.reason).refuse)]
        )

    def _on_revoked(self, event: Revoked, now_s: float) -> list[HubEffect]:
        """Shut a key's devices out, and drop their updates that wait; what is in the model stays."""
        effects: list[HubEffect] = []
        for member in self.members.of_key(event.key):
            effects += self.admission.revoke(member, now_s)
            effects += self.policy_engine.drop_updates(member.device_id, REVOKED)
        if effects:
            effects += self.policy_engine.fold_if_due(now_s)
        return effects

    def _on_tick(self, event: Ticked, now_s: float) -> list[HubEffect]:
        """End leases and fold updates that are due."""
        effects = self.admission.expire(now_s)
        effects += self.policy_engine.fold_if_due(now_s)
        return effects + self._answer_waiting(now_s, can_send=event.can_send)

    def _resume(self, resumed: Resumed, now_s: float) -> None:
        """Resume: renew all leases, since no device could be heard meanwhile; a start has cut all connections."""
        self.state.stopped = self.state.evaluates_last = False
        if resumed.lineage:
            self.messages_accepted.clear()  # counted since the last start
            self.messages_refused = self.messages_ignored = 0
            self.policy_engine.state.ancestry.branch(resumed.lineage, self.version)
        self.members.resume(now_s, connected=not resumed.lineage)

    # -- checkpoints and the end -----------------------------------------------------------------------------

    def _save_or_stop(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Return the last effects of an event: the end of training, or a checkpoint, if due."""
        save = self._save_if_due(event, now_s)
        if self.state.stopped:
            return []  # `_stop` has saved
        return self._stop_if_due(event, now_s) or save

    def _save_if_due(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Write a checkpoint if it is due and there is a new version."""
        state, model = self.state, self.policy_engine.state
        if model.version == state.saved_version:
            return []
        due = model.updates_applied - state.saved_updates >= self._checkpoint_every_updates
        if not due and isinstance(event, Ticked) and now_s >= state.save_at_s:
            state.save_at_s = now_s + self._checkpoint_every_s
            due = True
        if not due:
            return []
        state.saved_version, state.saved_updates = model.version, model.updates_applied
        return [Save()]

    def _stop_if_due(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        updates = self.settings.stop.updates
        if updates is not None and self.updates_applied >= updates:
            return self._stop("finished", f"{self.updates_applied} updates applied", now_s)
        if reached := self.policy_engine.state.evaluations.reached:
            return self._stop("finished", reached, now_s)
        if isinstance(event, Ticked) and now_s >= self.state.stop_at_s:
            return self._stop("finished", "the time to train is over", now_s)
        return []

    def _stop(self, reason: Literal["finished", "stopping"], detail: str, now_s: float) -> list[HubEffect]:
        """Say goodbye, make a last version of the updates that wait, save, and end.

        If training has finished, the hub evaluates the last version before the end.
        """
        self.state.stopped = True
        live = tuple([member.peer for member in self.members.members.values() if member.live and member.peer])
        last = self.policy_engine.fold(now_s) if self.policy_engine.gathering.count else []
        effects = [HubReport(reason, detail=detail), Broadcast(live, Goodbye(reason)), *last, Save()]
        if reason == "finished" and self.policy_engine.wants_last_evaluation:
            self.state.evaluates_last = True
            return [*effects, Evaluate()]
        return [*effects, EndHub(reason)]

    def _end_evaluated(self, event: Evaluated | HubStopRequested, now_s: float) -> list[HubEffect]:
        """End once the last version is evaluated, or at once if a stop is requested meanwhile."""
        effects: list[HubEffect] = []
        if isinstance(event, Evaluated):
            model = self.policy_engine.state
            effects += self.policy_engine.evaluations.observe(event, model.updates_applied, now_s)
            if event.number != model.version:  # it was begun before the end
                return [*effects, Evaluate()]
            effects.append(Save())
        self.state.evaluates_last = False
        return [*effects, EndHub("finished")]

    # -- updates ---------------------------------------------------------------------------------------------

    def _on_push_offered(self, member: Member, push: Push, now_s: float, *, has_capacity: bool) -> list[HubEffect]:
        """Answer the announcement of a push in pieces: receive it, or repeat the outcome of an answered one."""
        member.version, member.held = push.base, push.held_checksum
        if push.seq <= member.seq_last:
            return self._repeat_outcome(member, push, now_s, can_send=has_capacity)
        self._check_sequence(member, push)
        if not has_capacity or self.policy_engine.gathering.is_crowding(member.voter):
            raise self._busy()
        return [Receive(member.peer, push)]

    def _on_push_arrived(self, member: Member, event: PushArrived, now_s: float) -> list[HubEffect]:
        """Decide about an update, record the outcome, and answer.

        The recorded outcome is repeated if the device pushes the same update again, so no update counts twice.
        """
        push = event.push
        member.version, member.held = push.base, push.held_checksum
        if push.seq <= member.seq_last:
            again = self._repeat_outcome(member, push, now_s, can_send=event.can_answer)
            return [Discard(event.handle), *again]
        self._check_sequence(member, push)
        if (not event.can_answer and not push.transfer) or self.policy_engine.gathering.is_crowding(member.voter):
            raise self._busy()
        effects = self.admission.note_progress(member, now_s)
        outcome, decided = self.policy_engine.decide(member, event, now_s)
        self._count_answer(member)
        effects += decided
        if not isinstance(outcome, Rejected):
            member.strikes = 0
        member.seq_last = push.seq
        member.outcome_last, member.checksum_last = outcome, push.checksum
        ack = Ack(push.seq, outcome)
        if self._waits_for_version(outcome):
            self.members.begin_wait(member)
            return [*effects, SendToDevice(member.peer, ack)]
        effects += self._assign_or_defer(member, ack, now_s, can_send=event.can_answer)
        return effects + self._answer_waiting(now_s, can_send=event.can_answer)

    def _waits_for_version(self, outcome: Outcome) -> bool:
        """Whether a device gets the next version: its update waits, or it starts over from what others made."""
        if self.policy_engine.in_force.aggregate.answer != "at_flush":
            return False
        if isinstance(outcome, Rejected):
            return outcome.preempted and self.policy_engine.gathering.count > 0
        return isinstance(outcome, Buffered)

    def decides(self, push: Push, key: Key, now_s: float, *, can_answer: bool) -> bool:
        """Return whether an update that arrives now will be decided about: only then must it be measured."""
        member = self.members.find_session(push.session, key)
        if not can_answer or self.state.stopped or member is None or member.waiting:
            return False
        shut_out = member.state == "quarantined" and now_s < member.quarantined_until_s
        is_next = push.seq == member.seq_last + 1
        return is_next and not shut_out and not self.policy_engine.gathering.is_crowding(member.voter)

    def _check_sequence(self, member: Member, push: Push) -> None:
        if push.seq != member.seq_last + 1:
            raise RefusalError("sequence", f"push {push.seq} where {member.seq_last + 1} was due")
        if member.waiting:
            raise RefusalError("sequence", f"push {push.seq} before push {member.seq_last} is part of a version")

    def _count_answer(self, member: Member) -> None:
        self.state.pushes_answered += 1
        member.pushes_answered += 1

    def _repeat_outcome(self, member: Member, push: Push, now_s: float, *, can_send: bool) -> list[HubEffect]:
        """Repeat the recorded outcome of a push; only count a push that is older than the last."""
        self.state.duplicates += 1
        member.duplicates += 1
        self._count_answer(member)
        if push.seq != member.seq_last or member.outcome_last is None:
            return []
        ack = Ack(push.seq, Duplicate(member.outcome_last))
        if member.waiting:
            return [SendToDevice(member.peer, ack)]
        return self._assign_or_defer(member, ack, now_s, can_send=can_send)

    # -- assignments -----------------------------------------------------------------------------------------

    def _on_fetch(self, member: Member, fetch: Fetch, now_s: float, *, has_capacity: bool) -> list[HubEffect]:
        member.version, member.held = fetch.version, fetch.held_checksum
        if member.waiting:
            return []  # its answer comes with the next version
        if not has_capacity:
            raise self._busy()
        if rest := self._rest(member, member.rest_until_s - now_s, now_s):
            raise rest
        return self._assign(member, None, now_s)

    def _on_fetch_graph(self, member: Member, *, has_capacity: bool) -> list[HubEffect]:
        if self.graph is None:
            raise RefusalError("malformed", "this hub ships no graph, and its welcome named none")
        if not has_capacity:
            raise self._busy()
        return [SendGraph(member.peer)]

    def _assign_or_defer(
        self, member: Member, ack: Ack | None, now_s: float, *, can_send: bool
    ) -> list[HubEffect]:
        """Answer with the newest model or, if it is not to be sent now, with when to fetch it."""
        rest = self._rest(member, self.policy_engine.pacing.rest_s(member, now_s), now_s)
        if can_send and rest is None:
            return self._assign(member, ack, now_s)
        busy = SendToDevice(member.peer, (rest or self._busy()).refuse)
        return [busy] if ack is None else [SendToDevice(member.peer, ack), busy]

    def _assign(self, member: Member, ack: Ack | None, now_s: float) -> list[HubEffect]:
        publish = self.publish_schedule.follow(self.policy_engine, now_s)
        self.budgets.begin_exchange(member, now_s, self.policy_engine.is_learning)
        local_steps = self.policy_engine.pacing.assign_steps(member.measurements)
        ancestry = self.policy_engine.state.ancestry
        version = ModelVersion(ancestry.lineage, self.publish_schedule.state.number)
        held = member.version if member.follows and member.held is not None else None
        base = held.number if held is not None and ancestry.knows(held) else None
        self.members.end_wait(member)
        member.assign(version, local_steps, now_s)
        push_codec = self.codecs.choose(member)
        return [
            *publish,
            Assign(
                member.peer,
                version,
                local_steps,
                member.codec_model,
                ack,
                base=base,
                push_codec=push_codec,
                held=None if base is None else member.held,
                coarse=member.coarse,
                learning_rate_factor=self.policy_engine.divergence.local_learning_rate_factor,
            ),
        ]

    def _answer_waiting(self, now_s: float, *, can_send: bool) -> list[HubEffect]:
        """Answer the waiting members once their updates are folded."""
        if self.policy_engine.gathering.count or not self.members.waiters:
            return []
        effects: list[HubEffect] = []
        for member in self.members.take_waiting():
            effects += self._assign_or_defer(member, None, now_s, can_send=can_send)
        return effects

    def _rest(self, member: Member, still_s: float, now_s: float) -> RefusalError | None:
        """Return the refusal of a device that is to rest: for `still_s`, or longer for the day's bytes."""
        day_s = self.budgets.rest_s(member, now_s, self.policy_engine.is_learning)
        if still_s < REST_S_MIN and day_s < REST_S_MIN:
            return None
        rest_s = max(still_s, day_s)
        member.rest_until_s = now_s + rest_s
        why = "the model stands still" if still_s >= day_s else "to keep within the day's bytes"
        return RefusalError("busy", f"rest for {rest_s:.0f} s: {why}", rest_s, rest=True)

    def _busy(self) -> RefusalError:
        return RefusalError("busy", "the hub is busy; try again", self.settings.limits.retry_after_s)

    # -- status and checks -----------------------------------------------------------------------------------

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the hub's state for people and scripts; the keys are a contract (docs/reference/json.md)."""
        members = list(self.members.members.values())
        return {**self.describe(members, now_s), "devices": self.describe_devices(members, now_s)}

    def describe(self, members: Sequence[Member], now_s: float) -> dict[str, Any]:
        """Return the status without its devices; the times in it are of these members, or of some of many."""
        measurements = self.members.live_measurements(members[:: len(members) // SAMPLE + 1])
        return {
            "lineage": self.lineage,
            "version": self.version,
            "pushes_answered": self.state.pushes_answered,
            "updates_applied": self.updates_applied,
            "updates_rejected": self.updates_rejected,
            "updates_buffered": self.policy_engine.gathering.count,
            "duplicates": self.duplicates,
            "messages_accepted": dict(sorted(self.messages_accepted.items())),
            "messages_refused": self.messages_refused,
            "messages_ignored": self.messages_ignored,
            **self.policy_engine.describe(measurements),
            **self.policy_engine.divergence.describe(now_s),
            "traffic": self.budgets.describe(now_s),
        }

    def describe_devices(self, members: Iterable[Member], now_s: float) -> list[dict[str, Any]]:
        """Return the devices' parts of the status."""
        return self.members.describe(
            members, now_s, self.policy_engine.is_quarantined, self.budgets.describe_device
        )

    def imbalance(self) -> str:
        """Return how the counts of updates contradict one another; empty as long as they do not."""
        waiting = Counter([one.device_id for one in self.policy_engine.state.gathering.contributions])
        counted = self.updates_applied + self.updates_rejected + sum(waiting.values()) + self.duplicates
        if (answered := self.state.pushes_answered) != counted:
            return f"{answered} pushes were answered, and {counted} have an outcome"
        for member in self.members.members.values():
            if member.updates_buffered != waiting[member.device_id]:
                return (
                    f"{member.updates_buffered} of {member.device_id}'s answered pushes have no outcome, and "
                    f"{waiting[member.device_id]} updates wait"
                )
        return ""

    def check(self) -> None:
        """Raise `AssertionError` if the state contradicts itself; for tests and simulation."""
        self.admission.check()
        self.policy_engine.check()
        if imbalance := self.imbalance():
            raise AssertionError(imbalance)
        for member in self.members.members.values():
            assert member.seq_last >= 0
            assert not (member.waiting and not member.live)


def _kind_of(event: HubReceived | PushArrived | Heard) -> str:
    """Return the kind that an accepted message is counted under."""
    if isinstance(event, PushArrived):
        return "piece" if event.push.transfer else "push"
    return event.kind if isinstance(event, Heard) else type(event.message).__name__.lower()
