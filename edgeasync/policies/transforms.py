"""Transforms: gradient in, step out. The same ones serve the hub's optimizer and a device's own.

A step is what is *subtracted* from the parameters, so stages chain without changing its sign.

As in optax a transform is a pure description. It is split in two so that a hub's decisions are scalars that
can be written down and replayed: `plan` decides them, `apply` is elementwise arithmetic on any slice.
The kinds are in `optimizers` and `schedules`; here is what they and any other stage have in common.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from edgeasync.config import Section
from edgeasync.parameters import Vector

Scalars = tuple[float, ...]


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """What is known of an update when its scalars are decided.

    `norm` is the L2 norm of the gradient, or a bound above it; `count` the number of updates that the state
    vectors have seen, and `count_before` of those before the state was cleared; `staleness` the moving average of
    the updates' staleness in versions, 0 on a device.
    """

    norm: float
    count: int
    staleness: float = 0.0
    count_before: int = 0

    @property
    def total(self) -> int:
        """All updates before this one: what a schedule goes by."""
        return self.count_before + self.count


class Transform(Protocol):
    """One stage of an optimizer."""

    @property
    def state_vectors(self) -> int:
        """Vectors of the model's length that the stage keeps between updates; they begin at zero."""

    def plan(self, conditions: Conditions) -> Scalars:
        """Decide this update's scalars."""

    def factor(self, scalars: Scalars) -> float | None:
        """Return the single factor this update amounts to, or `None` if it is not mere scaling."""

    def apply(self, gradient: Vector, parameters: Vector, state: Sequence[Vector], scalars: Scalars) -> None:
        """Turn a slice of gradient into a step, in place, with the same slice of parameters and state vectors."""


class Scaling(Section, frozen=True):
    """Base of the stages that merely scale: a kind decides its factor in `plan` and needs no more."""

    @property
    def state_vectors(self) -> int:
        """None."""
        return 0

    def factor(self, scalars: Scalars) -> float | None:
        """Return the factor."""
        return scalars[0]

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,  # noqa: ARG002
        state: Sequence[Vector],  # noqa: ARG002
        scalars: Scalars,
    ) -> None:
        """Scale, in place."""
        scale(gradient, scalars[0])


def scale(values: Vector, factor: float) -> None:
    """Multiply in place; a factor of 1 costs nothing."""
    if factor != 1.0:
        np.multiply(values, np.float32(factor), out=values)


def state_vectors(chain: Sequence[Transform]) -> int:
    """Return how many state vectors a chain keeps in all."""
    return sum(transform.state_vectors for transform in chain)


def plan_chain(chain: Sequence[Transform], conditions: Conditions) -> tuple[Scalars, ...]:
    """Return every stage's scalars for one update; each stage is told the norm of what reaches it.

    After a stage that is not mere scaling the norm is not known, and stays what it was.
    """
    plan = []
    norm = conditions.norm
    for transform in chain:
        if norm != conditions.norm:
            conditions = msgspec.structs.replace(conditions, norm=norm)
        scalars = transform.plan(conditions)
        factor = transform.factor(scalars)
        if factor is not None:
            norm *= abs(factor)
        plan.append(scalars)
    return tuple(plan)


def leading_factor(chain: Sequence[Transform], plan: Sequence[Scalars]) -> tuple[float, int]:
    """Return the product of the stateless stages at the front that merely scale, and how many they are."""
    product = 1.0
    for position, (transform, scalars) in enumerate(zip(chain, plan, strict=True)):
        factor = transform.factor(scalars)
        if factor is None or transform.state_vectors:
            return product, position
        product *= factor
    return product, len(chain)


def apply_chain(
    chain: Sequence[Transform],
    gradient: Vector,
    parameters: Vector,
    state: Sequence[Vector],
    plan: Sequence[Scalars],
) -> None:
    """Run a slice of gradient through the chain, in place, with the same slice of parameters and state.

    Values beyond float32 turn infinite; whether numpy warns of that is the caller's to say.
    """
    used = 0
    for transform, scalars in zip(chain, plan, strict=True):
        transform.apply(gradient, parameters, state[used : used + transform.state_vectors], scalars)
        used += transform.state_vectors
