"""The `Trainer` protocols, and the loop that takes local steps between two exchanges."""

import math
import operator
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.core.device.events import Trained
from edgeasync.errors import DataError, EdgeAsyncError
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import METRIC_PATTERN, METRICS_MAX


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Result of a local step: its mean loss, or `None`, and the number of examples.

    >>> from edgeasync import StepResult
    >>> StepResult(loss=0.25, examples=32).examples
    32
    """

    loss: float | None
    examples: int


class StepsEndedError(EdgeAsyncError):
    """A trainer takes no more steps.

    The assignment ends early; without any step, the agent ends.
    """


class Trainer(Protocol):
    """Trains a model on a device. A custom trainer needs `spec`, `begin` and `step`.

    It chooses its data, loss and optimizer, and may use any library.

    >>> from edgeasync import Parameter, ParameterSpec, StepResult, Stop, train
    >>> class Halve:
    ...     spec = ParameterSpec((Parameter("weight", (3,)),))
    ...
    ...     def begin(self, parameters):
    ...         self.weight = self.spec.views(parameters)["weight"]
    ...
    ...     def step(self):
    ...         self.weight *= 0.5
    ...         return StepResult(loss=float(abs(self.weight).sum()), examples=1)
    >>> run = train({"weight": [8.0, 4.0, 2.0]}, [Halve()], until=Stop(updates=20))
    >>> bool(run.arrays["weight"].max() < 1.0)
    True
    """

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: train this vector in place from now on.

        The trainer updates running statistics in the same vector. It decides whether to reset the
        optimizer's state.
        """

    def step(self) -> StepResult:
        """Take one local step on one batch.

        An agent awaits an `async def step` on its event loop.
        """


class CoroutineTrainer(Protocol):
    """A `Trainer` whose steps the agent awaits on its event loop."""

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: train this vector in place from now on."""

    async def step(self) -> StepResult:
        """Take one local step on one batch."""


@runtime_checkable
class BufferedTrainer(Trainer, Protocol):
    """A `Trainer` whose parameters are stored elsewhere, such as on a GPU."""

    def flush(self) -> None:
        """Copy the parameters to the vector. Called at least after the last step of an assignment.

        Raises `StepsEndedError` if they are not accessible; the steps are then discarded.
        """


@runtime_checkable
class MeasuringTrainer(Trainer, Protocol):
    """A `Trainer` that measures more than the loss."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the steps since the last call, by name.

        They are sent to the hub.
        """


class ScoringTrainer(Trainer, Protocol):
    """A `Trainer` that can evaluate parameters, for policies that compare devices."""

    def score(self) -> float:
        """Return the loss of the current parameters on held-out examples; lower is better."""


@runtime_checkable
class ResumableTrainer(Trainer, Protocol):
    """A `Trainer` that resumes after a power cut. The hub provides the parameters."""

    def state(self) -> TrainerState:
        """Return the arrays to resume from. Called between two steps, and saved before the next."""

    def restore(self, state: TrainerState) -> None:
        """Resume from a state before `begin`. Raises `ValueError` if trainer or data differ."""


@runtime_checkable
class ResettableTrainer(Trainer, Protocol):
    """A `Trainer` that can start over, after the hub found its parameters far worse than others."""

    def reset(self) -> None:
        """Discard state of earlier steps except the parameters, such as momentum.

        `begin` follows.
        """


@runtime_checkable
class ScalableTrainer(Trainer, Protocol):
    """A `Trainer` whose learning rate the hub can reduce if training diverges."""

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the configured learning rate by `factor`, at most 1, from the next step on."""


@runtime_checkable
class InterruptibleTrainer(Trainer, Protocol):
    """A `Trainer` whose running step can be interrupted, because it might never return."""

    def interrupt(self) -> None:
        """Make the running step raise an exception soon, and later steps at once.

        May be called from any thread.
        """


def take_local_steps(
    trainer: Trainer | CoroutineTrainer,
    local_steps: int,
    *,
    should_stop: Callable[[], bool],
    on_step: Callable[[], None],
    wait: Callable[[float], object],
    clock: Callable[[], float] = time.perf_counter,
    step_s_min: float = 0.0,
    share: Callable[[], float] = lambda: 1.0,
    continues: bool = False,
    step: Callable[[], StepResult] | None = None,
) -> Trained | None:
    """Take `local_steps` steps, or return `None` as soon as `should_stop` is true.

    With `continues`, the steps continue those of an earlier call, so the result has no score and no
    base loss. A step that raises `StepsEndedError` ends the loop. The result then covers the steps
    before it, or is `None` if there were none. After the last step, a `BufferedTrainer` copies its
    parameters to the vector.

    `wait(remaining_s)` extends every step to `step_s_min`, which simulates a slower device, and so
    that steps take only a `share` of the time, above 0. `step_s` of the result is the mean time of
    a step including these waits and the copy. `on_step` is called after each step. Mean and
    (population) variance are over the steps that have a loss. `step` replaces the trainer's own if
    that must be awaited. For 0 steps the result has no loss. Raises `ValueError` if `local_steps`
    is negative, and `DataError` if a step does not return a loss and a number of examples.
    """
    if local_steps < 0:
        raise ValueError(f"local_steps is {local_steps}; pass 0 or more")
    scores = not continues and hasattr(trainer, "score")
    score = float(cast("ScoringTrainer", trainer).score()) if scores else None
    take_step = step or cast("Trainer", trainer).step
    totals = _StepTotals()
    while totals.count < local_steps:
        if should_stop():
            return None
        started = clock()
        try:
            result = take_step()
        except StepsEndedError:
            break
        taken_s = clock() - started
        remaining_s = max(step_s_min, taken_s / share()) - taken_s
        if remaining_s > 0.0:
            wait(remaining_s)
        totals.add(result, clock() - started)
        on_step()
    started = clock()
    if not totals.count or not _flush(trainer):
        return None if local_steps else Trained(0, 0, None, None, 0.0, score)
    metrics = _metrics(trainer.metrics()) if isinstance(trainer, MeasuringTrainer) else None
    return totals.trained(score, clock() - started, metrics, continues=continues)


class _StepTotals:
    """Sums up steps: examples, seconds, and mean and variance of their losses (Welford 1962).

    Sums of squares would lose precision if the losses are almost equal.
    """

    def __init__(self) -> None:
        self.count = self._examples = self._losses = 0
        self._seconds = self._mean = self._squares = 0.0
        self._first_loss: float | None = None

    def add(self, result: StepResult, seconds: float) -> None:
        """Count a step. Raises `DataError` for an invalid result."""
        loss, examples = _numbers(result)
        self.count += 1
        self._examples += examples
        self._seconds += seconds
        if self.count == 1:
            self._first_loss = loss
        if loss is not None:
            self._losses += 1
            deviation = loss - self._mean
            self._mean += deviation / self._losses
            self._squares += deviation * (loss - self._mean)

    def trained(
        self, score: float | None, flushed_s: float, metrics: dict[str, float] | None, *, continues: bool
    ) -> Trained:
        """Return the result of all steps. `flushed_s` is the time to copy the parameters."""
        return Trained(
            self.count,
            self._examples,
            self._mean if self._losses else None,
            self._squares / self._losses if self._losses else None,
            (self._seconds + flushed_s) / self.count,
            score,
            base_loss=None if continues else self._first_loss,
            metrics=metrics,
        )


def _flush(trainer: Trainer | CoroutineTrainer) -> bool:
    """Copy a trainer's parameters to the vector. Return whether this succeeded."""
    if isinstance(trainer, BufferedTrainer):
        try:
            trainer.flush()
        except StepsEndedError:
            return False
    return True


def _numbers(result: Any) -> tuple[float | None, int]:
    """Return a step's loss and examples as plain numbers; they may be numpy or torch scalars."""
    try:
        loss, examples = None if result.loss is None else float(result.loss), operator.index(result.examples)
    except (AttributeError, TypeError, ValueError):
        examples = -1
    if examples < 0:
        raise DataError(
            f"a trainer's step returned {result!r}; return StepResult(loss, examples), "
            "where loss is a number or None, and examples is an integer of at least 0"
        )
    return loss, examples


def _metrics(found: Mapping[str, float]) -> dict[str, float] | None:
    """Return a trainer's finite metrics as plain numbers.

    Raises `DataError` if they are invalid.
    """
    try:
        plain = {name: float(value) for name, value in found.items()}
        sound = len(plain) <= METRICS_MAX and all(re.match(METRIC_PATTERN, name) for name in plain)
    except (AttributeError, TypeError, ValueError):
        sound = False
    if not sound:
        raise DataError(
            f"a trainer's metrics() returned {found!r}; return at most {METRICS_MAX} numbers by names of up to 32 "
            "letters, digits, '_', '.' and '-'"
        )
    return {name: value for name, value in plain.items() if math.isfinite(value)} or None
