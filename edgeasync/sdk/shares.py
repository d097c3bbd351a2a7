"""What each worker of `train` or of an agent trains with, from the data that the user gave."""

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
"""What one worker trains with: examples, or a trainer of the user's own."""

DEFAULT_WORKERS = 4


def split(data: object, workers: int | None, seed: int) -> list[Share]:
    """Return the data of each worker, or its trainer; raises `ConfigError` or `DataError`."""
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
    """Return how many workers there are, of what is given to all or in a list; raises `ConfigError`."""
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ConfigError(f"workers is {workers!r}; give 1 or more")
    if not isinstance(given, list):
        return workers or default
    if not given:
        raise ConfigError("the list is empty: give what at least one worker trains with")
    if workers not in (None, len(given)):
        raise ConfigError(f"workers is {workers}, but the list has {len(given)} entries; leave out workers")
    return len(given)


def check_apart(parts: list[Any]) -> None:
    """Raise `ConfigError` if two workers have one trainer: each takes its steps in a thread of its own."""
    first: dict[int, int] = {}
    for number, part in enumerate(parts, 1):
        if is_trainer(part) and first.setdefault(id(part), number) != number:
            raise ConfigError(
                f"workers {first[id(part)]} and {number} have one trainer object: make another one for each worker"
            )


def check_epochs(until: object, shares: Sequence[Share]) -> None:
    """Raise `ConfigError` if training is to end by passes over data, and no share is data."""
    by_passes = isinstance(until, Stop) and until.epochs is not None
    if by_passes and not any(isinstance(share, Dataset) for share in shares):
        raise ConfigError("until: trainers of your own do not say how much data they have; give Stop(updates=...)")


def check_same_model(shares: Sequence[Share], spec: ParameterSpec) -> None:
    """Raise `ModelMismatchError` for a trainer of another model."""
    for number, share in enumerate(shares, 1):
        if not isinstance(share, Dataset) and share.spec != spec:
            raise ModelMismatchError(
                f"trainer {number} has other arrays than the model; give it the model's names and shapes"
            )


def hold_back(part: Share, validation: object, seed: int) -> tuple[Share, object]:
    """Return what a worker trains with, and what it validates on: a share of its data, or what was given.

    Raises `ConfigError` for a share that leaves nothing on one side, or of what is no data.
    """
    if isinstance(validation, bool) or not isinstance(validation, int | float):
        return part, validation
    if not isinstance(part, Dataset):
        raise ConfigError(
            "validation is a share of data; with a trainer of your own give a function of the arrays"
        )
    count = round(validation * len(part)) if 0 < validation < 1 else 0
    if not 0 < count < len(part):
        raise ConfigError(
            f"validation is {validation} of {len(part)} examples; keep back at least one, and not all"
        )
    order = np.random.default_rng(seed).permutation(len(part))
    return part.take(order[count:]), part.take(order[:count])


def is_trainer(part: object) -> TypeGuard[Trainer]:
    """Return whether data are a trainer of the user's own."""
    return all(hasattr(part, name) for name in ("spec", "begin", "step"))
