"""Bagua's face: an algorithm that a model is given together with its optimizers."""

import sys
from collections.abc import Sequence
from typing import Any, Self, Unpack

from edgeasync.async_train.adapters import is_torch
from edgeasync.async_train.communication import Averaging, Communication
from edgeasync.async_train.distributed import init_distributed
from edgeasync.async_train.learners import learner_of
from edgeasync.async_train.peers import PeerCommunication, communication_of
from edgeasync.errors import ConfigError


class AsyncModelAverageAlgorithm:
    """Averages models every `sync_interval_ms`; the first `warmup_steps` steps are synchronous.

    Modules of torch have `with_bagua` and `with_edgeasync` from the first algorithm on.

    >>> from edgeasync.async_train import AsyncModelAverageAlgorithm
    >>> AsyncModelAverageAlgorithm(sync_interval_ms=500, warmup_steps=10).sync_interval_ms
    500
    """

    def __init__(self, *, sync_interval_ms: float = 500, **averaging: Unpack[Averaging]) -> None:
        self.sync_interval_ms = sync_interval_ms
        self._averaging = averaging
        averaging.setdefault("averaging_policy", "time")
        averaging.setdefault("averaging_interval_s", sync_interval_ms / 1000)
        if "torch" in sys.modules:
            sys.modules["torch"].nn.Module.with_bagua = sys.modules["torch"].nn.Module.with_edgeasync = (
                with_edgeasync
            )
        self._started: list[tuple[Any, Communication | PeerCommunication]] = []

    def start(self, model: Any, rank: int, world_size: int) -> None:
        """Begin to average a model; its optimizers' steps count from now on."""
        started = communication_of(model, learner_of(model), rank, world_size, **self._averaging).start()
        self._started.append((model, started))

    def __deepcopy__(self, memo: object) -> Self:
        """Return this: a copy of a module has the same algorithm."""
        return self

    def communication(self, model: Any) -> Communication | PeerCommunication:
        """Return what averages a model; raises `ConfigError` for one that was never given."""
        for known, found in self._started:
            if known is model:
                return found
        raise ConfigError(
            "this algorithm averages another model: call with_edgeasync(model, [optimizer], algorithm)"
        )

    def abort(self, model: Any) -> None:
        """Send and receive nothing until `resume`."""
        self.communication(model).session.abort()

    def resume(self, model: Any) -> None:
        """Average again."""
        self.communication(model).session.resume()

    def stop(self, model: Any) -> None:
        """Send the last steps; rank 0 waits for the others, and its model is the average of all."""
        self.communication(model).stop()


def with_edgeasync(model: Any, optimizers: Sequence[Any], algorithm: AsyncModelAverageAlgorithm) -> Any:
    """Return a torch module that is averaged from now on, whenever one of its optimizers has stepped.

    Rank and number of processes are as `init_distributed` says. `model.bagua_algorithm` is the algorithm. Raises
    `ConfigError` for what is no torch module: `AsyncModelAverager` takes other models, too.

    >>> from edgeasync.async_train import AsyncModelAverageAlgorithm, with_edgeasync
    >>> with_edgeasync(object(), [], AsyncModelAverageAlgorithm())
    Traceback (most recent call last):
    edgeasync.errors.ConfigError: give a torch.nn.Module and a list of its optimizers; ...
    """
    if not is_torch(model) or not optimizers:
        raise ConfigError(
            "give a torch.nn.Module and a list of its optimizers; AsyncModelAverager takes other models"
        )
    algorithm.start(model, *init_distributed())
    model.bagua_algorithm = algorithm
    return model
