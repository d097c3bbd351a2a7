"""Schedules: stages that scale by a factor from 0 to 1, which depends on the number of updates so far.

The hub counts versions since the run began under its present policy. A device counts local steps, from 0 with
every assignment unless it keeps its optimizer's state.
"""

import math
from typing import Annotated, ClassVar

from msgspec import Meta

from edgeasync.policies.transforms import Conditions, Scalars, Scaling

UPDATES_MAX = 1_000_000_000


class CosineSchedule(Scaling, frozen=True, tag_field="kind", tag="cosine"):
    """A linear rise over `warm_up` updates, then half a cosine from 1 down to `final`.

    The factor is `final` after `updates`, and stays so. Raises `ValueError` if the warm-up is not over by then.
    """

    paper: ClassVar[str] = "Loshchilov and Hutter 2017 (arXiv:1608.03983)"

    updates: Annotated[
        int,
        Meta(
            ge=1,
            le=UPDATES_MAX,
            description="updates until the factor is `final`, warm-up included",
            examples=[1000],
        ),
    ]
    warm_up: Annotated[int, Meta(ge=0, le=UPDATES_MAX, description="updates until the factor is 1")] = 0
    final: Annotated[float, Meta(ge=0.0, le=1.0, description="the factor at the end, which stays")] = 0.0

    def __post_init__(self) -> None:
        if self.warm_up >= self.updates:
            raise ValueError(f"warm_up is {self.warm_up}; give fewer than the {self.updates} updates in all")

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the factor; the first update's is above 0, so that it is not wasted."""
        if conditions.total < self.warm_up:
            return ((conditions.total + 1) / (self.warm_up + 1),)
        done = min(1.0, (conditions.total - self.warm_up) / (self.updates - self.warm_up))
        return (self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * done)),)


class ExponentialSchedule(Scaling, frozen=True, tag_field="kind", tag="exponential"):
    """A staircase: the factor begins at 1 and is multiplied by `decay` after every `every` updates."""

    paper: ClassVar[str] = ""

    decay: Annotated[
        float, Meta(gt=0.0, le=1.0, description="multiplies the factor with every stair", examples=[0.5])
    ]
    every: Annotated[int, Meta(ge=1, le=UPDATES_MAX, description="updates on each stair", examples=[1000])]

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the factor."""
        return (self.decay ** (conditions.total // self.every),)


class InverseSqrtSchedule(Scaling, frozen=True, tag_field="kind", tag="inverse_sqrt"):
    """A linear rise to 1 over `warm_up` updates, then a fall by the square root of the number of updates.

    `min(n / warm_up, sqrt(warm_up / n))` at the n-th update: the schedule of the paper, scaled to a peak of 1.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017 (arXiv:1706.03762)"

    warm_up: Annotated[
        int, Meta(ge=1, le=UPDATES_MAX, description="updates until the factor is 1", examples=[100])
    ]

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the factor."""
        number = conditions.total + 1
        return (min(number / self.warm_up, math.sqrt(self.warm_up / number)),)
