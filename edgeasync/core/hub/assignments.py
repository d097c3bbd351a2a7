"""Assigns the newest model to devices, or defers the assignment. Part of `HubCore`."""

from edgeasync.core.hub.budgets import REST_S_MIN, Budgets
from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.effects import Assign, HubEffect, SendToDevice
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.publish_schedule import PublishSchedule
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.policies.codec_choice import FAST
from edgeasync.protocol.messages import Ack, Fetch, ModelVersion


class Assignments:
    """Sends devices the newest model, unless they must idle or the hub is busy."""

    def __init__(
        self,
        members: Membership,
        policy_engine: PolicyEngine,
        publish_schedule: PublishSchedule,
        codecs: CodecAgreement,
        budgets: Budgets,
        *,
        retry_after_s: float,
    ) -> None:
        self._members = members
        self._policy_engine = policy_engine
        self._publish_schedule = publish_schedule
        self._codecs = codecs
        self._budgets = budgets
        self._retry_after_s = retry_after_s

    def fetch(self, member: Member, fetch: Fetch, now_s: float, *, has_capacity: bool) -> list[HubEffect]:
        """Answer a `Fetch`.

        Raises `RefusalError` if the hub is busy, or if the device must idle.
        """
        member.version, member.held = fetch.version, fetch.held_checksum
        if member.waiting:
            return []  # it is answered with the next version
        if not has_capacity:
            raise self.busy()
        if rest := self._rest(member, member.rest_until_s - now_s, now_s):
            raise rest
        return self._assign(member, None, now_s)

    def assign_or_defer(self, member: Member, ack: Ack | None, now_s: float, *, can_send: bool) -> list[HubEffect]:
        """Answer with the newest model or, if it cannot be sent now, with a time to retry."""
        rest = self._rest(member, self._policy_engine.pacing.rest_s(member, now_s), now_s)
        if can_send and rest is None:
            return self._assign(member, ack, now_s)
        busy = SendToDevice(member.peer, (rest or self.busy()).refuse)
        return [busy] if ack is None else [SendToDevice(member.peer, ack), busy]

    def _assign(self, member: Member, ack: Ack | None, now_s: float) -> list[HubEffect]:
        plain = self._codecs.sends_plain(member)
        publish = [] if plain else self._publish_schedule.follow(self._policy_engine, now_s)
        self._budgets.begin_exchange(member, now_s, self._policy_engine.is_learning)
        local_steps = self._policy_engine.pacing.assign_steps(member.measurements)
        ancestry = self._policy_engine.state.ancestry
        newest, published = self._policy_engine.state.version, self._publish_schedule.state.number
        version = ModelVersion(ancestry.lineage, newest if plain else published)
        held = member.version if member.follows and member.held is not None and not plain else None
        base = held.number if held is not None and ancestry.knows(held) else None
        self._members.end_wait(member)
        member.assign(version, local_steps, now_s)
        push_codec = self._codecs.choose(member)
        return [
            *publish,
            Assign(
                member.peer,
                version,
                local_steps,
                FAST if plain else member.codec_model,
                ack,
                base=base,
                push_codec=push_codec,
                held=None if base is None else member.held,
                coarse=member.coarse and not plain,
                plain=plain,
                learning_rate_factor=self._policy_engine.divergence.local_learning_rate_factor,
            ),
        ]

    def answer_waiting(self, now_s: float, *, can_send: bool) -> list[HubEffect]:
        """Answer the waiting members whose updates have been folded."""
        if self._policy_engine.gathering.count or not self._members.waiters:
            return []
        effects: list[HubEffect] = []
        for member in self._members.take_waiting():
            effects += self.assign_or_defer(member, None, now_s, can_send=can_send)
        return effects

    def _rest(self, member: Member, still_s: float, now_s: float) -> RefusalError | None:
        """Return the refusal that makes a device idle, or `None` if it need not idle.

        The device idles for `still_s`, or longer if its daily quota requires it.
        """
        day_s = self._budgets.rest_s(member, now_s, self._policy_engine.is_learning)
        if still_s < REST_S_MIN and day_s < REST_S_MIN:
            return None
        rest_s = max(still_s, day_s)
        member.rest_until_s = now_s + rest_s
        why = "training has plateaued" if still_s >= day_s else "to stay within the daily quota"
        return RefusalError("busy", f"wait {rest_s:.0f} s: {why}", rest_s, rest=True)

    def busy(self) -> RefusalError:
        """Return the refusal of a request for which the hub has no capacity now."""
        return RefusalError("busy", "the hub is busy; try again", self._retry_after_s)
