"""Transforms: gradient in, step out. The optimizers of hub and devices consist of them.

A step is *subtracted* from the parameters, so stages chain without changing its sign.

As in optax, a transform is a pure description. It has two parts, so that the hub can log its
decisions as scalars and replay them: `plan` decides the scalars, and `apply` is elementwise
arithmetic on any slice. `optimizers` and `schedules` define the kinds. This module defines what all
stages share.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from edgeasync.config import Section
from edgeasync.parameters import Vector

Scalars = tuple[float, ...]


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """The facts about an update on which its scalars depend.

    `norm` is the L2 norm of the gradient, or an upper bound. `count` is the number of updates that
    the state vectors have seen, `count_before` the number of those before the state was last
    cleared. `staleness` is the moving average of the updates' staleness in versions, 0 on a device.
    `extrapolation` is FedExP's learning rate for the mean of the devices' updates, 0 on a device
    and while it is unknown. `devices` counts the live devices with a vote of their own; it is 1 on
    a device.

    >>> from edgeasync.policies import Conditions
    >>> Conditions(norm=2.0, count=3, count_before=10).total
    13
    """

    norm: float
    count: int
    staleness: float = 0.0
    count_before: int = 0
    extrapolation: float = 0.0
    devices: int = 1

    @property
    def total(self) -> int:
        """The number of all updates before this one, on which schedules depend."""
        return self.count_before + self.count


@runtime_checkable
class Transform(Protocol):
    """One stage of an optimizer.

    For each update, the hub calls `plan` once, then `apply` with these scalars for every slice. It
    keeps the stage's state vectors between updates. If there are no state vectors and `factor`
    returns a number, multiplying the gradient by that number is equivalent to `apply`.

    >>> import numpy as np
    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Plugin
    >>> class HeavyBall(Plugin, frozen=True):
    ...     rate: float = 0.5
    ...     state_vectors = 1
    ...     def plan(self, conditions):
    ...         return (self.rate,)
    ...     def factor(self, scalars):
    ...         return None
    ...     def apply(self, gradient, parameters, state, scalars):
    ...         state[0] *= np.float32(0.9)
    ...         state[0] += gradient
    ...         gradient[:] = state[0] * np.float32(scalars[0])
    >>> policy = Policy(optimizer=(HeavyBall(),))
    """

    @property
    def state_vectors(self) -> int:
        """Number of state vectors of the model's length, initially zero, kept between updates."""

    def plan(self, conditions: Conditions) -> Scalars:
        """Decide this update's scalars."""

    def factor(self, scalars: Scalars) -> float | None:
        """Return the factor of the gradient if this update only scales it, otherwise `None`."""

    def apply(self, gradient: Vector, parameters: Vector, state: Sequence[Vector], scalars: Scalars) -> None:
        """Convert a slice of the gradient to a step, in place.

        `parameters` and `state` are the same slices of the parameters and the state vectors.
        """


class Scaling(Section, frozen=True):
    """Base class of stages that only scale; a subclass only needs `plan`, which returns the factor.

    >>> from edgeasync import SGD, Policy
    >>> from edgeasync.policies import Plugin, Scaling
    >>> class Stairs(Scaling, Plugin, frozen=True):
    ...     every: int = 100
    ...     def plan(self, conditions):
    ...         return (0.5 ** (conditions.total // self.every),)
    >>> policy = Policy(optimizer=(SGD(learning_rate=1.0), Stairs()))
    """

    @property
    def state_vectors(self) -> int:
        """Always 0."""
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
    """Multiply in place; skip the work if the factor is 1."""
    if factor != 1.0:
        np.multiply(values, np.float32(factor), out=values)


def state_vectors(chain: Sequence[Transform]) -> int:
    """Return the number of state vectors of a chain."""
    return sum(transform.state_vectors for transform in chain)


def plan_chain(chain: Sequence[Transform], conditions: Conditions) -> tuple[Scalars, ...]:
    """Return every stage's scalars for one update.

    Each stage receives the norm of its input gradient. After a stage that does more than scale, the
    norm is unknown, so later stages receive the norm before that stage.
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
    """Return the product and the number of the leading stages that only scale and keep no state."""
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
    """Run a slice of the gradient through the chain, in place.

    `parameters` and `state` are the same slices of the parameters and the state vectors. Values
    beyond float32 become infinite; set `np.errstate` to silence numpy's warning.
    """
    used = 0
    for transform, scalars in zip(chain, plan, strict=True):
        transform.apply(gradient, parameters, state[used : used + transform.state_vectors], scalars)
        used += transform.state_vectors
