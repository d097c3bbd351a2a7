"""How long a member's payloads may be: a finite model that is far too long would spoil the mean as NaN does."""

import math
from collections.abc import Sequence

from edgeasync.core.peer.events import Decoded, Norms
from edgeasync.core.peer.plan import IncomingStep
from edgeasync.core.peer.refusals import Refused

TIMES_MAX = 100.0
"""How many times longer than the usual model a payload may be."""


def longest(own: Norms, others: Sequence[Norms]) -> Norms:
    """Return the norms that a member's payloads of one round may have.

    `own` are those of the receiver's model, `others` those that the other members last sent. The usual norm is
    their median, and 1 if that is less. If their number is even, the median is what lies nearest to `own` between
    the middle two. So of two members only the receiver counts.
    """
    trained, statistics = zip(own, *others, strict=True)
    return _bound(own[0], trained), _bound(own[1], statistics)


def _bound(own: float, norms: tuple[float, ...]) -> float:
    in_order = sorted(norms)
    low, high = in_order[(len(norms) - 1) // 2], in_order[len(norms) // 2]
    return TIMES_MAX * max(1.0, min(max(own, low), high))


class PayloadNorms:
    """The norms of what each other member has sent in a round; in a ring most values count twice."""

    def __init__(self) -> None:
        self.received: dict[str, Norms] = {}
        self._longest: Norms = (math.inf, math.inf)

    def bound(self, own: Norms, others: Sequence[Norms]) -> None:
        """Take no payloads that are far longer than this member's model and what the others last sent."""
        self._longest = longest(own, others)

    def measure(self, planned: IncomingStep, event: Decoded) -> None:
        """Add a payload's norms to those of what its sender sent before; raises `Refused`."""
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
