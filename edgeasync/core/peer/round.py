"""A round as one member sees it: what the member has received, decoded and sent."""

from collections.abc import Sequence
from typing import Literal

from edgeasync.core.peer.effects import (
    ApplyMean,
    Decode,
    Encode,
    ForwardPayload,
    OpenPayload,
    PeerEffect,
    ReleasePayload,
    SendToPeer,
    StorePiece,
    TakeSnapshot,
)
from edgeasync.core.peer.events import Decoded, Encoded, Norms, SnapshotTaken
from edgeasync.core.peer.norms import PayloadNorms
from edgeasync.core.peer.plan import IncomingStep, plan_round
from edgeasync.core.peer.refusals import Refused
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.core.peer.transfers import IncomingPayload, OutgoingPayloads
from edgeasync.protocol.peer_messages import Offer, PeerCredit, PeerPiece, Propose
from edgeasync.states import Table, check_move

RoundState = Literal["snapshot", "exchanging", "applying", "serving", "over"]

ROUND: Table[RoundState] = {
    "snapshot": ("exchanging", "over"),
    "exchanging": ("applying", "over"),
    "applying": ("serving", "over"),
    "serving": ("over",),
    "over": (),
}
"""The states of a round at one member, and the allowed changes.

In the state `serving`, the member has the mean, but others may still need its payloads.
"""

SEGMENT_SPARE_BYTES = 1 << 12
"""Maximum number of bytes that the headers of a codec add to the payload of one segment."""

OWN_WORK = -1
"""The step that is reported for a member that waits for its own work."""


class Round:
    """The part of one member in a round.

    `progress_s` is the time of the member's last progress of any kind, such as a received piece.
    `step_s` is the time at which one of its steps last started or ended.
    """

    def __init__(self, proposal: Propose, name: str, settings: PeerCoreSettings, now_s: float) -> None:
        self.proposal = proposal
        self.id = proposal.round
        self.state: RoundState = "snapshot"
        self.names = tuple([member.name for member in proposal.members])
        self.others = tuple([each for each in self.names if each != name])
        self.progress_s = self.step_s = now_s
        self._name = name
        self._plan = plan_round(proposal.topology, self.names, name)
        self._segment_bytes_max = -(-settings.payload_bytes_max // self._plan.segments) + SEGMENT_SPARE_BYTES
        self._piece_bytes = settings.piece_bytes
        self._incoming_steps = {step.step: step for step in self._plan.incoming}
        self._encoding: set[int] = set()
        self._decoding: set[int] = set()
        self._decoded: set[int] = set()
        self._incoming: dict[int, IncomingPayload] = {}
        self.outgoing = OutgoingPayloads(self._plan, settings)
        self.norms = PayloadNorms()

    def move(self, state: RoundState) -> None:
        """Change the state; raises `TransitionError` if `ROUND` does not allow it."""
        check_move(ROUND, self.state, state, "a round")
        self.state = state

    def begin(self) -> list[PeerEffect]:
        """Request the snapshot of the model."""
        return [TakeSnapshot(self.id, self.proposal, self._plan.segments)]

    # -- work on arrays ----------------------------------------------------------------------------------------

    def snapshot_taken(self, event: SnapshotTaken, last: Sequence[Norms], now_s: float) -> list[PeerEffect]:
        """Start the exchange; `last` are the norms of what the other members last sent."""
        self.norms.bound(event.norms, last)
        self.move("exchanging")
        return self._advance(now_s)

    def encoded(self, event: Encoded, now_s: float) -> list[PeerEffect]:
        """Offer a payload that is now encoded."""
        offer = Offer(self.id, event.step, event.payload_bytes, event.checksum)
        return [*self.outgoing.offer(offer, now_s), *self._advance(now_s)]

    def decoded(self, event: Decoded, now_s: float) -> list[PeerEffect]:
        """Start the steps that waited for this payload, and drop the payload; raises `Refused`."""
        planned = self._incoming_steps[event.step]
        self.norms.measure(planned, event)
        self._decoded.add(event.step)
        effects = self._advance(now_s)
        if not planned.own:
            effects.append(ReleasePayload(self.id, event.step, incoming=True))
        return effects

    def mean_applied(self, now_s: float) -> None:
        """Record that the mean is applied. From now on, only serve the other members."""
        self.progress_s = now_s
        self.move("serving")

    def _advance(self, now_s: float) -> list[PeerEffect]:
        """Return the effects for all work that can start now."""
        self.progress_s = self.step_s = now_s
        if self.state != "exchanging":
            return []
        effects: list[PeerEffect] = []
        for outgoing in self._plan.outgoing:
            if outgoing.step in self._encoding or not (outgoing.after is None or outgoing.after in self._decoded):
                continue
            self._encoding.add(outgoing.step)
            if outgoing.source != "forward":
                effects.append(Encode(self.id, outgoing.step, outgoing.segment, outgoing.source))
                continue
            received = self._incoming[outgoing.step - 1].offer
            effects.append(ForwardPayload(self.id, outgoing.step, received.step))
            offer = Offer(self.id, outgoing.step, received.payload_bytes, received.checksum)
            effects += self.outgoing.offer(offer, now_s)
        for incoming in self._plan.incoming:
            if incoming.step in self._decoding or not self._can_decode(incoming):
                continue
            self._decoding.add(incoming.step)
            effects.append(Decode(self.id, incoming.step, incoming.segment, incoming.way, incoming.own))
        if len(self._decoded) == len(self._plan.incoming) and self.outgoing.all_offered:
            self.move("applying")
            effects.append(ApplyMean(self.id))
        return effects

    def _can_decode(self, step: IncomingStep) -> bool:
        if step.after is not None and step.after not in self._decoded:
            return False
        if step.own:
            return self.outgoing.has_offered(step.step)
        return step.step in self._incoming and self._incoming[step.step].whole

    # -- messages ----------------------------------------------------------------------------------------------

    def offer(self, sender: str, offer: Offer, now_s: float) -> list[PeerEffect]:
        """Answer an offer with a credit that starts at the first missing byte; raises `Refused`."""
        self._check_sender(sender, offer.step)
        incoming = self._incoming.get(offer.step)
        if incoming is not None:
            if (credit := incoming.offered_again(offer)) is None:
                raise Refused("a payload that differs from the one offered before")
            return [SendToPeer(sender, credit)]
        if offer.payload_bytes > self._segment_bytes_max:
            raise Refused("a payload that is too long", fatal=True)
        incoming = self._incoming[offer.step] = IncomingPayload(offer, self._piece_bytes)
        return [
            OpenPayload(self.id, offer.step, offer.payload_bytes, offer.checksum),
            SendToPeer(sender, incoming.credit()),
            *self._advance(now_s),
        ]

    def piece(
        self, sender: str, piece: PeerPiece, payload_bytes: int, now_s: float, *, sound: bool
    ) -> list[PeerEffect]:
        """Store a piece if it is the next one; raises `Refused`."""
        self._check_sender(sender, piece.step)
        incoming = self._incoming.get(piece.step)
        if incoming is None:
            raise Refused("a piece that was not offered")
        if refusal := incoming.refusal(piece, payload_bytes, sound=sound):
            raise Refused(refusal)
        incoming.accept(payload_bytes)
        self.progress_s = now_s
        effects: list[PeerEffect] = [
            StorePiece(self.id, piece.step, piece.offset),
            SendToPeer(sender, incoming.credit()),
        ]
        return effects + self._advance(now_s) if incoming.whole else effects

    def ask_again(self, sender: str, step: int) -> list[PeerEffect]:
        """Request the bytes of a refused piece again."""
        incoming = self._incoming.get(step)
        if incoming is None or incoming.whole or self.sender(step) != sender:
            return []
        credit = incoming.credit_again()
        return [] if credit is None else [SendToPeer(sender, credit)]

    def sender(self, step: int) -> str:
        """Return the member that sends the payload of this step."""
        return self._incoming_steps[step].sender

    def credit(self, receiver: str, credit: PeerCredit, now_s: float) -> list[PeerEffect]:
        """Send the bytes that the receiver requests; raises `Refused`."""
        effects = self.outgoing.credit(receiver, credit, now_s)
        self.progress_s = max(self.progress_s, self.outgoing.progress_s)
        return effects

    def _check_sender(self, sender: str, step: int) -> None:
        planned = self._incoming_steps.get(step)
        if planned is None or planned.own or planned.sender != sender:
            raise Refused("a step of another sender")

    # -- time --------------------------------------------------------------------------------------------------

    def awaited(self, *, owed: bool) -> tuple[int, tuple[str, ...]]:
        """Return the step at which this member waits, and the members for which it waits.

        If `owed` is set, its own work is unfinished, so it waits for itself.
        """
        if owed:
            return OWN_WORK, (self._name,)
        missing = [
            step
            for step in self._plan.incoming
            if not step.own and not (step.step in self._incoming and self._incoming[step.step].whole)
        ]
        if not missing:
            return 0, ()
        if self._plan.in_order:
            return missing[0].step, (missing[0].sender,)
        return 0, tuple([step.sender for step in missing])
