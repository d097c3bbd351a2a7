"""A trainer made of a gradient function, an optimizer and batches; no more examples at once than memory allows."""

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
        """Begin an assignment: from now on train this vector in place.

        The stream of batches continues. The optimizer's state is reset, because momentum from another model
        points the wrong way. With `keep_optimizer_state` it stays. Raises `ModelMismatchError` for a vector that
        is not of the spec.
        """
        self.spec.check(parameters)
        self._parameters = parameters
        if not self._keep_optimizer_state:
            self.reset()

    def reset(self) -> None:
        """Forget the optimizer's state."""
        self._optimizer.reset()

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply every later step by this factor."""
        self._optimizer.factor = np.float32(factor)

    def step(self) -> StepResult:
        """Take one local step; raises `RuntimeError` before `begin`."""
        if self._parameters is None:
            raise RuntimeError("step() before begin(): there are no parameters to train")
        # A model that diverges shows in its loss; a warning for each step would tell nobody more.
        with np.errstate(over="ignore", invalid="ignore"):
            batches = (self._draw() for _ in range(self._accumulation_steps))
            result = self._parts.compute(self._parameters, batches)
            self._optimizer.update(self._parameters, self._parts.values)
        return result

    def _draw(self) -> Drawn:
        """Draw a batch; return its length, and what returns a part of it. A whole one may not fit into memory."""
        if isinstance(self._batches, Batches):
            drawn, take = self._batches.draw(), self._batches.take
            return len(drawn), lambda part: take(drawn[part])
        x, y = _next_pair(self._batches)
        # Not every kind of examples can be cut: a whole batch is given as it came.
        return len(y), lambda part: (x, y) if part == slice(0, len(y)) else (x[part], y[part])

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the steps since the last call."""
        return {} if self._meter is None else self._meter.take()

    def state(self) -> TrainerState:
        """Return the place in the data, if the batches know it, and the optimizer's state if it is kept."""
        place: dict[str, npt.NDArray[Any]]
        place = {"batches": self._batches.state()} if isinstance(self._batches, Batches) else {}
        return place | self._optimizer.state() if self._keep_optimizer_state else place

    def restore(self, state: TrainerState) -> None:
        """Resume from a state; raises `ValueError` for the state of another trainer or of other data."""
        ours, theirs = ({name: array.shape for name, array in each.items()} for each in (self.state(), state))
        if ours != theirs:
            raise ValueError("a state of other arrays than this trainer's")
        if isinstance(self._batches, Batches):
            self._batches.restore(state["batches"])
        if self._keep_optimizer_state:
            self._optimizer.restore(state)

    def compute_at_most(self, rows: int) -> None:
        """Let no more examples go through the model at once; raises `NoMemoryError` if it forbids parts."""
        self._parts.compute_at_most(rows, None)


def _next_pair(batches: Iterator[Any]) -> Batch:
    """Return a batch; raises `DataError` for what is no pair of examples and targets, and at the end of them."""
    try:
        batch = next(batches)
    except StopIteration:  # generators that it passes through would make something else of it
        raise DataError("the data have come to their end: a trainer's batches must never end") from None
    try:
        x, y = batch
        len(y)
    except (TypeError, ValueError):
        raise DataError(
            f"a trainer's batches gave {type(batch).__name__}; give pairs (x, y) of arrays, without end"
        ) from None
    return x, y


class LocalOptimizer:
    """The stages of a device's optimizer, the vectors that they keep, and how many steps they have taken.

    Raises `ConfigError` for a stage with a number out of its range.
    """

    def __init__(self, stages: Sequence[Transform], spec: ParameterSpec) -> None:
        for stage in stages:
            if isinstance(stage, Section):
                convert(to_table(stage), type(stage), where=type(stage).__name__)
        self.factor = np.float32(1.0)
        """By which every step is multiplied."""
        self._stages = tuple(stages)
        self._vectors = [np.zeros(spec.length, np.float32) for _ in range(state_vectors(self._stages))]
        self._count = 0
        trained = spec.trained_length
        self._chunks = [slice(at, min(at + CHUNK, trained)) for at in range(0, trained, CHUNK)]

    def reset(self) -> None:
        """Forget all steps."""
        self._count = 0
        for vector in self._vectors:
            vector.fill(0.0)

    def update(self, parameters: Vector, gradient: Vector) -> None:
        """Take a step, chunk by chunk; the gradient's memory is used for it."""
        # One pass of reading, little beside the gradient's own work, so that a stage may clip by the norm.
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
        """Return the count of steps, and the vectors themselves."""
        vectors = {f"optimizer.{number}": vector for number, vector in enumerate(self._vectors)}
        return {"count": np.array([self._count], np.int64), **vectors}

    def restore(self, state: TrainerState) -> None:
        """Continue from such a state."""
        self._count = int(state["count"][0])
        for number, vector in enumerate(self._vectors):
            vector[:] = state[f"optimizer.{number}"]


class GradientInParts:
    """The gradient of batches: of one at once, or added up over parts, of no more examples than memory allows.

    `adds_up` is whether it is of several batches together.
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
        """Compute the gradient of the mean loss over batches, of which there are several only if they add up."""
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
            if weight > 0.0:  # a part that counts for nothing may have no gradient
                np.multiply(self.values, np.float32(weight), out=self.values)
                total += self.values
                weights += weight
                if loss is not None:
                    has_loss = True
                    losses += weight * float(loss)
        np.divide(total, np.float32(weights or 1.0), out=self.values)
        return StepResult(losses / weights if has_loss else None, examples)

    def _parts(self, parameters: Vector, batches: Iterable[Drawn]) -> Iterator[tuple[Any, Targets, float | None]]:
        """Compute the gradient of one part after the other; yield the part and its loss.

        Raises `NoMemoryError` if not even one example fits, or the model forbids parts.
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
        """Let no more examples go through the model at once; raises `NoMemoryError` if it forbids parts."""
        if self._has_statistics or (self._weighing is not None and self._weighing.whole):
            why = "takes no parts"
            if self._has_statistics:
                why = "has a batch norm, which is not the same for a batch in parts"
            raise NoMemoryError(
                f"there is not the memory for a step, and the model {why}: set a smaller batch_size at the hub, "
                "or end other programs on this device"
            ) from error
        if self._sum is None:
            self._sum = np.zeros_like(self.values)
        self._size = MicroBatchSize(self._machine, rows)
        return self._size

    def _halve(self, rows: int, error: Exception) -> None:
        """Let half as many examples go through the model at once, after there was not the memory for `rows`."""
        size = self._size or self.compute_at_most(rows, error)
        if not size.failed(rows):
            raise NoMemoryError(
                f"there is not the memory for a step on a single example ({error}): train a smaller model, or end "
                "other programs on this device"
            ) from error
        _log.warning("there is not the memory for %d examples at once: from now on %d", rows, size.rows)
