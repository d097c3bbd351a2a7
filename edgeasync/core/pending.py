"""Accepted updates that wait to be folded, and when they become the next version. Part of `HubCore`."""

import math
from collections.abc import Callable

from edgeasync.core.effects import Fold
from edgeasync.policies.aggregation import Contribution
from edgeasync.policies.policy import Judgement
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.messages import Push, Rejected


def weigh(
    push: Push, lineage: str, staleness: int, norm: float, weight_of: Callable[[int], float | None]
) -> float | Rejected:
    """Return how much an update counts, or why it never will."""
    if push.base.lineage != lineage:
        return Rejected("foreign_lineage")
    if staleness < 0:
        return Rejected("future_version")
    if not math.isfinite(norm):
        return Rejected("not_finite")
    weight = weight_of(staleness)
    return Rejected("stale") if weight is None else weight


class PendingUpdates:
    """The contributions since the last fold; scalars and handles only."""

    def __init__(self, judgement: Judgement, held_max: int) -> None:
        self._judgement = judgement
        self._held_max = held_max
        self._contributions: list[Contribution] = []
        self._folds = 0

    def __len__(self) -> int:
        return len(self._contributions)

    def add(self, contribution: Contribution) -> None:
        """Let a contribution wait."""
        self._contributions.append(contribution)

    def due_s(self, now_s: float, devices_live: int) -> float | None:
        """Return when they are to be folded: now if there is no place for more, `None` if it is not known."""
        if not self._contributions:
            return None
        if len(self._contributions) >= self._held_max:
            return now_s
        return self._judgement.aggregate.flush_at_s(self._contributions, devices_live)

    def fold(self, number: int) -> tuple[Fold, list[Contribution]]:
        """Make version `number` of all that wait; return the effect and what went into it."""
        contributions, self._contributions = self._contributions, []
        weights = self._judgement.aggregate.weights(contributions)
        norm_bound = 0.0
        for weight, contribution in zip(weights, contributions, strict=True):
            norm_bound += abs(weight) * contribution.norm
        plan = plan_chain(self._judgement.optimizer, Conditions(norm_bound, self._folds))
        self._folds += 1
        return Fold(number, tuple([c.handle for c in contributions]), weights, plan), contributions

    def check(self, version: int, updates_applied: int) -> None:
        """Raise `AssertionError` where the counts contradict one another."""
        assert len(self._contributions) < self._held_max
        assert version >= self._folds
        assert updates_applied >= self._folds
