"""`HubCore`: the hub as a deterministic state machine. Events in, effects out.

It reads no clock: every call passes `now_s`, which never decreases. It draws no randomness: the
caller passes `make_session`. It accesses no arrays. It never raises an exception because of a
faulty peer. Instead, it answers with a `Refuse` and counts the fault. After too many faults, it
quarantines the device.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from edgeasync.core.hub.admission import Admission
from edgeasync.core.hub.assignments import Assignments
from edgeasync.core.hub.budgets import Budgets
from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.device_status import describe_devices
from edgeasync.core.hub.effects import (
    Discard,
    HubEffect,
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
from edgeasync.core.hub.lifecycle import Lifecycle
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import SAMPLE, Membership
from edgeasync.core.hub.outcomes import REVOKED
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.publish_schedule import PublishSchedule
from edgeasync.core.hub.pushes import Pushes
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    Key,
    ModelVersion,
    Order,
    Ping,
    Push,
    StatusRequest,
    Wake,
)  # fmt: skip
from edgeasync.protocol.status import DeviceStatus

RENEWALS_PER_LEASE = 8
"""A piece or credit creates an event only if 1/8 of the lease has passed since its last renewal."""

UNCOUNTED_BYTES_MAX = 4 << 20
"""A piece or a credit also creates an event once this number of bytes is uncounted. If the hub
crashes, uncounted bytes are lost.
"""


class HubCore:
    """The hub's decisions. `handle` returns effects to execute in order."""

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
        self.members = Membership(settings.liveness.lease_s)
        self.policy_engine = PolicyEngine(policy, version, self.members, settings)
        self.publish_schedule = PublishSchedule(settings.codec, version.number, now_s)
        self.budgets = Budgets(settings, self.members, spec.length)
        self.codecs = CodecAgreement(settings.codec, policy, spec.length, metered=self.budgets.metered)
        self.frozen_arrays = FrozenArrays(spec, settings)
        self.messages_refused = 0
        self.messages_accepted: Counter[str] = Counter()
        self.messages_ignored = 0
        """The number of messages that arrived after the end of training, while the hub created and
        wrote the last version.
        """
        self.admission = Admission(
            self.members,
            self.policy_engine,
            self.codecs,
            Handshake(spec, training, settings, self.frozen_arrays, graph=graph, policy=policy),
            settings,
            make_session=make_session,
        )
        self._renewal_s = settings.liveness.lease_s / RENEWALS_PER_LEASE
        self.assignments = Assignments(
            self.members,
            self.policy_engine,
            self.publish_schedule,
            self.codecs,
            self.budgets,
            retry_after_s=settings.limits.retry_after_s,
        )
        self.pushes = Pushes(self.members, self.policy_engine, self.admission, self.assignments)
        self.lifecycle = Lifecycle(self.members, self.policy_engine, settings, now_s)

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
        return self.lifecycle.state.stopped

    @property
    def updates_applied(self) -> int:
        """The number of updates folded into the model, over the whole run."""
        return self.policy_engine.state.updates_applied

    @property
    def updates_rejected(self) -> int:
        """The number of rejected updates, over the whole run."""
        return self.policy_engine.state.updates_rejected

    @property
    def duplicates(self) -> int:
        """The number of pushes that had been answered before, over the whole run."""
        return self.pushes.state.duplicates

    def next_deadline_s(self) -> float:
        """Return when a `Ticked` event is next due; infinity once stopped.

        Earlier `Ticked` events are harmless.
        """
        if self.stopped:
            return math.inf
        due = [self.lifecycle.next_deadline_s()]
        if (lease := self.members.next_deadline_s()) is not None:
            due.append(lease)
        if (fold := self.policy_engine.gathering.due_s()) is not None:
            due.append(fold)
        elif self.members.waiters and not self.policy_engine.gathering.count:
            due.append(-math.inf)  # the version that they wait for exists, or has no updates left
        return min(due)

    # -- events ----------------------------------------------------------------------------------------------

    def handle(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Process one event; return effects to execute in order.

        A faulty peer never makes it raise an exception.
        """
        if self.lifecycle.state.stopped and not isinstance(event, Resumed):
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
                effects = self.lifecycle.stop("finished" if event.finished else "stopping", "asked to stop", now_s)
        return effects + self.lifecycle.save_or_stop(event, now_s)

    def decides(self, push: Push, key: Key, now_s: float, *, can_answer: bool) -> bool:
        """Return whether the core will decide on an update that arrives now.

        The engine computes the norms of these updates only.
        """
        return not self.lifecycle.state.stopped and self.pushes.decides(push, key, now_s, can_answer=can_answer)

    def accept_silently(self, member: Member, kind: str, now_s: float) -> bool:
        """Accept a piece or a credit without an event if the event would only renew a fresh lease.

        Return false if the caller must pass an event.
        """
        if self.stopped or not member.live or now_s >= member.seen_s + self._renewal_s:
            return False
        if sum(member.link.uncounted) >= UNCOUNTED_BYTES_MAX:
            return False
        self.messages_accepted[kind] += 1
        return True

    def _after_training(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Process an event after training has ended.

        Wait for the last evaluation; after that, ignore and count messages.
        """
        if self.lifecycle.state.evaluates_last and isinstance(event, Evaluated | HubStopRequested):
            return self.lifecycle.end_evaluated(event, now_s)
        self.messages_ignored += isinstance(event, HubReceived | PushArrived | Heard | HubReceivedMalformed)
        return [Discard(event.handle)] if isinstance(event, PushArrived) else []

    def _on_message(self, event: HubReceived | PushArrived | Heard, now_s: float) -> list[HubEffect]:
        """Answer or refuse a decoded message."""
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
        """Return the member that sent a message; raises `RefusalError` for an unknown session."""
        if isinstance(event, PushArrived):
            return self.members.by_session(event.push.session, event.key)
        if isinstance(event, Heard):
            return self.members.by_peer(event.peer)
        message = event.message
        if isinstance(message, (Hello, StatusRequest, Wake, Order)):
            return None
        return self.members.by_session(message.session or b"", event.key)

    def _answer_anybody(self, event: HubReceived | PushArrived | Heard, now_s: float) -> list[HubEffect]:
        """Process a message that does not require a session.

        Raises `RefusalError` like `_answer`.
        """
        message = event.message if isinstance(event, HubReceived) else None
        match message:
            case Hello():
                effects = self.admission.hello(event.peer, message, now_s, event.key)
                return effects + self.budgets.judge_shares(self.members.members[message.device_id])
            case Wake():
                return [*self.policy_engine.pacing.wake("an operator requested it", now_s), SendStatus(event.peer)]
            case Order():
                return [*self._obey(message, event.key, now_s), SendStatus(event.peer, confirms=True)]
            case StatusRequest():
                return [SendStatus(event.peer, watches=message.watches, events_after=message.events_after)]
        return []  # a piece or credit on a connection without a member

    def _obey(self, order: Order, key: Key, now_s: float) -> list[HubEffect]:
        """Execute an operator's order; raises `RefusalError` for an unknown device."""
        if not key and self.policy_engine.policy.trust == "open":
            raise RefusalError(
                "not_allowed",
                "this hub has trust = 'open' and no keys, so it accepts no orders; start it with --keys",
            )
        voter = self.policy_engine.voter_of(order.device_id)
        if voter is None:
            raise RefusalError(
                "unknown_device", f"unknown device {order.device_id}; list the devices with 'edgeasync status'"
            )
        obey = (
            self.policy_engine.quarantine if order.order == "quarantine" else self.policy_engine.divergence.release
        )
        if (ordered := self.members.members.get(order.device_id)) is not None:
            for member in self.members.of_key(ordered.key) or [ordered]:
                self.members.note_change(member, urgent=True)
        return obey(voter, order.device_id, now_s)

    def _answer(self, event: HubReceived | PushArrived | Heard, member: Member, now_s: float) -> list[HubEffect]:
        """Return the effects of a member's message.

        Raises `RefusalError` only before any state changes, so a refused message has no other
        effect.
        """
        if isinstance(event, PushArrived):
            return self.pushes.arrived(member, event, now_s)
        if isinstance(event, Heard):
            return []
        message = event.message
        assert not isinstance(message, (Hello, StatusRequest, Wake, Order)), "they have no member"
        match message:
            case Ping():
                return self.admission.ping(member, message, now_s)
            case Push():
                return self.pushes.offered(member, message, now_s, has_capacity=event.has_capacity)
            case Fetch():
                return self.assignments.fetch(member, message, now_s, has_capacity=event.has_capacity)
            case FetchGraph():
                return self._on_fetch_graph(member, message, has_capacity=event.has_capacity)
            case Goodbye():
                return self.admission.leave(member, message)

    def _on_fetch_graph(self, member: Member, fetch: FetchGraph, *, has_capacity: bool) -> list[HubEffect]:
        if self.graph is None:
            raise RefusalError("malformed", "this hub has no training graph; its Welcome did not announce one")
        if not has_capacity:
            raise self.assignments.busy()
        return [SendGraph(member.peer, fetch.base)]

    def _refuse(
        self, event: HubReceived | PushArrived | Heard, refusal: RefusalError, now_s: float
    ) -> list[HubEffect]:
        self.messages_refused += 1
        effects: list[HubEffect] = [Discard(event.handle)] if isinstance(event, PushArrived) else []
        effects.append(SendToDevice(event.peer, refusal.refuse))
        if isinstance(event, HubReceived) and isinstance(event.message, Hello):
            self.admission.note_refused(event.message.device_id, str(refusal), now_s)
        elif refusal.refuse.code != "busy" and (refused := self.members.by_peer(event.peer)) is not None:
            refused.notes.note_error(str(refusal), now_s)
        if refusal.refuse.code in ("sequence", "malformed"):
            effects += self.admission.strike(event.peer, str(refusal), now_s, event.key)
        if isinstance(event, HubReceived) and refusal.refuse.code == "model_mismatch":
            assert isinstance(event.message, Hello), "members have the hub's model"
            effects += self.admission.warn_once(event.message.device_id, f"refused: {refusal}")
        return effects

    def _on_malformed(self, event: HubReceivedMalformed, now_s: float) -> list[HubEffect]:
        """Count a message that cannot be decoded, and refuse it.

        Do not answer if its sender has sent too many such messages.
        """
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
        """Expel the devices of a key, and drop their buffered updates.

        Updates already applied remain.
        """
        effects: list[HubEffect] = []
        for member in self.members.of_key(event.key):
            effects += self.admission.revoke(member, now_s)
            effects += self.policy_engine.drop_updates(member.device_id, REVOKED)
        if effects:
            effects += self.policy_engine.fold_if_due(now_s)
        return effects

    def _on_tick(self, event: Ticked, now_s: float) -> list[HubEffect]:
        """Expire leases, fold due updates, and answer waiting members."""
        effects = self.admission.expire(now_s)
        effects += self.policy_engine.fold_if_due(now_s)
        return effects + self.assignments.answer_waiting(now_s, can_send=event.can_send)

    def _resume(self, resumed: Resumed, now_s: float) -> None:
        """Renew all leases, since the hub received no messages.

        After a restart, drop all connections.
        """
        self.lifecycle.state.stopped = self.lifecycle.state.evaluates_last = False
        if resumed.lineage:
            self.messages_accepted.clear()  # counted from the hub's last start
            self.messages_refused = self.messages_ignored = 0
            self.policy_engine.state.ancestry.branch(resumed.lineage, self.version)
        self.members.resume(now_s, connected=not resumed.lineage)

    # -- status and checks -----------------------------------------------------------------------------------

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the core's fields of a `HubStatus` as plain values."""
        members = list(self.members.members.values())
        status = {**self.describe(members, now_s), "devices": self.describe_devices(members, now_s)}
        plain: dict[str, Any] = msgspec.to_builtins(status)
        return plain

    def describe(self, members: Sequence[Member], now_s: float) -> dict[str, Any]:
        """Return the status without the devices' entries.

        Its times are computed from `members` or, if there are many, from a sample of them.
        """
        measurements = self.members.live_measurements(members[:: len(members) // SAMPLE + 1])
        return {
            "lineage": self.lineage,
            "version": self.version,
            "pushes_answered": self.pushes.state.answered,
            "updates_applied": self.updates_applied,
            "updates_rejected": self.updates_rejected,
            "updates_buffered": self.policy_engine.gathering.count,
            "duplicates": self.duplicates,
            "messages_accepted": dict(sorted(self.messages_accepted.items())),
            "messages_refused": self.messages_refused,
            "messages_ignored": self.messages_ignored,
            "refused": self.admission.refused(now_s),
            **self.policy_engine.describe(measurements),
            "alarms": self.policy_engine.divergence.active_alarms(now_s),
            "alarms_past": self.policy_engine.divergence.ended_alarms(now_s),
            "traffic": self.budgets.describe(now_s),
        }

    def count_states(self) -> dict[str, int]:
        """Return the number of devices in each state, as the status shows it."""
        is_quarantined = self.policy_engine.is_quarantined
        members = self.members.members.values()
        states = ["quarantined" if is_quarantined(member) else str(member.shown_state) for member in members]
        return dict(Counter(states))

    def describe_devices(self, members: Iterable[Member], now_s: float) -> list[DeviceStatus]:
        """Return the devices' entries of the status."""
        return describe_devices(members, now_s, self.policy_engine.is_quarantined, self.budgets.quota_left)

    def imbalance(self) -> str:
        """Return a description of inconsistent update counts, or "" if they are consistent."""
        waiting = Counter([one.device_id for one in self.policy_engine.state.gathering.contributions])
        counted = self.updates_applied + self.updates_rejected + sum(waiting.values()) + self.duplicates
        if (answered := self.pushes.state.answered) != counted:
            return f"{answered} pushes were answered, but {counted} have an outcome"
        for member in self.members.members.values():
            if member.updates_buffered != waiting[member.device_id]:
                return (
                    f"{member.updates_buffered} answered pushes of {member.device_id} have no final outcome, but "
                    f"{waiting[member.device_id]} updates are buffered"
                )
        return ""

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent; for tests and simulation."""
        self.admission.check()
        self.policy_engine.check()
        if imbalance := self.imbalance():
            raise AssertionError(imbalance)
        for member in self.members.members.values():
            assert member.seq_last >= 0
            assert not (member.waiting and not member.live)


def _kind_of(event: HubReceived | PushArrived | Heard) -> str:
    """Return the message kind under which an accepted event is counted."""
    if isinstance(event, PushArrived):
        return "piece" if event.push.transfer else "push"
    return event.kind if isinstance(event, Heard) else type(event.message).__name__.lower()
