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
    """Result of a local step: its mean loss, if known, and the number of examples it used.

    >>> from edgeasync import StepResult
    >>> StepResult(loss=0.25, examples=32).examples
    32
    """

    loss: float | None
    examples: int


class StepsEndedError(EdgeAsyncError):
    """Raised by a trainer that cannot take further steps.

    The current assignment ends early. If it has no completed steps, the agent exits.
    """


class Trainer(Protocol):
    """Trains a model on a device. A custom trainer needs `spec`, `begin` and `step`.

    The trainer chooses its data, loss and optimizer, and may use any library.

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
        """Names, shapes and roles of the model's arrays."""

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: from now on, train the vector `parameters` in place.

        The trainer also updates running statistics in this vector. It may reset the optimizer's
        state.
        """

    def step(self) -> StepResult:
        """Take one local step on one batch.

        If `step` is an `async def`, the agent awaits it on its event loop.
        """


class CoroutineTrainer(Protocol):
    """A `Trainer` whose steps the agent awaits on its event loop."""

    @property
    def spec(self) -> ParameterSpec:
        """Names, shapes and roles of the model's arrays."""

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: from now on, train the vector `parameters` in place."""

    async def step(self) -> StepResult:
        """Take one local step on one batch."""


@runtime_checkable
class BufferedTrainer(Trainer, Protocol):
    """A `Trainer` whose parameters are stored elsewhere, such as on a GPU."""

    def flush(self) -> None:
        """Copy the parameters to the vector that was passed to `begin`.

        The agent calls this at least once, after the last step of an assignment. Raises
        `StepsEndedError` if the parameters are not accessible; the agent then discards the steps.
        """


@runtime_checkable
class MeasuringTrainer(Trainer, Protocol):
    """A `Trainer` that measures further metrics besides the loss."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics, by name, of the steps since the last call.

        The agent sends them to the hub.
        """


class ScoringTrainer(Trainer, Protocol):
    """A `Trainer` that can evaluate its parameters, for policies that compare devices."""

    def score(self) -> float:
        """Return the loss of the current parameters on held-out examples; lower is better."""


@runtime_checkable
class ResumableTrainer(Trainer, Protocol):
    """A `Trainer` that can resume after a power failure. The hub provides the parameters."""

    def state(self) -> TrainerState:
        """Return the arrays that `restore` needs in order to resume.

        The agent calls this between two steps, and saves the arrays before the next step.
        """

    def restore(self, state: TrainerState) -> None:
        """Resume from a saved state.

        The agent calls this before `begin`. Raises `ValueError` if the state was saved by another
        trainer or with other data.
        """


@runtime_checkable
class ResettableTrainer(Trainer, Protocol):
    """A `Trainer` that can be reset when the device starts over from the hub's model.

    The hub requests this if the device's training went wrong.
    """

    def reset(self) -> None:
        """Discard all state of earlier steps, such as momentum, except the parameters.

        The agent then calls `begin`.
        """


@runtime_checkable
class ScalableTrainer(Trainer, Protocol):
    """A `Trainer` whose learning rate the hub can reduce if training diverges."""

    def scale_learning_rate(self, factor: float) -> None:
        """Use the configured learning rate times `factor` for all following steps.

        `factor` is at most 1.
        """


@runtime_checkable
class InterruptibleTrainer(Trainer, Protocol):
    """A `Trainer` whose running step can be interrupted, in case it never returns."""

    def interrupt(self) -> None:
        """Abort the running step soon, and later steps immediately.

        Aborted steps raise an exception. May be called from any thread.
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

    If `continues` is true, the steps continue those of an earlier call, so the result contains
    neither a score nor a base loss. If a step raises `StepsEndedError`, the loop ends. The result
    then covers the completed steps, or is `None` if there are none. After the last step, a
    `BufferedTrainer` copies its parameters to the vector.

    After a step, `wait(remaining_s)` is called in two cases: if the step took less than
    `step_s_min`, which simulates a slower device, and if computation may use only the fraction
    `share()` of the time. `step_s` of the result is the mean duration of a step, including these
    waits and the copy. `on_step` is called after each step.

    The mean and the (population) variance of the loss cover the steps that returned a loss. If
    `trainer.step` must be awaited, pass a function `step` that is called instead. If `local_steps`
    is 0, the result has no loss. Raises `ValueError` if `local_steps` is negative, and `DataError`
    if a step does not return a loss and a number of examples.
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
    measured = getattr(trainer, "metrics", None)  # isinstance of a protocol takes longer than an exchange's codec
    metrics = None if measured is None else _metrics(measured())
    return totals.trained(score, clock() - started, metrics, continues=continues)


class _StepTotals:
    """Totals over steps: examples, seconds, and mean and variance of the loss (Welford 1962).

    A plain sum of squares would lose precision if the losses were almost equal.
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
        """Return the result of all steps. Copying the parameters took `flushed_s` seconds."""
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
    """Flush the parameters of a `BufferedTrainer`. Return False if they are not accessible."""
    flush = getattr(trainer, "flush", None)
    if flush is not None:
        try:
            flush()
        except StepsEndedError:
            return False
    return True


def _numbers(result: Any) -> tuple[float | None, int]:
    """Return a step's loss and number of examples, converted from numpy or torch scalars."""
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
    """Return the finite metrics of a trainer as Python floats.

    Raises `DataError` if the metrics are invalid.
    """
    try:
        plain = {name: float(value) for name, value in found.items()}
        sound = len(plain) <= METRICS_MAX and all(re.match(METRIC_PATTERN, name) for name in plain)
    except (AttributeError, TypeError, ValueError):
        sound = False
    if not sound:
        raise DataError(
            f"a trainer's metrics() returned {found!r}; return a dict of at most {METRICS_MAX} numbers, with "
            "names of up to 32 letters, digits, '_', '.' and '-'"
        )
    return {name: value for name, value in plain.items() if math.isfinite(value)} or None
