"""The engines of `train`, and the creation of their workers."""

from collections.abc import Sequence
from typing import Literal, get_args

from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError
from edgeasync.sdk.models import Prepared
from edgeasync.sdk.shares import Share, check_same_model
from edgeasync.sdk.workers.base import Workers, examples_of
from edgeasync.sdk.workers.tasks import TaskWorkers

Engine = Literal["tasks", "processes", "ray"]
"""Where workers run: in this process, in processes of this machine, or as actors on Ray."""


def make_workers(
    engine: Engine, prepared: Prepared, shares: Sequence[Share], seed: int, ray_address: str | None
) -> Workers:
    """Create the workers of a run without starting them.

    Raises `ConfigError` for invalid arguments, and `ModelMismatchError` if a trainer in `shares`
    trains another model.
    """
    if engine not in get_args(Engine):
        raise ConfigError(f"engine is {engine!r}; choose one of {', '.join(map(repr, get_args(Engine)))}")
    if ray_address is not None and engine != "ray":
        raise ConfigError(f"ray_address requires engine='ray', but engine is {engine!r}")
    check_same_model(shares, prepared.spec)
    if engine == "tasks":
        trainers = [
            prepared.make_trainer(share, seed + number, 1) if isinstance(share, Dataset) else share
            for number, share in enumerate(shares)
        ]
        return TaskWorkers(trainers, [examples_of(share) for share in shares])
    if engine == "processes":
        from edgeasync.sdk.workers.processes import ProcessWorkers  # noqa: PLC0415 - only if needed

        return ProcessWorkers(shares, prepared.make_trainer, seed)
    from edgeasync.sdk.workers.ray_actors import RayWorkers  # noqa: PLC0415 - only if needed

    return RayWorkers(shares, prepared.make_trainer, seed, ray_address)
