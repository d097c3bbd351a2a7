"""Transforms convert a gradient to a step. The optimizers of hub and devices consist of them.

A step is *subtracted* from the parameters, so the stages of a chain do not change the sign.

As in optax, a transform stores no state itself. It has two methods, so that the hub can log its
decisions as scalars and replay them: `plan` decides the scalars, and `apply` uses them for
elementwise arithmetic on any slice of the vectors. The modules `optimizers` and `schedules` define
the kinds of transforms. This module defines their protocol and the functions for chains.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from edgeasync.config import Section
from edgeasync.parameters import Vector

Scalars = tuple[float, ...]


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """The facts about an update that `Transform.plan` computes the scalars from.

    `norm` is the L2 norm of the gradient, or an upper bound of it. `count` is the number of earlier
    updates since the state vectors were last cleared, and `count_before` is the number of updates
    before that. `staleness` is the moving average of the updates' staleness in versions; it is 0 on
    a device. `extrapolation` is FedExP's learning rate for the mean of the devices' updates; it is
    0 on a device, and while it is unknown. `devices` is the number of live devices with their own
    vote; it is 1 on a device.

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
        """The number of all updates before this one, which schedules use."""
        return self.count_before + self.count


@runtime_checkable
class Transform(Protocol):
    """One stage of an optimizer.

    For each update, the hub calls `plan` once, and then calls `apply` with the returned scalars for
    every slice. It stores the stage's state vectors between updates. If a stage has no state
    vectors and `factor` returns a number, the hub may multiply the gradient by this number instead
    of calling `apply`.

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
        """Number of state vectors that the stage needs, each as long as the model. They start at zero."""

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the scalars for this update."""

    def factor(self, scalars: Scalars) -> float | None:
        """Return the factor of the gradient if this update only scales it, otherwise `None`."""

    def apply(self, gradient: Vector, parameters: Vector, state: Sequence[Vector], scalars: Scalars) -> None:
        """Convert a slice of the gradient to a step, in place.

        `parameters` and `state` are the corresponding slices of the parameters and state vectors.
        """


class Scaling(Section, frozen=True):
    """Base class of stages that only scale the gradient; a subclass only needs `plan`.

    `plan` returns a tuple that contains the factor.

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
        """Multiply a slice of the gradient by the factor, in place."""
        scale(gradient, scalars[0])


def scale(values: Vector, factor: float) -> None:
    """Multiply `values` in place; does nothing if the factor is 1."""
    if factor != 1.0:
        np.multiply(values, np.float32(factor), out=values)


def state_vectors(chain: Sequence[Transform]) -> int:
    """Return the total number of state vectors of a chain."""
    return sum(transform.state_vectors for transform in chain)


def plan_chain(chain: Sequence[Transform], conditions: Conditions) -> tuple[Scalars, ...]:
    """Return every stage's scalars for one update.

    Each stage receives the norm of its input gradient. After a stage that does more than scale the
    gradient, the norm is unknown, so the following stages receive that stage's input norm.
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
    """Return the product of the factors of a chain's leading scaling stages, and their number.

    The first stage that does more than scale the gradient, or that has state, ends the count.
    """
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

    `parameters` and `state` are the corresponding slices of the parameters and state vectors.
    Values beyond float32 become infinite; set `np.errstate` to silence numpy's warning.
    """
    used = 0
    for transform, scalars in zip(chain, plan, strict=True):
        transform.apply(gradient, parameters, state[used : used + transform.state_vectors], scalars)
        used += transform.state_vectors
