"""Bugs to plant in what protects peers from a hostile member."""

from pathlib import Path

from edgeasync.core.peer import norms
from edgeasync.core.peer.backoff import Backoff
from edgeasync.core.peer.neighbours import Neighbours
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.round import Round
from edgeasync.training.last_finite import LastFinite
from tests.support.simulation.planting import Change, Mutants

TOO_LONG = "if trained > self._longest[0] or statistics > self._longest[1]:"

CHANGES = {
    # What payloads hold.
    "a payload of any length counts": (Change(Round, "_measure", TOO_LONG, "if False:"),),
    "statistics of any length count": (
        Change(Round, "_measure", TOO_LONG, "if trained > self._longest[0]:"),
    ),
    "a refused payload raises the bound": (
        Change(norms, "_bound", "min(max(own, low), high)", "max(norms)"),
        Change(
            PeerCore,
            "_answered",
            "sender = round_.sender(event.step)",
            "sender = round_.sender(event.step); self.neighbours[sender].norms = event.norms",
        ),
    ),
    "who sends a refused payload is not blamed": (
        Change(PeerCore, "_answered", "(OWN_WORK, (sender,))", "None"),
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
        Change(PeerCore, "_is_early", "return self._is_within_half(now_s)", "return False"),
    ),
    "a proposal before half of the steps is taken up": (
        Change(PeerCore, "_accept_or_decline", "if not self._half_due:", "if False:"),
    ),
    "a repeated round may be repeated early, too": (
        Change(PeerCore, "_note_retried", "if not self._is_retry:", "if True:"),
    ),
    # What failed rounds cost.
    "a proposer whose rounds fail is never declined": (
        Change(Backoff, "note_failed", "if failed > FREE:", "if False:"),
    ),
}  # fmt: skip

HOSTILE_MUTANTS = Mutants(CHANGES, Path(__file__).with_name("hostile_planted_seeds.json"), seeds_max=100)
