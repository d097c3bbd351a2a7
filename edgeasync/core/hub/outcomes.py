"""The outcome of an update, derived from the effects of its event."""

from collections.abc import Sequence

from edgeasync.core.hub.effects import Assign, HubEffect, HubReport, SendToDevice
from edgeasync.protocol.messages import Ack, Applied, Duplicate, FirstOutcome, Outcome, Rejected

BUFFERED = "buffered"
"""The outcome of an update that waits for a fold."""

QUARANTINED, REVOKED, ROLLED_BACK = "quarantined", "revoked", "rolled_back"
"""Reasons why a buffered update is dropped."""

_DROPS = {"excluded": QUARANTINED, "revoked": REVOKED}
"""Why an event drops buffered updates, by the kind of a report that it causes. If it causes neither
report, the hub has rolled back.
"""

_WEIGHED = ("stale", "behind", "not_finite", "quarantined")


def outcome_of(effects: Sequence[HubEffect]) -> Outcome | None:
    """Return the outcome in the answer to a push; `None` if it was refused or not answered."""
    for effect in effects:
        kind = type(effect)
        if kind is Assign:
            ack = effect.ack  # type: ignore[union-attr]
        elif kind is SendToDevice and type(effect.message) is Ack:  # type: ignore[union-attr]
            ack = effect.message  # type: ignore[union-attr]
        else:
            continue
        if ack is not None:
            return ack.outcome
    return None


def first_outcome(effects: Sequence[HubEffect]) -> FirstOutcome | None:
    """Return the outcome of a new update; `None` if it was refused or had been answered before."""
    outcome = outcome_of(effects)
    return None if isinstance(outcome, Duplicate) else outcome


def outcome_name(outcome: FirstOutcome) -> str:
    """Return "applied", "buffered", or the reason why the update was rejected."""
    if type(outcome) is Rejected:
        return outcome.reason
    return "applied" if type(outcome) is Applied else BUFFERED


def why_dropped(effects: Sequence[HubEffect]) -> str:
    """Return the reason why an event drops buffered updates."""
    told = (_DROPS.get(effect.event) for effect in effects if type(effect) is HubReport)
    return next(filter(None, told), ROLLED_BACK)


def is_weighed(outcome: FirstOutcome) -> bool:
    """Return whether the hub computed the staleness of an update before it decided."""
    return type(outcome) is not Rejected or outcome.reason in _WEIGHED
