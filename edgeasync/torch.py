"""Trains torch modules on a fleet.

`model` wraps a module for `train`, `Hub` and `Agent`; `join` accepts the module itself. `load`
copies a run's trained arrays into a module, and `to_onnx` exports a module for devices without
torch. This module is imported only on first use.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeasync.data.dataset import Dataset, Inputs
from edgeasync.errors import ConfigError, DataError, ModelMismatchError
from edgeasync.parameters import Arrays, ParameterSpec, Vector
from edgeasync.sdk.adapted import Adapted
from edgeasync.sdk.models import Prepared
from edgeasync.sdk.run import Run
from edgeasync.sdk.torch_copies import Copies
from edgeasync.sdk.torch_export import to_onnx
from edgeasync.sdk.torch_losses import Loss, TorchLoss
from edgeasync.sdk.torch_modules import (
    copy_of,
    exchanged_of,
    frozen_of,
    hooked,
    listed,
    parameters_of,
    read_tensors,
    write_tensors,
)
from edgeasync.sdk.torch_optimizers import MakeOptimizer, maker_of
from edgeasync.sdk.torch_scores import ROWS, check_scores, scores_of
from edgeasync.sdk.torch_steps import watch_steps
from edgeasync.sdk.torch_trainer import TorchTrainer, returned, tensor_of
from edgeasync.training.evaluation import EvaluationResult, Evaluator, add_up, mean_of
from edgeasync.training.losses import LossSum
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import Trainer

__all__ = ["load", "model", "to_onnx", "watch_steps"]

EVALUATED_AT_ONCE = 256
"""Batch size of evaluations."""


def model(
    module: nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    device: str | torch.device = "cpu",
) -> "TorchModel":
    """Return a module as a model for `train`, `Hub` and `Agent`. The module is copied, not changed.

    - `loss`: the mean loss of a batch. The default is cross-entropy for integer targets, and mean
      squared error for other targets. Element-wise losses of torch accept targets (n,) for an
      output (n, 1). A custom loss receives the output of the module, such as a dict. Accuracy and
      metrics are computed only if this output is a single tensor of scores for the targets.
    - `optimizer`: an optimizer of `torch.optim` for all parameters of the module that are not
      frozen. Its groups and current learning rates are used. Alternatively, a function that
      receives parameters and returns an optimizer for them. The default is SGD with a learning rate
      of 0.05.
    - `device`: the torch device on which to train, such as "cuda".

    A module with several inputs receives them by their names in the data.

    >>> import numpy as np
    >>> from torch import nn
    >>> import edgeasync
    >>> data = np.eye(3), np.arange(3)
    >>> module = nn.Linear(3, 3)
    >>> run = edgeasync.train(edgeasync.torch.model(module), data, workers=1, until=edgeasync.Stop(updates=4))
    >>> type(run.model).__name__
    'Linear'
    """
    return TorchModel(module, loss, optimizer, torch.device(device))


def load(module: nn.Module, run: Run | Arrays) -> nn.Module:
    """Copy the arrays of a run, or named arrays, into a module, and return the module.

    Raises `ModelMismatchError` if they belong to another model.

    >>> import numpy as np
    >>> from torch import nn
    >>> from edgeasync.torch import load
    >>> load(nn.Linear(1, 1), {"weight": np.ones((1, 1)), "bias": np.zeros(1)}).weight.tolist()
    [[1.0]]
    """
    arrays = run.arrays if isinstance(run, Run) else run
    exchanged = exchanged_of(module)
    if exchanged.keys() != arrays.keys():
        name = min(exchanged.keys() ^ arrays.keys())
        raise ModelMismatchError(
            f"the run and {type(module).__name__} have different arrays: only one of them has {name!r}; pass the "
            "module that was trained"
        )
    write_tensors(exchanged, arrays)
    return module


class TorchModel(Adapted):
    """A module that devices train, created by `model`."""

    optimizer_is = "pass one of torch.optim to edgeasync.torch.model"
    measures = True

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None,
        device: torch.device,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is {type(module).__name__}; pass a torch.nn.Module")
        self._module = copy_of(module).cpu()
        self._loss = TorchLoss(loss)
        self._make_optimizer = maker_of(optimizer, module)
        self._device = device
        self.spec = ParameterSpec(tuple(parameters_of(self._module)))
        self.frozen = frozen_of(self._module)

    def __getstate__(self) -> dict[str, Any]:
        if names := hooked(self._module):
            raise ConfigError(
                f"the gradient of {listed(names)} has a hook, which cannot be sent to another process; train with "
                "engine='tasks', or remove the hook"
            )
        return self.__dict__

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model in the form that `train` and agents need."""
        exchanged = exchanged_of(self._module)
        initial = np.empty(self.spec.length, np.float32)
        read_tensors(exchanged, self.spec.views(initial))
        return Prepared(
            spec=self.spec,
            initial=initial,
            make_trainer=lambda data, seed, _: self._trainer(data, local, seed),
            make_evaluator=self._evaluator,
            restore=lambda arrays: load(copy_of(self._module), arrays),
            frozen=self.frozen,
        )

    def _trainer(self, data: Dataset, local: LocalTraining, seed: int) -> Trainer:
        data = self._targets_of(data)
        module = copy_of(self._module).to(self._device)
        if scores := scores_of(self._loss.given, whole_targets=data.y.dtype.kind == "i"):
            x = data.features[np.arange(min(ROWS, len(data)))]
            check_scores(module, lambda tried: returned(tried, x, self._device), scores)
        optimizer = self._make_optimizer([tensor for tensor in module.parameters() if tensor.requires_grad])
        return TorchTrainer(
            self.spec, module, self._loss, optimizer, data=data, local=local, seed=seed, frozen=self.frozen
        )

    def _targets_of(self, data: Dataset) -> Dataset:
        """Convert integer targets to floats if the loss needs floats, as for ONNX models.

        Raises `DataError` if the input names in the data differ from those of the module.
        """
        if isinstance(data.features, Inputs):
            taken = inspect.signature(self._module.forward)
            try:
                taken.bind(**data.features.arrays)
            except TypeError:
                raise DataError(
                    f"the data has the inputs {', '.join(data.features.arrays)}, but "
                    f"{type(self._module).__name__}.forward has {', '.join(taken.parameters)}; use the same names"
                ) from None
        whole = self._loss.takes_values and data.y.dtype.kind == "i"
        return Dataset(data.features, data.y.astype(np.float32)) if whole else data

    def _evaluator(self, data: Dataset) -> Evaluator:
        data = self._targets_of(data)
        module = copy_of(self._module).to(self._device).eval()
        exchanged, copies = exchanged_of(module), Copies()

        def evaluate(parameters: Vector) -> EvaluationResult:
            copies.write(exchanged, self.spec.views(parameters))
            with torch.no_grad():
                return add_up(data.features, data.y, EVALUATED_AT_ONCE, loss_of)

        def loss_of(x: Any, y: Any) -> LossSum:
            found = returned(module, x, self._device)
            loss = float(self._loss(found, tensor_of(y, self._device)))
            classes = found.argmax(1).cpu().numpy() if self._loss.tells_classes(found, y) else None
            return mean_of(loss, y, classes, ignored_label=self._loss.ignored_label)

        return evaluate
