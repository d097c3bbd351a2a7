"""The rounds of a peer: the current round, and the outcomes of earlier ones."""

import math

import msgspec

from edgeasync.core.peer import events
from edgeasync.core.peer.backoff import Backoff
from edgeasync.core.peer.effects import DropRound, PeerEffect, PeerReport, SendToPeer
from edgeasync.core.peer.neighbours import Neighbours
from edgeasync.core.peer.refusals import NORMAL, Refusals, Refused
from edgeasync.core.peer.round import OWN_WORK, Round
from edgeasync.core.peer.schedule import Schedule
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.core.peer.suspicion import Suspicion
from edgeasync.protocol.peer_messages import (
    Abandon,
    AbandonReason,
    Offer,
    PeerCredit,
    PeerPiece,
    PeerPing,
    Propose,
    RoundId,
)

UNFINISHED = frozenset({"snapshot", "exchanging"})
"""The states of a round whose mean is not complete yet."""

RoundMessage = Offer | PeerCredit | PeerPiece


class Rounds:
    """The part of one peer in its rounds.

    Every method that returns effects may change `current`.
    """

    def __init__(self, name: str, neighbours: Neighbours, settings: PeerCoreSettings, refusals: Refusals) -> None:
        self.current: Round | None = None
        self.completed: RoundId | None = None
        """The last round whose mean is in the model."""
        self.highest: RoundId | None = None
        """The round with the highest id that this peer has joined."""
        self.number = 0
        """The highest number of a round that this peer knows."""
        self.owed = 0
        """The number of work effects that were not answered yet."""
        self.given_up: Abandon | None = None
        """The message with which this peer last abandoned a round."""
        self.schedule = Schedule(settings)
        self.suspicion = Suspicion(settings.lease_s)
        self.backoff = Backoff(settings.lease_s)
        self._declined: set[str] = set()
        """The peers that have declined a round of this peer since the last complete round."""
        self._name = name
        self._neighbours = neighbours
        self._settings = settings
        self._refusals = refusals

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        assert self.owed >= 0
        if self.current is not None:
            assert self.current.state != "over"
            assert self.current.state != "applying" or self.owed
            assert self.highest is not None
            assert self.current.id == self.highest
            assert self.completed != self.current.id or self.current.state == "serving"

    def begin(self, proposal: Propose, now_s: float) -> list[PeerEffect]:
        """Join a round."""
        self.schedule.note_begun(now_s)
        self.highest = proposal.round
        self.number = max(self.number, proposal.round.number)
        self.current = Round(proposal, self._name, self._settings, now_s)
        return [
            *self.current.begin(),
            PeerReport("round_started", _told(self.current)),
            *self._early_offers(proposal.round, now_s),
        ]

    def _early_offers(self, round_id: RoundId, now_s: float) -> list[PeerEffect]:
        """Process the offers that arrived before the proposal of their round."""
        effects: list[PeerEffect] = []
        for neighbour in self._neighbours:
            offers, neighbour.early_offers = neighbour.early_offers, {}
            for offer in offers.values():
                if offer.round == round_id:
                    effects += self.handle(events.PeerReceived(neighbour.name, offer), offer, now_s)
        return effects

    # -- transfers ---------------------------------------------------------------------------------------------

    def handle(self, event: events.PeerReceived, message: RoundMessage, now_s: float) -> list[PeerEffect]:
        """Process a message of a transfer. Most messages are of this kind."""
        peer = event.peer
        if why := self._neighbours.stranger(peer, now_s):
            return self._refusals.note(peer, why)
        round_ = self.current
        if round_ is None or round_.id != message.round or peer not in round_.others:
            return self._of_another_round(peer, message)
        # The sender has not restarted since it joined the round. Otherwise, it would not know the
        # round's id.
        self._neighbours[peer].heard_s = now_s
        try:
            match message:
                case Offer():
                    return round_.offer(peer, message, now_s)
                case PeerCredit():
                    return round_.credit(peer, message, now_s)
                case PeerPiece():
                    return round_.piece(peer, message, event.payload_bytes, now_s, sound=event.sound)
        except Refused as refused:
            effects = self._refusals.note(peer, str(refused))
            if refused.fatal and round_.state in UNFINISHED:
                return effects + self.give_up("corrupt", now_s, (OWN_WORK, (peer,)))
            if isinstance(message, PeerPiece) and str(refused) not in NORMAL:
                effects += round_.ask_again(peer, message.step)
            return effects

    def _of_another_round(self, peer: str, message: RoundMessage) -> list[PeerEffect]:
        """Refuse a message of another round, or store an offer that arrived before its proposal.

        If an offer of a past round is repeated, its sender gets the outcome of that round.
        """
        over = self.highest is not None and message.round <= self.highest
        if isinstance(message, Offer) and not over:
            self._neighbours[peer].keep_early(message)
            return []
        effects = self._refusals.note(peer, "a round that is over" if over else "a round that was not proposed")
        if not isinstance(message, Offer):
            return effects
        if message.round == self.completed:
            effects.append(SendToPeer(peer, PeerCredit(message.round, message.step, message.payload_bytes)))
        elif self.given_up is not None and message.round == self.given_up.round:
            effects.append(SendToPeer(peer, self.given_up))
        return effects

    # -- work --------------------------------------------------------------------------------------------------

    def answered(self, event: events.WorkEvent, now_s: float) -> list[PeerEffect]:
        """Process the result of work if its round is not over."""
        self.owed -= 1
        round_ = self.current
        if round_ is None or round_.id != event.round:
            return []
        match event:
            case events.SnapshotTaken():
                last = [self._neighbours[name].norms for name in round_.others if name in self._neighbours]
                return round_.snapshot_taken(event, [norms for norms in last if norms is not None], now_s)
            case events.Encoded():
                return round_.encoded(event, now_s)
            case events.Decoded():
                try:
                    return round_.decoded(event, now_s)
                except Refused as refused:
                    sender = round_.sender(event.step)
                    told = self._refusals.note(sender, str(refused))
                    return told + self.give_up("corrupt", now_s, (OWN_WORK, (sender,)))
            case events.MeanApplied():
                return self._mean_applied(round_, now_s)
            case events.WorkFailed():
                told = [PeerReport("warning", event.reason)]
                return told + self.give_up("failed", now_s, (OWN_WORK, (self._name,)))

    def _mean_applied(self, round_: Round, now_s: float) -> list[PeerEffect]:
        round_.mean_applied(now_s)
        self.completed = round_.id
        self.schedule.note_applied(now_s)
        for name, norms in round_.norms.received.items():
            if name in self._neighbours:
                self._neighbours[name].norms = norms
        self.suspicion.forgive(round_.names)
        self.backoff.note_whole(round_.names)
        self._declined.clear()
        return [PeerReport("round_done", _told(round_))]

    # -- reports of other members ------------------------------------------------------------------------------

    def note_ping(self, peer: str, ping: PeerPing, now_s: float) -> list[PeerEffect]:
        """Process what a ping reports about the current round."""
        self.number = max(self.number, ping.number)
        round_ = self.current
        if round_ is None or peer not in round_.others:
            return []
        if ping.leaving and ping.completed == round_.id:
            round_.outgoing.leave_behind(peer)  # it ended cleanly: the others have its payloads
        is_preempted = ping.current is not None and ping.current > round_.id
        if is_preempted and round_.id.proposer == self._name and round_.state in UNFINISHED:
            return self.give_up("preempted", now_s)
        return []

    def told_to_abandon(self, peer: str, abandon: Abandon, now_s: float) -> list[PeerEffect]:
        """Abandon a round that another member has abandoned, unless it is complete here."""
        round_ = self.current
        if round_ is not None and round_.id == abandon.round:
            if peer not in round_.others:
                return self._refusals.note(peer, "a message from outside the round")
            return self._lose(round_, peer, abandon, now_s)
        waiting = self.schedule.waiting
        if self.given_up is not None and self.given_up.round == abandon.round:
            self.suspicion.accuse(peer, abandon)
        elif waiting is not None and waiting.round == abandon.round:
            self.schedule.waiting = None
        elif abandon.round == self.completed:
            self.schedule.note_retried(abandon.round)
            self._neighbours.note_abandon(peer, abandon)
        else:
            return self._refusals.note(peer, "a round that is over")
        return []

    def _lose(self, round_: Round, peer: str, abandon: Abandon, now_s: float) -> list[PeerEffect]:
        """Abandon the current round because another member did, or continue without that member."""
        if round_.state not in UNFINISHED:
            round_.outgoing.leave_behind(peer)
            self.schedule.note_retried(round_.id)
            self._neighbours.note_abandon(peer, abandon)
            return []
        # Other members doubt the members that are reported as lost. So repeat the reported names,
        # not the names of the members for which this member waited.
        lost = (abandon.step, abandon.awaited) if abandon.reason == "lost" else None
        effects = self.give_up(abandon.reason, now_s, lost)
        if abandon.reason in {"lost", "unknown_member"}:
            self._neighbours.doubt(abandon.awaited, now_s)
        if abandon.reason not in {"early", "unknown_member"}:
            self.suspicion.accuse(peer, abandon)
        elif round_.id.proposer == self._name:
            self._declined_by(peer, abandon, now_s)
        return effects

    def _declined_by(self, peer: str, abandon: Abandon, now_s: float) -> None:
        """Prepare the next proposal after a peer has declined a round.

        Propose again without the members that the peer does not know. If the peer declines
        repeatedly, propose without the peer.
        """
        if self._name in abandon.awaited or peer in self._declined:
            self.suspicion.accuse(peer, msgspec.structs.replace(abandon, awaited=(peer,)))
        else:
            self._declined.add(peer)
            if abandon.reason == "unknown_member":
                self.schedule.due_s = now_s

    # -- end of a round ----------------------------------------------------------------------------------------

    def give_up(
        self,
        reason: AbandonReason,
        now_s: float,
        blamed: tuple[int, tuple[str, ...]] | None = None,
        *,
        at_fault: str = "",
    ) -> list[PeerEffect]:
        """Abandon the round without its mean, and name the members that delayed it.

        The failure counts against the proposer of the round. If the proposer `at_fault` preempted
        the round, it counts against `at_fault` instead.
        """
        round_ = self.current
        assert round_ is not None
        self.backoff.note_failed(at_fault or round_.id.proposer, now_s)
        # While this member receives from a slow member, the members behind it stall. So it must
        # name the slow member.
        since_s = round_.step_s if reason == "stalled" else round_.progress_s
        if blamed is None and now_s >= since_s + self._settings.lease_s / 2:
            blamed = round_.awaited(owed=bool(self.owed))
        step, awaited = blamed or (0, ())
        abandon = Abandon(round_.id, reason, step, awaited, ready=not self.owed and reason != "left")
        self.given_up = abandon
        self.suspicion.begin(self._name, abandon, round_.names)
        self._drop(round_)
        self.schedule.note_given_up(reason, now_s)
        waited = f"; it waited for {', '.join(awaited)}" if awaited else ""
        return [
            DropRound(round_.id),
            *[SendToPeer(name, abandon) for name in round_.others if name in self._neighbours],
            PeerReport("round_abandoned", f"round {round_.id.number} of {round_.id.proposer}: {reason}{waited}"),
        ]

    def end(self, now_s: float) -> list[PeerEffect]:
        """Drop a round whose mean is in the model."""
        round_ = self.current
        assert round_ is not None
        self._drop(round_)
        self.schedule.note_ended(now_s)
        return [DropRound(round_.id)]

    def _drop(self, round_: Round) -> None:
        round_.move("over")
        self.current = None

    def leave(self, now_s: float) -> list[PeerEffect]:
        """Leave the current round, if any, because this peer ends."""
        round_ = self.current
        if round_ is None:
            return []
        return self.give_up("left", now_s) if round_.state in UNFINISHED else [DropRound(round_.id)]

    # -- time --------------------------------------------------------------------------------------------------

    def stalls_at_s(self) -> float:
        """Return the time at which the round stalls, which is one lease after its last progress.

        A round whose mean waits for the trainer never stalls.
        """
        if self.current is None or self.current.state == "applying":
            return math.inf
        return self.current.progress_s + self._settings.lease_s

    def settle(self, now_s: float) -> list[PeerEffect]:
        """Abandon the round if it has lost a member or stalls; drop it once nobody needs it."""
        round_ = self.current
        if round_ is None:
            return []
        gone = [
            member.name
            for member in round_.proposal.members
            if member.name not in {self._name, *round_.outgoing.gone} and not self._neighbours.knows(member, now_s)
        ]
        if round_.state in UNFINISHED:
            if gone:
                return self.give_up("lost", now_s, (OWN_WORK, tuple(gone)))
            return self.give_up("stalled", now_s) if now_s >= self.stalls_at_s() else []
        for name in gone:
            round_.outgoing.leave_behind(name)
            self.schedule.note_retried(round_.id)
        if round_.state == "serving" and (self._all_have_it(round_) or now_s >= self.stalls_at_s()):
            return self.end(now_s)
        return []

    def _all_have_it(self, round_: Round) -> bool:
        """Return whether no other member needs the payloads of this member.

        A proposer also waits until all other members have completed the round.
        """
        if not round_.outgoing.served:
            return False
        if round_.id.proposer != self._name:
            return True
        waiting = [name for name in round_.others if name not in round_.outgoing.gone]
        return all(self._neighbours[name].has_completed(round_.id) for name in waiting)

    def repeat(self, now_s: float) -> list[PeerEffect]:
        """Repeat unanswered offers, and send the proposal again to members that have not joined."""
        round_ = self.current
        if round_ is None:
            return []
        effects = round_.outgoing.offer_again(now_s)
        if round_.id.proposer != self._name:
            return effects
        for name in round_.others:
            taken = name in self._neighbours and self._neighbours[name].has_taken(round_.id)
            if not taken and name not in round_.outgoing.gone:
                effects.append(SendToPeer(name, round_.proposal))
        return effects


def _told(round_: Round) -> str:
    return f"round {round_.id.number} of {round_.id.proposer}: {', '.join(round_.names)}"
