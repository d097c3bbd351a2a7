"""Accumulates gradients over several small batches before each step."""

import math
import time
from collections.abc import Callable
from typing import Any

from edgeasync.async_train.learners import learner_of
from edgeasync.errors import ConfigError

STEP_SHARE = 0.1
"""Maximum fraction of time spent on steps and exchanges; above it, batches per step increase."""

SMOOTHING = 0.2
"""Weight of a new measurement in a moving average of durations."""


class AsyncGradientAccumulator:
    """Takes one step for several batches, equal to a step on one large batch.

    docs/train/async_train_blocks.md describes the arguments. `session` is the result of
    `edgeasync.join` for a torch module or for `model.network`.

    >>> import numpy as np
    >>> from edgeasync.async_train import AsyncGradientAccumulator, data, nn, optim
    >>> accumulator = AsyncGradientAccumulator(nn.Sequential(nn.Linear(4, 2)), accumulation_steps=2)
    >>> for x, y in data.DataLoader((np.eye(4), [0, 1, 0, 1]), batch_size=2):
    ...     loss = accumulator.train_step(x, y, optimizer=optim.SGD(lr=0.1))
    >>> accumulator.is_update_step(), accumulator.steps
    (True, 1)
    """

    def __init__(
        self,
        model: object,
        accumulation_steps: int | None = None,
        *,
        base_batch_size: int | None = None,
        target_batch_size: int | None = None,
        adaptive_accumulation: bool = False,
        device: object = None,
        session: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.accumulation_steps = _batches(accumulation_steps, base_batch_size, target_batch_size)
        """Number of batches for the current step."""
        self.steps = 0  # taken so far
        self._pace = BatchesPerStep(self.accumulation_steps, adaptive=adaptive_accumulation)
        self._learner = learner_of(model, device, "AsyncGradientAccumulator")
        self.model = self._learner.model  # the user's model or, for layers and files, a `Model` of them
        self.device = self._learner.device  # the device on which the model computes
        self._session, self._clock = session, clock
        self._batches = self._examples = 0

    def train_step(self, inputs: Any, targets: Any, optimizer: Any, loss_fn: Any = None) -> float:
        """Accumulate a batch's gradient, and return the batch's mean loss.

        If this was the last batch of a step, take the step.
        """
        began_s = self._clock()
        loss = self._learner.add(inputs, targets, loss_fn)
        self._pace.note_batch(self._clock() - began_s)
        self._batches += 1
        self._examples += len(targets)
        if self._batches >= self.accumulation_steps:
            self.finish(optimizer, loss)
        return loss

    def finish(self, optimizer: Any, loss: float | None = None) -> None:
        """Take a step with the batches so far, for example at the end of an epoch."""
        if not self._batches:
            return
        began_s = self._clock()
        self._learner.count_step(optimizer, self._session, loss, self._examples)
        self.accumulation_steps = self._pace.note_step(self._clock() - began_s)
        self.steps += 1
        self._batches = self._examples = 0

    def is_update_step(self) -> bool:
        """Return whether the last `train_step` took a step."""
        return self.steps > 0 and self._batches == 0


class BatchesPerStep:
    """The number of batches per step: fixed, or computed from the durations of batches and steps."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self._most, self._adaptive = most, adaptive
        self._batch_s: float | None = None
        self._step_s: float | None = None

    def note_batch(self, seconds: float) -> None:
        """Record how long it took to compute a batch's gradient."""
        self._batch_s = _mean(self._batch_s, seconds)

    def note_step(self, seconds: float) -> int:
        """Record the duration of a step; return the number of batches for the next one."""
        self._step_s = _mean(self._step_s, seconds)
        if not self._batch_s or not self._adaptive:
            return self._most
        wanted = self._step_s * (1.0 - STEP_SHARE) / STEP_SHARE / self._batch_s
        return max(1, min(self._most, math.ceil(wanted)))


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + SMOOTHING * (new - known)


def _batches(steps: int | None, base: int | None, target: int | None) -> int:
    """Return the largest number of batches per step; raises `ConfigError` for invalid arguments."""
    if (steps is None) == (base is None or target is None) or (base is None) != (target is None):
        raise ConfigError("pass accumulation_steps, or both base_batch_size and target_batch_size")
    if steps is None:
        assert base is not None
        assert target is not None
        if not 1 <= base <= target:
            raise ConfigError(f"base_batch_size ({base}) must be between 1 and target_batch_size ({target})")
        return math.ceil(target / base)
    if steps < 1:
        raise ConfigError(f"accumulation_steps is {steps}; pass 1 or more")
    return steps
