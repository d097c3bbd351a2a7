"""How long a member's payloads may be: a finite model that is far too long would spoil the mean as NaN does."""

from collections.abc import Sequence

from edgeasync.core.peer.events import Norms

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
