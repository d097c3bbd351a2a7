"""Members by device id, session, connection or key. Part of `HubCore`."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from typing import Literal

from edgeasync.core.hub.changes import Changes
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.member import LIVE, DeviceState, Member
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.medians import median
from edgeasync.protocol.messages import (
    Key,
)

NAMES_MAX = 64
"""If a key has more device ids than this, the hub does not tolerate long first updates of its
devices.
"""

SAMPLE = 256
"""The sample size for larger fleets, so that processing an event takes constant time."""


class Membership:
    """The members by device id, session, connection and key, and their leases."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.changes: Changes | None = None
        """Records changed members while somebody views the fleet."""
        self.generation = 0
        """Increases when a member is added or evicted."""
        self.members: dict[str, Member] = {}
        self._in_order: list[Member] = []
        """The members in the order in which they joined, for sampling."""
        self.measurements: dict[str, DeviceMeasurements] = {}
        self.waiters: dict[str, Member] = {}
        """The members whose update is buffered, and that wait for the version that will contain
        it.
        """
        self.pausing: dict[str, Member] = {}
        """The live members at pace 0. They have no vote, and no version waits for them."""
        self._by_session: dict[bytes, Member] = {}
        self._by_peer: dict[Peer, Member] = {}
        self._by_key: dict[Key, set[str]] = {}
        self._leases: OrderedDict[str, Member] = OrderedDict()
        """The live members in the order of their last messages, which is also the order in which
        their leases expire.
        """
        self.live_count = 0
        self.voters: dict[str, int] = {}
        """The number of live devices that are not paused, for each voter."""
        self.shared: dict[str, int] = {}
        """The entries of `voters` with more than one device.

        Replace the table instead of changing it, because its identity is the cache key of vote
        counts.
        """

    def dump_state(self) -> list[Member]:
        """Return the members in the order in which they joined.

        They are not copies: encode them before the next event.
        """
        return list(self.members.values())

    def load_state(self, members: list[Member]) -> None:
        """Restore the members of a durable state."""
        self.generation += 1
        self.members = {member.device_id: member for member in members}
        self._in_order = list(members)
        self.measurements = {member.device_id: member.measurements for member in members}
        self.waiters = {member.device_id: member for member in members if member.waiting}
        self.pausing = {member.device_id: member for member in members if member.pauses}
        self._by_session = {member.session: member for member in members if member.session}
        self._by_peer = {member.peer: member for member in members if member.peer}
        self._by_key = {}
        for member in members:
            self._note_key(member)
        live = sorted([member for member in members if member.live], key=_by_lease)
        self._leases = OrderedDict((member.device_id, member) for member in live)
        self.live_count = len(live)
        self.voters = dict(Counter([member.voter for member in live if not member.pauses]))
        self.shared = {voter: names for voter, names in self.voters.items() if names > 1}

    def by_session(self, session: bytes, key: Key = b"") -> Member:
        """Return the member to which a session belongs.

        Raises `RefusalError` if the session is unknown or belongs to another key.
        """
        member = self.find_session(session, key)
        if member is None:
            raise RefusalError("unknown_session", "the hub does not know this session; send Hello again")
        return member

    def find_session(self, session: bytes, key: Key) -> Member | None:
        """Return the member to which a session belongs.

        Return `None` if the session is unknown or belongs to another key.
        """
        member = self._by_session.get(session)
        return None if member is None or member.key != key else member

    def by_peer(self, peer: Peer) -> Member | None:
        """Return the member on a connection, if any."""
        return self._by_peer.get(peer)

    def add(self, member: Member) -> None:
        """Add a new member."""
        self.generation += 1
        self.members[member.device_id] = member
        self._in_order.append(member)
        self.measurements[member.device_id] = member.measurements

    def forget(self, member: Member) -> None:
        """Evict a member that is not live."""
        self.generation += 1
        self.note_change(member, urgent=True)
        self.end_wait(member)
        del self.members[member.device_id]
        self._in_order.remove(member)
        del self.measurements[member.device_id]
        self._forget_key(member)
        self._by_session.pop(member.session, None)
        self._by_peer.pop(member.peer, None)

    def open_session(self, member: Member, session: bytes) -> None:
        """Replace a member's session."""
        self._by_session.pop(member.session, None)
        member.session = session
        self._by_session[session] = member

    def bind(self, member: Member, peer: Peer) -> Peer | None:
        """Bind a member to a connection; return the member's previous connection, if any."""
        if member.peer == peer:
            return None
        replaced = member.peer if self._by_peer.pop(member.peer, None) is not None else None
        if (previous := self._by_peer.get(peer)) is not None:
            previous.peer = b""
            self.end_wait(previous)
        member.peer = peer
        self._by_peer[peer] = member
        return replaced

    def note_change(self, member: Member, *, urgent: bool = False) -> None:
        """Record that a member changed, if anybody views the fleet."""
        if self.changes is not None:
            self.changes.note(member.device_id, urgent=urgent)

    def move(self, member: Member, state: DeviceState) -> None:
        """Change a member's state."""
        member.move(state)
        self.note_change(member, urgent=True)

    def renew(self, member: Member, now_s: float) -> None:
        """Renew a member's lease."""
        self.note_change(member)
        member.seen_s = now_s
        member.lease_until_s = now_s + self.lease_s
        if member.device_id in self._leases:
            self._leases.move_to_end(member.device_id)

    def revive(self, member: Member) -> None:
        """Mark a member as live, and track the lease that was just renewed."""
        if not member.live:
            self.set_pace(member, 100, "")
            self._count(member, 1)
        self.move(member, "joining")
        self._leases[member.device_id] = member

    def retire(self, member: Member, state: Literal["lost", "left", "quarantined"]) -> None:
        """End a member's lease.

        The hub still remembers the member and the number of its last push.
        """
        self.set_pace(member, 100, "")
        if member.live:
            self._count(member, -1)
        self._leases.pop(member.device_id, None)
        self.move(member, state)
        self.end_wait(member)

    def set_pace(self, member: Member, percent: int, reason: str) -> None:
        """Record the pace that a member reports.

        Its vote counts only while the pace is not 0.
        """
        paused = member.pauses
        member.pace_percent, member.pace_reason = percent, reason
        self.note_change(member, urgent=True)
        if member.pauses == paused:
            return
        if paused:
            del self.pausing[member.device_id]
            self._count_vote(member, 1)
        else:
            self.pausing[member.device_id] = member
            self._count_vote(member, -1)

    def begin_wait(self, member: Member) -> None:
        """Record that a member waits for the version that contains its update."""
        member.waiting = True
        self.waiters[member.device_id] = member

    def end_wait(self, member: Member) -> None:
        """Record that a member no longer waits for a version."""
        if member.waiting:
            member.waiting = False
            del self.waiters[member.device_id]

    def take_waiting(self) -> list[Member]:
        """Remove and return the waiting members, in the order of their updates."""
        waiting = sorted(
            self.waiters.values(), key=lambda member: (member.measurements.updated_s, member.device_id)
        )
        for member in waiting:
            self.end_wait(member)
        return waiting

    def _count(self, member: Member, change: int) -> None:
        """Count a device when it becomes live, or stops being live."""
        self.live_count += change
        if not member.pauses:
            self._count_vote(member, change)

    def _count_vote(self, member: Member, change: int) -> None:
        voter = member.voter
        names = self.voters.get(voter, 0) + change
        if names:
            self.voters[voter] = names
        else:
            self.voters.pop(voter, None)
        if names > 1:
            self.shared = self.shared | {voter: names}
        elif voter in self.shared:
            self.shared = {other: names for other, names in self.shared.items() if other != voter}

    def change_key(self, member: Member, key: Key) -> None:
        """Assign a member and its vote to a key."""
        if member.key == key:
            return
        if member.live:
            self._count(member, -1)
        self._forget_key(member)
        member.give_to(key)
        self._note_key(member)
        if member.live:
            self._count(member, 1)

    def _note_key(self, member: Member) -> None:
        if member.key:
            self._by_key.setdefault(member.key, set()).add(member.device_id)

    def _forget_key(self, member: Member) -> None:
        if member.key:
            names = self._by_key[member.key]
            names.remove(member.device_id)
            if not names:
                del self._by_key[member.key]

    def of_key(self, key: Key) -> list[Member]:
        """Return the members of a key, sorted by device id, without scanning all members."""
        return [self.members[name] for name in sorted(self._by_key.get(key, ()))]

    def long_updates_of_voter(self, member: Member) -> float:
        """Return the number of long updates that count against a device.

        With keys, the long updates of all devices of its key count. Return infinity for a key with
        more than `NAMES_MAX` device ids.
        """
        names = self._by_key.get(member.key, ())
        if len(names) < 2:
            return member.updates_long
        return sum(self.members[name].updates_long for name in names) if len(names) <= NAMES_MAX else math.inf

    def expel(self, member: Member) -> None:
        """End the session of a member whose key is not valid, and free its device id."""
        if member.live:
            self.retire(member, "left")
        self.set_pace(member, 100, "")
        self._by_session.pop(member.session, None)
        self._by_peer.pop(member.peer, None)
        member.session = member.peer = b""
        self.change_key(member, b"")

    def resume(self, now_s: float, *, connected: bool) -> None:
        """Renew all leases. Unless the members are still `connected`, drop their connections."""
        for member in self.members.values():
            member.assigned = None  # its cycle includes time that the hub's clock did not count
            if member.live:
                self.renew(member, now_s)
                member.progress_s = now_s
            if not connected:
                member.peer = b""
                self.end_wait(member)
            self.note_change(member)
            if member.live and not connected:
                self.set_pace(member, 100, "")  # its next ping reports the current pace
                self.move(
                    member, "joining"
                )  # `greet` then accepts a device whose session is newer than this state
        if not connected:
            self._by_peer.clear()

    def next_deadline_s(self) -> float | None:
        """Return when the next lease expires, or `None` without live members."""
        return next(iter(self._leases.values())).lease_until_s if self._leases else None

    def expired(self, now_s: float) -> list[Member]:
        """Return each live member whose lease has expired, ordered by the time of expiry.

        Each member is returned only once.
        """
        ended = list(takewhile(lambda member: member.lease_until_s <= now_s, self._leases.values()))
        for member in ended:
            del self._leases[member.device_id]
        return sorted(ended, key=_by_lease)  # sort, because the order of simultaneous expiries is not durable

    @property
    def stride(self) -> int:
        """The sampling interval: with stride n, a sample contains every n-th member."""
        return max(1, math.ceil(self.live_count / SAMPLE))

    def sample(self, turn: int) -> list[Member]:
        """Return the live members or, in a large fleet, a sample of about `SAMPLE` of them.

        Each `turn` selects different members.
        """
        stride = self.stride
        return [member for member in self._in_order[turn % stride :: stride] if member.state in LIVE]

    def live_measurements(self, members: Iterable[Member]) -> list[DeviceMeasurements]:
        """Return the measurements of one member per voter.

        Only members that are live and not paused are considered.
        """
        if not self.shared:
            return [member.measurements for member in members if member.state in ("training", "joining")]
        found: dict[str, DeviceMeasurements] = {}
        for member in members:
            if member.state not in ("training", "joining"):
                continue
            known = found.setdefault(member.voter, member.measurements)
            if not known.updates:
                found[member.voter] = member.measurements
        return list(found.values())

    def note_infrequent(
        self,
        infrequent_votes: dict[str, float],
        members: Iterable[Member],
        infrequent_s: float,
        overdue_s: float,
    ) -> dict[str, float]:
        """Return the votes of the infrequent members, for which no version waits.

        A member is infrequent if its exchange cycle is longer than `infrequent_s`. A member without
        an update is infrequent if its first assignment was sent before `overdue_s`. If it has not
        received an assignment, it is infrequent if it joined before `overdue_s`. The entries of
        members that are not in `members` stay unchanged. If nothing changes, the same object is
        returned.
        """
        found = dict(infrequent_votes)
        for member in members:
            if member.device_id in self.pausing:
                infrequent = False
            elif member.measurements.updates:
                infrequent = member.measurements.cycle_s > infrequent_s
            else:
                infrequent = (member.progress_s if member.assigned is None else member.assigned_s) < overdue_s
            if infrequent:
                found[member.device_id] = 1.0 / self.shared.get(member.voter, 1)
            elif found:
                found.pop(member.device_id, None)
        return infrequent_votes if found == infrequent_votes else found

    def loss_of_majority(self, members: Iterable[Member]) -> float | None:
        """Return the lowest loss that more than half of these members' voters reach.

        Return `None` if too few voters report a loss. Only live members that are not paused are
        included. If such a member has sent updates, its last update must have counted. A voter's
        loss is the highest loss among its devices.
        """
        worst: dict[str, float] = {}
        for member in members:
            measurements = member.measurements
            if member.state in ("training", "joining") and (measurements.counted or not measurements.updates):
                loss = measurements.last_loss
                worst[member.voter] = max(worst.get(member.voter, -math.inf), math.inf if loss is None else loss)
        losses = sorted(worst.values())
        return losses[len(losses) // 2] if losses and math.isfinite(losses[len(losses) // 2]) else None

    def loss(self) -> float | None:
        """Return the median of the last losses that the devices reported; `None` without losses."""
        losses = [
            loss for measurements in self.measurements.values() if (loss := measurements.last_loss) is not None
        ]
        return median(losses) if losses else None

    def check(self) -> None:
        """Raise `AssertionError` if the tables are inconsistent."""
        assert self._in_order == list(self.members.values())
        assert self.live_count == sum(member.live for member in self.members.values())
        voting = [member for member in self.members.values() if member.live and not member.pauses]
        assert self.voters == Counter(member.voter for member in voting)
        assert self.shared == {voter: names for voter, names in self.voters.items() if names > 1}
        assert set(self.measurements) == set(self.members)
        assert self.waiters == {name: member for name, member in self.members.items() if member.waiting}
        assert self.pausing == {name: member for name, member in self.members.items() if member.pauses}
        assert all(member.state == "paused" for member in self.pausing.values())
        for session, member in self._by_session.items():
            assert member.session == session
            assert self.members[member.device_id] is member
        owned = {(member.key, member.device_id) for member in self.members.values() if member.key}
        assert owned == {(key, name) for key, names in self._by_key.items() for name in names}
        for peer, member in self._by_peer.items():
            assert member.peer == peer
        assert set(self._leases) == {device_id for device_id, member in self.members.items() if member.live}
        ends_s = [member.lease_until_s for member in self._leases.values()]
        assert ends_s == sorted(ends_s)

    def names_of(self, key: Key) -> int:
        """Return the number of device ids that a key uses; 0 if there are no keys."""
        return len(self._by_key.get(key, ()))


def _by_lease(member: Member) -> tuple[float, str]:
    return member.lease_until_s, member.device_id
