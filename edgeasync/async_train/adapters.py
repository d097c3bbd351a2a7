"""What a program of the reference gives - data, losses, optimizers - as edgeasync's public face takes it."""

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
"""Arguments of `Hub`, `Agent` and `join` that may be paths."""

BATCH_SIZE = 32
"""Where nobody says one, and data come in no batches."""


def settled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that are used later, with absolute paths: the working directory may be another one then."""
    return {
        name: Path(value).expanduser().absolute() if name in PLACES and isinstance(value, str | Path) else value
        for name, value in arguments.items()
    }


TORCH_LOSSES: dict[str, Callable[[Any], Loss]] = {
    "BCEWithLogitsLoss": lambda _: BinaryCrossEntropy(),
    "CrossEntropyLoss": lambda loss: CrossEntropy(
        class_weights=None if loss.weight is None else tuple(loss.weight.tolist()),
        label_smoothing=loss.label_smoothing,
        ignored_label=loss.ignore_index if loss.ignore_index >= 0 else None,  # no label here is below 0
    ),
    "L1Loss": lambda _: MeanAbsoluteError(),
    "MSELoss": lambda _: MeanSquaredError(),
}
"""What torch's losses of these names are."""


def is_torch(model: object) -> bool:
    """Return whether a model is a `torch.nn.Module`; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def has_parameters(model: object) -> bool:
    """Return whether a model is one of the user's own in numpy: an object with named arrays."""
    return isinstance(getattr(model, "parameters", None), Mapping)


def as_data(dataset: object = None, dataloader: object = None) -> Dataset:
    """Return one of the two as data for `Agent`; raises `ConfigError` for none or both, and `DataError`."""
    if (dataset is None) == (dataloader is None):
        raise ConfigError("training needs data: give dataset or dataloader, one of the two")
    return as_dataset(dataloader if dataset is None else dataset)


def batch_size_of(loader: object) -> int:
    """Return the batch size of a loader, or the usual one if it has none."""
    return batch_size(loader) or BATCH_SIZE


def as_loss(loss_fn: object) -> LossSetting:
    """Return the loss that an object of ours or of torch stands for; raises `ConfigError`."""
    name = type(loss_fn).__name__
    make = TORCH_LOSSES.get(name) if type(loss_fn).__module__.startswith("torch.") else None
    if make is None:
        return loss_of(loss_fn)
    if (reduction := getattr(loss_fn, "reduction", "mean")) != "mean":
        raise ConfigError(f"{name} has reduction={reduction!r}; a loss is the mean of a batch here: leave it out")
    if name == "BCEWithLogitsLoss":
        for argument in ("weight", "pos_weight"):
            if getattr(loss_fn, argument, None) is not None:
                raise ConfigError(f"{name} has a {argument}, which only torch itself can train with; leave it out")
    return make(loss_fn)


def as_stages(optimizer: object) -> Any:
    """Return an optimizer of `optim` as edgeasync's own, and anything else as it is."""
    return optimizer.optimizer() if isinstance(optimizer, Optimizer) else optimizer


def as_maker(optimizer: object) -> Any:
    """Return an optimizer for `edgeasync.torch.model`: torch's as it is, another as what makes torch's."""
    ours = as_optimizer(optimizer)
    return ours.maker_for_torch() if isinstance(ours, Optimizer) else ours


def as_optimizer(optimizer: Any) -> Any:
    """Return edgeasync's own SGD or Adam as one of `optim`, and anything else as it is."""
    found: Optimizer
    if isinstance(optimizer, SGD):
        found = optim.SGD(lr=optimizer.learning_rate, momentum=optimizer.momentum)
    elif isinstance(optimizer, Adam):
        betas = optimizer.beta1, optimizer.beta2
        found = optim.Adam(lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon)
    else:
        return optimizer
    found.stage = optimizer  # which may say more than torch's can
    return found


def as_address(server: str) -> str:
    """Return `host:port` as an address; one with its transport stays as it is.

    >>> as_address("10.0.0.1:5000")
    'tcp://10.0.0.1:5000'
    """
    transport, _, place = server.rpartition("://")
    if transport == "ipc" and place and place[0] not in "@*":  # a path, which no `chdir` is to move
        return f"ipc://{Path(place).expanduser().absolute()}"
    return server if transport else f"tcp://{server}"


def put_back(model: Any, arrays: Any) -> None:
    """Put trained values into the model that was given; a file keeps its own."""
    if is_torch(model):
        import edgeasync.torch as ours  # noqa: PLC0415 - who has a module has paid for torch

        ours.load(model, arrays)
    elif hasattr(model, "load_state_dict"):
        model.load_state_dict(arrays)
    elif has_parameters(model):
        model.parameters = arrays
