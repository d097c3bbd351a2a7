"""Limits the norms of the payloads that members send.

A finite model with a far too large norm would corrupt the mean in the same way as NaN.
"""

import math
from collections.abc import Sequence

from edgeasync.core.peer.events import Decoded, Norms
from edgeasync.core.peer.plan import IncomingStep
from edgeasync.core.peer.refusals import Refused

TIMES_MAX = 100.0
"""Maximum norm of a payload, as a multiple of the usual norm of a model."""


def longest(own: Norms, others: Sequence[Norms]) -> Norms:
    """Return the maximum norms of the payloads of a member in one round.

    `own` are the norms of the receiver's model, and `others` the norms that the other members last
    sent. The usual norm is the median of all of these, but at least 1. For an even number of
    members, it is `own`, clamped to the range between the two middle norms. So with two members, it
    is `own`.
    """
    trained, statistics = zip(own, *others, strict=True)
    return _bound(own[0], trained), _bound(own[1], statistics)


def _bound(own: float, norms: tuple[float, ...]) -> float:
    in_order = sorted(norms)
    low, high = in_order[(len(norms) - 1) // 2], in_order[len(norms) // 2]
    return TIMES_MAX * max(1.0, min(max(own, low), high))


class PayloadNorms:
    """The norms of the payloads of each other member. In a ring, most values are counted twice."""

    def __init__(self) -> None:
        self.received: dict[str, Norms] = {}
        self._longest: Norms = (math.inf, math.inf)

    def bound(self, own: Norms, others: Sequence[Norms]) -> None:
        """Set the limits by the norms of this member's model and of what the others last sent."""
        self._longest = longest(own, others)

    def measure(self, planned: IncomingStep, event: Decoded) -> None:
        """Add the norms of a payload to those of its sender; raises `Refused` above the limit."""
        if planned.own:
            return
        if not event.sound:
            raise Refused("a corrupt payload", fatal=True)
        before = self.received.get(planned.sender, (0.0, 0.0))
        trained, statistics = [
            math.hypot(norm, added / planned.models) for norm, added in zip(before, event.norms, strict=True)
        ]
        if trained > self._longest[0] or statistics > self._longest[1]:
            raise Refused("a payload with a far too large norm", fatal=True)
        self.received[planned.sender] = trained, statistics
