"""A parameter tree and its loss as a model for `train`, `Hub` and `Agent`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError
from edgeasync.jax.trees import arrays_of, frozen_of, gpu_of, parameters_of, read_tree, tree_like
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.sdk.adapted import Adapted
from edgeasync.sdk.models import Prepared
from edgeasync.training.evaluation import EvaluationResult, Evaluator, add_up, mean_of
from edgeasync.training.losses import LossSum
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import StepResult

EVALUATED_AT_ONCE = 256
"""Batch size of evaluations."""


def model(
    params: Any,
    loss_fn: Callable[[Any, Any, Any], Any],
    optimizer: optax.GradientTransformation | None = None,
    *,
    predict: Callable[[Any, Any], Any] | None = None,
    frozen: Any = None,
) -> "JaxModel":
    """Return a parameter tree and its loss as a model for `train`, `Hub` and `Agent`.

    - `params`: a tree of float32 arrays with the initial values.
    - `loss_fn(params, x, y)`: the mean loss of a batch. It is compiled together with the
      optimizer's step.
    - `optimizer`: an optax optimizer; by default `optax.sgd(0.05)`.
    - `predict(params, x)`: the scores of each class, (n, classes, ...). It is needed to evaluate
      the accuracy.
    - `frozen`: a tree of arrays that `loss_fn` closes over. The hub rejects devices with different
      values.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import edgeasync
    >>> def loss(params, x, y):
    ...     return jnp.mean((x @ params["weight"] - y) ** 2)
    >>> model = edgeasync.jax.model({"weight": jnp.zeros(3)}, loss)
    >>> x = np.random.default_rng(0).normal(size=(64, 3))
    >>> run = edgeasync.train(model, (x, x[:, 0]), workers=1, until=edgeasync.Stop(updates=4))
    >>> run.model["weight"].shape
    (3,)
    """
    return JaxModel(params, loss_fn, optax.sgd(0.05) if optimizer is None else optimizer, predict, frozen)


class JaxModel(Adapted):
    """A parameter tree that devices train with a loss; created by `model`."""

    optimizer_is = "pass one of optax to edgeasync.jax.model"

    def __init__(self, params: Any, loss_fn: Any, optimizer: Any, predict: Any, frozen: Any) -> None:
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; pass an optimizer of optax")
        self.params = params
        self.spec = ParameterSpec(tuple(parameters_of(params)))
        self.frozen = frozen_of(frozen)
        self.optimizer = optimizer
        self._loss = jax.jit(loss_fn)
        self._predict = None if predict is None else jax.jit(predict)

        def step(params: Any, state: Any, x: Any, y: Any, factor: float) -> Any:
            loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
            changes, state = optimizer.update(gradients, state, params)
            changes = jax.tree.map(lambda change: (change * factor).astype(change.dtype), changes)
            return optax.apply_updates(params, changes), state, loss

        self.compiled_step = jax.jit(step)

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model in the form that `train` and agents need."""
        return Prepared(
            spec=self.spec,
            initial=self.spec.flatten(arrays_of(self.params)),
            make_trainer=lambda data, seed, _: JaxTrainer(self, data, local, seed),
            make_evaluator=self._evaluator,
            restore=lambda arrays: tree_like(self.params, arrays),
            frozen=self.frozen,
        )

    def _evaluator(self, data: Dataset) -> Evaluator:
        predict = self._predict if data.y.dtype.kind == "i" else None

        def evaluate(parameters: Vector) -> EvaluationResult:
            tree = tree_like(self.params, self.spec.views(parameters))

            def loss_of(x: Any, y: Any) -> LossSum:
                classes = None if predict is None else np.asarray(predict(tree, x)).argmax(1)
                return mean_of(float(self._loss(tree, x, y)), y, classes)

            return add_up(data.x, data.y, EVALUATED_AT_ONCE, loss_of)

        return evaluate


class JaxTrainer:
    """Trains a tree with a compiled step.

    On a CPU, each step updates the vector. On a GPU, only `flush` does.
    """

    def __init__(self, model: JaxModel, data: Dataset, local: LocalTraining, seed: int) -> None:
        self.spec, self.frozen = model.spec, model.frozen
        self._params = model.params
        self._step = model.compiled_step
        self._init = model.optimizer.init
        one_input = Dataset(data.x, data.y)
        self._stream = batches(one_input, local.batch_size, seed)
        self._keeps = local.keep_optimizer_state
        self._state: Any = None
        self._vector: Vector | None = None
        self._is_ahead = False
        """Whether steps have changed the tree since the vector was updated."""
        self._factor = 1.0

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: train this vector in place from now on."""
        self.spec.check(parameters)
        self._vector = parameters
        self._params = tree_like(self._params, self.spec.views(parameters))
        self._is_ahead = False
        if self._state is None or not self._keeps:
            self._state = self._init(self._params)

    def reset(self) -> None:
        """Reset the optimizer's state."""
        self._state = None

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the change that each later step makes by this factor."""
        self._factor = factor

    def step(self) -> StepResult:
        """Run one compiled step on one batch."""
        assert self._vector is not None
        x, y = next(self._stream)
        self._params, self._state, loss = self._step(self._params, self._state, x, y, self._factor)
        self._is_ahead = True
        if gpu_of(self._params) is None:
            self.flush()
        return StepResult(float(loss), len(y))

    def flush(self) -> None:
        """Copy the parameters to the vector."""
        if self._is_ahead:
            assert self._vector is not None
            read_tree(self._params, self.spec.views(self._vector))
            self._is_ahead = False
