"""Trains a model batch by batch: torch modules, models of edgeasync, and the user's own."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync import Parameter, ParameterSpec
from edgeasync.async_train.adapters import as_loss, as_optimizer, has_parameters, is_torch
from edgeasync.async_train.cuda import usable
from edgeasync.async_train.data.loader import DataLoader
from edgeasync.async_train.loss_functions import CrossEntropyLoss, LossFunction
from edgeasync.async_train.model import Model
from edgeasync.async_train.optim import Optimizer
from edgeasync.async_train.watching import WATCHED
from edgeasync.errors import ConfigError

Vector = npt.NDArray[np.float32]

EVALUATED_AT_ONCE = 256
"""Batch size for evaluations on a pair of arrays."""


class Learner(ABC):
    """Accumulates a model's gradients, and takes optimizer steps.

    The values are stored in the user's model.
    """

    model: Any
    """The model that contains the values."""

    @property
    @abstractmethod
    def device(self) -> str:
        """The device on which the model computes."""

    @property
    @abstractmethod
    def participant(self) -> Any:
        """The model in the form that `join` accepts."""

    @property
    def hub_model(self) -> Any:
        """The model in the form that `Hub` accepts."""
        return self.model

    @abstractmethod
    def add(self, inputs: Any, targets: Any, loss_fn: Any) -> float:
        """Accumulate a batch's gradient, weighted by its size; return the batch's mean loss."""

    @abstractmethod
    def step(self, optimizer: Any) -> None:
        """Take one optimizer step with the mean of the accumulated gradients, and clear them."""

    @abstractmethod
    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the model's inference results: scores or class numbers."""

    def count_step(self, optimizer: Any, session: Any, loss: float | None, examples: int) -> None:
        """Take a step, and count it in the session of `edgeasync.join`, if there is one."""
        self.step(optimizer)
        if session is not None:
            session.step(loss=loss, examples=examples)

    def train(
        self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None, session: Any = None
    ) -> float:
        """Train one batch and count the step; return the mean loss before the step."""
        loss = self.add(inputs, targets, loss_fn)
        self.count_step(optimizer, session, loss, len(targets))
        return loss


def learner_of(model: Any, device: object = None, where: str = "device") -> Learner:
    """Create the learner of a model; raises `ConfigError` for an unsupported model.

    By default, the model stays on its device.
    """
    chosen = usable(device, model, where)
    if is_torch(model):
        return TorchLearner(model.to(chosen))
    if not isinstance(model, Model) and has_parameters(model):
        return OwnLearner(model)
    return NetworkLearner((model if isinstance(model, Model) else Model(model)).to(chosen))


def evaluate(learner: Learner, loader: Iterable[tuple[Any, Any]] | tuple[Any, Any]) -> float:
    """Return a model's accuracy on batches or arrays; for float targets, the mean squared error."""
    total, count = 0.0, 0
    if isinstance(loader, tuple):
        loader = DataLoader(loader, batch_size=EVALUATED_AT_ONCE)
    for inputs, targets in loader:
        y, found = np.asarray(targets), learner.predict(inputs)
        if y.dtype.kind in "iu":
            total += float(((found.argmax(1) if found.ndim > y.ndim else found) == y).sum())
        else:
            total += float(np.square(found - y.reshape(found.shape)).sum())
        count += y.size
    if not count:
        raise ConfigError("the loader returned no batches to evaluate on")
    return total / count


class ChosenOptimizer:
    """Converts each optimizer to one of `optim` only once, so that the result keeps its state."""

    def __init__(self) -> None:
        self._given: object = None
        self._optimizer: Any = None

    def __call__(self, optimizer: object) -> Any:
        """Return the converted optimizer."""
        if optimizer is not self._given:
            self._given, self._optimizer = optimizer, as_optimizer(optimizer)
        return self._optimizer


class ArrayLearner(Learner):
    """Base class of learners whose gradients are accumulated in one flat vector."""

    def __init__(self) -> None:
        self._chosen = ChosenOptimizer()
        self._sum: Vector | None = None
        self._weight = 0.0

    def collect(self, gradient: Vector, weight: float) -> None:
        """Accumulate a gradient, multiplied by its weight."""
        scaled = gradient * np.float32(weight)
        self._sum = scaled if self._sum is None else np.add(self._sum, scaled, out=self._sum)
        self._weight += weight

    def move(self, model: object, optimizer: object, spec: ParameterSpec, vector: Vector) -> None:
        """Step a model's vector with the mean of the accumulated gradients, and clear them."""
        optimizer = self._chosen(optimizer)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer is {type(optimizer).__name__}; for a model that is not a torch module use one of "
                "async_train.optim"
            )
        if self._sum is not None and self._weight > 0.0:
            self._sum /= np.float32(self._weight)
            optimizer.update(spec, vector, self._sum)
            WATCHED.stepped(model, optimizer)
        self._sum, self._weight = None, 0.0


class NetworkLearner(ArrayLearner):
    """Learner of an edgeasync model."""

    model: Model

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    @property
    def device(self) -> str:
        """The device on which the model computes."""
        return self.model.device

    @property
    def participant(self) -> Any:
        """The network, which contains the values."""
        return self.model.network

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return scores."""
        return np.asarray(self.model(np.asarray(inputs)))

    def add(self, inputs: Any, targets: Any, loss_fn: Any) -> float:
        """Accumulate a batch's gradient; return its mean loss."""
        values = np.asarray(inputs)
        found = self.model.fit_to(values.shape[1:]).gradient(values, np.asarray(targets), as_loss(loss_fn))
        self.collect(found.vector, found.weight)
        return found.loss

    def step(self, optimizer: Any) -> None:
        """Take one step of the optimizer."""
        network = self.model.network
        self.move(self.model, optimizer, network.spec, network.vector)


class OwnLearner(ArrayLearner):
    """Learner of the user's own model, with `parameters` and `gradient(arrays, x, y)`.

    The model's arrays are read before each gradient and written after each step, because other code
    may change them in between.
    """

    device = "cpu"

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.parameters = {name: _writable(value) for name, value in model.parameters.items()}
        self.model = model
        arrays = {name: np.asarray(value, np.float32) for name, value in model.parameters.items()}
        self._spec = ParameterSpec(tuple([Parameter(name, array.shape) for name, array in arrays.items()]))
        self._vector = self._spec.flatten(arrays)
        self._arrays = self._spec.views(self._vector)

    @property
    def participant(self) -> Any:
        """The model's arrays."""
        return self.model.parameters

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the result of the model's own `predict`."""
        return np.asarray(self.model.predict(self.participant, np.asarray(inputs)))

    def add(self, inputs: Any, targets: Any, loss_fn: Any) -> float:  # noqa: ARG002
        """Accumulate a batch's gradient; return its mean loss."""
        self._read()
        loss, found = self.model.gradient(self._arrays, np.asarray(inputs), np.asarray(targets))
        gradients = {name: np.asarray(found[name], np.float32) for name in self._arrays}
        self.collect(self._spec.flatten(gradients), len(targets))
        return float(loss)

    def step(self, optimizer: Any) -> None:
        """Take one step of the optimizer."""
        self._read()
        self.move(self.model, optimizer, self._spec, self._vector)
        for name, array in self._arrays.items():
            self.model.parameters[name][...] = array

    def _read(self) -> None:
        for name, array in self._arrays.items():
            array[...] = self.model.parameters[name]


class TorchLearner(Learner):
    """Learner of a torch module; gradients accumulate in its parameters."""

    def __init__(self, module: Any) -> None:
        self.model = module
        self._chosen = ChosenOptimizer()
        self._weight = 0.0

    @property
    def device(self) -> str:
        """The device on which the model computes."""
        return str(next(self.model.parameters()).device)

    @property
    def participant(self) -> Any:
        """The module."""
        return self.model

    @property
    def hub_model(self) -> Any:
        """A copy of the module with its current values."""
        import edgeasync.torch as ours  # noqa: PLC0415 - imports torch

        return ours.model(self.model)

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the module's output in evaluation mode."""
        torch, before = sys.modules["torch"], self.model.training
        with torch.no_grad():
            found: npt.NDArray[Any] = self.model.eval()(torch.as_tensor(inputs).to(self.device)).cpu().numpy()
        self.model.train(before)
        return found

    def count_step(self, optimizer: Any, session: Any, loss: float | None, examples: int) -> None:
        """Take an optimizer step. A hook of the session counts the step."""
        if session is not None:
            session.note(loss=loss, examples=examples)
        self.step(optimizer)

    def add(self, inputs: Any, targets: Any, loss_fn: Any) -> float:
        """Accumulate a batch's gradient; return its mean loss."""
        torch, device = sys.modules["torch"], self.device
        if not self._weight:
            self.model.zero_grad()
        x, y = (torch.as_tensor(np.ascontiguousarray(each) if isinstance(each, np.ndarray) else each).to(device)
                for each in (inputs, targets))  # fmt: skip
        loss = torch_loss(loss_fn)(self.model(x), y)
        weight = _weight_of(loss_fn, y)
        if weight:
            (loss * weight).backward()
            self._weight += weight
        return float(loss.detach())

    def step(self, optimizer: Any) -> None:
        """Take one step of an optimizer of torch or of `optim`."""
        optimizer = self._chosen(optimizer)
        if isinstance(optimizer, Optimizer):
            optimizer = optimizer.for_torch(self.model.parameters())
        if self._weight:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self._weight
        optimizer.step()
        optimizer.zero_grad()
        self._weight = 0.0


def _writable(value: Any) -> npt.NDArray[Any]:
    """Return `value` as a writable array of floats; it is copied only if necessary."""
    whole = isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.flags.writeable
    return value if whole else np.array(value, np.float32)


def torch_loss(loss_fn: Any) -> Callable[[Any, Any], Any]:
    """Return the loss function for tensors, by default cross entropy.

    Raises `ConfigError` if `loss_fn` cannot be called.
    """
    if loss_fn is None:
        return CrossEntropyLoss()
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is {type(loss_fn).__name__}; for a torch module use a loss of torch.nn or async_train.nn"
        )
    found: Callable[[Any, Any], Any] = loss_fn
    return found


def _weight_of(loss_fn: Any, targets: Any) -> float:
    """Return the divisor of a batch's mean loss: the sum of class weights or the example count."""
    if isinstance(loss_fn, LossFunction):
        loss: Any = loss_fn.loss()
        weights, ignored = getattr(loss, "class_weights", None), getattr(loss, "ignored_label", None)
    else:
        weights, ignored = getattr(loss_fn, "weight", None), getattr(loss_fn, "ignore_index", None)
    if targets.is_floating_point():  # torch takes the mean over examples
        return float(len(targets))
    if ignored is not None:
        targets = targets[targets != ignored]
    if weights is None:
        return float(len(targets))
    each = np.asarray(weights if isinstance(weights, tuple) else weights.cpu(), np.float64)
    return float(each[np.asarray(targets.cpu())].sum())
