"""Distributes data or trainers to the workers of `train` or of an agent."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import iid
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.parameters import ParameterSpec
from edgeasync.sdk.models import as_dataset
from edgeasync.sdk.plan import check_seed
from edgeasync.sdk.stop import Stop
from edgeasync.training.trainer import Trainer

Share = Dataset | Trainer
"""What one worker trains on: a dataset, or the user's own trainer."""

DEFAULT_WORKERS = 4


def split(data: object, workers: int | None, seed: int) -> list[Share]:
    """Return the data or trainer of each worker.

    Raises `ConfigError` for invalid arguments, and `DataError` for unusable data.
    """
    check_seed(seed)
    count = count_workers(workers, data, DEFAULT_WORKERS)
    if not isinstance(data, list):
        return list(iid(as_dataset(data, "the data"), count, seed))
    check_apart(data)
    return [
        part if is_trainer(part) else as_dataset(part, f"the data of worker {number}")
        for number, part in enumerate(data, 1)
    ]


def count_workers(workers: int | None, given: object, default: int) -> int:
    """Return the number of workers: the length of the list `given`, else `workers` or `default`.

    Raises `ConfigError` for invalid arguments.
    """
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ConfigError(f"workers is {workers!r}; pass 1 or more")
    if not isinstance(given, list):
        return workers or default
    if not given:
        raise ConfigError("the list is empty: pass the data or trainer of at least one worker")
    if workers not in (None, len(given)):
        raise ConfigError(
            f"workers is {workers}, but the list has {len(given)} entries; remove the argument workers"
        )
    return len(given)


def check_apart(parts: list[Any]) -> None:
    """Raise `ConfigError` if two workers have the same trainer, since each worker has a thread."""
    first: dict[int, int] = {}
    for number, part in enumerate(parts, 1):
        if is_trainer(part) and first.setdefault(id(part), number) != number:
            raise ConfigError(
                f"workers {first[id(part)]} and {number} share a trainer object: create one for each worker"
            )


def check_epochs(until: object, shares: Sequence[Share]) -> None:
    """Raise `ConfigError` if `until` counts epochs, but no worker has a dataset."""
    by_passes = isinstance(until, Stop) and until.epochs is not None
    if by_passes and not any(isinstance(share, Dataset) for share in shares):
        raise ConfigError(
            "until.epochs needs a dataset: your own trainers do not report their size; use Stop(updates=...)"
        )


def check_same_model(shares: Sequence[Share], spec: ParameterSpec) -> None:
    """Raise `ModelMismatchError` if a trainer's arrays differ from `spec`."""
    for number, share in enumerate(shares, 1):
        if not isinstance(share, Dataset) and share.spec != spec:
            raise ModelMismatchError(
                f"the arrays of trainer {number} differ from the model's; use the model's names and shapes"
            )


def hold_back(part: Share, validation: object, seed: int) -> tuple[Share, object]:
    """Hold out a fraction of a worker's data; return the training data and the validation data.

    If `validation` is data or a function, both arguments are returned unchanged. Raises
    `ConfigError` if either result would be empty, or if `part` is not a dataset.
    """
    if isinstance(validation, bool) or not isinstance(validation, int | float):
        return part, validation
    if not isinstance(part, Dataset):
        raise ConfigError(
            f"validation is {validation}, a fraction of the data, but your own trainer has no data to hold out; "
            "pass a function of the named arrays"
        )
    count = round(validation * len(part)) if 0 < validation < 1 else 0
    if not 0 < count < len(part):
        raise ConfigError(
            f"validation is {validation} of {len(part)} examples; hold out at least one, but not all"
        )
    order = np.random.default_rng(seed).permutation(len(part))
    return part.take(order[count:]), part.take(order[:count])


def is_trainer(part: object) -> TypeGuard[Trainer]:
    """Return whether `part` is the user's own trainer."""
    return all(hasattr(part, name) for name in ("spec", "begin", "step"))
