"""Converts data, losses and optimizers of the toolbox into those of edgeasync's public API."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeasync import SGD, Adam, Dataset
from edgeasync.async_train import optim
from edgeasync.async_train.data import as_dataset
from edgeasync.async_train.data import batch_size_of as batch_size
from edgeasync.async_train.loss_functions import loss_of
from edgeasync.async_train.optim import Optimizer
from edgeasync.errors import ConfigError
from edgeasync.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Loss,
    LossSetting,
    MeanAbsoluteError,
    MeanSquaredError,
)

PLACES = ("run", "keys", "state", "peers", "validation")
"""Arguments of `Hub`, `Agent` and `join` that may be file paths."""

BATCH_SIZE = 32
"""Default batch size for data that are not batched."""


def settled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths in `arguments` absolute, because the working directory may change later."""
    return {
        name: Path(value).expanduser().absolute() if name in PLACES and isinstance(value, str | Path) else value
        for name, value in arguments.items()
    }


TORCH_LOSSES: dict[str, Callable[[Any], Loss]] = {
    "BCEWithLogitsLoss": lambda _: BinaryCrossEntropy(),
    "CrossEntropyLoss": lambda loss: CrossEntropy(
        class_weights=None if loss.weight is None else tuple(loss.weight.tolist()),
        label_smoothing=loss.label_smoothing,
        ignored_label=loss.ignore_index if loss.ignore_index >= 0 else None,  # labels are never negative
    ),
    "L1Loss": lambda _: MeanAbsoluteError(),
    "MSELoss": lambda _: MeanSquaredError(),
}
"""Conversions of torch losses, by class name."""


def is_torch(model: object) -> bool:
    """Return whether a model is a `torch.nn.Module`, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def has_parameters(model: object) -> bool:
    """Return whether a model is the user's own numpy model, which has named arrays."""
    return isinstance(getattr(model, "parameters", None), Mapping)


def as_data(dataset: object = None, dataloader: object = None) -> Dataset:
    """Convert `dataset` or `dataloader` to data for `Agent`.

    Raises `ConfigError` unless exactly one is set, and `DataError` for unusable data.
    """
    if (dataset is None) == (dataloader is None):
        raise ConfigError("training needs data: pass either dataset or dataloader")
    return as_dataset(dataloader if dataset is None else dataset)


def batch_size_of(loader: object) -> int:
    """Return the batch size of a loader, or the default for other data."""
    return batch_size(loader) or BATCH_SIZE


def as_loss(loss_fn: object) -> LossSetting:
    """Convert a loss of torch or of this package to edgeasync's; raises `ConfigError` for others."""
    name = type(loss_fn).__name__
    make = TORCH_LOSSES.get(name) if type(loss_fn).__module__.startswith("torch.") else None
    if make is None:
        return loss_of(loss_fn)
    if (reduction := getattr(loss_fn, "reduction", "mean")) != "mean":
        raise ConfigError(f"{name} has reduction={reduction!r}, but the loss must be a mean; remove reduction")
    if name == "BCEWithLogitsLoss":
        for argument in ("weight", "pos_weight"):
            if getattr(loss_fn, argument, None) is not None:
                raise ConfigError(f"{name} has a {argument}, which is supported only for torch modules; remove it")
    return make(loss_fn)


def as_stages(optimizer: object) -> Any:
    """Convert an optimizer of `optim` to edgeasync's; return anything else unchanged."""
    return optimizer.optimizer() if isinstance(optimizer, Optimizer) else optimizer


def as_maker(optimizer: object) -> Any:
    """Convert an optimizer for `edgeasync.torch.model`; torch optimizers are returned unchanged."""
    ours = as_optimizer(optimizer)
    return ours.maker_for_torch() if isinstance(ours, Optimizer) else ours


def as_optimizer(optimizer: Any) -> Any:
    """Convert edgeasync's SGD or Adam to one of `optim`; return anything else unchanged."""
    found: Optimizer
    if isinstance(optimizer, SGD):
        found = optim.SGD(lr=optimizer.learning_rate, momentum=optimizer.momentum)
    elif isinstance(optimizer, Adam):
        betas = optimizer.beta1, optimizer.beta2
        found = optim.Adam(lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon)
    else:
        return optimizer
    found.stage = optimizer  # edgeasync's optimizer may have options that torch's lacks
    return found


def as_address(server: str) -> str:
    """Convert `host:port` to an address; addresses with a transport are returned unchanged.

    >>> as_address("10.0.0.1:5000")
    'tcp://10.0.0.1:5000'
    """
    transport, _, place = server.rpartition("://")
    if transport == "ipc" and place and place[0] not in "@*":  # a path: make it independent of `chdir`
        return f"ipc://{Path(place).expanduser().absolute()}"
    return server if transport else f"tcp://{server}"


def put_back(model: Any, arrays: Any) -> None:
    """Load trained values into the user's model; a model file is not changed."""
    if is_torch(model):
        import edgeasync.torch as ours  # noqa: PLC0415 - imports torch

        ours.load(model, arrays)
    elif hasattr(model, "load_state_dict"):
        model.load_state_dict(arrays)
    elif has_parameters(model):
        model.parameters = arrays
