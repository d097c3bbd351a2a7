"""Bugs to plant in the peers' core."""

from pathlib import Path

from edgeasync.core.peer import round as round_module
from edgeasync.core.peer.neighbours import Neighbours
from edgeasync.core.peer.norms import PayloadNorms
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.round import Round
from edgeasync.core.peer.rounds import Rounds
from edgeasync.core.peer.suspicion import Suspicion
from edgeasync.core.peer.transfers import IncomingPayload, OutgoingPayload, OutgoingPayloads
from tests.support.simulation.planting import Change, Mutants

CHANGES = {
    # The mean.
    "a mean is applied before all segments are here": (
        Change(
            Round,
            "_advance",
            "len(self._decoded) == len(self._plan.incoming)",
            "len(self._decoded) >= len(self._plan.incoming) - 1",
        ),
    ),
    "a corrupt piece is kept": (
        Change(IncomingPayload, "refusal", 'return "" if sound else "a corrupt piece"', 'return ""'),
        Change(PayloadNorms, "measure", "if not event.sound:", "if False:"),
    ),
    "a corrupt payload counts": (Change(PayloadNorms, "measure", "if not event.sound:", "if False:"),),
    "a repeated piece counts again": (
        Change(IncomingPayload, "refusal", "piece.offset < self.received_bytes", "False"),
    ),
    "a misplaced piece counts": (
        Change(IncomingPayload, "refusal", "piece.offset > self.received_bytes", "False"),
        Change(PayloadNorms, "measure", "if not event.sound:", "if False:"),
    ),
    "a ring passes the wrong segment on": (
        Change(round_module, "plan_round", "members.index(name)", "members.index(name) - 1"),
    ),
    "a mean is coded again on its way": (
        Change(Round, "_advance", 'if outgoing.source != "forward":', "if True:"),
        Change(Round, "_advance", "outgoing.source)", "outgoing.source.replace('forward', 'sum'))"),
    ),
    "members add payloads in the order in which they arrive": (
        Change(Round, "_can_decode", "step.after not in self._decoded", "False"),
    ),
    "a member does not decode its own payload": (
        Change(Round, "_advance", "incoming.way, incoming.own)", "incoming.way, False)"),
    ),
    # Who is a member.
    "a member that has started again is taken for the one before": (
        Change(Neighbours, "knows", "neighbour.ping.incarnation == member.incarnation", "True"),
        Change(
            PeerCore,
            "_refuse_proposal",
            "RoundMember(self.name, self.incarnation) not in proposal.members",
            "False",
        ),
    ),
    "a start with a lower number never counts": (
        Change(Neighbours, "refusal", " and self.hears(self._listed[name], now_s)", ""),
    ),
    "any message renews a lease": (
        Change(
            PeerCore,
            "_received",
            "message = event",
            "self.neighbours[event.peer].heard_s = now_s; message = event",
        ),
    ),
    "a round number far ahead counts": (
        Change(PeerCore, "_pinged", "ping.number > self.rounds.number + ROUND_LEAP_MAX", "False"),
        Change(PeerCore, "_proposed", "round_id.number > rounds.number + ROUND_LEAP_MAX", "False"),
    ),
    # Who waits for whom.
    "a lost member is waited for": (Change(Rounds, "settle", "if gone:", "if False:"),),
    "a dead peer stays a candidate": (
        Change(Neighbours, "is_live", "self.hears(neighbour, now_s)", "True"),
    ),
    "a round that stands still is never given up": (
        Change(Rounds, "stalls_at_s", "self.current.progress_s + self._settings.lease_s", "math.inf"),
    ),
    "nothing is repeated": (Change(Rounds, "repeat", "if round_ is None:", "if True:"),),
    "a sender does not go back": (
        Change(OutgoingPayload, "credit", "credit.again and self._goes_back(received_bytes, now_s)", "False"),
    ),
    "nobody serves others after its own mean": (
        Change(Rounds, "settle", "(self._all_have_it(round_) or now_s >= self.stalls_at_s())", "True"),
        Change(Rounds, "_of_another_round", "if message.round == self.completed:", "if False:"),
    ),
    "a culprit is left out for ever": (
        Change(Suspicion, "leaves_out", "now_s < self._left_out[name][1]", "True"),
        Change(Suspicion, "forgive", "self._left_out.pop(name, None)", "pass"),
    ),
    # Memory.
    "a round begins while work is owed": (Change(PeerCore, "_accept_or_decline", "if rounds.owed or", "if"),),
    "a round that was given up is not dropped": (
        Change(Rounds, "give_up", "DropRound(round_.id),", ""),
    ),
    "payloads are not released": (
        Change(Round, "decoded", "if not planned.own:", "if False:"),
        Change(
            OutgoingPayloads,
            "_released",
            "return [ReleasePayload(credit.round, credit.step, incoming=False)]",
            "return []",
        ),
    ),
}  # fmt: skip

PEER_MUTANTS = Mutants(CHANGES, Path(__file__).with_name("peer_planted_seeds.json"), seeds_max=100)
