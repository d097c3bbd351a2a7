"""Bagua's interface: an algorithm that is attached to a torch module and its optimizers."""

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

    Creating the first algorithm adds the methods `with_bagua` and `with_edgeasync` to torch
    modules.

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
        """Start averaging a model after its optimizers' steps."""
        started = communication_of(model, learner_of(model), rank, world_size, **self._averaging).start()
        self._started.append((model, started))

    def __deepcopy__(self, memo: object) -> Self:
        """Return this object, because copies of a module share the algorithm."""
        return self

    def communication(self, model: Any) -> Communication | PeerCommunication:
        """Return the communication of a model; raises `ConfigError` for a model without one."""
        for known, found in self._started:
            if known is model:
                return found
        raise ConfigError(
            "this algorithm does not average this model: call with_edgeasync(model, [optimizer], algorithm) first"
        )

    def abort(self, model: Any) -> None:
        """Stop averaging until `resume`."""
        self.communication(model).session.abort()

    def resume(self, model: Any) -> None:
        """Resume averaging."""
        self.communication(model).session.resume()

    def stop(self, model: Any) -> None:
        """Push the last steps, and stop averaging.

        Rank 0 waits for the other processes, and loads the average of all models.
        """
        self.communication(model).stop()


def with_edgeasync(model: Any, optimizers: Sequence[Any], algorithm: AsyncModelAverageAlgorithm) -> Any:
    """Average a torch module after its optimizers' steps, and return the module.

    Rank and world size come from `init_distributed`. `model.bagua_algorithm` is set to the
    algorithm. Raises `ConfigError` for models that are not torch modules; use `AsyncModelAverager`
    for them.

    >>> from edgeasync.async_train import AsyncModelAverageAlgorithm, with_edgeasync
    >>> with_edgeasync(object(), [], AsyncModelAverageAlgorithm())
    Traceback (most recent call last):
    edgeasync.errors.ConfigError: pass a torch.nn.Module and a list of its optimizers; ...
    """
    if not is_torch(model) or not optimizers:
        raise ConfigError(
            "pass a torch.nn.Module and a list of its optimizers; use AsyncModelAverager for other models"
        )
    algorithm.start(model, *init_distributed())
    model.bagua_algorithm = algorithm
    return model
