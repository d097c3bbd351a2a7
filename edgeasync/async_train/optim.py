"""Optimizers with torch's arguments; their method `optimizer` converts them to edgeasync's."""

import sys
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import edgeasync
from edgeasync.async_train.watching import WATCHED
from edgeasync.errors import ConfigError

if TYPE_CHECKING:
    from edgeasync import ParameterSpec
    from edgeasync.async_train.model import Model

__all__ = ["SGD", "Adam"]

Vector = npt.NDArray[np.float32]


class Optimizer:
    """Base class of `SGD` and `Adam`.

    `params` may be omitted if the model is passed to the class or function that trains.
    """

    def __init__(self, params: Iterable[Any] | None, stage: Any, weight_decay: float, **for_torch: Any) -> None:
        self._model: Model | None = getattr(params, "model", None)
        self._tensors = None if params is None or self._model is not None else list(params)
        self.stage, self._weight_decay = stage, weight_decay
        self.for_torch_options = {**for_torch, "weight_decay": weight_decay}
        self._torch: tuple[list[Any], Any] | None = None
        self._steps: VectorSteps | None = None
        self._factor = 1.0

    def optimizer(self) -> Any:
        """Return edgeasync's `SGD` or `Adam`, or a list of two stages if there is weight decay."""
        if not self._weight_decay:
            return self.stage
        from edgeasync.policies.optimizers import WeightDecay  # noqa: PLC0415 - rarely needed

        return [WeightDecay(rate=self._weight_decay), self.stage]

    def step(self) -> None:
        """Take a step with the gradients of `loss.backward()`.

        Raises `ConfigError` if the optimizer was created without parameters.
        """
        if self._tensors is not None:
            self.for_torch(self._tensors).step()
            return
        model = self._known_model
        if model.gradient_sum is not None:
            self.update(model.network.spec, model.network.vector, model.gradient_sum)
            WATCHED.stepped(model, self)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        what = self._known_model if self._tensors is None else self.for_torch(self._tensors)
        what.zero_grad()

    @property
    def _known_model(self) -> "Model":
        if self._model is None:
            kind = type(self).__name__
            raise ConfigError(f"{kind} has no parameters: write optim.{kind}(model.parameters(), lr=...)")
        return self._model

    def update(self, spec: "ParameterSpec", vector: Vector, gradient: Vector) -> None:
        """Step a flat vector of parameters in place, and update the momentum or moving averages."""
        if self._steps is None or self._steps.spec != spec:
            stages = self.optimizer()
            self._steps = VectorSteps(spec, stages if isinstance(stages, list) else [stages])
            self._steps.scale_learning_rate(self._factor)
        self._steps.take(vector, gradient)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate by a factor from the next step on."""
        self._factor *= factor
        if self._steps is not None:
            self._steps.scale_learning_rate(self._factor)
        if self._torch is not None:
            for group in self._torch[1].param_groups:
                group["lr"] *= factor

    def for_torch(self, tensors: Iterable[Any]) -> Any:
        """Return torch's optimizer of the same name for these tensors.

        Later calls with the same tensors return the same optimizer.
        """
        tensors = list(tensors)
        if self._torch is None or [id(one) for one in self._torch[0]] != [id(one) for one in tensors]:
            self._torch = tensors, self.maker_for_torch()(tensors)
            for group in self._torch[1].param_groups:
                group["lr"] *= self._factor
        return self._torch[1]

    def maker_for_torch(self) -> Callable[[Iterable[Any]], Any]:
        """Return a function that creates torch's optimizer of the same name."""
        name, options = type(self).__name__, dict(self.for_torch_options)
        return lambda parameters: getattr(sys.modules["torch"].optim, name)(parameters, **options)


class VectorSteps:
    """Applies an optimizer's steps to flat vectors, with gradients that the caller has computed."""

    def __init__(self, spec: "ParameterSpec", stages: list[Any]) -> None:
        self.spec = spec
        self._gradient = np.zeros(0, np.float32)
        batches = repeat((np.zeros((1, 1), np.float32), np.zeros(1, np.int64)))  # unused
        self._trainer = edgeasync.GradientTrainer(spec, self._give, stages, batches, keep_optimizer_state=True)

    def scale_learning_rate(self, factor: float) -> None:
        """Scale the original learning rate by a factor."""
        self._trainer.scale_learning_rate(factor)

    def take(self, vector: Vector, gradient: Vector) -> None:
        """Take a step."""
        self._gradient = gradient
        self._trainer.begin(vector)
        self._trainer.step()

    def _give(self, parameters: Vector, x: Any, y: Any, out: Vector) -> None:  # noqa: ARG002
        np.copyto(out, self._gradient)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    >>> from edgeasync.async_train import optim
    >>> optim.SGD(lr=0.1, momentum=0.9).optimizer().momentum
    0.9
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 0.001,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        stage = edgeasync.SGD(learning_rate=lr, momentum=momentum)
        super().__init__(params, stage, weight_decay, lr=lr, momentum=momentum)


class Adam(Optimizer):
    """The optimizer Adam, which adapts the step size of each value.

    >>> from edgeasync.async_train import optim
    >>> optim.Adam(lr=0.001).optimizer().learning_rate
    0.001
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        stage = edgeasync.Adam(learning_rate=lr, beta1=betas[0], beta2=betas[1], epsilon=eps)
        super().__init__(params, stage, weight_decay, lr=lr, betas=betas, eps=eps)
