"""Schedules are stages that scale the step by a factor that depends on the number of updates.

The factor is from 0 to 1. On the hub, the number of updates is the number of versions since the run
began to use its current policy. On a device, it is the number of local steps, which restarts at 0
with every assignment unless the device keeps its optimizer's state.
"""

import math
from typing import Annotated, ClassVar

from msgspec import Meta

from edgeasync.policies.transforms import Conditions, Scalars, Scaling


class CosineSchedule(Scaling, frozen=True, tag_field="kind", tag="cosine"):
    """Cosine decay of the factor from 1 to 0 over a number of updates, after which it stays 0."""

    paper: ClassVar[str] = "Loshchilov and Hutter 2017 (arXiv:1608.03983)"

    updates: Annotated[int, Meta(ge=1, le=1_000_000_000, examples=[1000])]
    """Number of updates after which the factor is 0."""

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the factor, which is 1 for the first update."""
        return (0.5 * (1.0 + math.cos(math.pi * min(1.0, conditions.total / self.updates))),)
