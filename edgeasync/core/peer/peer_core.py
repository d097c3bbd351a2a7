"""`PeerCore`: a peer as a deterministic state machine, without I/O and clock.

`neighbours.py` tracks which peers are live, `rounds.py` tracks the rounds, and `schedule.py` when
rounds are due. This file decides which rounds a peer proposes, and which proposals it accepts.
"""

import math

from edgeasync.core.peer import events
from edgeasync.core.peer.effects import EndPeer, PeerEffect, PeerReport, SendToPeer, WorkEffect
from edgeasync.core.peer.neighbours import (
    NOT_LISTED,
    OTHER_FROZEN,
    OTHER_INTERVAL,
    Neighbour,
    Neighbours,
    all_hear_each_other,
)
from edgeasync.core.peer.refusals import Refusals
from edgeasync.core.peer.round import OWN_WORK
from edgeasync.core.peer.rounds import RoundMessage, Rounds
from edgeasync.core.peer.settings import PeerCoreSettings, interval_of
from edgeasync.protocol.messages import PEERS_MAX
from edgeasync.protocol.peer_messages import (
    ROUND_LEAP_MAX,
    ROUND_NUMBER_MAX,
    Abandon,
    PeerCredit,
    PeerPing,
    Propose,
    RoundId,
    RoundMember,
)


class PeerCore:
    """A peer's decisions. Methods return effects to execute in order.

    `incarnation` must increase with every start under the same key. Call `tick` at the time
    `next_deadline_s`.
    """

    def __init__(self, name: str, incarnation: int, peers: tuple[str, ...], settings: PeerCoreSettings) -> None:
        self.name = name
        self.incarnation = incarnation
        self.settings = settings
        self.over = False
        self.neighbours = Neighbours(name, peers, settings)
        self.refusals = Refusals(self.neighbours)
        self.rounds = Rounds(name, self.neighbours, settings, self.refusals)
        self._schedule = self.rounds.schedule
        self._ping_count = 0
        self._begun = settings.begins_ready
        self._now_s = self._ping_at_s = self._silence_s = 0.0

    def begin(self, now_s: float) -> list[PeerEffect]:
        """Send a `hello` to all peers."""
        self._schedule.begin(now_s)
        return self.tick(now_s)

    def handle(self, event: events.PeerEvent, now_s: float) -> list[PeerEffect]:
        """Return the effects of an event."""
        if self.over:
            return []
        self._now_s = now_s
        if isinstance(event, events.PeerReceived) and isinstance(event.message, RoundMessage):
            return self._count(self._in_round(event, event.message, now_s))
        return self._count(self._decide(event, now_s))

    def tick(self, now_s: float) -> list[PeerEffect]:
        """Send pings, repeat unanswered messages, abandon a stalled round, or propose a due one."""
        if self.over:
            return []
        self._now_s = now_s
        effects: list[PeerEffect] = []
        if now_s >= self._ping_at_s:
            self._ping_at_s = now_s + self.settings.ping_s
            effects += self._ping_all(now_s)
            effects += self.rounds.repeat(now_s)
        return self._count(effects + self._settle(now_s))

    @property
    def next_deadline_s(self) -> float:
        """The time at which `tick` is next due."""
        if self.over:
            return math.inf
        return min(self._ping_at_s, self._silence_s, self.rounds.stalls_at_s(), self._proposes_at_s(self._now_s))

    def _count(self, effects: list[PeerEffect]) -> list[PeerEffect]:
        self.rounds.owed += sum(isinstance(effect, WorkEffect) for effect in effects)
        return effects

    def _in_round(self, event: events.PeerReceived, message: RoundMessage, now_s: float) -> list[PeerEffect]:
        effects = self.rounds.handle(event, message, now_s)
        round_ = self.rounds.current
        if isinstance(message, PeerCredit) and round_ is not None and round_.state == "serving":
            effects += self._settle(now_s)
        return effects

    def _decide(self, event: events.PeerEvent, now_s: float) -> list[PeerEffect]:
        effects: list[PeerEffect] = []
        match event:
            case events.PeerReceived():
                effects = self._received(event, now_s)
            case events.PeerReceivedMalformed():
                return self.refusals.note(event.peer, "a malformed message", event.reason)
            case events.TrainingBegun():
                self._begun = True
                self._ping_at_s = now_s  # notify all immediately
            case events.RoundDue():
                self._schedule.note_wanted(now_s, in_round=self.rounds.current is not None)
                effects = self._take_up_waiting(now_s)
            case events.RoundHalfDue():
                effects = self._take_up_waiting(now_s)
            case events.PeersChanged():
                self.neighbours.replace(event.peers)
                self._ping_at_s = now_s
            case events.PeerStopRequested():
                return self._stop(now_s)
            case _:
                effects = self._answered(event, now_s)
        return effects + self._settle(now_s)

    def _answered(self, event: events.WorkEvent, now_s: float) -> list[PeerEffect]:
        """Process the result of work; if the round is complete here, notify its proposer."""
        before = self.rounds.completed
        effects = self.rounds.answered(event, now_s)
        completed = self.rounds.completed
        if completed is not None and completed != before and completed.proposer in self.neighbours:
            effects.append(SendToPeer(completed.proposer, self._ping(now_s)))
        return effects

    # -- pings -------------------------------------------------------------------------------------------------

    def _ping(self, now_s: float, *, leaving: bool = False) -> PeerPing:
        self._ping_count += 1
        current = self.rounds.current
        return PeerPing(
            incarnation=self.incarnation,
            count=self._ping_count,
            fingerprint=self.settings.fingerprint,
            number=self.rounds.number,
            ready=self._ready(now_s),
            heard=self.neighbours.heard(now_s),
            current=None if current is None else current.id,
            completed=self.rounds.completed,
            leaving=leaving,
            frozen=self.settings.frozen_arrays,
            round_every_s=self.settings.round_every_s,
            round_steps=self.settings.round_steps,
        )

    def _ping_all(self, now_s: float, *, leaving: bool = False) -> list[PeerEffect]:
        ping = self._ping(now_s, leaving=leaving)
        return [SendToPeer(neighbour.name, ping) for neighbour in self.neighbours]

    def _ready(self, now_s: float) -> bool:
        """Return whether this peer can join a round: its trainer has started and responds."""
        if not self.rounds.owed:
            return self._begun
        current = self.rounds.current
        return current is not None and now_s < current.progress_s + self.settings.lease_s

    def _pinged(self, neighbour: Neighbour, ping: PeerPing, now_s: float) -> list[PeerEffect]:
        """Record a ping from a peer; if the peer is new, answer immediately."""
        if refusal := self.neighbours.refusal(neighbour.name, ping, now_s):
            detail = ""
            if refusal == OTHER_INTERVAL:
                there = interval_of(ping.round_every_s, ping.round_steps)
                detail = f"{refusal}: it uses {there}, this device {self.settings.interval}"
            return self.refusals.note(neighbour.name, refusal, detail)
        if ping.number > self.rounds.number + ROUND_LEAP_MAX:
            return self.refusals.note(neighbour.name, "a round too far ahead")
        effects: list[PeerEffect] = []
        if self.neighbours.has_other_frozen(ping) and self.refusals.is_first(neighbour.name, OTHER_FROZEN):
            detail = f"{OTHER_FROZEN}; it may take part because peers.frozen = 'warn'"
            effects.append(PeerReport("warning", detail, neighbour.name))
        is_new = not self.neighbours.hears(neighbour, now_s)
        if neighbour.ping.incarnation != ping.incarnation:
            is_new = True
            self.rounds.suspicion.forgive((neighbour.name,))
        neighbour.ping = ping
        neighbour.heard_s = -math.inf if ping.leaving else now_s
        effects += self.rounds.note_ping(neighbour.name, ping, now_s)
        if is_new and not ping.leaving:
            effects.append(SendToPeer(neighbour.name, self._ping(now_s)))
        return effects

    # -- proposals --------------------------------------------------------------------------------------------

    def _received(self, event: events.PeerReceived, now_s: float) -> list[PeerEffect]:
        message = event.message
        why = self.neighbours.stranger(event.peer, now_s)
        if isinstance(message, PeerPing) and why != NOT_LISTED:
            return self._pinged(self.neighbours[event.peer], message, now_s)
        if why:
            return self.refusals.note(event.peer, why)
        if isinstance(message, Propose):
            return self._proposed(event.peer, message, now_s)
        if isinstance(message, Abandon):
            return self.rounds.told_to_abandon(event.peer, message, now_s)
        return []

    def _proposed(self, peer: str, proposal: Propose, now_s: float) -> list[PeerEffect]:
        """Accept the proposed round with the highest id, unless the proposal is invalid."""
        round_id = proposal.round
        if round_id.proposer != peer:
            return self.refusals.note(peer, "a round in another peer's name")
        rounds = self.rounds
        if rounds.current is not None and rounds.current.id == round_id:
            if rounds.current.proposal != proposal:
                return self.refusals.note(peer, "another round under the same number")
            return [SendToPeer(peer, self._ping(now_s))]
        if rounds.highest is not None and round_id <= rounds.highest:
            effects = self.refusals.note(peer, "a round that is over")
            if rounds.given_up is not None and rounds.given_up.round == round_id:
                return [*effects, SendToPeer(peer, rounds.given_up)]
            return [*effects, SendToPeer(peer, self._ping(now_s))]
        if round_id.number > rounds.number + ROUND_LEAP_MAX:
            return self.refusals.note(peer, "a round too far ahead")
        if refusal := self._refuse_proposal(proposal):
            return self.refusals.note(peer, refusal)
        return self._accept_or_decline(peer, proposal, now_s)

    def _refuse_proposal(self, proposal: Propose) -> str:
        """Return why a proposal is invalid, or ""."""
        names = [member.name for member in proposal.members]
        if names != sorted(set(names)):
            return "a round whose members are not in order"
        if RoundMember(proposal.round.proposer, proposal.round.incarnation) not in proposal.members:
            return "a round without its proposer"
        if RoundMember(self.name, self.incarnation) not in proposal.members:
            return "a round without this peer's current start"
        if any(name != self.name and name not in self.neighbours for name in names):
            return "a round with an unlisted member"
        if proposal.codec not in self.settings.codecs:
            return "a round with an unknown codec"
        if (proposal.topology, proposal.piece_bytes) != (self.settings.topology, self.settings.piece_bytes):
            return "a round with another topology or piece size"
        return ""

    def _accept_or_decline(self, peer: str, proposal: Propose, now_s: float) -> list[PeerEffect]:
        told = self._judge(now_s)
        others = [member for member in proposal.members if member.name != self.name]
        unknown = tuple([member.name for member in others if not self.neighbours.knows(member, now_s)])
        if unknown:
            return [*told, SendToPeer(peer, Abandon(proposal.round, "unknown_member", OWN_WORK, unknown))]
        rounds, schedule = self.rounds, self._schedule
        if rounds.suspicion.declines(peer, now_s):
            return [*told, SendToPeer(peer, Abandon(proposal.round, "left_out"))]
        if schedule.is_early(rounds.completed, now_s) or now_s < rounds.backoff.until_s(peer):
            return [*told, SendToPeer(peer, Abandon(proposal.round, "early"))]
        if not schedule.half_due:
            schedule.waiting = proposal
            return told
        effects = told
        if rounds.current is not None:
            if rounds.current.state == "applying":
                return effects  # the proposer repeats it
            if rounds.current.state == "serving":
                effects += rounds.end(now_s)
            else:
                effects += rounds.give_up("preempted", now_s, at_fault=peer)
        if rounds.owed or not self._begun:
            return effects  # the proposer repeats it
        return [*effects, *rounds.begin(proposal, now_s), SendToPeer(peer, self._ping(now_s))]

    def _take_up_waiting(self, now_s: float) -> list[PeerEffect]:
        """Process a proposal that was received before half of the steps were taken."""
        proposal = self._schedule.take_waiting()
        if proposal is None or proposal.round.proposer not in self.neighbours:
            return []
        return self._proposed(proposal.round.proposer, proposal, now_s)

    # -- time --------------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[PeerEffect]:
        """Report new and lost live peers, settle the round, and propose a round if one is due."""
        effects: list[PeerEffect] = [*self.neighbours.changes(now_s)]
        self._silence_s = self.neighbours.next_silence_s(now_s)
        effects += self.rounds.settle(now_s)
        if now_s >= self._proposes_at_s(now_s):
            effects += self._propose(now_s)
        return effects

    def _stop(self, now_s: float) -> list[PeerEffect]:
        effects = self.rounds.leave(now_s) + self._ping_all(now_s, leaving=True)
        self.over = True
        return [*effects, PeerReport("stopped"), EndPeer("stopped")]

    # -- proposing ---------------------------------------------------------------------------------------------

    def _candidates(self, now_s: float) -> list[Neighbour]:
        return [
            neighbour
            for neighbour in self.neighbours.live(now_s)
            if neighbour.ping.ready
            and neighbour.heard_s > neighbour.doubted_s
            and not self._lags(neighbour.ping)
            and not self.rounds.suspicion.leaves_out(neighbour.name, now_s)
            and now_s >= self.rounds.backoff.until_s(neighbour.name)
        ]

    def _lags(self, ping: PeerPing) -> bool:
        """Return whether a peer is still in a round that this peer proposed and completed."""
        completed = self.rounds.completed
        if completed is None or completed.proposer != self.name or ping.current != completed:
            return False
        return ping.completed is None or ping.completed < completed

    def _proposes_at_s(self, now_s: float) -> float:
        """Return the time at which this peer proposes a round.

        For each candidate whose name is lower than this peer's, it waits for one more lease.
        """
        rounds, schedule = self.rounds, self._schedule
        if rounds.current is not None or rounds.owed or not self._begun:
            return math.inf
        if schedule.due_s == math.inf or rounds.number >= ROUND_NUMBER_MAX:
            return math.inf
        candidates = self._candidates(now_s)
        if not candidates or rounds.suspicion.leaves_out(self.name, now_s):
            return math.inf
        lower = sum(neighbour.name < self.name for neighbour in candidates)
        due_s = max(schedule.due_s + lower * self.settings.lease_s, rounds.backoff.until_s(self.name))
        completed = rounds.completed
        if completed is not None and any(
            neighbour.name == completed.proposer and neighbour.ping.current == completed
            for neighbour in candidates
        ):
            return max(due_s, schedule.linger_until_s)
        return due_s

    def _judge(self, now_s: float) -> list[PeerEffect]:
        """Exclude the peers that made the last round fail, once its members have reported."""
        return [
            PeerReport("warning", "excluded from rounds for a while, because others had to wait for it", culprit)
            for culprit in self.rounds.suspicion.judge(now_s)
        ]

    def _propose(self, now_s: float) -> list[PeerEffect]:
        """Propose a round to all candidates that hear one another."""
        effects = self._judge(now_s)
        if self.rounds.suspicion.leaves_out(self.name, now_s):
            return effects
        chosen = all_hear_each_other(self._candidates(now_s))[: PEERS_MAX - 1]
        members = [RoundMember(self.name, self.incarnation)]
        members += [RoundMember(each.name, each.ping.incarnation) for each in chosen]
        if len(members) == 1:
            return effects
        settings = self.settings
        proposal = Propose(
            RoundId(self.rounds.number + 1, self.name, self.incarnation),
            settings.topology,
            settings.codec,
            settings.piece_bytes,
            tuple(sorted(members, key=lambda member: member.name)),
        )
        effects += self.rounds.begin(proposal, now_s)
        others = [member.name for member in proposal.members if member.name != self.name]
        return [*effects, *[SendToPeer(name, proposal) for name in others]]
