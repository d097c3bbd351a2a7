"""What a program of the reference gives - data, loss, optimizer, model - as edgeasync's public face takes it."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from edgeasync import SGD, Adam, Dataset, data
from edgeasync.errors import ConfigError, DataError
from edgeasync.losses import BinaryCrossEntropy, CrossEntropy, Huber, Loss, LossSetting, MeanAbsoluteError
from edgeasync.losses import MeanSquaredError as Mse

LOSSES: dict[str, Loss] = {
    "BCEWithLogitsLoss": BinaryCrossEntropy(),
    "CrossEntropyLoss": CrossEntropy(),
    "HuberLoss": Huber(),
    "L1Loss": MeanAbsoluteError(),
    "MSELoss": Mse(),
}
"""Losses by the names that torch's classes have."""


def is_torch(model: object) -> bool:
    """Return whether a model is a `torch.nn.Module`; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def as_data(dataset: object = None, dataloader: object = None) -> Any:
    """Return one of the two as data for `train` and `Agent`.

    A loader over a dataset stands for that dataset: who trains on it draws the batches. Any other loader is read
    once. Raises `ConfigError` unless there is one of the two, and `DataError` for what holds no examples.
    """
    if (dataset is None) == (dataloader is None):
        raise ConfigError("training needs data: give dataset or dataloader, one of the two")
    given: Any = dataset if dataloader is None else dataloader
    given = getattr(given, "dataset", given) if hasattr(given, "batch_size") else given
    if given is None or isinstance(given, Dataset | tuple | list | str) or hasattr(given, "__fspath__"):
        return given
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return data.from_samples(given)
    if not hasattr(given, "__iter__"):
        raise DataError(
            f"the data is {type(given).__name__}; give a dataset, a loader, or a tuple (x, y) of arrays"
        )
    batches = [(np.asarray(x), np.asarray(y)) for x, y in given]
    if not batches:
        raise DataError("the loader has no batches; give it data")
    return tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))


def batch_size_of(*loaders: object) -> int | None:
    """Return the batch size of the first loader that has one."""
    return next((size for each in loaders if (size := getattr(each, "batch_size", None)) is not None), None)


def as_loss(loss_fn: object) -> LossSetting:
    """Return the loss that an object stands for, by its class as torch names it; raises `ConfigError`."""
    if loss_fn is None:
        return "cross_entropy"
    if isinstance(loss_fn, str | Loss):
        return loss_fn  # type: ignore[return-value] - who takes it checks a name
    found = LOSSES.get(type(loss_fn).__name__)
    if found is None:
        raise ConfigError(
            f"loss_fn is {type(loss_fn).__name__}; a model that travels has one of {', '.join(LOSSES)}, or an object "
            "of edgeasync.losses; any other needs a torch module on each worker"
        )
    return found


def as_optimizer(optimizer: object) -> Any:
    """Return an optimizer of `optim` as edgeasync's own, and anything else as it is."""
    return optimizer.optimizer() if hasattr(optimizer, "optimizer") else optimizer


def torch_optimizer(optimizer: Any) -> Any:
    """Return an optimizer for a torch module: torch's own as it is, another as a function that makes torch's."""
    own = as_optimizer(optimizer)
    if not isinstance(own, SGD | Adam):
        return own
    import torch  # noqa: PLC0415 - who trains a module has it

    decay = float(getattr(optimizer, "weight_decay", 0.0))
    make: Callable[..., Any] = torch.optim.Adam if isinstance(own, Adam) else torch.optim.SGD
    extra = {} if isinstance(own, Adam) else {"momentum": own.momentum}
    return lambda parameters: make(parameters, lr=own.learning_rate, weight_decay=decay, **extra)


def as_address(server: str) -> str:
    """Return `host:port` as an address; one with its transport stays as it is.

    >>> as_address("10.0.0.1:5000")
    'tcp://10.0.0.1:5000'
    """
    return server if "://" in server else f"tcp://{server}"
