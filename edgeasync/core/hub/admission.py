"""Admission, leases, pauses and quarantine of devices. Part of `HubCore`."""

from collections.abc import Callable
from typing import Literal

from edgeasync.core.hub.arrivals import Arrivals
from edgeasync.core.hub.codec_agreement import CodecAgreement
from edgeasync.core.hub.effects import Expel, HubEffect, HubReport, SendToDevice, SuspendTransfers
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.handshake import Handshake
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.refusal import MALFORMED, RefusalError
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.core.hub.strangers import STRANGERS_MAX, Strangers
from edgeasync.protocol.messages import Goodbye, Hello, Key, Ping, Pong

REVOKED = (
    "this device's key was revoked, renamed or replaced; to enrol again, run 'edgeasync keys enrol NAME' at the "
    "hub, then 'edgeasync agent --enrol TOKEN' or Agent(enrol=TOKEN) here"
)
"""The message for a device whose key is no longer valid."""

ASKED = "paused by its program"
"""The pace reason of a device that sent `Goodbye` because its program paused it."""

_WHY_LEFT = {
    "finished": "its agent finished",
    "paused": ASKED,
    "stopping": "its agent was stopped",
}
"""What the reasons of a device's `Goodbye` mean."""

REFUSED_MAX = 100
REFUSED_S = 600.0
"""The number of refused devices to remember, and for how long after their last attempt."""


class Admission:
    """Moves members between their states. `HubCore` creates it.

    Methods return the effects to execute, in order.
    """

    def __init__(
        self,
        members: Membership,
        policy_engine: PolicyEngine,
        codecs: CodecAgreement,
        handshake: Handshake,
        settings: HubCoreSettings,
        *,
        make_session: Callable[[], bytes],
    ) -> None:
        self._members = members
        self._policy_engine = policy_engine
        self._codecs = codecs
        self._handshake = handshake
        self._limits = settings.limits
        self._progress_s = settings.liveness.progress_s
        self._make_session = make_session
        self._strangers = Strangers(settings.limits.strikes_max, settings.limits.quarantine_s)
        self._arrivals = Arrivals(members, settings.limits.devices_max)
        self._warned: dict[str, str] = {}
        self._refused: dict[str, tuple[str, float]] = {}
        """Why devices that are not members were refused, and when, the latest last."""

    def expire(self, now_s: float) -> list[HubEffect]:
        """Expire the leases of members that have not sent a message for too long."""
        effects: list[HubEffect] = []
        for member in self._members.expired(now_s):
            self._retire(member, "lost")
            if member.peer:
                effects.append(SuspendTransfers(member.peer))
            member.notes.why_left = f"nothing heard for {now_s - member.seen_s:.1f} s"
            effects.append(HubReport("lost", member.device_id, member.notes.why_left))
        return effects

    def hello(self, peer: Peer, hello: Hello, now_s: float, key: Key = b"") -> list[HubEffect]:
        """Admit a device, for the first time or again.

        Raises `RefusalError` if the device is not admitted.
        """
        # Strangers' strikes are not durable. A replay lacks them, so they must not affect members.
        stranger = self._members.by_peer(peer) is None
        if stranger and (remaining_s := self._strangers.remaining_s(key or peer, now_s)):
            raise RefusalError("quarantined", MALFORMED.format(hello.device_id), remaining_s)
        others = [each for each in self._others(peer, key) if each.device_id != hello.device_id]
        for each in others:
            if each.state == "quarantined" and now_s < each.quarantined_until_s:
                sentence = MALFORMED.format(each.device_id)
                raise RefusalError("quarantined", sentence, each.quarantined_until_s - now_s)
        self._handshake.check(hello)
        known = self._members.members.get(hello.device_id)
        was_live, peer_before = (known.live, known.peer) if known is not None else (False, b"")
        voter_before = "" if known is None else known.voter
        member, arrival = self._arrivals.greet(hello, peer, self._make_session(), now_s, key)
        if known is None:
            # The hub may have evicted this device while its updates were buffered.
            member.pushes_answered = self._policy_engine.gathering.count_of(hello.device_id)
        if voter_before not in ("", member.voter):
            self._policy_engine.withdraw(voter_before)
        member.strikes = max([member.strikes, *[each.strikes for each in others if each.state != "quarantined"]])
        self._codecs.greet(member, hello.codecs)
        effects: list[HubEffect] = []
        if peer_before not in (b"", peer):
            effects.append(SuspendTransfers(peer_before))
        if was_live and arrival == "rejoined":
            effects.append(
                HubReport("lost", member.device_id, f"replaced by start {member.incarnation} of its agent")
            )
        effects.append(HubReport(arrival, member.device_id, f"start {member.incarnation}"))
        if difference := self._handshake.frozen_arrays.difference(hello):
            effects += self.warn_once(member.device_id, f"{difference}; it may train because hub.frozen = 'warn'")
        self._handshake.frozen_arrays.note(hello)
        return [*effects, SendToDevice(peer, self._handshake.welcome(member))]

    def note_refused(self, device_id: str, sentence: str, now_s: float) -> None:
        """Record, for users, that a device's `Hello` was refused."""
        if (member := self._members.members.get(device_id)) is not None:
            member.notes.note_error(sentence, now_s)
            return
        self._refused.pop(device_id, None)
        self._refused[device_id] = sentence, now_s
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def refused(self, now_s: float) -> dict[str, str]:
        """Return the devices that were refused lately and have not joined since, and why."""
        members = self._members.members
        return {
            device_id: sentence
            for device_id, (sentence, at_s) in self._refused.items()
            if device_id not in members and now_s < at_s + REFUSED_S
        }

    def warn_once(self, device_id: str, sentence: str) -> list[HubEffect]:
        """Warn about a device's model, unless the last warning about this device was the same."""
        if self._warned.pop(device_id, None) == sentence:
            self._warned[device_id] = sentence
            return []
        self._warned[device_id] = sentence
        if len(self._warned) > STRANGERS_MAX:
            del self._warned[next(iter(self._warned))]
        return [HubReport("warning", device_id, sentence)]

    def _others(self, peer: Peer, key: Key) -> list[Member]:
        """Return the members to which faults of a sender are attributed.

        With keys, these are all members of the sender's key. Without keys, it is the member on the
        sender's connection.
        """
        if key:
            return self._members.of_key(key)
        member = self._members.by_peer(peer)
        return [] if member is None else [member]

    def leave(self, member: Member, goodbye: Goodbye) -> list[HubEffect]:
        """End the lease of a device that has sent `Goodbye`."""
        self._retire(member, "left")
        member.notes.why_left = _WHY_LEFT[goodbye.reason]
        if goodbye.reason == "paused":
            self._members.set_pace(member, 0, ASKED)
        return [SuspendTransfers(member.peer), HubReport("left", member.device_id, goodbye.reason)]

    def revoke(self, member: Member, now_s: float) -> list[HubEffect]:
        """Expel a member whose key is no longer valid. If the member is connected, notify it."""
        told = [SendToDevice(member.peer, RefusalError("not_allowed", REVOKED).refuse)] if member.peer else []
        effects: list[HubEffect] = [
            *told,
            Expel(member.peer, member.owner),
            HubReport("revoked", member.device_id, "its key is no longer valid"),
        ]
        if member.live:
            self._members.retire(member, "left")
        self._policy_engine.forget(member)
        self._policy_engine.revoke(member, now_s)
        self._handshake.frozen_arrays.forget(member.device_id)
        self._members.expel(member)
        member.notes.why_left = "its key was revoked"
        return effects

    def _retire(self, member: Member, state: Literal["lost", "left", "quarantined"]) -> None:
        self._members.retire(member, state)
        self._policy_engine.forget(member)

    def renew_lease(self, member: Member, peer: Peer, now_s: float) -> list[HubEffect]:
        """Renew the lease of the member that sent a message.

        If the member has a new connection, bind the member to it. Raises `RefusalError` while the
        member is in quarantine.
        """
        if member.state == "quarantined":
            if now_s < member.quarantined_until_s:
                raise RefusalError(
                    "quarantined",
                    MALFORMED.format(member.device_id),
                    member.quarantined_until_s - now_s,
                )
            member.strikes = 0
        effects: list[HubEffect] = []
        if member.peer != peer and (replaced := self._members.bind(member, peer)) is not None:
            effects.append(SuspendTransfers(replaced))
        self._members.renew(member, now_s)
        if not member.live:
            self._members.revive(member)
            member.notes.joined_s, member.notes.why_left = now_s, ""
            effects.append(HubReport("rejoined", member.device_id, "sent a message again"))
        return effects

    def ping(self, member: Member, ping: Ping, now_s: float) -> list[HubEffect]:
        """Answer a ping, and record the link, the pace and the progress that it reports."""
        member.link.observe_ping(min(ping.round_trip_s, self._members.lease_s))
        member.temperature_c = ping.temperature_c
        effects = self._note_pace(member, ping, now_s)
        stalled_s = member.stalled_s(now_s)
        if ping.steps_total != member.steps_total:
            member.steps_total = ping.steps_total
            effects += self.note_progress(member, now_s)
        elif member.state != "paused" and stalled_s > self._progress_s:
            self._members.move(member, "paused")
            effects.append(HubReport("paused", member.device_id, f"no local step for {stalled_s:.0f} s"))
        return [*effects, SendToDevice(member.peer, Pong(ping.sent_s))]

    def _note_pace(self, member: Member, ping: Ping, now_s: float) -> list[HubEffect]:
        """Record the pace of a member. While the pace is 0, no version waits for the member."""
        paused = member.pauses
        if (ping.pace_percent, ping.pace_reason) == (member.pace_percent, member.pace_reason):
            return []
        self._members.set_pace(member, ping.pace_percent, ping.pace_reason)
        if paused and not member.pauses:
            return self.note_progress(member, now_s)
        if paused or not member.pauses:
            return []
        self._policy_engine.pause(member)
        if member.state != "paused":
            self._members.move(member, "paused")
        return [HubReport("paused", member.device_id, ping.pace_reason)]

    def note_progress(self, member: Member, now_s: float) -> list[HubEffect]:
        """Record that a member takes local steps.

        While the member's pace is 0, the steps are ignored, because the device took them before its
        pause.
        """
        member.progress_s = now_s
        if member.state == "training" or member.pauses:
            return []
        paused = member.state == "paused"
        self._members.move(member, "training")
        return [HubReport("training", member.device_id, "takes local steps again")] if paused else []

    def is_muted(self, peer: Peer, now_s: float, key: Key) -> bool:
        """Return whether a connection gets no answer, because it sent too many invalid messages."""
        member = self._members.by_peer(peer)
        if member is None:
            return self._strangers.remaining_s(key or peer, now_s) > 0
        return member.state == "quarantined"

    def strike(self, peer: Peer, reason: str, now_s: float, key: Key = b"") -> list[HubEffect]:
        """Count a fault of the sender; if a member has too many faults, quarantine it."""
        limits = self._limits
        member = self._members.by_peer(peer)
        if member is None:
            self._strangers.strike(key or peer, now_s)
            return []
        if member.state == "quarantined":
            return []
        member.strikes += 1
        member.notes.note_error(reason, now_s)
        if member.strikes < limits.strikes_max:
            return []
        self._retire(member, "quarantined")
        member.quarantined_until_s = now_s + limits.quarantine_s
        member.notes.why_left = f"quarantined after {limits.strikes_max} malformed messages"
        return [SuspendTransfers(peer), HubReport("quarantined", member.device_id, reason)]

    def check(self) -> None:
        """Raise `AssertionError` if the tables are inconsistent."""
        self._members.check()
        assert len(self._members.members) <= self._limits.devices_max
        self._strangers.check()
