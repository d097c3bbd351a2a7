"""`AsyncModelAverager`: each process trains its own model, and a hub, or they themselves, average them."""

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
    """Trains this process's model, and averages it with those of the others; rank 0 holds the hub.

    `rank` and `world_size` are by default what `init_distributed` returns. Rank 0 is at `master`, by default where
    MASTER_ADDR and MASTER_PORT say. With `topology="ring"` or
    `"all_to_all"` there is no hub, and a file of `peers`. Use this by `with`, or `stop` it.

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
        ignore("AsyncModelAverager", "edgeasync speaks over ZeroMQ", communication_backend=communication_backend)
        self._learner = learner_of(model, device, "AsyncModelAverager")
        self.device = self._learner.device
        """Where it computes."""
        place = init_distributed(rank=rank, world_size=world_size)
        self.communication = communication_of(model, self._learner, *place, **averaging)

    def train_step(self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None) -> float:
        """Take a step on a batch, and return its loss; when it is time, the model is averaged before that."""
        return self._learner.train(inputs, targets, optimizer, loss_fn, self.communication.start().session)

    async def train_step_async(
        self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None
    ) -> float:
        """Do what `train_step` does, in a thread."""
        return await asyncio.to_thread(self.train_step, inputs, targets, optimizer, loss_fn)

    @property
    def last_averaging_iteration(self) -> int:
        """How many iterations ago the model was averaged last."""
        return int(self.communication.start().session.steps_since_exchange)

    def abort(self) -> None:
        """Send and receive nothing until `resume`; the model stays this process's own."""
        self.communication.start().session.abort()

    def resume(self) -> None:
        """Average again; what was trained meanwhile is part of the next average."""
        self.communication.start().session.resume()

    def evaluate(self, test_data: Iterable[tuple[Any, Any]]) -> float:
        """Return the accuracy of this process's model; of values, not classes, the mean squared error."""
        return evaluate(self._learner, test_data)

    def start(self) -> Self:
        """Begin, unless that has happened; the first `train_step` does it, too."""
        self.communication.start()
        return self

    def stop(self) -> None:
        """Send the last steps; rank 0 waits for the others to end, and its model is the average of all."""
        self.communication.stop()
