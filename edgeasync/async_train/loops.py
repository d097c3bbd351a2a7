"""A model in a loop of the user's own, a batch at a time: what averagers and trainers have in common."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.async_train.adapters import is_torch
from edgeasync.async_train.data.loader import DataLoader
from edgeasync.async_train.learners import counted_step, learner_of
from edgeasync.async_train.model import Model
from edgeasync.errors import ConfigError

EVALUATED_AT_ONCE = 256
"""How many examples of a pair of arrays an evaluation computes at a time."""


class Loop:
    """A model that is trained a batch at a time: torch's, one of `nn`, an ONNX file, or a custom one.

    Its values are in the model that was given. `hub_model` is the model as `Hub` takes it, with the values that it
    had first, and `participant` as `join` takes it.
    """

    def __init__(self, model: Any, device: object = None, where: str = "device") -> None:
        self._learner = learner_of(model, device, where)
        self._model = self._learner.model
        self.participant = self.hub_model = self._model
        if is_torch(model):
            import edgeasync.torch as ours  # noqa: PLC0415 - who has a module has paid for torch

            self.hub_model = ours.model(model)
        elif isinstance(self._model, Model):
            self.participant = self._model.network
        else:
            self.participant = model.parameters

    @property
    def device(self) -> str:
        """Where the model computes."""
        return self._learner.device

    def step(
        self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None, session: Any = None
    ) -> float:
        """Take one step of the optimizer on a batch, and count it; return its mean loss before the step."""
        loss = self._learner.add(inputs, targets, loss_fn)
        counted_step(self._learner, optimizer, session, loss, len(targets))
        return loss

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return what the model says of inputs, as in use: scores, or the numbers of classes."""
        if not is_torch(self._model):
            given = np.asarray(inputs)
            own = not isinstance(self._model, Model)
            return np.asarray(self._model.predict(self.participant, given) if own else self._model(given))
        import torch

        module, device = self._model, next(self._model.parameters()).device
        before = module.training
        with torch.no_grad():
            found: npt.NDArray[Any] = module.eval()(torch.as_tensor(inputs).to(device)).cpu().numpy()
        module.train(before)
        return found


def evaluate(loop: Loop, loader: Iterable[tuple[Any, Any]] | tuple[Any, Any]) -> float:
    """Return the accuracy on a loader's batches or a pair of arrays; of values the mean squared error."""
    total, count = 0.0, 0
    if isinstance(loader, tuple):
        loader = DataLoader(loader, batch_size=EVALUATED_AT_ONCE)
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
