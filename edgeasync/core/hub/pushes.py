"""Pushes: decide once on each update, and repeat its outcome. Part of `HubCore`."""

import msgspec

from edgeasync.core.hub.admission import Admission
from edgeasync.core.hub.assignments import Assignments
from edgeasync.core.hub.effects import Discard, HubEffect, Receive, SendToDevice
from edgeasync.core.hub.events import PushArrived
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.protocol.messages import Ack, Buffered, Duplicate, Key, Outcome, Push, Rejected


class PushesState(msgspec.Struct):
    """The number of answered pushes and of duplicates among them, over the whole run."""

    answered: int = 0
    duplicates: int = 0


class Pushes:
    """Answers pushes. It raises `RefusalError` only before any state changes."""

    def __init__(
        self, members: Membership, policy_engine: PolicyEngine, admission: Admission, assignments: Assignments
    ) -> None:
        self.state = PushesState()
        self._members = members
        self._policy_engine = policy_engine
        self._admission = admission
        self._assignments = assignments

    def offered(self, member: Member, push: Push, now_s: float, *, has_capacity: bool) -> list[HubEffect]:
        """Answer the announcement of a push that will be sent in pieces.

        If the push was answered before, repeat the outcome; otherwise receive the push.
        """
        member.version, member.held = push.base, push.held_checksum
        if push.seq <= member.seq_last:
            return self._repeat_outcome(member, push, now_s, can_send=has_capacity)
        self._check_sequence(member, push)
        if not has_capacity or self._policy_engine.gathering.is_crowding(member.voter):
            raise self._assignments.busy()
        return [Receive(member.peer, push)]

    def arrived(self, member: Member, event: PushArrived, now_s: float) -> list[HubEffect]:
        """Decide on an update, record its outcome, and answer.

        If the device pushes the same update again, the recorded outcome is repeated. So no update
        counts twice.
        """
        push = event.push
        member.version, member.held = push.base, push.held_checksum
        if push.seq <= member.seq_last:
            again = self._repeat_outcome(member, push, now_s, can_send=event.can_answer)
            return [Discard(event.handle), *again]
        self._check_sequence(member, push)
        if (not event.can_answer and not push.transfer) or self._policy_engine.gathering.is_crowding(member.voter):
            raise self._assignments.busy()
        effects = self._admission.note_progress(member, now_s)
        outcome, decided = self._policy_engine.decide(member, event, now_s)
        self._count_answer(member)
        effects += decided
        if not isinstance(outcome, Rejected):
            member.strikes = 0
        member.seq_last = push.seq
        member.outcome_last, member.checksum_last = outcome, push.checksum
        ack = Ack(push.seq, outcome)
        if self._waits_for_version(outcome):
            self._members.begin_wait(member)
            return [*effects, SendToDevice(member.peer, ack)]
        effects += self._assignments.assign_or_defer(member, ack, now_s, can_send=event.can_answer)
        return effects + self._assignments.answer_waiting(now_s, can_send=event.can_answer)

    def _waits_for_version(self, outcome: Outcome) -> bool:
        """Return whether a device must wait for the next version before it continues.

        It must wait if its update is buffered. If the hub told it to start over, it must wait for
        the buffered updates of other devices.
        """
        if self._policy_engine.in_force.aggregate.answer != "at_flush":
            return False
        if isinstance(outcome, Rejected):
            return outcome.preempted and self._policy_engine.gathering.count > 0
        return isinstance(outcome, Buffered)

    def decides(self, push: Push, key: Key, now_s: float, *, can_answer: bool) -> bool:
        """Return whether the core will decide on an update that arrives now.

        The engine computes the norms of these updates only.
        """
        member = self._members.find_session(push.session, key)
        if not can_answer or member is None or member.waiting:
            return False
        shut_out = member.state == "quarantined" and now_s < member.quarantined_until_s
        is_next = push.seq == member.seq_last + 1
        return is_next and not shut_out and not self._policy_engine.gathering.is_crowding(member.voter)

    def _check_sequence(self, member: Member, push: Push) -> None:
        if push.seq != member.seq_last + 1:
            raise RefusalError("sequence", f"push has number {push.seq}, expected {member.seq_last + 1}")
        if member.waiting:
            raise RefusalError(
                "sequence",
                f"push {push.seq} arrived while push {member.seq_last} waits for a fold; wait for its assignment",
            )

    def _count_answer(self, member: Member) -> None:
        self.state.answered += 1
        member.pushes_answered += 1

    def _repeat_outcome(self, member: Member, push: Push, now_s: float, *, can_send: bool) -> list[HubEffect]:
        """Repeat the recorded outcome of the last push; if the push is older, only count it."""
        self.state.duplicates += 1
        member.duplicates += 1
        self._count_answer(member)
        if push.seq != member.seq_last or member.outcome_last is None:
            return []
        ack = Ack(push.seq, Duplicate(member.outcome_last))
        if member.waiting:
            return [SendToDevice(member.peer, ack)]
        return self._assignments.assign_or_defer(member, ack, now_s, can_send=can_send)
