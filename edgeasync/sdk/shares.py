"""What each worker of `train` or of an agent trains with, from the data that the user gave."""

from typing import Any, TypeGuard

from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import iid
from edgeasync.errors import ConfigError
from edgeasync.sdk.models import as_dataset
from edgeasync.sdk.plan import check_seed
from edgeasync.training.trainer import Trainer

Share = Dataset | Trainer
"""What one worker trains with: examples, or a trainer of the user's own."""

DEFAULT_WORKERS = 4


def split(data: object, workers: int | None, seed: int) -> list[Share]:
    """Return the data of each worker, or its trainer; raises `ConfigError` or `DataError`."""
    check_seed(seed)
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ConfigError(f"workers is {workers!r}; give 1 or more")
    if not isinstance(data, list):
        return list(iid(as_dataset(data, "the data"), DEFAULT_WORKERS if workers is None else workers, seed))
    if not data:
        raise ConfigError("the list of data is empty: give the data of at least one worker")
    if workers not in (None, len(data)):
        raise ConfigError(f"workers is {workers}, but there are data of {len(data)}; leave out workers")
    check_apart(data)
    return [
        part if _is_trainer(part) else as_dataset(part, f"the data of worker {number}")
        for number, part in enumerate(data, 1)
    ]


def check_apart(parts: list[Any]) -> None:
    """Raise `ConfigError` if two workers have one trainer: each takes its steps in a thread of its own."""
    first: dict[int, int] = {}
    for number, part in enumerate(parts, 1):
        if _is_trainer(part) and first.setdefault(id(part), number) != number:
            raise ConfigError(
                f"workers {first[id(part)]} and {number} have one trainer object: make another one for each worker"
            )


def _is_trainer(part: object) -> TypeGuard[Trainer]:
    return all(hasattr(part, name) for name in ("spec", "begin", "step"))
