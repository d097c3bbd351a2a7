"""Trains with a gradient function, an optimizer and a stream of batches, within free memory."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgeasync.config import Section, convert, to_table
from edgeasync.core.arrays.spool import TrainerState
from edgeasync.data.dataset import Batch, Batches, Targets
from edgeasync.errors import DataError, NoMemoryError
from edgeasync.metrics import Meter
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.transforms import Conditions, Transform, apply_chain, plan_chain, state_vectors
from edgeasync.training.micro_batches import Machine, MicroBatch, MicroBatchSize, check_accumulation
from edgeasync.training.trainer import StepResult

Gradient = Callable[[Vector, npt.NDArray[np.float32], Any, Vector], float | None]
"""`gradient(parameters, x, y, out)` writes the gradient of the mean loss to `out`, and returns the
mean loss or `None`.
"""


@runtime_checkable
class WeighingGradient(Protocol):
    """A `Gradient` that reports the weight of each batch, and whether batches can be split."""

    @property
    def weight(self) -> float:
        """The last batch's weight in a weighted mean of gradients."""

    @property
    def whole(self) -> bool:
        """Whether a batch must be computed as a whole, instead of in parts."""

    def __call__(self, parameters: Vector, x: Any, y: Any, out: Vector) -> float | None:
        """Write the gradient of the batch's mean loss to `out`, and return the loss or `None`."""


Drawn = tuple[int, Callable[[slice], Batch]]
"""A batch: the number of its examples, and a function that returns a slice of these examples."""

_log = logging.getLogger(__name__)


class GradientTrainer:
    """A `Trainer` that combines a gradient function, an optimizer and a stream of batches.

    `gradient(parameters, x, y, out)` writes the gradient of the batch's mean loss into `out`, a
    flat vector like `parameters`. It returns the loss, or `None`. The `optimizer` is a sequence of
    stages such as `SGD`. Only trained entries of the vector pass through the optimizer; the
    gradient function updates running statistics itself. The trainer allocates one vector for the
    gradient, and the vectors that the optimizer needs for its state.

    A local step uses one batch, or `accumulation_steps` batches. If `micro_batch_size` is set, a
    batch is split into parts of at most that many examples; `"auto"` chooses the size from
    measurements of `machine`. The gradients of the parts are added up in one more vector. Each part
    is weighted by its number of examples, or by the `weight` of a `WeighingGradient`. Except for
    rounding, the result equals the gradient of the whole batch.

    Raises `ConfigError` if batches would be combined or split although the spec has running
    statistics, because batch norms depend on the size of the parts. Also raises `ConfigError` if a
    number in a stage of the optimizer is out of range.

    If a batch does not fit into memory, it is split into halves repeatedly, down to single
    examples. If the spec has running statistics, or the gradient function needs whole batches, the
    trainer raises `NoMemoryError` instead.

    A gradient function that computes scores may add them to `meter`. The agent sends the metrics of
    this meter to the hub with each update.

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
        self.spec = spec
        self._parts = GradientInParts(
            spec, gradient, machine or Machine(), micro_batch_size, adds_up=accumulation_steps > 1
        )
        self._optimizer = LocalOptimizer(optimizer, spec)
        self._batches = batches
        self._accumulation_steps = accumulation_steps
        self._keep_optimizer_state = keep_optimizer_state
        self._meter = meter
        self._parameters: Vector | None = None

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: from now on, train the vector `parameters` in place.

        The stream of batches continues. The momentum of another model has the wrong direction, so
        the optimizer's state is reset unless `keep_optimizer_state` is set. Raises
        `ModelMismatchError` if the vector does not match the spec.
        """
        self.spec.check(parameters)
        self._parameters = parameters
        if not self._keep_optimizer_state:
            self.reset()

    def reset(self) -> None:
        """Reset the optimizer's state."""
        self._optimizer.reset()

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply all later steps by `factor`."""
        self._optimizer.factor = np.float32(factor)

    def step(self) -> StepResult:
        """Take one local step. Raises `RuntimeError` before `begin`."""
        if self._parameters is None:
            raise RuntimeError("step() called before begin(): there are no parameters to train")
        # If the model diverges, the loss shows it, so a warning per step is not useful.
        with np.errstate(over="ignore", invalid="ignore"):
            batches = (self._draw() for _ in range(self._accumulation_steps))
            result = self._parts.compute(self._parameters, batches)
            self._optimizer.update(self._parameters, self._parts.values)
        return result

    def _draw(self) -> Drawn:
        """Draw a batch. Return its length, and a function that returns slices of the batch.

        Slices are necessary because the whole batch may not fit into memory.
        """
        if isinstance(self._batches, Batches):
            drawn, take = self._batches.draw(), self._batches.take
            return len(drawn), lambda part: take(drawn[part])
        x, y = _next_pair(self._batches)
        # Not all types of examples can be sliced, so a whole batch is passed unchanged.
        return len(y), lambda part: (x, y) if part == slice(0, len(y)) else (x[part], y[part])

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the steps since the last call."""
        return {} if self._meter is None else self._meter.take()

    def state(self) -> TrainerState:
        """Return the arrays that `restore` needs.

        They are the position in the stream of batches, if the stream has one, and the optimizer's
        state if it is kept between assignments.
        """
        place: dict[str, npt.NDArray[Any]]
        place = {"batches": self._batches.state()} if isinstance(self._batches, Batches) else {}
        return place | self._optimizer.state() if self._keep_optimizer_state else place

    def restore(self, state: TrainerState) -> None:
        """Resume from a saved state.

        Raises `ValueError` if the state belongs to another trainer or other data.
        """
        ours, theirs = ({name: array.shape for name, array in each.items()} for each in (self.state(), state))
        if ours != theirs:
            raise ValueError("the state's arrays do not match this trainer's")
        if isinstance(self._batches, Batches):
            self._batches.restore(state["batches"])
        if self._keep_optimizer_state:
            self._optimizer.restore(state)

    def compute_at_most(self, rows: int) -> None:
        """Limit the number of examples that are computed at once to `rows`.

        Raises `NoMemoryError` if batches cannot be split.
        """
        self._parts.compute_at_most(rows, None)


def _next_pair(batches: Iterator[Any]) -> Batch:
    """Return the next batch.

    Raises `DataError` if there is no further batch, or if it is not a pair of examples and targets.
    """
    try:
        batch = next(batches)
    except StopIteration:  # this exception would break a generator that calls this function
        raise DataError("the batches have ended; a trainer needs an endless iterator of batches") from None
    try:
        x, y = batch
        len(y)
    except (TypeError, ValueError):
        raise DataError(
            f"expected batches (x, y) of arrays, got {type(batch).__name__}; yield such pairs without end"
        ) from None
    return x, y


class LocalOptimizer:
    """A device's optimizer: its stages, their state vectors, and the number of steps taken.

    Raises `ConfigError` if a number in a stage is out of range.
    """

    def __init__(self, stages: Sequence[Transform], spec: ParameterSpec) -> None:
        for stage in stages:
            if isinstance(stage, Section):
                convert(to_table(stage), type(stage), where=type(stage).__name__)
        self.factor = np.float32(1.0)
        """Factor by which all steps are multiplied."""
        self._stages = tuple(stages)
        self._vectors = [np.zeros(spec.length, np.float32) for _ in range(state_vectors(self._stages))]
        self._count = 0
        trained = spec.trained_length
        self._chunks = [slice(at, min(at + CHUNK, trained)) for at in range(0, trained, CHUNK)]

    def reset(self) -> None:
        """Reset the state to what it was before the first step."""
        self._count = 0
        for vector in self._vectors:
            vector.fill(0.0)

    def update(self, parameters: Vector, gradient: Vector) -> None:
        """Take a step, processing the vectors chunk by chunk. Overwrites `gradient`."""
        # Stages may clip by norm, which needs one more pass over the gradient. This is cheap
        # compared with computing the gradient.
        squares = sum(float(np.vdot(gradient[chunk], gradient[chunk])) for chunk in self._chunks)
        plan = plan_chain(self._stages, Conditions(math.sqrt(squares), self._count))
        for chunk in self._chunks:
            step = gradient[chunk]
            apply_chain(self._stages, step, parameters[chunk], [vector[chunk] for vector in self._vectors], plan)
            if self.factor != 1.0:
                step *= self.factor
            parameters[chunk] -= step
        self._count += 1

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the number of steps, and the state vectors without copying them."""
        vectors = {f"optimizer.{number}": vector for number, vector in enumerate(self._vectors)}
        return {"count": np.array([self._count], np.int64), **vectors}

    def restore(self, state: TrainerState) -> None:
        """Resume from a state that `state` returned."""
        self._count = int(state["count"][0])
        for number, vector in enumerate(self._vectors):
            vector[:] = state[f"optimizer.{number}"]


class GradientInParts:
    """Computes gradients of whole batches, or in parts that fit into memory.

    Set `adds_up` if the gradients of several batches will be combined.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        function: Gradient,
        machine: Machine,
        micro_batch_size: MicroBatch | None,
        *,
        adds_up: bool,
    ) -> None:
        self.values = np.zeros(spec.length, np.float32)
        """The gradient that was computed last."""
        self._function = function
        self._weighing = function if isinstance(function, WeighingGradient) else None
        self._has_statistics = spec.trained_length < spec.length
        self._machine = machine
        self._size: MicroBatchSize | None = None
        if micro_batch_size is not None:
            self._size = MicroBatchSize(machine, None if micro_batch_size == "auto" else micro_batch_size)
        self._sum = np.zeros_like(self.values) if adds_up or micro_batch_size is not None else None

    def compute(self, parameters: Vector, batches: Iterable[Drawn]) -> StepResult:
        """Compute the gradient of the mean loss over `batches`.

        There may be several batches only if `adds_up` was set.
        """
        if self._sum is None:
            (drawn,) = batches
            length, part_of = drawn
            try:
                x, y = part_of(slice(0, length))
                return StepResult(self._function(parameters, x, y, self.values), length)
            except (MemoryError, NoMemoryError) as error:
                self._halve(length, error)
            batches = [drawn]
        return self._add_up(parameters, batches)

    def _add_up(self, parameters: Vector, batches: Iterable[Drawn]) -> StepResult:
        total = self._sum
        assert total is not None
        total.fill(0.0)
        examples, weights, losses = 0, 0.0, 0.0
        has_loss = False
        for x, y, loss in self._parts(parameters, batches):
            weight = float(len(y) if self._weighing is None else self._weighing.weight)
            examples += len(x)
            if weight > 0.0:  # a part of weight 0 may have no gradient
                np.multiply(self.values, np.float32(weight), out=self.values)
                total += self.values
                weights += weight
                if loss is not None:
                    has_loss = True
                    losses += weight * float(loss)
        np.divide(total, np.float32(weights or 1.0), out=self.values)
        return StepResult(losses / weights if has_loss else None, examples)

    def _parts(self, parameters: Vector, batches: Iterable[Drawn]) -> Iterator[tuple[Any, Targets, float | None]]:
        """Compute the gradient of each part into `values`. Yield each part's data and its loss.

        Raises `NoMemoryError` if a single example does not fit into memory, or if batches cannot be
        split.
        """
        for length, part_of in batches:
            start = 0
            while start < length:
                size = self._size
                end = length if size is None else min(start + size.rows, length)
                if size is not None:
                    size.begin()
                try:
                    x, y = part_of(slice(start, end))
                    loss = self._function(parameters, x, y, self.values)
                except (MemoryError, NoMemoryError) as error:
                    self._halve(end - start, error)
                    continue
                if size is not None:
                    size.done(end - start, length)
                yield x, y, loss
                start = end

    def compute_at_most(self, rows: int, error: Exception | None) -> MicroBatchSize:
        """Limit the number of examples that are computed at once to `rows`.

        Raises `NoMemoryError` if batches cannot be split.
        """
        if self._has_statistics or (self._weighing is not None and self._weighing.whole):
            why = "cannot be computed in parts"
            if self._has_statistics:
                why = "has a batch norm, which needs the whole batch"
            raise NoMemoryError(
                f"not enough memory for a step, and the batch cannot be split because the model {why}; set a "
                "smaller batch_size at the hub, or stop other programs on this device"
            ) from error
        if self._sum is None:
            self._sum = np.zeros_like(self.values)
        self._size = MicroBatchSize(self._machine, rows)
        return self._size

    def _halve(self, rows: int, error: Exception) -> None:
        """Halve the number of examples computed at once, after `rows` of them exhausted memory."""
        size = self._size or self.compute_at_most(rows, error)
        if not size.failed(rows):
            raise NoMemoryError(
                f"not enough memory for a step on a single example ({error}); train a smaller model, or stop "
                "other programs on this device"
            ) from error
        _log.warning("not enough memory for %d examples at once, continuing with %d", rows, size.rows)
