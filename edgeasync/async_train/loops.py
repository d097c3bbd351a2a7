"""A model in a loop of the user's own, a batch at a time: what averagers and trainers have in common."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeasync import Parameter, ParameterSpec
from edgeasync.async_train.given import as_loss, as_optimizer, is_torch
from edgeasync.async_train.model import Model
from edgeasync.async_train.optim import SGD, Optimizer
from edgeasync.errors import ConfigError


class Loop(Protocol):
    """A model that is trained a batch at a time; its values are in the model that was given."""

    hub_model: Any
    """The model as `Hub` takes it, with the values that it has now."""
    participant: Any
    """The model as `join` takes it."""

    def step(self, inputs: Any, targets: Any, optimizer: Any, loss_fn: Any, session: Any = None) -> float:
        """Take one step of the optimizer on a batch, and count it; return its mean loss before the step."""

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return what the model says of inputs: scores, or the numbers of classes."""


def loop_of(model: Any, device: object = "cpu") -> Loop:
    """Return the loop of a model: torch's, one of `nn`, the path of an ONNX file, or a custom one."""
    if is_torch(model):
        return TorchLoop(model, device)
    if isinstance(getattr(model, "parameters", None), Mapping):
        return ArrayLoop(model)
    return ModelLoop(model if isinstance(model, Model) else Model(model))


def evaluate(loop: Loop, loader: Iterable[tuple[Any, Any]]) -> float:
    """Return the accuracy on the batches of a loader; of values, not classes, the mean squared error."""
    total, count = 0.0, 0
    for inputs, targets in loader:
        y, found = np.asarray(targets), loop.predict(inputs)
        if y.dtype.kind in "iu":
            total += float(((found.argmax(1) if found.ndim > y.ndim else found) == y).sum())
        else:
            total += float(np.square(found - y.reshape(found.shape)).sum())
        count += y.size
    if not count:
        raise ConfigError("the loader has no batches to evaluate on")
    return total / count


class TorchLoop:
    """A torch module, on its device."""

    def __init__(self, module: Any, device: object) -> None:
        import edgeasync.torch as ours  # noqa: PLC0415 - who has a module has paid for torch

        self.participant = module.to(device)
        self._device = device
        self.hub_model = ours.model(module)

    def step(self, inputs: Any, targets: Any, optimizer: Any, loss_fn: Any, session: Any = None) -> float:
        """Take one step of the optimizer on a batch, and count it; return its mean loss before the step."""
        module, used = self.participant, as_optimizer(optimizer)
        if isinstance(used, Optimizer):
            used = used.for_torch(module.parameters())
        x, y = self._tensor(inputs), self._tensor(targets)
        module.train()
        used.zero_grad()
        loss = loss_fn(module(x), y)
        loss.backward()
        found = float(loss.detach())
        if session is not None:  # which sees the optimizer's step itself
            session.note(loss=found, examples=len(y))
        used.step()
        return found

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return what the model says of inputs: scores, or the numbers of classes."""
        import torch  # noqa: PLC0415 - who has a module has paid for it

        module = self.participant
        before = module.training
        with torch.no_grad():
            found: npt.NDArray[Any] = module.eval()(self._tensor(inputs)).cpu().numpy()
        module.train(before)
        return found

    def _tensor(self, values: Any) -> Any:
        import torch  # noqa: PLC0415 - who has a module has paid for it

        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(self._device)


class ModelLoop:
    """A model of `nn` or of ONNX, which onnxruntime computes."""

    def __init__(self, model: Model) -> None:
        self._model = self.hub_model = model
        self.participant = model.network
        self._used = _Used()

    def step(self, inputs: Any, targets: Any, optimizer: Any, loss_fn: Any, session: Any = None) -> float:
        """Take one step of the optimizer on a batch, and count it; return its mean loss before the step."""
        network, values = self._model.network, np.asarray(inputs)
        found = self._model.fit_to(values.shape[1:]).gradient(values, np.asarray(targets), as_loss(loss_fn))
        self._used.of(optimizer).update(network.spec, network.vector, found.vector)
        if session is not None:
            session.step(loss=found.loss, examples=len(values))
        return found.loss

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return what the model says of inputs: scores, or the numbers of classes."""
        values = np.asarray(inputs)
        return np.asarray(self._model.fit_to(values.shape[1:])(values))


class ArrayLoop:
    """A custom model: an object with `parameters`, a dict of arrays, and `gradient(arrays, x, y)`."""

    def __init__(self, model: Any) -> None:
        arrays = {name: np.asarray(array, np.float32) for name, array in model.parameters.items()}
        self.spec = ParameterSpec(tuple(Parameter(name, array.shape) for name, array in arrays.items()))
        self._vector = np.empty(self.spec.length, np.float32)
        self.arrays = self.spec.views(self._vector)
        for name, array in arrays.items():
            self.arrays[name][...] = array
        model.parameters = self.arrays
        self._model = self.hub_model = model
        self.participant = self
        self._used = _Used()

    def step(self, inputs: Any, targets: Any, optimizer: Any, loss_fn: Any, session: Any = None) -> float:  # noqa: ARG002
        """Take one step of the optimizer on a batch by the model's own loss, and count it; return the loss."""
        loss, gradients = self._model.gradient(self.arrays, np.asarray(inputs), np.asarray(targets))
        vector = np.empty_like(self._vector)
        for name, view in self.spec.views(vector).items():
            view[...] = gradients[name]
        self._used.of(optimizer).update(self.spec, self._vector, vector)
        if session is not None:
            session.step(loss=float(loss), examples=len(inputs))
        return float(loss)

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the classes that the model predicts."""
        return np.asarray(self._model.predict(self.arrays, np.asarray(inputs)))


class _Used:
    """The optimizer of the last step, which keeps its momentum for the next."""

    def __init__(self) -> None:
        self._given: Any = None
        self._found: Any = SGD(lr=0.05)

    def of(self, optimizer: Any) -> Optimizer:
        """Return an optimizer that moves a vector; raises `ConfigError` for torch's, which moves tensors."""
        if optimizer is not None and optimizer is not self._given:
            self._given, self._found = optimizer, as_optimizer(optimizer)
        if not isinstance(self._found, Optimizer):
            raise ConfigError(
                f"optimizer is {type(self._found).__name__}, and the model is not torch's: give optim.SGD(lr=0.1)"
            )
        return self._found
