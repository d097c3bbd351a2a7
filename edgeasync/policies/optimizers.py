"""Optimizers, and the other stages of an optimizer chain: clipping and weight decay."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.parameters import Vector
from edgeasync.policies.schedules import CosineSchedule
from edgeasync.policies.transforms import Conditions, Scalars, Scaling, Transform, scale

LearningRate = Annotated[float, Meta(gt=0.0, le=1e6)]
MomentumShare = Annotated[
    float,
    Meta(ge=0.0, lt=1.0),
]

EPSILON_MIN = float(np.finfo(np.float32).tiny)
"""Minimum divisor. A smaller divisor would be 0 in float32, or a slow subnormal number."""


class Momentum(Section, frozen=True):
    """Base class of optimizers with one velocity vector; `plan` sets the momentum of an update.

    Asynchrony acts as momentum. If updates have a mean staleness of `tau` versions, asynchrony has
    the effect of momentum `tau / (1 + tau)` (Mitliagkas et al. 2016, arXiv:1605.09774). Momentum
    `b` averages over a horizon of `1 / (1 - b)` updates. So asynchrony alone has a horizon of `1 +
    tau` updates, and the horizons of momentum and asynchrony multiply. With
    `correct_for_staleness`, the momentum `b` is reduced to `b'`, so that `b'` and asynchrony
    together have the horizon of `b`: `(1 + tau) / (1 - b') = 1 / (1 - b)`, that is `b' = b - (1 -
    b) tau`. If asynchrony alone has a longer horizon than `b`, `b'` is 0.

    With `learning_rate_max`, the learning rate follows FedExP (Jhunjhunwala et al. 2023,
    arXiv:2301.09604). The less the devices' updates agree, the smaller is the norm of their mean
    compared with their own norms, and the larger is the learning rate.
    """

    learning_rate: LearningRate = 1.0
    """Factor of the step."""
    momentum: MomentumShare = 0.0
    """Factor of the old velocity in each update. If it is over 0, the optimizer stores one more
    vector as large as the model.
    """
    correct_for_staleness: bool = False
    """Lower the momentum to `momentum - (1 - momentum) s`, at least 0, where `s` is the mean
    staleness. Stale updates have an effect like momentum (Mitliagkas et al. 2016). With this
    correction, the lowered momentum and staleness together have the effect of `momentum`.
    """
    staleness_max: Annotated[float, Meta(ge=0.0)] | None = None
    """If the mean staleness exceeds this value, the momentum is 0 and the learning rate at most 1."""
    devices_min: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """With fewer live devices than this, the momentum is 0 and the learning rate is at most 1. With
    `devices_min = 2` and a learning rate of at least 1, the hub applies the updates of a single
    device unchanged. This key has no effect in a device's optimizer.
    """
    learning_rate_max: Annotated[Annotated[float, Meta(gt=0.0, le=1e6)] | None, Meta(examples=[1.75])] = None
    """Maximum learning rate when the devices' updates disagree. With this key, the hub raises the
    learning rate to `1 / (3 (a + (1 - a) / n))` for `n` updates with a mean cosine `a`, as in
    FedExP (Jhunjhunwala et al. 2023). The maximum must be at least `learning_rate`. This key has no
    effect in a device's optimizer.
    """

    def __post_init__(self) -> None:
        if self.learning_rate_max is not None and self.learning_rate_max < self.learning_rate:
            raise ValueError(
                f"learning_rate_max ({self.learning_rate_max:g}) must not be below learning_rate "
                f"({self.learning_rate:g})"
            )

    @property
    def state_vectors(self) -> int:
        """1 for the velocity, or 0 without momentum."""
        return 1 if self.momentum else 0

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the learning rate and the momentum."""
        late = self.staleness_max is not None and conditions.staleness > self.staleness_max
        if late or conditions.devices < self.devices_min:
            return (min(self.learning_rate, 1.0), 0.0)
        momentum = self.momentum
        if self.correct_for_staleness:
            momentum = max(0.0, momentum - (1.0 - momentum) * conditions.staleness)
        learning_rate = self.learning_rate
        if self.learning_rate_max is not None:
            learning_rate = min(self.learning_rate_max, max(learning_rate, conditions.extrapolation))
        return (learning_rate, momentum)

    def factor(self, scalars: Scalars) -> float | None:
        """Return the learning rate if the momentum of this update is 0, otherwise `None`."""
        learning_rate, momentum = scalars
        return None if momentum else learning_rate


class SGD(Momentum, frozen=True, tag_field="kind", tag="sgd"):
    """Stochastic gradient descent with heavy-ball momentum: `v = momentum v + g`, step `learning_rate v`.

    The formula is that of Sutskever et al. 2013. With momentum 0, it stores no state.

    >>> from edgeasync import SGD
    >>> SGD(learning_rate=0.1, momentum=0.9).momentum
    0.9
    """

    paper: ClassVar[str] = "Polyak 1964 (doi:10.1016/0041-5553(64)90137-5)"

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,  # noqa: ARG002
        state: Sequence[Vector],
        scalars: Scalars,
    ) -> None:
        """Convert the gradient to a step, in place."""
        learning_rate, momentum = scalars
        if momentum:
            (velocity,) = state
            np.multiply(velocity, np.float32(momentum), out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.multiply(velocity, np.float32(learning_rate), out=gradient)
        else:
            for velocity in state:
                np.copyto(velocity, gradient)
            scale(gradient, learning_rate)


class Nesterov(Momentum, frozen=True, tag_field="kind", tag="nesterov"):
    """Nesterov's accelerated gradient: `u = momentum (u + g)`, step `learning_rate (g + u)`.

    As in Bengio et al. 2013, the gradient is computed at the current parameters. Their form is `v =
    momentum v + g`, step `learning_rate (g + momentum v)`. The two forms are equivalent, because `u
    = momentum v`, but theirs needs one more pass over the vectors. If the momentum changes between
    two updates, both forms use the earlier momentum for `v`, and the current momentum for the step.
    """

    paper: ClassVar[str] = "Nesterov 1983; Bengio et al. 2013 (arXiv:1212.0901)"

    momentum: MomentumShare = 0.8
    """Factor of the old velocity `v` in each update."""

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,  # noqa: ARG002
        state: Sequence[Vector],
        scalars: Scalars,
    ) -> None:
        """Convert the gradient to a step, in place."""
        learning_rate, momentum = scalars
        if momentum:
            (velocity,) = state
            np.add(velocity, gradient, out=velocity)
            np.multiply(velocity, np.float32(momentum), out=velocity)
            np.add(gradient, velocity, out=gradient)
        else:
            for velocity in state:
                velocity.fill(0.0)
        scale(gradient, learning_rate)


class Adam(Section, frozen=True, tag_field="kind", tag="adam"):
    """Adam: uses moving averages of the gradient and its square, corrected for their start at zero.

    `epsilon` is added to the square root, as in the paper. Adam stores two vectors as large as the
    model.

    >>> from edgeasync import Adam
    >>> Adam(learning_rate=0.001).epsilon
    1e-08
    """

    paper: ClassVar[str] = "Kingma and Ba 2015 (arXiv:1412.6980)"

    learning_rate: LearningRate = 0.001
    """Factor of the step."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Factor of the old value in the moving average `m` of gradients."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.999
    """Factor of the old value in the moving average `v` of squared gradients."""
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-8
    """Small number that is added to the divisor to prevent a division by 0."""

    @property
    def state_vectors(self) -> int:
        """2, for the moving averages of the gradient and of its square."""
        return 2

    def factor(self, scalars: Scalars) -> float | None:  # noqa: ARG002
        """Return `None`, because Adam does more than scale the gradient."""
        return None

    def plan(self, conditions: Conditions) -> Scalars:
        """Return the learning rate with its bias correction, and the constants of the second moment.

        These are the bias correction of its square root, both betas, and epsilon.
        """
        first = 1.0 - self.beta1 ** (conditions.count + 1)
        second = 1.0 - self.beta2 ** (conditions.count + 1)
        epsilon = max(self.epsilon, EPSILON_MIN)
        return (self.learning_rate / first, 1.0 / math.sqrt(second), self.beta1, self.beta2, epsilon)

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,  # noqa: ARG002
        state: Sequence[Vector],
        scalars: Scalars,
    ) -> None:
        """Convert the gradient to a step, in place."""
        step_size, root_scale, beta1, beta2, epsilon = scalars
        mean, square = state
        scratch = np.multiply(gradient, np.float32(1.0 - beta1))
        np.multiply(mean, np.float32(beta1), out=mean)
        np.add(mean, scratch, out=mean)
        np.multiply(gradient, gradient, out=scratch)
        np.multiply(scratch, np.float32(1.0 - beta2), out=scratch)
        np.multiply(square, np.float32(beta2), out=square)
        np.add(square, scratch, out=square)
        np.sqrt(square, out=scratch)
        scale(scratch, root_scale)
        np.add(scratch, np.float32(epsilon), out=scratch)
        np.divide(mean, scratch, out=gradient)
        scale(gradient, step_size)


class ClipByGlobalNorm(Scaling, frozen=True, tag_field="kind", tag="clip_by_global_norm"):
    """Limit the L2 norm of the gradient to `norm`, and keep its direction.

    The hub uses an upper bound of the gradient's norm: the sum of the norms of the updates folded
    together. So it may clip a gradient too much, but never too little.
    """

    paper: ClassVar[str] = "Pascanu et al. 2013 (arXiv:1211.5063)"

    norm: Annotated[float, Meta(gt=0.0, le=1e9)] = 10.0
    """Maximum L2 norm."""

    def plan(self, conditions: Conditions) -> Scalars:
        """Return `norm` divided by the gradient's norm, at most 1."""
        return (self.norm / conditions.norm if conditions.norm > self.norm else 1.0,)


class WeightDecay(Section, frozen=True, tag_field="kind", tag="weight_decay"):
    """Pull the parameters `w` towards zero: `g + rate w`.

    As a stage before an optimizer, it adds the gradient of an L2 penalty, `rate / 2` times the
    squared norm of the parameters. As a stage after an optimizer, the decay is decoupled, as in the
    paper: every update subtracts the fraction `rate` of each parameter, regardless of the learning
    rate.
    """

    paper: ClassVar[str] = "Loshchilov and Hutter 2019 (arXiv:1711.05101)"

    rate: Annotated[float, Meta(gt=0.0, le=1.0, examples=[1e-4])]
    """Fraction of each parameter that is subtracted per update."""

    @property
    def state_vectors(self) -> int:
        """Always 0."""
        return 0

    def plan(self, conditions: Conditions) -> Scalars:  # noqa: ARG002
        """Return the constant rate."""
        return (self.rate,)

    def factor(self, scalars: Scalars) -> float | None:  # noqa: ARG002
        """Return `None`, because weight decay does more than scale the gradient."""
        return None

    def apply(
        self,
        gradient: Vector,
        parameters: Vector,
        state: Sequence[Vector],  # noqa: ARG002
        scalars: Scalars,
    ) -> None:
        """Add the decay, in place."""
        np.add(gradient, np.multiply(parameters, np.float32(scalars[0])), out=gradient)


TransformKind = SGD | Nesterov | Adam | ClipByGlobalNorm | WeightDecay | CosineSchedule


def check_chain(chain: Sequence[Transform]) -> None:
    """Raise `ValueError` for a chain with conflicting stages.

    Clipping must not follow a stage after which the norm is unknown. Only one stage may have
    momentum, because the delays of two such stages would add up.
    """
    with_momentum = ""
    reshaping = ""
    for position, stage in enumerate(chain):
        name = f"`{_kind(stage)}` at {position}"
        if isinstance(stage, ClipByGlobalNorm) and reshaping:
            raise ValueError(f"{name} must come before {reshaping}, which makes the norm of the update unknown")
        if isinstance(stage, Momentum | Adam) and stage.state_vectors:
            if with_momentum:
                raise ValueError(f"{name} and {with_momentum} both have momentum; remove one of them")
            with_momentum = name
        if not reshaping and not _merely_scales(stage):
            reshaping = name


def _merely_scales(stage: Transform) -> bool:
    return not stage.state_vectors and stage.factor(stage.plan(Conditions(1.0, 0))) is not None


def _kind(stage: Transform) -> str:
    config = getattr(stage, "__struct_config__", None)
    return str(config.tag) if config else type(stage).__name__
