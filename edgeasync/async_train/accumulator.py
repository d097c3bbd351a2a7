"""Large batches from small ones: gradients add up over several batches before a step is taken."""

import math
import time
from collections.abc import Callable
from typing import Any

from edgeasync.async_train.learners import learner_of
from edgeasync.errors import ConfigError

STEP_SHARE = 0.1
"""The share of time that steps, and the exchanges in them, may take before batches become larger."""

SMOOTHING = 0.2
"""The share of a new measurement in a mean of seconds."""


class AsyncGradientAccumulator:
    """Takes one step for several batches; the step is that of one large batch.

    docs/train/async_train_blocks.md has the arguments. `session` is what `edgeasync.join` returned for a torch
    module, or for `model.network`.

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
        """Batches for the step that is being prepared."""
        self.steps = 0  # that were taken
        self._pace = BatchesPerStep(self.accumulation_steps, adaptive=adaptive_accumulation)
        self._learner = learner_of(model, device, "AsyncGradientAccumulator")
        self.model = self._learner.model  # the one that was given or, for layers and files, a `Model` of them
        self.device = self._learner.device  # where it computes
        self._session, self._clock = session, clock
        self._batches = self._examples = 0

    def train_step(self, inputs: Any, targets: Any, optimizer: Any, loss_fn: Any = None) -> float:
        """Add a batch's gradient, and take a step if it was the last of the step; return its mean loss."""
        began_s = self._clock()
        loss = self._learner.add(inputs, targets, loss_fn)
        self._pace.note_batch(self._clock() - began_s)
        self._batches += 1
        self._examples += len(targets)
        if self._batches >= self.accumulation_steps:
            self.finish(optimizer, loss)
        return loss

    def finish(self, optimizer: Any, loss: float | None = None) -> None:
        """Take the step with the batches that there are: after the last one of an epoch, say."""
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
    """How many batches make a step: at most a given number or, if it adapts, by what batches and steps take."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self._most, self._adaptive = most, adaptive
        self._batch_s: float | None = None
        self._step_s: float | None = None

    def note_batch(self, seconds: float) -> None:
        """Take what a batch's gradient took."""
        self._batch_s = _mean(self._batch_s, seconds)

    def note_step(self, seconds: float) -> int:
        """Take what a step took; return how many batches the next one has."""
        self._step_s = _mean(self._step_s, seconds)
        if not self._batch_s or not self._adaptive:
            return self._most
        wanted = self._step_s * (1.0 - STEP_SHARE) / STEP_SHARE / self._batch_s
        return max(1, min(self._most, math.ceil(wanted)))


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + SMOOTHING * (new - known)


def _batches(steps: int | None, base: int | None, target: int | None) -> int:
    """Return the most batches of a step; raises `ConfigError` unless one of both ways is given."""
    if (steps is None) == (base is None or target is None) or (base is None) != (target is None):
        raise ConfigError("give accumulation_steps, or base_batch_size and target_batch_size")
    if steps is None:
        assert base is not None
        assert target is not None
        if not 1 <= base <= target:
            raise ConfigError(f"base_batch_size is {base}, target_batch_size {target}; give 1 <= base <= target")
        return math.ceil(target / base)
    if steps < 1:
        raise ConfigError(f"accumulation_steps is {steps}; give 1 or more")
    return steps
