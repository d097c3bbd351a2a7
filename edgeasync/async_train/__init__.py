"""A toolbox for asynchronous training with familiar class names, such as `ParameterServer`.

It uses only edgeasync's public API, and the rest of edgeasync does not import it.
docs/train/async_train.md explains each name and the differences from other libraries. Names are
imported on first use.

    >>> from edgeasync.async_train import init_distributed
    >>> rank, world_size = init_distributed(rank=0, world_size=1)
    >>> rank, world_size
    (0, 1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeasync.async_train.accumulator import AsyncGradientAccumulator
    from edgeasync.async_train.averager import AsyncModelAverager
    from edgeasync.async_train.bagua import AsyncModelAverageAlgorithm, with_edgeasync
    from edgeasync.async_train.distributed import init_distributed
    from edgeasync.async_train.one_machine import async_sgd
    from edgeasync.async_train.parameter_server import ParameterServer
    from edgeasync.async_train.worker import AsyncWorker

_HOMES = {
    "AsyncGradientAccumulator": "accumulator",
    "AsyncModelAverageAlgorithm": "bagua",
    "AsyncModelAverager": "averager",
    "AsyncTrainer": "warm_up",
    "AsyncTrainingMonitor": "monitor",
    "AsyncWorker": "worker",
    "FaultTolerantTrainer": "fault_tolerant",
    "ParameterServer": "parameter_server",
    "async_sgd": "one_machine",
    "init_distributed": "distributed",
    "transforms": "data",
    "with_edgeasync": "bagua",
}
_MODULES = ("cuda", "data", "distributed", "models", "nn", "optim")

__all__ = [
    "AsyncGradientAccumulator",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverager",
    "AsyncTrainer",
    "AsyncTrainingMonitor",
    "AsyncWorker",
    "FaultTolerantTrainer",
    "ParameterServer",
    "async_sgd",
    "init_distributed",
    "with_edgeasync",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; dir(edgeasync.async_train) lists all names"
        )
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES])
