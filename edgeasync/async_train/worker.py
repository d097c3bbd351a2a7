"""`AsyncWorker`: trains on its own data for a parameter server."""

import logging
import sys
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from edgeasync import Agent
from edgeasync.async_train.adapters import (
    as_address,
    as_data,
    as_loss,
    as_maker,
    as_stages,
    batch_size_of,
    is_torch,
    settled,
)
from edgeasync.async_train.cuda import provider_of, usable
from edgeasync.callbacks import ExchangeEvent
from edgeasync.errors import ConfigError, EdgeAsyncError

LOG = logging.getLogger("edgeasync.async_train")


class Training(TypedDict, total=False):
    """Arguments of `train` besides the data; see docs/train/async_train.md."""

    dataloader: object
    epochs: int
    optimizer: object
    loss_fn: object
    metrics: Sequence[str]
    log_frequency: int | None


class AsyncWorker:
    """Trains on its own data, and pushes an update every `update_frequency` batches.

    If `delay` is set, the worker keeps training after each update, and uses the server's answer
    exactly `delay` batches later. The worker trains the server's model. If that model is a torch
    module that the server does not send, pass the module here, too, as `model`. All other arguments
    are those of `Agent`, such as `state`, `enrol` and `insecure`.

    >>> import numpy as np
    >>> from edgeasync.async_train import AsyncWorker, ParameterServer, nn, optim
    >>> data = np.eye(4), np.arange(4) % 2
    >>> with ParameterServer(nn.Sequential(nn.Linear(4, 2)), port=0) as server:
    ...     worker = AsyncWorker(server.hub.address, local_batch_size=2)
    ...     worker.train(data, epochs=20, optimizer=optim.SGD(lr=1.0))
    >>> worker.evaluate(data)
    1.0
    """

    def __init__(
        self,
        server_address: str,
        local_batch_size: int | None = None,
        update_frequency: int = 1,
        device: object = None,
        *,
        delay: int | None = None,
        bandwidth_limit_bytes_per_s: int | None = None,
        model: Any = None,
        **agent: Any,
    ) -> None:
        self._address, self._model = as_address(server_address), model
        self.device = usable(device, model, "AsyncWorker")
        """The device on which the model computes."""
        self._batch_size = local_batch_size
        if delay is not None and not 0 <= delay <= update_frequency:
            raise ConfigError(
                f"delay is {delay}, but must be from 0 to {update_frequency} (update_frequency): a worker "
                "may have only one unanswered update, so that each counts exactly once"
            )
        said = {"delay_steps": delay, "bandwidth_bytes_per_s_max": bandwidth_limit_bytes_per_s}
        own = {name: value for name, value in said.items() if value is not None}
        self._settings = settled(
            {"local_steps_max": update_frequency, "provider": provider_of(self.device), **own, **agent}
        )
        self.agent: Agent | None = None

    def train(self, dataset: object = None, **training: Unpack[Training]) -> None:
        """Train for `epochs` epochs on `dataset` or `dataloader`, or until the server ends training."""
        with self._begin(dataset, **training) as agent:
            agent.wait()

    async def train_async(self, dataset: object = None, **training: Unpack[Training]) -> None:
        """Do the same as `train`, on the caller's event loop."""
        async with self._begin(dataset, **training) as agent:
            await agent.wait_async()

    def evaluate(self, test_data: object) -> float:
        """Return the newest local model's accuracy or, for float targets, its loss."""
        if self.agent is None:
            raise EdgeAsyncError("this worker has no model yet: call train first")
        found = self.agent.evaluate(as_data(test_data))
        return found.loss if found.accuracy is None else found.accuracy

    def _begin(self, dataset: object = None, **training: Unpack[Training]) -> Agent:
        how = how_to_train(self._model, self.device, dataset, **training)
        own = {} if self._batch_size is None else {"batch_size": self._batch_size}
        self.agent = Agent(self._address, **how | own | self._settings)
        return self.agent


def how_to_train(
    model: Any,
    device: str,
    dataset: object = None,
    *,
    dataloader: object = None,
    epochs: int = 1,
    optimizer: object = None,
    loss_fn: Any = None,
    metrics: Sequence[str] = (),
    log_frequency: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of `Agent` that correspond to these arguments."""
    how: dict[str, Any] = {
        "data": as_data(dataset, dataloader),
        "batch_size": batch_size_of(dataset if dataloader is None else dataloader),
        "metrics": [name for name in metrics if name != "loss"],  # always reported
        "passes": epochs,
        "callbacks": [WorkerProgress(log_frequency)] if log_frequency else [],
        "keep_optimizer_state": True,
    }
    if is_torch(model):
        import edgeasync.torch as ours  # noqa: PLC0415 - imports torch

        return how | {"model": ours.model(model, loss_fn, as_maker(optimizer), device=device)}
    loss = None if loss_fn is None or model is not None else as_loss(loss_fn)
    return how | {"model": model, "optimizer": as_stages(optimizer), "loss": loss}


class WorkerProgress:
    """Logs a worker's progress every `log_frequency` batches, or prints it if INFO is disabled."""

    def __init__(self, log_frequency: int) -> None:
        self._log_frequency, self._batches = log_frequency, 0

    def on_exchange(self, event: ExchangeEvent) -> None:
        """Add an update's steps, and log the progress if it is due."""
        before, self._batches = self._batches, self._batches + event.local_steps
        if self._batches // self._log_frequency > before // self._log_frequency:
            told = {"loss": event.loss, **event.metrics}
            values = ", ".join(f"{name} {value:.4g}" for name, value in told.items() if value is not None)
            line = f"batch {self._batches}, version {event.version}: {values}"
            if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
                LOG.info("%s", line)
            else:  # show the lines even if logging is not configured
                sys.stderr.write(f"{line}\n")
