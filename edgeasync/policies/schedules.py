"""Schedules: stages that scale by a factor from 0 to 1, depending on the number of updates.

The hub counts versions since the run began under its present policy. A device counts local steps,
starting at 0 with every assignment unless it keeps its optimizer's state.
"""

import math
from typing import Annotated, ClassVar

from msgspec import Meta

from edgeasync.policies.transforms import Conditions, Scalars, Scaling


class CosineSchedule(Scaling, frozen=True, tag_field="kind", tag="cosine"):
    """Half a cosine from 1 to 0 over a number of updates; afterwards the factor stays 0."""

    paper: ClassVar[str] = "Loshchilov and Hutter 2017 (arXiv:1608.03983)"

    updates: Annotated[int, Meta(ge=1, le=1_000_000_000, examples=[1000])]
    """Number of updates until the factor is 0."""

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the factor; it is 1 for the first update."""
        return (0.5 * (1.0 + math.cos(math.pi * min(1.0, conditions.total / self.updates))),)
