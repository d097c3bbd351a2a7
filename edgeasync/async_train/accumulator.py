"""Large batches from small ones: gradients add up over several batches before a step is taken."""

import math
import time
from collections.abc import Callable
from typing import Any

from edgeasync.async_train.given import is_torch
from edgeasync.async_train.learners import learner_of
from edgeasync.errors import ConfigError

STEP_SHARE = 0.1
"""The share of time that steps, and the exchanges in them, may take before batches become larger."""

SMOOTHING = 0.2
"""The share of a new measurement in a mean of seconds."""


class AsyncGradientAccumulator:
    """Takes one step for several batches; the step is that of one large batch.

    - `model`: a torch module, a model of `async_train.nn`, an ONNX file, or an object with `parameters` and
      `gradient`.
    - `accumulation_steps`: batches for one step. Or `base_batch_size` and `target_batch_size`: examples.
    - `adaptive_accumulation`: as few batches as needed, so that steps with their exchanges take at most a tenth of
      the time: from one up to the number above.
    - `session`: what `edgeasync.join` returned for the torch module, or for `model.network`; a step is one of its
      steps, so batches in between cost no exchange.

    >>> import numpy as np
    >>> from edgeasync.async_train import AsyncGradientAccumulator, nn, optim
    >>> accumulator = AsyncGradientAccumulator(nn.Sequential(nn.Linear(4, 2)), accumulation_steps=2)
    >>> x, y, optimizer = np.eye(4), [0, 1, 0, 1], optim.SGD(lr=0.1)
    >>> for _ in range(2):
    ...     loss = accumulator.train_step(x, y, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
    ...     accumulator.is_update_step()
    False
    True
    """

    def __init__(
        self,
        model: object,
        accumulation_steps: int | None = None,
        *,
        base_batch_size: int | None = None,
        target_batch_size: int | None = None,
        adaptive_accumulation: bool = False,
        session: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most = _batches(accumulation_steps, base_batch_size, target_batch_size)
        self.accumulation_steps = self._most
        """Batches for the step that is being prepared."""
        self.steps = 0
        """Steps that were taken."""
        self._pace = Pace(self._most) if adaptive_accumulation else None
        self._learner = learner_of(model)
        self.model = self._learner.model
        """The model that has the values: the one that was given or, for layers and files, a `Model` of them."""
        self._session = session
        self._clock = clock
        self._batches = self._examples = 0

    def train_step(self, inputs: Any, targets: Any, *, optimizer: Any, loss_fn: Any = None) -> float:
        """Add a batch's gradient, and take a step if it was the last of the step; return its mean loss."""
        began_s = self._clock()
        loss = self._learner.add(inputs, targets, loss_fn)
        if self._pace is not None:
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
        watched = is_torch(self.model)  # then the session sees the optimizer's step itself
        if self._session is not None and watched:
            self._session.note(loss=loss, examples=self._examples)
        self._learner.step(optimizer)
        if self._session is not None and not watched:
            self._session.step(loss=loss, examples=self._examples)
        if self._pace is not None:
            self.accumulation_steps = self._pace.note_step(self._clock() - began_s)
        self.steps += 1
        self._batches = self._examples = 0

    def is_update_step(self) -> bool:
        """Return whether the last `train_step` took a step."""
        return self.steps > 0 and self._batches == 0


class Pace:
    """How many batches make a step, by what batches and steps take."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._batch_s: float | None = None
        self._step_s: float | None = None

    def note_batch(self, seconds: float) -> None:
        """Take what a batch's gradient took."""
        self._batch_s = _mean(self._batch_s, seconds)

    def note_step(self, seconds: float) -> int:
        """Take what a step took; return how many batches the next one has."""
        self._step_s = _mean(self._step_s, seconds)
        if not self._batch_s:
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
