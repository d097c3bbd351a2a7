"""The members: device ids, state ids, incarnations, sessions and leases. Part of `HubCore`; no I/O.

A device's folder has one random *state id*; every start of an agent on it is the next *incarnation*. Of two starts
with the same state id the higher incarnation wins. A new state id (a reflashed card) is admitted only when the old
one is not live. Its pushes are numbered from the beginning, and the old state id is remembered as retired.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, Literal

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.link import LinkEstimate
from edgeasync.core.hub.reported_stats import ReportedStats, clamp
from edgeasync.core.hub.traffic import OwnDay, Traffic
from edgeasync.errors import EdgeAsyncError
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.medians import add_recent, median
from edgeasync.protocol.messages import (
    COUNT_MAX,
    DAY_S,
    SECONDS_MAX,
    DeviceProfile,
    FirstOutcome,
    Hello,
    Key,
    ModelVersion,
    Push,
    RefusalCode,
    Refuse,
)
from edgeasync.states import Table, check_move

Arrival = Literal["joined", "rejoined", "reconnected"]
"""How a device became a member by its hello."""

DeviceState = Literal["joining", "training", "paused", "lost", "left", "quarantined"]

MEMBER: Table[DeviceState] = {
    "left": ("joining", "quarantined"),
    "joining": ("training", "paused", "lost", "left", "quarantined"),
    "training": ("paused", "joining", "lost", "left", "quarantined"),
    "paused": ("training", "joining", "lost", "left", "quarantined"),
    "lost": ("joining", "quarantined"),
    "quarantined": ("joining",),
}
"""A member's state: `paused` takes no local steps, `lost` was silent for a lease, `quarantined` is shut out."""

LIVE: tuple[DeviceState, ...] = ("joining", "training", "paused")
"""The states of a device that holds its lease."""

Owner = tuple[str, bytes]
"""Device id and state id: the owner of a transfer, over any connection."""

MALFORMED = "{} sent too much that is malformed, and is put aside; see the hub's events"
"""The sentence for a device in quarantine."""

STEPS_UNASSIGNED = 8
"""Local steps of an update from a device that the hub has assigned none, since it had forgotten the device."""

SHORTENED = 0.5
"""An update that counts with less than this share of its length is counted as shortened."""

RETIRED_STATES_MAX = 8

SHARE = 4
"""One key's names take a fourth of the places for devices at most."""

NAMES_MAX = 64
"""A key with more names than this is no newcomer, whatever they have sent."""

SAMPLE = 256
"""How many devices stand for a larger fleet when the hub measures it: no event takes longer for a larger one."""

STRANGERS_MAX = 4096
"""How many connections without a member have their strikes remembered."""


class RefusalError(EdgeAsyncError):
    """A message is refused; `refuse` is the answer."""

    def __init__(
        self, code: RefusalCode, sentence: str, retry_after_s: float | None = None, *, rest: bool = False
    ) -> None:
        super().__init__(sentence)
        retry_s = None if retry_after_s is None else min(retry_after_s, SECONDS_MAX)
        self.refuse = Refuse(code, sentence[:1024], retry_s, rest)


class Member(msgspec.Struct, array_like=True, dict=True, eq=False):
    """One device that the hub knows, live or not. All fields are durable.

    The attributes `link`, `codec_push`, which is chosen for the link, and what that choice depends on are not
    durable: the hub measures the link again after a restart. Nor are `held`, the checksum of what the device says
    it holds as `version`, and `coarse`, whether it may be sent a coarse whole model: both follow from what it says
    in a session. The `voter` follows from the key.
    """

    device_id: str
    state_id: bytes
    incarnation: int
    profile: DeviceProfile
    measurements: DeviceMeasurements
    seq_last: int = 0
    outcome_last: FirstOutcome | None = None
    session: bytes = b""
    peer: Peer = b""
    state: DeviceState = "left"
    codec_model: str = "identity"
    codecs_push: tuple[str, ...] = ()
    follows: bool = False
    piece_bytes_max: int = 0
    version: ModelVersion | None = None
    retired: list[bytes] = []
    seen_s: float = 0.0
    lease_until_s: float = 0.0
    progress_s: float = 0.0
    quarantined_until_s: float = 0.0
    steps_total: int = 0
    strikes: int = 0
    updates_applied: int = 0
    waiting: bool = False
    assigned: ModelVersion | None = None
    assigned_s: float = 0.0
    checksum_last: int | None = None
    key: Key = b""
    steps_assigned: int = 0
    """The most local steps of the assignments since its last push; `steps_before` of those before that push."""
    steps_before: int = 0
    updates_rejected: dict[str, int] = {}
    updates_shortened: int = 0
    """How many of its updates counted with less than half of their length."""
    updates_long: int = 0
    """How many of its updates were longer than usual when they were folded."""
    weight: float = 0.0
    """The weights of its folded updates by staleness and shares; `weight_kept`: as they were, by their length."""
    weight_kept: float = 0.0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    own_day: OwnDay | None = None
    rest_until_s: float = 0.0
    exchange_s: float = 0.0
    """When the last exchange began; its bytes are counted from `exchange_bytes`, its update is after this many."""
    exchange_bytes: int = 0
    exchange_updates: int = 0
    pace_percent: int = 100
    """The share of the time in which it says that it trains: 0 while it pauses. And in its words why."""
    pace_reason: str = ""
    temperature_c: float | None = None
    pushes_answered: int = 0
    """Updates with an outcome, and repetitions of such; those are the `duplicates`."""
    duplicates: int = 0

    def __post_init__(self) -> None:
        self.link = LinkEstimate()
        self.codec_push = "identity"
        self.codec_asked, self.codec_changed = 0, False
        self.held: int | None = None
        self.coarse = False
        self.give_to(self.key)

    def give_to(self, key: Key) -> None:
        """Make a key the owner, or nobody."""
        self.key = key
        self.voter = key.hex() if key else self.device_id
        """Whose the device's vote and its places for transfers are: its key's or, without keys, its own."""

    def count_folded(self, weight: float, clip: float) -> None:
        """Count a folded update: its weight, and the factor that shortened it."""
        self.updates_applied += 1
        self.updates_shortened += clip < SHORTENED
        self.weight += weight
        self.weight_kept += weight * clip

    @property
    def updates_buffered(self) -> int:
        """Its updates that wait to be folded: those of its answered pushes without another outcome."""
        return self.pushes_answered - self.duplicates - self.updates_applied - sum(self.updates_rejected.values())

    @property
    def owner(self) -> Owner:
        """The owner of this device's transfers, until another state takes its place."""
        return self.device_id, self.state_id

    @property
    def live(self) -> bool:
        """Whether the device holds its lease."""
        return self.state in LIVE

    @property
    def pauses(self) -> bool:
        """Whether the device holds its lease, and says that it takes no steps for now."""
        return self.live and not self.pace_percent

    @property
    def shown_state(self) -> DeviceState:
        """The state as people see it: who said goodbye for a pause is not gone."""
        return "paused" if self.state == "left" and not self.pace_percent else self.state

    def move(self, state: DeviceState) -> None:
        """Change the state; raises `TransitionError` if `MEMBER` does not allow it."""
        check_move(MEMBER, self.state, state, "a member")
        self.state = state

    def assign(self, version: ModelVersion, local_steps: int, now_s: float) -> None:
        """Note an assignment: the device may train it, or one that was sent before."""
        self.assigned, self.assigned_s = version, now_s
        self.steps_assigned = max(self.steps_assigned, local_steps)
        self.link.begin_cycle()

    def observe(self, push: Push, now_s: float, *, overlap_steps_max: int, slack_s: float) -> ReportedStats:
        """Record how the device trained, and how long after its assignment its update came; return what holds."""
        cycle_s = now_s - self.assigned_s if push.base == self.assigned else None
        # An assignment that was sent before the last push may have come after it.
        steps_max = max(self.steps_assigned, self.steps_before) or STEPS_UNASSIGNED
        self.steps_assigned, self.steps_before = 0, self.steps_assigned
        if delay_steps := self.profile.delay_steps:
            overlap_steps_max = max(overlap_steps_max, min(delay_steps, steps_max))
        stats = clamp(
            push,
            steps_max=steps_max,
            overlap_steps_max=overlap_steps_max,
            examples_told=self.profile.examples,
            cycle_s=cycle_s,
            slack_s=slack_s,
        )
        if cycle_s is not None:
            self.link.end_cycle(cycle_s - (stats.local_steps - stats.overlap_steps) * stats.step_s)
        self.assigned = None
        self.measurements.observe_arrival(now_s)
        self.measurements.observe(
            cycle_s=cycle_s,
            score=stats.score,
            base_loss=stats.base_loss,
            local_steps=stats.local_steps,
            overlap_steps=stats.overlap_steps,
            examples=stats.examples,
            step_s=stats.step_s,
            loss_mean=stats.loss_mean,
            loss_variance=stats.loss_variance,
        )
        return stats


class Strangers:
    """Strikes of connections without a member, or of their keys: of the `STRANGERS_MAX` that were struck last.

    They end `quarantine_s` after the last one. An end that hangs on the last strike alone lets a replay, which
    knows fewer strikes than the hub knew, refuse nobody whom the hub admitted.
    """

    def __init__(self, strikes_max: int, quarantine_s: float) -> None:
        self._strikes_max = strikes_max
        self._quarantine_s = quarantine_s
        self._strikes: dict[Peer, tuple[int, float]] = {}

    def remaining_s(self, peer: Peer, now_s: float) -> float:
        """Return for how long a connection stays shut out; 0 if it is not."""
        strikes, ends_s = self._strikes.get(peer, (0, 0.0))
        return max(0.0, ends_s - now_s) if strikes >= self._strikes_max else 0.0

    def strike(self, peer: Peer, now_s: float) -> None:
        """Count a strike."""
        strikes, ends_s = self._strikes.pop(peer, (0, 0.0))
        self._strikes[peer] = (strikes + 1 if now_s < ends_s else 1, now_s + self._quarantine_s)
        if len(self._strikes) > STRANGERS_MAX:
            del self._strikes[next(iter(self._strikes))]

    def check(self) -> None:
        """Raise `AssertionError` if too many connections are remembered."""
        assert len(self._strikes) <= STRANGERS_MAX


class Membership:
    """The members, found by device id, session or connection, and when their leases end."""

    def __init__(self, lease_s: float, devices_max: int) -> None:
        self.lease_s = lease_s
        self.devices_max = devices_max
        self.members: dict[str, Member] = {}
        self._in_order: list[Member] = []
        """The members in the order in which they joined, for samples of them."""
        self.measurements: dict[str, DeviceMeasurements] = {}
        self.waiters: dict[str, Member] = {}
        """The members that wait for a version with their update."""
        self.pausing: dict[str, Member] = {}
        """The live members that say they pause: they have no vote, so that nobody waits for them."""
        self._by_session: dict[bytes, Member] = {}
        self._by_peer: dict[Peer, Member] = {}
        self._by_key: dict[Key, set[str]] = {}
        self._leases: OrderedDict[str, Member] = OrderedDict()
        """The live members in the order of their last messages, which is that of their leases."""
        self.live_count = 0
        self.voters: dict[str, int] = {}
        """How many live devices each voter has that do not pause."""
        self.shared: dict[str, int] = {}
        """The same, of voters with more than one. It is replaced, never changed: votes are counted by it."""

    def dump_state(self) -> list[Member]:
        """Return the members in the order in which they joined; encode them at once, since they are not copies."""
        return list(self.members.values())

    def load_state(self, members: list[Member]) -> None:
        """Resume with the members of a durable state."""
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
        """Return the member of a session; raises `RefusalError` for one that is unknown, or another key's."""
        member = self.find_session(session, key)
        if member is None:
            raise RefusalError("unknown_session", "the hub does not know this session; say hello again")
        return member

    def find_session(self, session: bytes, key: Key) -> Member | None:
        """Return the member of a session, `None` for one that is unknown, or another key's."""
        member = self._by_session.get(session)
        return None if member is None or member.key != key else member

    def by_peer(self, peer: Peer) -> Member | None:
        """Return the member on a connection, if there is one."""
        return self._by_peer.get(peer)

    def greet(
        self, hello: Hello, peer: Peer, session: bytes, now_s: float, key: Key = b""
    ) -> tuple[Member, Arrival]:
        """Admit a device; return its member, and whether it `joined`, `rejoined` or `reconnected`.

        Raises `RefusalError` for another's key, a stale start, a retired state, a second live state or a full hub.
        """
        member = self.members.get(hello.device_id)
        if member is None:
            self._make_place(key, now_s)
            measurements = DeviceMeasurements(examples=hello.profile.examples)
            member = Member(
                hello.device_id,
                hello.state_id,
                hello.incarnation,
                hello.profile,
                measurements,
                seq_last=_seq_before(hello),
            )
            self.members[hello.device_id] = member
            self._in_order.append(member)
            self.measurements[hello.device_id] = member.measurements
            event: Arrival = "joined"
        else:
            if key and member.key not in (b"", key):
                raise RefusalError("not_allowed", f"{hello.device_id} belongs to another key")
            event = self._readmit(member, hello, peer, now_s)
            if member.state == "quarantined":
                member.strikes = 0
        self._change_key(member, key)
        member.profile = hello.profile
        member.own_day = _own_day(hello.profile, now_s)
        member.piece_bytes_max = hello.piece_bytes_max
        member.measurements.examples = hello.profile.examples
        member.measurements.local_steps_max = hello.profile.local_steps_max
        member.measurements.updated_s = 0.0
        member.assigned = member.version = member.held = None
        self._by_session.pop(member.session, None)
        member.session = session
        self._by_session[session] = member
        self.bind(member, peer)
        self.end_wait(member)
        self.set_pace(member, 100, "")
        if event != "reconnected":
            member.rest_until_s = 0.0
        member.steps_total = 0
        member.progress_s = now_s
        self.renew(member, now_s)
        self.revive(member)
        return member, event

    def bind(self, member: Member, peer: Peer) -> Peer | None:
        """Make `peer` the member's connection; return the one it replaces, if any."""
        if member.peer == peer:
            return None
        replaced = member.peer if self._by_peer.pop(member.peer, None) is not None else None
        if (previous := self._by_peer.get(peer)) is not None:
            previous.peer = b""
            self.end_wait(previous)
        member.peer = peer
        self._by_peer[peer] = member
        return replaced

    def renew(self, member: Member, now_s: float) -> None:
        """Renew a member's lease."""
        member.seen_s = now_s
        member.lease_until_s = now_s + self.lease_s
        if member.device_id in self._leases:
            self._leases.move_to_end(member.device_id)

    def revive(self, member: Member) -> None:
        """Make a member live whose lease was renewed just now, and watch for the end of that."""
        if not member.live:
            self.set_pace(member, 100, "")
            self._count(member, 1)
        member.move("joining")
        self._leases[member.device_id] = member

    def retire(self, member: Member, state: Literal["lost", "left", "quarantined"]) -> None:
        """End a member's lease; the hub still knows it, and the number of its last push."""
        self.set_pace(member, 100, "")
        if member.live:
            self._count(member, -1)
        self._leases.pop(member.device_id, None)
        member.move(state)
        self.end_wait(member)

    def set_pace(self, member: Member, percent: int, reason: str) -> None:
        """Note in what share of the time a member says that it trains."""
        paused = member.pauses
        member.pace_percent, member.pace_reason = percent, reason
        if member.pauses == paused:
            return
        if paused:
            del self.pausing[member.device_id]
            self._count_vote(member, 1)
        else:
            self.pausing[member.device_id] = member
            self._count_vote(member, -1)

    def begin_wait(self, member: Member) -> None:
        """Note that a member waits for a version with its update."""
        member.waiting = True
        self.waiters[member.device_id] = member

    def end_wait(self, member: Member) -> None:
        """Note that a member does not wait, or no longer."""
        if member.waiting:
            member.waiting = False
            del self.waiters[member.device_id]

    def take_waiting(self) -> list[Member]:
        """Return the members that wait, in the order of their updates; none of them waits any more."""
        waiting = sorted(
            self.waiters.values(), key=lambda member: (member.measurements.updated_s, member.device_id)
        )
        for member in waiting:
            self.end_wait(member)
        return waiting

    def _count(self, member: Member, change: int) -> None:
        """Count a device that comes to be live, or no longer is."""
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

    def _change_key(self, member: Member, key: Key) -> None:
        """Give a member to a key; its vote goes with it."""
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
        """Return the members of a key, by their names, without a walk over all."""
        return [self.members[name] for name in sorted(self._by_key.get(key, ()))]

    def long_updates_of_voter(self, member: Member) -> float:
        """Return how many long updates a device has sent or, with keys, its key; infinity with many names."""
        names = self._by_key.get(member.key, ())
        if len(names) < 2:
            return member.updates_long
        return sum(self.members[name].updates_long for name in names) if len(names) <= NAMES_MAX else math.inf

    def expel(self, member: Member) -> None:
        """End the session of a member whose key counts no more. Its place is free for the next key of its name."""
        if member.live:
            self.retire(member, "left")
        self.set_pace(member, 100, "")
        self._by_session.pop(member.session, None)
        self._by_peer.pop(member.peer, None)
        member.session = member.peer = b""
        self._change_key(member, b"")

    def resume(self, now_s: float, *, connected: bool) -> None:
        """Renew all leases; unless the members are still `connected`, forget their connections."""
        for member in self.members.values():
            member.assigned = None  # its cycle is longer than what the hub's clock shows
            if member.live:
                self.renew(member, now_s)
                member.progress_s = now_s
            if not connected:
                member.peer = b""
                self.end_wait(member)
            if member.live and not connected:
                self.set_pace(member, 100, "")  # its next ping says what holds by then
                member.move("joining")  # which admits a device whose session is newer than this state
        if not connected:
            self._by_peer.clear()

    def next_deadline_s(self) -> float | None:
        """Return when the next lease ends, if nothing is heard of its member until then."""
        return next(iter(self._leases.values())).lease_until_s if self._leases else None

    def expired(self, now_s: float) -> list[Member]:
        """Return each live member whose lease has ended, once, ordered by the end of the lease."""
        ended = list(takewhile(lambda member: member.lease_until_s <= now_s, self._leases.values()))
        for member in ended:
            del self._leases[member.device_id]
        return sorted(ended, key=_by_lease)  # the order of those that end together is not durable

    def describe(
        self,
        members: Iterable[Member],
        now_s: float,
        is_quarantined: Callable[[Member], bool],
        budget_of: Callable[[Member, float], dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Return the devices' parts of the status: `is_quarantined` tells of orders, `budget_of` of the day."""
        return [
            {
                "id": member.device_id,
                **_quarantine(member, now_s, ordered=is_quarantined(member)),
                "staleness": member.measurements.staleness,
                "local_steps": member.measurements.local_steps,
                "last_seen_s": round(now_s - member.seen_s, 3),
                "examples_per_s": round(member.measurements.examples_per_s, 1),
                "pushes_answered": member.pushes_answered,
                "updates_applied": member.updates_applied,
                "updates_buffered": member.updates_buffered,
                "duplicates": member.duplicates,
                "updates_rejected": member.updates_rejected,
                "updates_shortened": member.updates_shortened,
                "weight_kept": round(member.weight_kept / member.weight, 3) if member.weight else None,
                "loss": _shown(member.measurements),
                "pace_percent": member.pace_percent,
                "pace_reason": member.pace_reason,
                "temperature_c": member.temperature_c,
                "assigned_steps": member.measurements.assigned_steps,
                "why": member.measurements.why,
                "bound": member.measurements.bound,
                "step_s": round(member.measurements.step_s, 6),
                "talk_s": round(member.measurements.communication_s, 6),
                "talk_share": round(member.measurements.communication_share, 3),
                "period_s": round(member.measurements.period_s or member.measurements.cycle_s, 6),
                "push_codec": member.codec_push,
                "bytes_up": member.traffic.up_bytes + member.link.uncounted[0],
                "bytes_down": member.traffic.down_bytes + member.link.uncounted[1],
                **member.link.describe(),
                **budget_of(member, now_s),
            }
            for member in members
        ]

    @property
    def stride(self) -> int:
        """One of how many members is in a sample."""
        return max(1, math.ceil(self.live_count / SAMPLE))

    def sample(self, turn: int) -> list[Member]:
        """Return the live members or, in a large fleet, about `SAMPLE` of them: others in each turn."""
        stride = self.stride
        return [member for member in self._in_order[turn % stride :: stride] if member.state in LIVE]

    def live_measurements(self, members: Iterable[Member]) -> list[DeviceMeasurements]:
        """Return the measurements of those members that are live and not paused: one of each voter."""
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
        """Return which members nobody waits for, with their votes: those with a cycle over `infrequent_s`.

        So is a device without an update, once its first assignment was sent before `overdue_s` or, without one,
        since it joined before that. Of others the answer is as before, and so is the object if nothing changes.
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
        """Return the lowest loss that more than half of these members' voters reach, `None` if fewer tell a loss.

        They are those with a live device that is not paused, and whose last update counted if it has sent any. A
        voter's loss is the highest of its devices'.
        """
        worst: dict[str, float] = {}
        for member in members:
            measurements = member.measurements
            if member.state in ("training", "joining") and (measurements.counted or not measurements.updates):
                loss = _shown(measurements)
                worst[member.voter] = max(worst.get(member.voter, -math.inf), math.inf if loss is None else loss)
        losses = sorted(worst.values())
        return losses[len(losses) // 2] if losses and math.isfinite(losses[len(losses) // 2]) else None

    def loss(self) -> float | None:
        """Return the median of the devices' last losses, for people; `None` without any loss."""
        losses = [
            loss for measurements in self.measurements.values() if (loss := _shown(measurements)) is not None
        ]
        return median(losses) if losses else None

    def check(self) -> None:
        """Raise `AssertionError` if the tables contradict one another."""
        assert len(self.members) <= self.devices_max
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

    def _readmit(self, member: Member, hello: Hello, peer: Peer, now_s: float) -> Arrival:
        """Admit a known device again; raises `RefusalError` for a stale start or a second live device."""
        if member.state == "quarantined" and now_s < member.quarantined_until_s:
            raise RefusalError(
                "quarantined",
                MALFORMED.format(member.device_id),
                member.quarantined_until_s - now_s,
            )
        if hello.state_id != member.state_id:
            self._replace_state(member, hello, now_s)
            return "rejoined"
        if hello.incarnation < member.incarnation:
            raise RefusalError("superseded", f"a later start of {member.device_id} has taken its place")
        if hello.incarnation == member.incarnation and member.live:
            same = hello.session == member.session or peer == member.peer or member.state == "joining"
            if not same:
                raise self._duplicate(member, now_s)
            return "reconnected"
        member.incarnation = hello.incarnation
        return "rejoined"

    def _replace_state(self, member: Member, hello: Hello, now_s: float) -> None:
        """Give the device id to a new state; raises `RefusalError` if it is retired or the old one is live."""
        if hello.state_id in member.retired:
            raise RefusalError(
                "retired_state",
                f"this state of {member.device_id} was replaced by a newer one; delete its state folder",
            )
        if member.live:
            raise self._duplicate(member, now_s)
        add_recent(member.retired, member.state_id, RETIRED_STATES_MAX)
        member.state_id = hello.state_id
        member.incarnation = hello.incarnation
        member.seq_last = hello.seq_answered
        member.outcome_last = member.checksum_last = None

    def _duplicate(self, member: Member, now_s: float) -> RefusalError:
        return RefusalError(
            "duplicate_device_id",
            f"a device named {member.device_id} is connected already; give this one another name "
            "(--device-id, name= in Python)",
            max(0.0, member.lease_until_s - now_s),
        )

    def _make_place(self, key: Key, now_s: float) -> None:
        """Make room for one device: forget a silent one if need be; raises `RefusalError` if all must stay.

        A key that holds its share of the places gives one of its own. Otherwise the key with the most gives one.
        """
        share = math.ceil(self.devices_max / SHARE)
        crowding = self._names_of(key) >= share
        if len(self.members) < self.devices_max and not crowding:
            return
        silent = [
            member
            for member in (self.of_key(key) if crowding else self.members.values())
            if not member.live and (member.state != "quarantined" or now_s >= member.quarantined_until_s)
        ]
        if not silent:
            why = f"one key has {share} of the hub's places at most" if crowding else "the hub has no place free"
            raise RefusalError(
                "hub_full", f"{why}; limits.devices_max = {self.devices_max} at the hub", self.lease_s
            )
        self._forget(min(silent, key=lambda member: (-self._names_of(member.key), member.seen_s)))

    def _forget(self, member: Member) -> None:
        self.end_wait(member)
        del self.members[member.device_id]
        self._in_order.remove(member)
        del self.measurements[member.device_id]
        self._forget_key(member)
        self._by_session.pop(member.session, None)
        self._by_peer.pop(member.peer, None)

    def _names_of(self, key: Key) -> int:
        """Return how many places a key holds; without keys each device stands for itself."""
        return len(self._by_key.get(key, ()))


def _seq_before(hello: Hello) -> int:
    """Return the number after which a device's pushes begin that the hub does not know.

    A device with a session was a member before, until the hub forgot it. The push after its last answered one may
    have counted, so nobody may use that number again.
    """
    return min(hello.seq_answered + (hello.session is not None), COUNT_MAX)


def _own_day(profile: DeviceProfile, now_s: float) -> OwnDay | None:
    """Return the day of a device with a limit of its own, as it says."""
    most = profile.bytes_per_day_max
    if not most:
        return None
    return OwnDay(most - min(profile.day_left_bytes, most), now_s + min(profile.day_remaining_s, DAY_S))


def _by_lease(member: Member) -> tuple[float, str]:
    return member.lease_until_s, member.device_id


def _shown(measurements: DeviceMeasurements) -> float | None:
    """Return a device's last mean loss, if it has told one that is finite."""
    loss = measurements.loss_mean
    return loss if measurements.updates and loss is not None and math.isfinite(loss) else None


def _quarantine(member: Member, now_s: float, *, ordered: bool) -> dict[str, Any]:
    """Return a member's state as the status shows it, and why it is in quarantine and what ends that."""
    if ordered:
        ends = f"by 'edgeasync device release {member.device_id}'"
        return {"state": "quarantined", "quarantine": {"cause": "an operator's order", "ends": ends}}
    if member.state != "quarantined":
        return {"state": member.shown_state, "quarantine": None}
    remaining_s = max(0.0, member.quarantined_until_s - now_s)
    cause = "it sent too much that is malformed"
    return {"state": member.state, "quarantine": {"cause": cause, "ends": f"in {remaining_s:.0f} s"}}
