"""What a device runs between two exchanges: a `Trainer`, and the loop that takes its local steps."""

import logging
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.config import Section, convert, to_table
from edgeasync.core.arrays.spool import TrainerState
from edgeasync.core.device.events import Trained
from edgeasync.data.dataset import Batch, Batches, Targets
from edgeasync.errors import DataError, EdgeAsyncError, NoMemoryError
from edgeasync.metrics import Meter
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.transforms import Conditions, Transform, apply_chain, plan_chain, state_vectors
from edgeasync.protocol.messages import METRIC_PATTERN, METRICS_MAX
from edgeasync.training.micro_batches import (
    Machine,
    MicroBatch,
    MicroBatchSize,
    ThisMachine,
    check_accumulation,
)

Gradient = Callable[[Vector, npt.NDArray[np.float32], Any, Vector], float | None]
"""`gradient(parameters, x, y, out)` writes the mean loss's gradient to `out` and returns the loss, if any."""


@runtime_checkable
class WeighingGradient(Protocol):
    """A `Gradient` that says what its batches count, and whether it takes them in parts."""

    @property
    def weight(self) -> float:
        """What the last batch counts beside others."""

    @property
    def whole(self) -> bool:
        """Whether a batch must be computed at once."""

    def __call__(self, parameters: Vector, x: Any, y: Any, out: Vector) -> float | None:
        """Write the gradient of the batch's mean loss to `out`; return the loss, if any."""


Drawn = tuple[int, Callable[[slice], Batch]]
"""A batch: how many examples it has, and what returns a part of them."""

_log = logging.getLogger(__name__)


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Result of one local step: its mean loss (`None` if there is no loss), and the number of examples.

    >>> from edgeasync import StepResult
    >>> StepResult(loss=0.25, examples=32).examples
    32
    """

    loss: float | None
    examples: int


class StepsEndedError(EdgeAsyncError):
    """A trainer takes no more steps: the assignment ends with those it has taken, and without any the agent."""


class Trainer(Protocol):
    """Trains on a device. A trainer of your own has `spec`, `begin` and `step`.

    It chooses its data, its loss and its optimizer, and may use any library.

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
        """Begin an assignment: from now on train this vector in place.

        The trainer changes running statistics in the same vector. It decides whether to reset the optimizer's
        state.
        """

    def step(self) -> StepResult:
        """Take one local step, on one batch. An agent awaits an `async def step` on its loop."""


class CoroutineTrainer(Protocol):
    """A `Trainer` whose steps the agent awaits on its loop."""

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: from now on train this vector in place."""

    async def step(self) -> StepResult:
        """Take one local step, on one batch."""


@runtime_checkable
class BufferedTrainer(Trainer, Protocol):
    """A `Trainer` whose parameters are elsewhere, such as on a GPU: its steps do not change the vector."""

    def flush(self) -> None:
        """Copy the parameters to the vector; called after the last step of an assignment, perhaps more often.

        Raises `StepsEndedError` if they are out of reach: the steps are then abandoned.
        """


@runtime_checkable
class MeasuringTrainer(Trainer, Protocol):
    """A `Trainer` that measures more than the loss."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the steps since the last call, by name; they travel to the hub with the update."""


class ScoringTrainer(Trainer, Protocol):
    """A `Trainer` that can say how good the model is that it was given, for policies that compare devices."""

    def score(self) -> float:
        """Return the loss of the parameters as they are on examples kept for that; low is good."""


@runtime_checkable
class ResumableTrainer(Trainer, Protocol):
    """A `Trainer` that resumes after a power cut where it was, but for the parameters: the hub brings those."""

    def state(self) -> TrainerState:
        """Return the arrays to resume from; called between two steps, and written before the next one."""

    def restore(self, state: TrainerState) -> None:
        """Resume from a state, before `begin`; raises `ValueError` for another trainer's, or one on other data."""


@runtime_checkable
class ResettableTrainer(Trainer, Protocol):
    """A `Trainer` that can start over: the hub has found its parameters far worse than those of others."""

    def reset(self) -> None:
        """Forget what earlier steps left beside the parameters, such as momentum; `begin` follows."""


@runtime_checkable
class ScalableTrainer(Trainer, Protocol):
    """A `Trainer` whose learning rate the hub can reduce while training diverges."""

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate that was set by this factor, up to 1, from the next step on."""


@runtime_checkable
class InterruptibleTrainer(Trainer, Protocol):
    """A `Trainer` whose running step can be ended: by what it runs, it might never return."""

    def interrupt(self) -> None:
        """Make a running step raise soon and each later one at once; called from any thread, as training ends."""


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
    """Take `local_steps` steps, or return `None` as soon as `should_stop` says so: the work is abandoned.

    Steps that continue an earlier call's (`continues`) have no score and no base loss. A step that raises
    `StepsEndedError` ends them early: what was done by then is returned, or `None` if nothing was.

    After the last step a `BufferedTrainer` copies its parameters to the vector; `step_s` includes that.

    Every step is drawn out by `wait(remaining_s)`: to `step_s_min`, to stand for a slower device, and so that it
    takes only a `share` of the time, above 0. `step_s` of the result, mean seconds a step, includes it. `on_step`
    is called after each step. Mean and variance, the population's, are of the steps that have a loss. `step`
    stands for the trainer's own, if that must be awaited. Of no steps the result has no loss. Raises `ValueError`
    if `local_steps` is below 0, and `DataError` if a step returns something else than a loss and a count of
    examples.
    """
    if local_steps < 0:
        raise ValueError(f"local_steps is {local_steps}; give 0 or more")
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
    """Adds up steps: examples, seconds, and mean and variance of their losses by Welford 1962.

    Sums of squares would cancel once the losses are nearly alike.
    """

    def __init__(self) -> None:
        self.count = self._examples = self._losses = 0
        self._seconds = self._mean = self._squares = 0.0
        self._first_loss: float | None = None

    def add(self, result: StepResult, seconds: float) -> None:
        """Count a step; raises `DataError` for a result of something else."""
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
        """Return the result of all steps; bringing the parameters took `flushed_s`."""
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
    """Let a trainer's steps reach the vector; return whether they have."""
    if isinstance(trainer, BufferedTrainer):
        try:
            trainer.flush()
        except StepsEndedError:
            return False
    return True


def _pair(batch: Any) -> Batch:
    """Return a batch; raises `DataError` for what is no pair of examples and targets."""
    try:
        x, y = batch
        len(y)
    except (TypeError, ValueError):
        raise DataError(
            f"a trainer's batches gave {type(batch).__name__}; give pairs (x, y) of arrays, without end"
        ) from None
    return x, y


def _numbers(result: Any) -> tuple[float | None, int]:
    """Return a step's loss and examples as plain numbers: a trainer may well compute them by numpy or torch."""
    try:
        loss, examples = None if result.loss is None else float(result.loss), operator.index(result.examples)
    except (AttributeError, TypeError, ValueError):
        examples = -1
    if examples < 0:
        raise DataError(
            f"a trainer's step returned {result!r}; return StepResult(loss, examples): "
            "the loss is a number or None, the examples are a whole number, 0 or more"
        )
    return loss, examples


def _metrics(found: Mapping[str, float]) -> dict[str, float] | None:
    """Return a trainer's metrics as they may travel; those that are not finite are left out."""
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


class GradientTrainer:
    """A `Trainer` from a gradient function, an optimizer and a stream of batches.

    `gradient(parameters, x, y, out)` writes the gradient of the batch's mean loss into `out`, a flat vector like
    `parameters`. It returns the loss, or `None`. The `optimizer` is a sequence of stages such as `SGD`. Only
    trained entries pass through the optimizer; the gradient function changes statistics itself. The trainer
    keeps one vector for the gradient, and as many as the optimizer has state.

    A local step is of one batch, or of `accumulation_steps` batches together. With a `micro_batch_size` no more
    examples go through the gradient function at once; `"auto"` chooses by what `machine` measures. Then gradients
    are added up in one more vector, each by the weight of its part: the number of examples, or what a
    `WeighingGradient` says. The result is that of the whole batch, but for rounding.
    Raises `ConfigError` for a spec with statistics, since batch norms depend on what goes through at once, and
    for a stage of the optimizer with a number out of its range.

    If there is not the memory for a batch, half as many examples go through from then on, and so on down to one;
    not where the spec has statistics, or the gradient function takes no parts: `NoMemoryError`.

    A gradient function that has scores may add them to a `meter`, whose metrics travel with the updates.

    >>> import numpy as np
    >>> from edgeasync import SGD, Dataset, GradientTrainer
    >>> from edgeasync.data import batches
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> model = SoftmaxModel(inputs=4, classes=2)
    >>> stream = batches(Dataset.of(np.eye(4), [0, 1, 0, 1]), batch_size=2, seed=0)
    >>> trainer = GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], stream)
    >>> trainer.begin(model.initial(0))
    >>> trainer.step()
    StepResult(loss=0.693..., examples=2)
    """

    def __init__(
        self,
        spec: ParameterSpec,
        gradient: Gradient,
        optimizer: Sequence[Transform],
        batches: Iterator[Batch],
        *,
        keep_optimizer_state: bool = False,
        accumulation_steps: int = 1,
        micro_batch_size: MicroBatch | None = None,
        meter: Meter | None = None,
        machine: Machine | None = None,
    ) -> None:
        check_accumulation(spec, accumulation_steps, micro_batch_size)
        for stage in optimizer:
            if isinstance(stage, Section):
                convert(to_table(stage), type(stage), where=type(stage).__name__)
        self._spec = spec
        self._gradient_of = gradient
        self._accumulation_steps = accumulation_steps
        self._micro_batch_size = micro_batch_size
        self._weighing = gradient if isinstance(gradient, WeighingGradient) else None
        self._meter = meter
        self._machine = machine or ThisMachine()
        self._auto = MicroBatchSize(self._machine) if micro_batch_size == "auto" else None
        in_parts = accumulation_steps > 1 or micro_batch_size is not None
        self._sum = np.zeros(spec.length, np.float32) if in_parts else None
        self._optimizer = tuple(optimizer)
        self._batches = batches
        self._keep_optimizer_state = keep_optimizer_state
        self._gradient = np.zeros(spec.length, np.float32)
        self._state = [np.zeros(spec.length, np.float32) for _ in range(state_vectors(self._optimizer))]
        self._count = 0
        self._factor = np.float32(1.0)
        self._parameters: Vector | None = None

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""
        return self._spec

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment: from now on train this vector in place.

        The stream of batches continues. The optimizer's state is reset, because momentum from another model
        points the wrong way. With `keep_optimizer_state` it stays. Raises `ModelMismatchError` for a vector that
        is not of the spec.
        """
        self._spec.check(parameters)
        self._parameters = parameters
        if not self._keep_optimizer_state:
            self.reset()

    def reset(self) -> None:
        """Forget the optimizer's state."""
        self._count = 0
        for state in self._state:
            state.fill(0.0)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply every later step by this factor."""
        self._factor = np.float32(factor)

    def step(self) -> StepResult:
        """Take one local step; raises `RuntimeError` before `begin`."""
        if self._parameters is None:
            raise RuntimeError("step() before begin(): there are no parameters to train")
        # A model that diverges shows in its loss; a warning for each step would tell nobody more.
        with np.errstate(over="ignore", invalid="ignore"):
            if self._sum is None:
                result = self._take_whole(self._parameters)
            else:
                batches = (self._draw() for _ in range(self._accumulation_steps))
                result = self._add_up(self._parameters, self._sum, batches)
            self._update(self._parameters)
        return result

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the steps since the last call."""
        return {} if self._meter is None else self._meter.take()

    def state(self) -> TrainerState:
        """Return the place in the data, if the batches know it, and the optimizer's state if it is kept."""
        state: dict[str, npt.NDArray[Any]] = {}
        if isinstance(self._batches, Batches):
            state["batches"] = self._batches.state()
        if self._keep_optimizer_state:
            state["count"] = np.array([self._count], np.int64)
            state |= {f"optimizer.{number}": vector for number, vector in enumerate(self._state)}
        return state

    def restore(self, state: TrainerState) -> None:
        """Resume from a state; raises `ValueError` for the state of another trainer or of other data."""
        if {name: array.shape for name, array in state.items()} != {
            name: array.shape for name, array in self.state().items()
        }:
            raise ValueError("a state of other arrays than this trainer's")
        if isinstance(self._batches, Batches):
            self._batches.restore(state["batches"])
        if self._keep_optimizer_state:
            self._count = int(state["count"][0])
            for number, vector in enumerate(self._state):
                vector[:] = state[f"optimizer.{number}"]

    def _take_whole(self, parameters: Vector) -> StepResult:
        """Compute the gradient of one batch at once, or in parts from now on if there is not the memory."""
        length, part_of = self._draw()
        try:
            x, y = part_of(slice(0, length))
            return StepResult(self._gradient_of(parameters, x, y, self._gradient), length)
        except (MemoryError, NoMemoryError) as error:
            self._halve(length, error)
        self._sum = np.zeros_like(self._gradient)
        return self._add_up(parameters, self._sum, [(length, part_of)])

    def _add_up(self, parameters: Vector, total: Vector, batches: Iterable[Drawn]) -> StepResult:
        """Compute the gradient of several batches, or of one in parts, with `total` to add up in."""
        total.fill(0.0)
        examples, weights, losses = 0, 0.0, 0.0
        has_loss = False
        for x, y, loss in self._parts(parameters, batches):
            weight = float(len(y) if self._weighing is None else self._weighing.weight)
            examples += len(x)
            if weight > 0.0:  # a part that counts for nothing may have no gradient
                np.multiply(self._gradient, np.float32(weight), out=self._gradient)
                total += self._gradient
                weights += weight
                if loss is not None:
                    has_loss = True
                    losses += weight * float(loss)
        np.divide(total, np.float32(weights or 1.0), out=self._gradient)
        return StepResult(losses / weights if has_loss else None, examples)

    def _parts(self, parameters: Vector, batches: Iterable[Drawn]) -> Iterator[tuple[Any, Targets, float | None]]:
        """Compute the gradient of one part after the other; yield the part and its loss.

        Raises `NoMemoryError` if not even one example fits, or the model forbids parts.
        """
        for length, part_of in batches:
            start = 0
            while start < length:
                auto = self._auto
                rows = auto.rows if auto is not None else self._micro_batch_size or length
                end = min(start + int(rows), length)
                if auto is not None:
                    auto.begin()
                try:
                    x, y = part_of(slice(start, end))
                    loss = self._gradient_of(parameters, x, y, self._gradient)
                except (MemoryError, NoMemoryError) as error:
                    self._halve(end - start, error)
                    continue
                if auto is not None:
                    auto.done(end - start, length)
                yield x, y, loss
                start = end

    def _draw(self) -> Drawn:
        """Draw a batch; return its length, and what returns a part of it. A whole one may not fit into memory."""
        if isinstance(self._batches, Batches):
            drawn, take = self._batches.draw(), self._batches.take
            return len(drawn), lambda part: take(drawn[part])
        x, y = _pair(next(self._batches))
        # Not every kind of examples can be cut: a whole batch is given as it came.
        return len(y), lambda part: (x, y) if part == slice(0, len(y)) else (x[part], y[part])

    def compute_at_most(self, rows: int) -> None:
        """Let no more examples go through the model at once; raises `NoMemoryError` if it forbids parts."""
        self._check_parts(None)
        self._auto = MicroBatchSize(self._machine, rows)
        if self._sum is None:
            self._sum = np.zeros_like(self._gradient)

    def _halve(self, rows: int, error: Exception) -> None:
        """Let half as many examples go through the model at once, after there was not the memory for `rows`."""
        if self._auto is None:
            self._check_parts(error)
            self._auto = MicroBatchSize(self._machine, rows)
        if not self._auto.failed():
            raise NoMemoryError(
                f"there is not the memory for a step on a single example ({error}): train a smaller model, or end "
                "other programs on this device"
            ) from error
        _log.warning("there is not the memory for %d examples at once: from now on %d", rows, self._auto.rows)

    def _check_parts(self, error: Exception | None) -> None:
        """Raise `NoMemoryError` if a batch must go through the model as a whole."""
        statistics = self._spec.trained_length < self._spec.length
        if statistics or (self._weighing is not None and self._weighing.whole):
            why = (
                "has a batch norm, which is not the same for a batch in parts" if statistics else "takes no parts"
            )
            raise NoMemoryError(
                f"there is not the memory for a step, and the model {why}: set a smaller batch_size at the hub, "
                "or end other programs on this device"
            ) from error

    def _update(self, parameters: Vector) -> None:
        trained = self._spec.trained_length
        chunks = [slice(at, min(at + CHUNK, trained)) for at in range(0, trained, CHUNK)]
        # One pass of reading, little beside the gradient's own work, so that a stage may clip by the norm.
        squares = sum(float(np.vdot(self._gradient[chunk], self._gradient[chunk])) for chunk in chunks)
        plan = plan_chain(self._optimizer, Conditions(math.sqrt(squares), self._count))
        for chunk in chunks:
            step = self._gradient[chunk]
            apply_chain(self._optimizer, step, parameters[chunk], [state[chunk] for state in self._state], plan)
            if self._factor != 1.0:
                step *= self._factor
            parameters[chunk] -= step
        self._count += 1
