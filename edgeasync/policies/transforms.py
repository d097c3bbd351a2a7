"""Transforms: gradient in, step out. The same ones serve the hub's optimizer and a device's own.

A step is what is *subtracted* from the parameters, so stages chain without changing its sign.

As in optax a transform is a pure description. It is split in two so that a hub's decisions are scalars that
can be written down and replayed: `plan` decides them, `apply` is elementwise arithmetic on any slice.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.parameters import Vector

Scalars = tuple[float, ...]


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """What is known of an update when its scalars are decided.

    `norm` is the L2 norm of the gradient, or a bound above it; `count` the number of updates before; `staleness`
    the moving average of the updates' staleness in versions, 0 on a device.
    """

    norm: float
    count: int
    staleness: float = 0.0


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


class SGD(Section, frozen=True, tag_field="kind", tag="sgd"):
    """Stochastic gradient descent with heavy-ball momentum: `v = momentum v + g`, step `learning_rate v`.

    Polyak 1964; in the form of Sutskever et al. 2013. With momentum 0 it keeps no state.
    """

    learning_rate: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0

    @property
    def state_vectors(self) -> int:
        """The velocity, if there is momentum."""
        return 1 if self.momentum else 0

    def plan(self, conditions: Conditions) -> Scalars:  # noqa: ARG002
        """Return learning rate and momentum: constants here."""
        return (self.learning_rate, self.momentum)

    def factor(self, scalars: Scalars) -> float | None:
        """Return the learning rate when there is no momentum."""
        learning_rate, momentum = scalars
        return None if momentum else learning_rate

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,  # noqa: ARG002
        state: Sequence[Vector],
        scalars: Scalars,
    ) -> None:
        """Turn gradient into step, in place."""
        learning_rate, momentum = scalars
        if momentum:
            (velocity,) = state
            np.multiply(velocity, np.float32(momentum), out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.multiply(velocity, np.float32(learning_rate), out=gradient)
        else:
            np.multiply(gradient, np.float32(learning_rate), out=gradient)


class Adam(Section, frozen=True, tag_field="kind", tag="adam"):
    """Adam: moving averages of the gradient and of its square, both corrected for their start at zero.

    Kingma and Ba 2015 (arXiv:1412.6980); `epsilon` is added outside the root, as there. It keeps two vectors.
    """

    learning_rate: Annotated[float, Meta(gt=0.0, le=1e6)] = 0.001
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.999
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-8

    @property
    def state_vectors(self) -> int:
        """The averages of the gradient and of its square."""
        return 2

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the corrected learning rate, the correction of the root, and the averages' factors."""
        first = 1.0 - self.beta1 ** (conditions.count + 1)
        second = 1.0 - self.beta2 ** (conditions.count + 1)
        return (self.learning_rate / first, 1.0 / math.sqrt(second), self.beta1, self.beta2, self.epsilon)

    def factor(self, scalars: Scalars) -> float | None:  # noqa: ARG002
        """Return `None`: it is never mere scaling."""
        return None

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,  # noqa: ARG002
        state: Sequence[Vector],
        scalars: Scalars,
    ) -> None:
        """Turn gradient into step, in place."""
        step_size, root_scale, beta1, beta2, epsilon = [np.float32(value) for value in scalars]
        mean, square = state
        np.multiply(mean, beta1, out=mean)
        np.multiply(square, beta2, out=square)
        scratch = np.multiply(gradient, np.float32(1.0) - beta1)
        np.add(mean, scratch, out=mean)
        np.multiply(gradient, gradient, out=scratch)
        np.multiply(scratch, np.float32(1.0) - beta2, out=scratch)
        np.add(square, scratch, out=square)
        np.sqrt(square, out=scratch)
        np.multiply(scratch, root_scale, out=scratch)
        np.add(scratch, epsilon, out=scratch)
        np.divide(mean, scratch, out=gradient)
        np.multiply(gradient, step_size, out=gradient)


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
        scalars = transform.plan(msgspec.structs.replace(conditions, norm=norm))
        norm *= abs(transform.factor(scalars) or 1.0)
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
    """Run a slice of gradient through the chain, in place, with the same slice of parameters and state."""
    used = 0
    for transform, scalars in zip(chain, plan, strict=True):
        transform.apply(gradient, parameters, state[used : used + transform.state_vectors], scalars)
        used += transform.state_vectors
