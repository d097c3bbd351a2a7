"""Limits on the norms of a member's payloads.

A finite model that is far too long would corrupt the mean as NaN does.
"""

import math
from collections.abc import Sequence

from edgeasync.core.peer.events import Decoded, Norms
from edgeasync.core.peer.plan import IncomingStep
from edgeasync.core.peer.refusals import Refused

TIMES_MAX = 100.0
"""Maximum norm of a payload as a multiple of the usual model's norm."""


def longest(own: Norms, others: Sequence[Norms]) -> Norms:
    """Return the maximum norms of a member's payloads in one round.

    `own` are the norms of the receiver's model, `others` those that the other members last sent.
    The usual norm is their median, but at least 1. For an even count, it is the value nearest to
    `own` between the middle two. So with two members only the receiver counts.
    """
    trained, statistics = zip(own, *others, strict=True)
    return _bound(own[0], trained), _bound(own[1], statistics)


def _bound(own: float, norms: tuple[float, ...]) -> float:
    in_order = sorted(norms)
    low, high = in_order[(len(norms) - 1) // 2], in_order[len(norms) // 2]
    return TIMES_MAX * max(1.0, min(max(own, low), high))


class PayloadNorms:
    """The norms of each other member's payloads; in a ring most values count twice."""

    def __init__(self) -> None:
        self.received: dict[str, Norms] = {}
        self._longest: Norms = (math.inf, math.inf)

    def bound(self, own: Norms, others: Sequence[Norms]) -> None:
        """Set the limits by this member's model and by what the others last sent."""
        self._longest = longest(own, others)

    def measure(self, planned: IncomingStep, event: Decoded) -> None:
        """Add a payload's norms to those of its sender; raises `Refused` above the limit."""
        if planned.own:
            return
        if not event.sound:
            raise Refused("a corrupt payload", fatal=True)
        before = self.received.get(planned.sender, (0.0, 0.0))
        trained, statistics = [
            math.hypot(norm, added / planned.models) for norm, added in zip(before, event.norms, strict=True)
        ]
        if trained > self._longest[0] or statistics > self._longest[1]:
            raise Refused("a payload that is far longer than a model", fatal=True)
        self.received[planned.sender] = trained, statistics
