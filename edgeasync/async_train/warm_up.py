"""`AsyncTrainer`: workers exchange often and in rounds during a warm-up, and later less often."""

import asyncio
import math
from typing import Any

import edgeasync
from edgeasync import SGD, Policy, Run, Stop
from edgeasync.async_train import adapters
from edgeasync.async_train.communication import Communication
from edgeasync.async_train.cuda import usable
from edgeasync.async_train.data import as_dataset
from edgeasync.async_train.hub_model import as_trained
from edgeasync.async_train.ignored import ignore
from edgeasync.async_train.learners import Learner, learner_of
from edgeasync.async_train.watching import watched
from edgeasync.errors import ConfigError
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import WarmUp


class AsyncTrainer:
    """Trains a model with workers in this process, or batch by batch; training has a warm-up.

    - `model`: as for `edgeasync.train`, or a `torch.nn.Module`.
    - `warm_up_epochs`: the number of passes over the data during warm-up. In the warm-up, all
      workers exchange in rounds, every `warm_up_sync_frequency` batches. After the warm-up, workers
      do not wait for each other, and exchange every `regular_sync_frequency` batches.
    - `delay`: the number of batches that a worker trains between pushing an update and using the
      answer. If `delay` is 0, the worker waits for the answer. `delay` is limited to the number of
      batches between two exchanges, also during warm-up.
    - `workers`: the number of workers that `train` starts.
    - `steps_per_epoch`: the number of batches per epoch, from which `train_step` computes the end
      of the warm-up.
    - `seed`: the seed for the initial values and for shuffling the examples.

    >>> import numpy as np
    >>> from edgeasync import nn
    >>> from edgeasync.async_train import AsyncTrainer, optim
    >>> trainer = AsyncTrainer(nn.Linear(4, 2), warm_up_epochs=1, warm_up_sync_frequency=2, workers=2)
    >>> run = trainer.train((np.eye(4).repeat(9, 0), [0, 1, 0, 1] * 9), epochs=4, optimizer=optim.SGD(lr=0.1))
    >>> run.updates > 1
    True
    """

    def __init__(
        self,
        model: Any,
        warm_up_epochs: float = 2,
        warm_up_sync_frequency: int = 10,
        regular_sync_frequency: int = 100,
        *,
        delay: int = 0,
        workers: int = 4,
        steps_per_epoch: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self._workers, self._seed = model, workers, seed
        self._warm_up = warm_up_epochs, warm_up_sync_frequency
        self._regular, self._delay, self._steps_per_epoch = regular_sync_frequency, delay, steps_per_epoch
        self._stepping: tuple[Learner, Communication] | None = None

    def train(self, dataset: Any = None, epochs: float = 1, optimizer: Any = None, loss_fn: Any = None,
              **more: Any) -> Run:  # fmt: skip
        """Train for `epochs` epochs, load the trained values into the model, and return the run.

        `more` may contain `dataloader`, and arguments of `edgeasync.train` such as `evaluate`,
        `run` and `batch_size`.
        """
        run = edgeasync.train(**self._plan(dataset, epochs, optimizer, loss_fn, **more))
        adapters.put_back(self.model, run.arrays)
        return run

    async def train_async(self, dataset: Any = None, epochs: float = 1, optimizer: Any = None, loss_fn: Any = None,
                          **more: Any) -> Run:  # fmt: skip
        """Do the same as `train`, on the caller's event loop."""
        run = await edgeasync.train_async(**self._plan(dataset, epochs, optimizer, loss_fn, **more))
        adapters.put_back(self.model, run.arrays)
        return run

    def train_step(self, inputs: Any, targets: Any, optimizer: Any = None, loss_fn: Any = None) -> float:
        """Train one batch and return its loss. A hub runs in this process until `close`."""
        if self._stepping is None:
            unknown = None if self._steps_per_epoch else self._warm_up[0] or None
            ignore("AsyncTrainer.train_step", "set steps_per_epoch, too", warm_up_epochs=unknown)
            epoch = self._steps_per_epoch or 0
            policy = make_policy(self._warm_up, self._regular, epoch, self._delay)
            self._stepping = make_stepping(self.model, policy)
        learner, communication = self._stepping
        return learner.train(inputs, targets, optimizer, loss_fn, communication.start().session)

    async def train_step_async(self, *batch: Any, **training: Any) -> float:
        """Call `train_step` in a thread."""
        return await asyncio.to_thread(self.train_step, *batch, **training)

    def close(self) -> Run | None:
        """Push the last steps of `train_step`, end its hub, and return the run."""
        stepping, self._stepping = self._stepping, None
        return None if stepping is None else stepping[1].stop()

    def check_may_watch(self) -> None:
        """Raise `ConfigError` after the first `train_step`: a new monitor would have no effect."""
        if self._stepping is not None:
            raise ConfigError("training has already started: create the monitor before the first train_step")

    def _plan(self, dataset: Any, epochs: float, optimizer: Any, loss_fn: Any, **more: Any) -> dict[str, Any]:
        """Return the arguments of `edgeasync.train`."""
        loader = more.pop("dataloader", None)
        examples = as_dataset(adapters.as_data(dataset, loader))
        device = usable(None, self.model, "AsyncTrainer")  # where the model is
        how = as_trained(self.model, examples, optimizer, loss_fn, device)
        size = more.pop("batch_size", None) or adapters.batch_size_of(dataset if loader is None else loader)
        how |= {"batch_size": size, "workers": self._workers, "seed": self._seed, "until": Stop(epochs=epochs)}
        steps_per_epoch = math.ceil(len(examples) / size)
        how["policy"] = make_policy(self._warm_up, self._regular, steps_per_epoch, self._delay)
        return watched(self.model, {"data": examples} | how | more)


def make_policy(warm_up: tuple[float, int], regular: int, steps_per_epoch: int, delay: int) -> Policy:
    """Return a policy with a warm-up of `warm_up[0]` epochs."""
    epochs, frequency = warm_up
    updates = math.ceil(epochs * steps_per_epoch / frequency)
    first = WarmUp(updates=updates, frequency=FixedFrequency(local_steps=frequency)) if updates else None
    return Policy(
        optimizer=(SGD(),),
        frequency=FixedFrequency(local_steps=regular),
        delay_steps=delay,
        warm_up=first,
    )


def make_stepping(model: Any, policy: Policy) -> tuple[Learner, Communication]:
    """Create the learner of a model, and its communication through a hub in this process."""
    learner = learner_of(model)
    return learner, Communication(model, learner, "127.0.0.1:*", session={}, hub={"policy": policy})
