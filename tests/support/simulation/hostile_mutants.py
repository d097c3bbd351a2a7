"""Bugs to plant in what protects peers from a hostile member."""

from pathlib import Path

from edgeasync.core.peer import norms
from edgeasync.core.peer.backoff import Backoff
from edgeasync.core.peer.neighbours import Neighbours
from edgeasync.core.peer.norms import PayloadNorms
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.rounds import Rounds
from edgeasync.core.peer.schedule import Schedule
from edgeasync.training.last_finite import LastFinite
from tests.support.simulation.planting import Change, Mutants

TOO_LONG = "if trained > self._longest[0] or statistics > self._longest[1]:"

CHANGES = {
    # What payloads hold.
    "a payload of any length counts": (Change(PayloadNorms, "measure", TOO_LONG, "if False:"),),
    "statistics of any length count": (
        Change(PayloadNorms, "measure", TOO_LONG, "if trained > self._longest[0]:"),
    ),
    "a refused payload raises the bound": (
        Change(norms, "_bound", "min(max(own, low), high)", "max(norms)"),
        Change(
            Rounds,
            "answered",
            "sender = round_.sender(event.step)",
            "sender = round_.sender(event.step); self._neighbours[sender].norms = event.norms",
        ),
    ),
    "who sends a refused payload is not blamed": (
        Change(Rounds, "answered", "(OWN_WORK, (sender,))", "None"),
    ),
    "a model that is not finite is trained on": (
        Change(LastFinite, "restore", "parameters[:] = self.copy[0]", "pass"),
    ),
    "a model that is not finite is kept": (
        Change(LastFinite, "keep", " or not np.isfinite(parameters).all()", ""),
    ),
    # How fast rounds follow each other.
    "peers of another interval are in rounds": (
        Change(Neighbours, "refusal", "return OTHER_INTERVAL", "pass"),
    ),
    "an early proposal is taken up": (
        Change(Schedule, "is_early", "self._is_within_half(now_s)", "False"),
    ),
    "a proposal before half of the steps is taken up": (
        Change(PeerCore, "_accept_or_decline", "if not schedule.half_due:", "if False:"),
    ),
    "a repeated round may be repeated early, too": (
        Change(Schedule, "note_retried", "if not self._is_retry:", "if True:"),
    ),
    # What failed rounds cost.
    "a proposer whose rounds fail is never declined": (
        Change(Backoff, "note_failed", "if failed > FREE:", "if False:"),
    ),
}  # fmt: skip

HOSTILE_MUTANTS = Mutants(CHANGES, Path(__file__).with_name("hostile_planted_seeds.json"), seeds_max=100)
