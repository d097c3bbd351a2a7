"""`AsyncModelAverager`: averages the models of several processes, with or without a hub."""

import asyncio
from collections.abc import Iterable
from typing import Any, Self, Unpack

from edgeasync.async_train.communication import Averaging
from edgeasync.async_train.distributed import init_distributed
from edgeasync.async_train.ignored import ignore
from edgeasync.async_train.learners import evaluate, learner_of
from edgeasync.async_train.peers import communication_of
from edgeasync.async_train.running import Running


class AsyncModelAverager(Running):
    """Trains this process's model, and averages it with the models of other processes.

    By default, a hub averages the models; it runs in the process with rank 0. `rank` and
    `world_size` default to the result of `init_distributed`. `master` is the hub's address, by
    default from the environment variables MASTER_ADDR and MASTER_PORT. With `topology="ring"` or
    `"all_to_all"`, the processes average their models without a hub; `peers` is the file that lists
    the processes. Use this object in a `with` statement, or call `stop` at the end.

    >>> import numpy as np
    >>> from edgeasync.async_train import AsyncModelAverager, nn, optim
    >>> model, optimizer = nn.Sequential(nn.Linear(4, 2)), optim.SGD(lr=0.5)
    >>> with AsyncModelAverager(model, master="127.0.0.1:*", averaging_frequency=4) as averager:
    ...     for _ in range(10):
    ...         loss = averager.train_step(np.eye(4), [0, 1, 0, 1], optimizer, nn.CrossEntropyLoss())
    >>> averager.evaluate([(np.eye(4), [0, 1, 0, 1])])
    1.0
    """

    def __init__(
        self,
        model: Any,
        world_size: int | None = None,
        rank: int | None = None,
        *,
        device: object = None,
        communication_backend: str | None = None,
        **averaging: Unpack[Averaging],
    ) -> None:
        ignore("AsyncModelAverager", "edgeasync uses ZeroMQ", communication_backend=communication_backend)
        self._learner = learner_of(model, device, "AsyncModelAverager")
        self.device = self._learner.device
        """The device on which the model computes."""
        place = init_distributed(rank=rank, world_size=world_size)
        self.communication = communication_of(model, self._learner, *place, **averaging)

    def train_step(self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None) -> float:
        """Average if it is due, then train one batch and return its loss."""
        return self._learner.train(inputs, targets, optimizer, loss_fn, self.communication.start().session)

    async def train_step_async(
        self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None
    ) -> float:
        """Call `train_step` in a thread."""
        return await asyncio.to_thread(self.train_step, inputs, targets, optimizer, loss_fn)

    @property
    def last_averaging_iteration(self) -> int:
        """The number of iterations since the last averaging."""
        return int(self.communication.start().session.steps_since_exchange)

    def abort(self) -> None:
        """Stop averaging until `resume`; training continues locally."""
        self.communication.start().session.abort()

    def resume(self) -> None:
        """Resume averaging; local changes become part of the next average."""
        self.communication.start().session.resume()

    def evaluate(self, test_data: Iterable[tuple[Any, Any]]) -> float:
        """Return the model's accuracy or, for float targets, its mean squared error."""
        return evaluate(self._learner, test_data)

    def start(self) -> Self:
        """Start averaging unless it has started; the first `train_step` calls this method."""
        self.communication.start()
        return self

    def stop(self) -> None:
        """Push the last steps, and stop averaging.

        Rank 0 waits for the other processes, and loads the average of all models.
        """
        self.communication.stop()
