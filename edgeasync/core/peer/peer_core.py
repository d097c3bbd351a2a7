"""`PeerCore`: a peer as a deterministic state machine. Events and time in, effects out; no I/O, no clock.

`neighbours.py` knows who is live, `round.py` what happens within a round, `suspicion.py` who is left out for a
while. This file decides when a round begins, with whom, and when it is given up.
"""

import math
from collections import Counter

import msgspec

from edgeasync.core.peer.backoff import Backoff
from edgeasync.core.peer.effects import DropRound, EndPeer, PeerEffect, PeerReport, SendToPeer, WorkEffect
from edgeasync.core.peer.events import (
    Decoded,
    Encoded,
    MeanApplied,
    PeerEvent,
    PeerReceived,
    PeerReceivedMalformed,
    PeersChanged,
    PeerStopRequested,
    RoundDue,
    RoundHalfDue,
    SnapshotTaken,
    TrainingBegun,
    WorkEvent,
    WorkFailed,
)
from edgeasync.core.peer.neighbours import (
    OTHER_FROZEN,
    OTHER_INTERVAL,
    Neighbour,
    Neighbours,
    all_hear_each_other,
)
from edgeasync.core.peer.round import OWN_WORK, Refused, Round
from edgeasync.core.peer.settings import PeerCoreSettings, interval_of
from edgeasync.core.peer.suspicion import Suspicion
from edgeasync.protocol.peer_messages import (
    PEERS_MAX,
    ROUND_LEAP_MAX,
    ROUND_NUMBER_MAX,
    Abandon,
    AbandonReason,
    Offer,
    PeerCredit,
    PeerPiece,
    PeerPing,
    Propose,
    RoundId,
    RoundMember,
)

LINGER_LEASES_MAX = 8
"""How many leases a peer waits for a proposer that says its round is still in progress."""

NORMAL = frozenset(
    {
        "a message before a ping",
        "a ping of an earlier start",
        "a repeated piece",
        "a round that is over",
        "a round that was not proposed",
        "an old ping",
    }
)
"""Refusals that late, early or repeated messages bring about; people are not told."""

RoundMessage = Offer | PeerCredit | PeerPiece


class PeerCore:
    """A peer's decisions. `begin`, `handle` and `tick` return effects to carry out in order.

    `incarnation` must grow with every start under the same key. Call `tick` at `next_deadline_s`. `refused` counts
    what was not accepted, by a short text such as "a corrupt piece".
    """

    def __init__(self, name: str, incarnation: int, peers: tuple[str, ...], settings: PeerCoreSettings) -> None:
        self.name = name
        self.incarnation = incarnation
        self.settings = settings
        self.refused: Counter[str] = Counter()
        self.round: Round | None = None
        self.completed: RoundId | None = None
        """The last round whose mean is in the model."""
        self.over = False
        self.neighbours = Neighbours(name, peers, settings)
        self._suspicion = Suspicion(settings.lease_s)
        self._backoff = Backoff(settings.lease_s)
        self._told: set[tuple[str, str]] = set()
        self._owed = 0
        """Work effects without an answer."""
        self._number = 0
        self._highest: RoundId | None = None
        self._given_up: Abandon | None = None
        self._given_up_members: tuple[str, ...] = ()
        self._declined: set[str] = set()
        """Who declined a round of this peer since the last one that became whole."""
        self._ping_count = 0
        self._alone = False
        self._begun = settings.begins_ready
        self._due_s = math.inf
        self._applied_s = self._linger_until_s = -math.inf
        self._is_retry = False
        """Whether the last round began early, because a member had given up the one before."""
        self._retried: RoundId | None = None
        """A round that another member has given up, but not this one: it may be repeated early."""
        self._half_s = -math.inf
        """When half of the interval has passed for all members of the last round."""
        self._half_due = True
        self._waiting: Propose | None = None
        """A proposal that waits until the trainer has taken half of `round_steps`."""
        self._wanted = False
        self._now_s = self._ping_at_s = self._silence_s = 0.0

    @property
    def owed(self) -> int:
        """How many work effects have no answer yet."""
        return self._owed

    def begin(self, now_s: float) -> list[PeerEffect]:
        """Say hello to all peers."""
        interval_s = self.settings.interval_s
        self._due_s = math.inf if interval_s is None else now_s + interval_s
        return self.tick(now_s)

    def handle(self, event: PeerEvent, now_s: float) -> list[PeerEffect]:
        """Return the effects of an event."""
        if self.over:
            return []
        self._now_s = now_s
        if isinstance(event, PeerReceived) and isinstance(event.message, RoundMessage):
            return self._count(self._in_round(event, event.message, now_s))
        return self._count(self._decide(event, now_s))

    def tick(self, now_s: float) -> list[PeerEffect]:
        """Ping, repeat what was not answered, give up what stands still, and propose the round that is due."""
        if self.over:
            return []
        self._now_s = now_s
        effects: list[PeerEffect] = []
        if now_s >= self._ping_at_s:
            self._ping_at_s = now_s + self.settings.ping_s
            effects += self._ping_all(now_s)
            effects += self._repeat(now_s)
        return self._count(effects + self._settle(now_s))

    @property
    def live(self) -> tuple[str, ...]:
        """The peers that are live, as of the last event."""
        return tuple([neighbour.name for neighbour in self.neighbours.live(self._now_s)])

    @property
    def next_deadline_s(self) -> float:
        """When `tick` is next due."""
        if self.over:
            return math.inf
        return min(self._ping_at_s, self._silence_s, self._stalls_at_s(), self._proposes_at_s(self._now_s))

    def check(self) -> None:
        """Raise `AssertionError` if the state contradicts itself."""
        assert self._owed >= 0
        if self.round is not None:
            assert self.round.state != "over"
            assert self.round.state != "applying" or self._owed
            assert self._highest is not None
            assert self.round.id == self._highest
            assert self.completed != self.round.id or self.round.state == "serving"

    def _count(self, effects: list[PeerEffect]) -> list[PeerEffect]:
        self._owed += sum(isinstance(effect, WorkEffect) for effect in effects)
        return effects

    def _decide(self, event: PeerEvent, now_s: float) -> list[PeerEffect]:
        match event:
            case PeerReceived():
                effects = self._received(event, now_s)
            case PeerReceivedMalformed():
                return self._refuse(event.peer, "a message that cannot be read", event.reason)
            case TrainingBegun():
                self._begun = True
                self._ping_at_s = now_s  # all are to know at once
                effects = []
            case RoundDue():
                self._wanted = True
                if self.round is None:
                    self._due_s = min(self._due_s, max(now_s, self._half_s))
                effects = self._take_up_waiting(now_s)
            case RoundHalfDue():
                effects = self._take_up_waiting(now_s)
            case PeersChanged():
                self.neighbours.replace(event.peers)
                self._ping_at_s = now_s
                effects = []
            case PeerStopRequested():
                return self._stop(now_s)
            case _:
                effects = self._answered(event, now_s)
        return effects + self._settle(now_s)

    def _refuse(self, peer: str, why: str, detail: str = "") -> list[PeerEffect]:
        """Count what is not accepted; tell people of the first of its kind from each peer, unless it is normal."""
        self.refused[why] += 1
        if why in NORMAL or (peer, why) in self._told or peer not in self.neighbours:
            return []
        self._told.add((peer, why))
        return [PeerReport("refused", detail or why, peer)]

    # -- pings -------------------------------------------------------------------------------------------------

    def _ping(self, now_s: float, *, leaving: bool = False) -> PeerPing:
        self._ping_count += 1
        return PeerPing(
            incarnation=self.incarnation,
            count=self._ping_count,
            fingerprint=self.settings.fingerprint,
            number=self._number,
            ready=self._ready(now_s),
            heard=self.neighbours.heard(now_s),
            current=None if self.round is None else self.round.id,
            completed=self.completed,
            leaving=leaving,
            frozen=self.settings.frozen_arrays,
            round_every_s=self.settings.round_every_s,
            round_steps=self.settings.round_steps,
        )

    def _ping_all(self, now_s: float, *, leaving: bool = False) -> list[PeerEffect]:
        ping = self._ping(now_s, leaving=leaving)
        return [SendToPeer(neighbour.name, ping) for neighbour in self.neighbours]

    def _ready(self, now_s: float) -> bool:
        """Return whether a round can be proposed to this peer: its trainer has begun, and does not hang."""
        if not self._owed:
            return self._begun
        return self.round is not None and now_s < self.round.progress_s + self.settings.lease_s

    def _pinged(self, neighbour: Neighbour, ping: PeerPing, now_s: float) -> list[PeerEffect]:
        """Note where a peer stands. It is answered at once if it is new, so that both soon know each other."""
        if refusal := self.neighbours.refusal(neighbour.name, ping, now_s):
            detail = ""
            if refusal == OTHER_INTERVAL:
                there = interval_of(ping.round_every_s, ping.round_steps)
                detail = f"{refusal}: {there} there, {self.settings.interval} here"
            return self._refuse(neighbour.name, refusal, detail)
        if ping.number > self._number + ROUND_LEAP_MAX:
            return self._refuse(neighbour.name, "a round too far ahead")
        effects: list[PeerEffect] = []
        if self.neighbours.has_other_frozen(ping) and (neighbour.name, OTHER_FROZEN) not in self._told:
            self._told.add((neighbour.name, OTHER_FROZEN))
            detail = f"{OTHER_FROZEN}; it takes part, because of peers.frozen = 'warn'"
            effects.append(PeerReport("warning", detail, neighbour.name))
        is_new = not self.neighbours.hears(neighbour, now_s)
        if neighbour.ping is None or neighbour.ping.incarnation != ping.incarnation:
            is_new = True
            self._suspicion.forgive((neighbour.name,))
        neighbour.ping = ping
        neighbour.heard_s = -math.inf if ping.leaving else now_s
        self._number = max(self._number, ping.number)
        round_ = self.round
        if round_ is not None and neighbour.name in round_.others:
            if ping.leaving and ping.completed == round_.id:
                round_.leave_behind(neighbour.name)  # in order: it has handed out what others need of it
            is_preempted = ping.current is not None and ping.current > round_.id
            if is_preempted and round_.id.proposer == self.name and round_.state in {"snapshot", "exchanging"}:
                effects += self._give_up("preempted", now_s)
        if is_new and not ping.leaving:
            effects.append(SendToPeer(neighbour.name, self._ping(now_s)))
        return effects

    # -- messages of rounds ------------------------------------------------------------------------------------

    def _received(self, event: PeerReceived, now_s: float) -> list[PeerEffect]:
        if event.peer not in self.neighbours:
            return self._refuse(event.peer, "a message of a peer that is not on the list")
        neighbour = self.neighbours[event.peer]
        message = event.message
        if isinstance(message, PeerPing):
            return self._pinged(neighbour, message, now_s)
        if not self.neighbours.hears(neighbour, now_s):
            return self._refuse(event.peer, "a message before a ping")
        if isinstance(message, Propose):
            return self._proposed(event.peer, message, now_s)
        if isinstance(message, Abandon):
            return self._told_to_abandon(event.peer, message, now_s)
        return []

    def _in_round(self, event: PeerReceived, message: RoundMessage, now_s: float) -> list[PeerEffect]:
        """Carry a round's transfer on; this is all that most messages take."""
        peer = event.peer
        if peer not in self.neighbours:
            return self._refuse(peer, "a message of a peer that is not on the list")
        neighbour = self.neighbours[peer]
        if not self.neighbours.hears(neighbour, now_s):
            return self._refuse(peer, "a message before a ping")
        round_ = self.round
        if round_ is None or round_.id != message.round or peer not in round_.others:
            return self._of_another_round(peer, message)
        neighbour.heard_s = now_s  # of the start that is in the round: another start would not know its name
        try:
            match message:
                case Offer():
                    return round_.offer(peer, message, now_s)
                case PeerCredit():
                    effects = round_.credit(peer, message, now_s)
                    return effects + self._settle(now_s) if round_.state == "serving" else effects
                case PeerPiece():
                    return round_.piece(peer, message, event.payload_bytes, now_s, sound=event.sound)
        except Refused as refused:
            effects = self._refuse(peer, str(refused))
            if refused.fatal and round_.state in {"snapshot", "exchanging"}:
                return effects + self._give_up("corrupt", now_s, (OWN_WORK, (peer,)))
            if isinstance(message, PeerPiece) and str(refused) not in NORMAL:
                effects += round_.ask_again(peer, message.step)
            return effects

    def _of_another_round(self, peer: str, message: RoundMessage) -> list[PeerEffect]:
        """Refuse a transfer of another round, but keep an offer that overtook the proposal.

        Who repeats an offer of a round that is over is told how it ended.
        """
        over = self._highest is not None and message.round <= self._highest
        if isinstance(message, Offer) and not over:
            self.neighbours[peer].keep_early(message)
            return []
        effects = self._refuse(peer, "a round that is over" if over else "a round that was not proposed")
        if not isinstance(message, Offer):
            return effects
        if message.round == self.completed:
            effects.append(SendToPeer(peer, PeerCredit(message.round, message.step, message.payload_bytes)))
        elif self._given_up is not None and message.round == self._given_up.round:
            effects.append(SendToPeer(peer, self._given_up))
        return effects

    def _proposed(self, peer: str, proposal: Propose, now_s: float) -> list[PeerEffect]:
        """Take the highest round, unless something is wrong with it."""
        round_id = proposal.round
        if round_id.proposer != peer:
            return self._refuse(peer, "a round in the name of another")
        if self.round is not None and self.round.id == round_id:
            if self.round.proposal != proposal:
                return self._refuse(peer, "another round under the same number")
            return [SendToPeer(peer, self._ping(now_s))]
        if self._highest is not None and round_id <= self._highest:
            effects = self._refuse(peer, "a round that is over")
            if self._given_up is not None and self._given_up.round == round_id:
                return [*effects, SendToPeer(peer, self._given_up)]
            return [*effects, SendToPeer(peer, self._ping(now_s))]
        if round_id.number > self._number + ROUND_LEAP_MAX:
            return self._refuse(peer, "a round too far ahead")
        if refusal := self._refuse_proposal(proposal):
            return self._refuse(peer, refusal)
        return self._accept_or_decline(peer, proposal, now_s)

    def _refuse_proposal(self, proposal: Propose) -> str:
        """Return what no sound proposer would propose, or nothing."""
        names = [member.name for member in proposal.members]
        if names != sorted(set(names)):
            return "a round whose members are not in order"
        if RoundMember(proposal.round.proposer, proposal.round.incarnation) not in proposal.members:
            return "a round without its proposer"
        if RoundMember(self.name, self.incarnation) not in proposal.members:
            return "a round without this start of this peer"
        if any(name != self.name and name not in self.neighbours for name in names):
            return "a round with a member that is not on the list"
        if proposal.codec not in self.settings.codecs:
            return "a round with an unknown codec"
        if (proposal.topology, proposal.piece_bytes) != (self.settings.topology, self.settings.piece_bytes):
            return "a round of another topology, or with other pieces"
        return ""

    def _accept_or_decline(self, peer: str, proposal: Propose, now_s: float) -> list[PeerEffect]:
        told = self._judge(now_s)
        others = [member for member in proposal.members if member.name != self.name]
        unknown = tuple([member.name for member in others if not self.neighbours.knows(member, now_s)])
        if unknown:
            return [*told, SendToPeer(peer, Abandon(proposal.round, "unknown_member", OWN_WORK, unknown))]
        if self._suspicion.declines(peer, now_s):
            return [*told, SendToPeer(peer, Abandon(proposal.round, "left_out"))]
        if self._is_early(now_s) or now_s < self._backoff.until_s(peer):
            return [*told, SendToPeer(peer, Abandon(proposal.round, "early"))]
        if not self._half_due:
            self._waiting = proposal
            return told
        effects = told
        if self.round is not None:
            if self.round.state == "applying":
                return effects  # the proposer repeats it
            if self.round.state == "serving":
                effects += self._end_round(now_s)
            else:
                effects += self._give_up("preempted", now_s, at_fault=peer)
        if self._owed or not self._begun:
            return effects  # the proposer repeats it
        return [*effects, *self._begin_round(proposal, now_s), SendToPeer(peer, self._ping(now_s))]

    def _is_early(self, now_s: float) -> bool:
        """Return whether less than half the interval has passed since the last whole round.

        A round that another member has given up may be repeated at once, but only one time.
        """
        if self.completed is not None and self.completed == self._retried:
            return False
        return self._is_within_half(now_s)

    def _is_within_half(self, now_s: float) -> bool:
        interval_s = self.settings.interval_s
        return interval_s is not None and now_s < self._applied_s + interval_s / 2

    def _note_retried(self, round_id: RoundId) -> None:
        """Note that another member has given up a round whose mean is here."""
        if not self._is_retry:
            self._retried = round_id

    def _take_up_waiting(self, now_s: float) -> list[PeerEffect]:
        """Take up the proposal that came before half of the steps were taken."""
        self._half_due = True
        proposal, self._waiting = self._waiting, None
        if proposal is None or proposal.round.proposer not in self.neighbours:
            return []
        return self._proposed(proposal.round.proposer, proposal, now_s)

    def _begin_round(self, proposal: Propose, now_s: float) -> list[PeerEffect]:
        self._is_retry = self._is_within_half(now_s)
        self._half_due, self._waiting = self.settings.round_steps is None, None
        self._highest = proposal.round
        self._number = max(self._number, proposal.round.number)
        self._wanted = False
        self.round = Round(proposal, self.name, self.settings, now_s)
        told = f"round {proposal.round.number} of {proposal.round.proposer}: {', '.join(self.round.names)}"
        return [*self.round.begin(), PeerReport("round_started", told), *self._early_offers(proposal.round, now_s)]

    def _early_offers(self, round_id: RoundId, now_s: float) -> list[PeerEffect]:
        """Take the offers that came before the proposal."""
        effects: list[PeerEffect] = []
        for neighbour in self.neighbours:
            offers, neighbour.early_offers = neighbour.early_offers, {}
            for offer in offers.values():
                if offer.round == round_id:
                    effects += self._in_round(PeerReceived(neighbour.name, offer), offer, now_s)
        return effects

    def _told_to_abandon(self, peer: str, abandon: Abandon, now_s: float) -> list[PeerEffect]:
        """Give up what another member has given up, unless the mean is already here."""
        round_ = self.round
        if round_ is not None and round_.id == abandon.round:
            if peer not in round_.others:
                return self._refuse(peer, "a message of a peer that is not in the round")
            if round_.state in {"applying", "serving"}:
                round_.leave_behind(peer)
                self._note_retried(round_.id)
                self.neighbours.note_abandon(peer, abandon)
                return []
            # The others doubt who is named as lost: that must not be whom this member happened to wait for.
            lost = (abandon.step, abandon.awaited) if abandon.reason == "lost" else None
            effects = self._give_up(abandon.reason, now_s, lost)
            if abandon.reason in {"lost", "unknown_member"}:
                self.neighbours.doubt(abandon.awaited, now_s)
            if abandon.reason not in {"early", "unknown_member"}:
                self._accuse(peer, abandon)
            elif round_.id.proposer == self.name:
                self._declined_by(peer, abandon, now_s)
            return effects
        if self._given_up is not None and self._given_up.round == abandon.round:
            self._accuse(peer, abandon)
            return []
        if self._waiting is not None and self._waiting.round == abandon.round:
            self._waiting = None
            return []
        if abandon.round != self.completed:
            return self._refuse(peer, "a round that is over")
        self._note_retried(abandon.round)
        self.neighbours.note_abandon(peer, abandon)
        return []

    def _declined_by(self, peer: str, abandon: Abandon, now_s: float) -> None:
        """Propose without those that a member does not know, at once; without that member if it declines again."""
        if self.name in abandon.awaited or peer in self._declined:
            self._accuse(peer, msgspec.structs.replace(abandon, awaited=(peer,)))
        else:
            self._declined.add(peer)
            if abandon.reason == "unknown_member":
                self._due_s = now_s

    def _accuse(self, accuser: str, abandon: Abandon) -> None:
        if {accuser, *abandon.awaited} <= {*self._given_up_members}:
            self._suspicion.accuse(accuser, abandon)

    # -- work --------------------------------------------------------------------------------------------------

    def _answered(self, event: WorkEvent, now_s: float) -> list[PeerEffect]:
        """Carry on with the result of work, if its round is not over."""
        self._owed -= 1
        round_ = self.round
        if round_ is None or round_.id != event.round:
            return []
        match event:
            case SnapshotTaken():
                last = [self.neighbours[name].norms for name in round_.others if name in self.neighbours]
                return round_.snapshot_taken(event, [norms for norms in last if norms is not None], now_s)
            case Encoded():
                return round_.encoded(event, now_s)
            case Decoded():
                try:
                    return round_.decoded(event, now_s)
                except Refused as refused:
                    sender = round_.sender(event.step)
                    return [
                        *self._refuse(sender, str(refused)),
                        *self._give_up("corrupt", now_s, (OWN_WORK, (sender,))),
                    ]
            case MeanApplied():
                return self._mean_applied(round_, now_s)
            case WorkFailed():
                return [
                    PeerReport("warning", event.reason),
                    *self._give_up("failed", now_s, (OWN_WORK, (self.name,))),
                ]

    def _mean_applied(self, round_: Round, now_s: float) -> list[PeerEffect]:
        round_.mean_applied(now_s)
        self.completed = round_.id
        self._applied_s = now_s
        for name, norms in round_.received.items():
            if name in self.neighbours:
                self.neighbours[name].norms = norms
        self._suspicion.forgive(round_.names)
        self._backoff.note_whole(round_.names)
        self._declined.clear()
        effects: list[PeerEffect] = [
            PeerReport(
                "round_done", f"round {round_.id.number} of {round_.id.proposer}: {', '.join(round_.names)}"
            )
        ]
        if round_.id.proposer in self.neighbours:
            effects.append(SendToPeer(round_.id.proposer, self._ping(now_s)))
        return effects

    # -- the end of a round ------------------------------------------------------------------------------------

    def _give_up(
        self,
        reason: AbandonReason,
        now_s: float,
        blamed: tuple[int, tuple[str, ...]] | None = None,
        *,
        at_fault: str = "",
    ) -> list[PeerEffect]:
        """Leave the round without its mean, and tell the others whom this peer waited for, if for long.

        The round counts as a failed one of its proposer, or of the proposer `at_fault` that has preempted it.
        """
        round_ = self.round
        assert round_ is not None
        self._backoff.note_failed(at_fault or round_.id.proposer, now_s)
        self._half_due = True
        # Those behind this member stand still while it receives from a slow one: then it must name that one.
        since_s = round_.step_s if reason == "stalled" else round_.progress_s
        if blamed is None and now_s >= since_s + self.settings.lease_s / 2:
            blamed = round_.awaited(owed=bool(self._owed))
        step, awaited = blamed or (0, ())
        abandon = Abandon(round_.id, reason, step, awaited, ready=not self._owed and reason != "left")
        self._given_up, self._given_up_members = abandon, round_.names
        self._suspicion.accuse(self.name, abandon)
        round_.move("over")
        self.round = None
        half_s = max(self.settings.ping_s, (self.settings.interval_s or 0.0) / 2)
        waits = {"early": half_s, "left": 0.0, "lost": 0.0, "left_out": self.settings.lease_s}
        self._due_s = now_s + waits.get(reason, self.settings.ping_s)
        waited = f", which waited for {', '.join(awaited)}" if awaited else ""
        return [
            DropRound(round_.id),
            *[SendToPeer(name, abandon) for name in round_.others if name in self.neighbours],
            PeerReport("round_abandoned", f"round {round_.id.number} of {round_.id.proposer}: {reason}{waited}"),
        ]

    def _end_round(self, now_s: float) -> list[PeerEffect]:
        """Drop a round whose mean is in the model."""
        round_ = self.round
        assert round_ is not None
        round_.move("over")
        self.round = None
        interval_s = self.settings.interval_s
        if interval_s is not None:  # and not early for a member that has completed the round only now
            self._half_s = now_s + interval_s / 2
            self._due_s = max(self._applied_s + interval_s, self._half_s)
        else:
            self._due_s = now_s if self._wanted else math.inf
        self._linger_until_s = now_s + LINGER_LEASES_MAX * self.settings.lease_s
        return [DropRound(round_.id)]

    def _stop(self, now_s: float) -> list[PeerEffect]:
        effects: list[PeerEffect] = []
        if self.round is not None:
            mean_is_here = self.round.state in {"applying", "serving"}
            effects += [DropRound(self.round.id)] if mean_is_here else self._give_up("left", now_s)
        effects += self._ping_all(now_s, leaving=True)
        self.over = True
        return [*effects, PeerReport("stopped"), EndPeer("stopped")]

    # -- time --------------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[PeerEffect]:
        """Do what follows from who is live now, and from the time."""
        effects = self._tell_who_is_live(now_s)
        self._silence_s = self.neighbours.next_silence_s(now_s)
        if self.round is not None:
            effects += self._check_round(self.round, now_s)
        if now_s >= self._proposes_at_s(now_s):
            effects += self._propose(now_s)
        return effects

    def _tell_who_is_live(self, now_s: float) -> list[PeerEffect]:
        effects: list[PeerEffect] = []
        live = 0
        for neighbour in self.neighbours:
            is_live = self.neighbours.is_live(neighbour, now_s)
            live += is_live
            if is_live != neighbour.told_live:
                neighbour.told_live = is_live
                effects.append(PeerReport("peer_found" if is_live else "peer_lost", peer=neighbour.name))
        if self._alone != (not live):
            self._alone = not live
            if self._alone:
                effects.append(PeerReport("alone"))
        return effects

    def _check_round(self, round_: Round, now_s: float) -> list[PeerEffect]:
        """Give the round up if a member is gone or nothing moves; drop it once nobody needs it."""
        gone = [
            member.name
            for member in round_.proposal.members
            if member.name not in {self.name, *round_.gone} and not self.neighbours.knows(member, now_s)
        ]
        if round_.state in {"snapshot", "exchanging"}:
            if gone:
                return self._give_up("lost", now_s, (OWN_WORK, tuple(gone)))
            return self._give_up("stalled", now_s) if now_s >= self._stalls_at_s() else []
        for name in gone:
            round_.leave_behind(name)
            self._note_retried(round_.id)
        if round_.state == "serving" and (self._all_have_it(round_) or now_s >= self._stalls_at_s()):
            return self._end_round(now_s)
        return []

    def _all_have_it(self, round_: Round) -> bool:
        """Return whether nobody needs this member's payloads; a proposer waits for all others' ends, too."""
        if not round_.served:
            return False
        if round_.id.proposer != self.name:
            return True
        waiting = [name for name in round_.others if name not in round_.gone]
        return all(self._has_completed(name, round_.id) for name in waiting)

    def _has_completed(self, name: str, round_id: RoundId) -> bool:
        ping = self.neighbours[name].ping
        return ping is not None and ping.completed is not None and ping.completed >= round_id

    def _stalls_at_s(self) -> float:
        """Return when the round has stood still for a lease; a mean that waits for the trainer never does."""
        if self.round is None or self.round.state == "applying":
            return math.inf
        return self.round.progress_s + self.settings.lease_s

    def _repeat(self, now_s: float) -> list[PeerEffect]:
        """Repeat what has not been answered: offers, and the proposal to those who did not take it."""
        round_ = self.round
        if round_ is None:
            return []
        effects = round_.retry(now_s)
        if round_.id.proposer != self.name:
            return effects
        for name in round_.others:
            ping = self.neighbours[name].ping if name in self.neighbours else None
            taken = ping is not None and (ping.current == round_.id or self._has_completed(name, round_.id))
            if not taken and name not in round_.gone:
                effects.append(SendToPeer(name, round_.proposal))
        return effects

    # -- proposing ---------------------------------------------------------------------------------------------

    def _candidates(self, now_s: float) -> list[Neighbour]:
        return [
            neighbour
            for neighbour in self.neighbours.live(now_s)
            if neighbour.ping is not None
            and neighbour.ping.ready
            and neighbour.heard_s > neighbour.doubted_s
            and not self._lags(neighbour.ping)
            and not self._suspicion.leaves_out(neighbour.name, now_s)
            and now_s >= self._backoff.until_s(neighbour.name)
        ]

    def _lags(self, ping: PeerPing) -> bool:
        """Return whether a member is still in a round of this peer that has ended without it."""
        completed = self.completed
        if completed is None or completed.proposer != self.name or ping.current != completed:
            return False
        return ping.completed is None or ping.completed < completed

    def _proposes_at_s(self, now_s: float) -> float:
        """Return when this peer proposes a round: a lease later for each candidate with a lower name."""
        if self.round is not None or self._owed or self._due_s == math.inf or self._number >= ROUND_NUMBER_MAX:
            return math.inf
        if not self._begun:
            return math.inf
        candidates = self._candidates(now_s)
        if not candidates or self._suspicion.leaves_out(self.name, now_s):
            return math.inf
        lower = sum(neighbour.name < self.name for neighbour in candidates)
        due_s = max(self._due_s + lower * self.settings.lease_s, self._backoff.until_s(self.name))
        if self.completed is not None and any(
            neighbour.name == self.completed.proposer
            and neighbour.ping is not None
            and neighbour.ping.current == self.completed
            for neighbour in candidates
        ):
            return max(due_s, self._linger_until_s)
        return due_s

    def _judge(self, now_s: float) -> list[PeerEffect]:
        """Leave out who kept the last round from becoming whole; by now all of its members have said so."""
        return [
            PeerReport("warning", "left out of rounds for a while: others waited for it", culprit)
            for culprit in self._suspicion.judge(now_s)
        ]

    def _propose(self, now_s: float) -> list[PeerEffect]:
        """Propose a round to all candidates that hear one another."""
        effects = self._judge(now_s)
        if self._suspicion.leaves_out(self.name, now_s):
            return effects
        chosen = all_hear_each_other(self._candidates(now_s))[: PEERS_MAX - 1]
        members = [RoundMember(self.name, self.incarnation)]
        members += [RoundMember(each.name, each.ping.incarnation) for each in chosen if each.ping is not None]
        if len(members) == 1:
            return effects
        settings = self.settings
        proposal = Propose(
            RoundId(self._number + 1, self.name, self.incarnation),
            settings.topology,
            settings.codec,
            settings.piece_bytes,
            tuple(sorted(members, key=lambda member: member.name)),
        )
        effects += self._begin_round(proposal, now_s)
        return [*effects, *[SendToPeer(name, proposal) for name in self.round.others]] if self.round else effects
