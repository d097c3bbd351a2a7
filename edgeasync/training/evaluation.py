"""What a model is worth on held-out data: loss and accuracy of a flat vector of parameters.

Examples keep their order, a bounded number at a time, so the same vector gives the same result. An
evaluator may be called in any thread, by one at a time; it reads the vector where it is and changes nothing.
"""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import Dataset, Features
from edgeasync.errors import DataError
from edgeasync.parameters import Vector
from edgeasync.training.losses import LossSum, cross_entropy
from edgeasync.training.numpy_models import Model

ROWS_MAX = 256
"""Examples that go through a model at a time; more make it no faster."""

VALUES_MAX = 1 << 20
"""Values of a batch's widest known array, 4 MiB; of larger examples fewer are taken at a time."""


class EvaluationResult(msgspec.Struct, frozen=True):
    """The mean loss over a data set, and the share of labels that the model gets right.

    `accuracy` is `None` unless the targets are labels. If the model diverged, the loss is not finite.
    """

    loss: float
    accuracy: float | None
    examples: int


def plain(found: EvaluationResult) -> EvaluationResult:
    """Return an evaluation with plain numbers; raise `DataError` if it is none."""
    try:
        accuracy = None if found.accuracy is None else float(found.accuracy)
        return EvaluationResult(float(found.loss), accuracy, operator.index(found.examples))
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"an evaluator returned {found!r}; return EvaluationResult(loss, accuracy, examples), "
            "where only the accuracy may be None"
        ) from error


class Evaluator(Protocol):
    """Holds a data set and a model's form, and says what a vector of its parameters is worth."""

    def __call__(self, parameters: Vector) -> EvaluationResult:
        """Evaluate; raises `ModelMismatchError` for a vector that is not of the model."""


class NumpyEvaluator:
    """An `Evaluator` of a model in numpy: one forward pass for loss and accuracy.

    Raises `DataError` for data that does not fit the model.
    """

    def __init__(self, model: Model, dataset: Dataset) -> None:
        model.check_data(dataset)
        self._model = model
        self._dataset = dataset
        self._rows = rows_at_once(max(max(parameter.shape) for parameter in model.spec.parameters))

    def __call__(self, parameters: Vector) -> EvaluationResult:
        """Evaluate; raises `ModelMismatchError` for a vector that is not of the model."""

        def loss_of(x: Any, y: Any) -> LossSum:
            return cross_entropy(self._model.scores(parameters, x), y)

        return add_up(self._dataset.x, self._dataset.y, self._rows, loss_of)


def rows_at_once(values: int) -> int:
    """Return how many examples make a batch if the widest array has `values` for each."""
    return max(1, min(ROWS_MAX, VALUES_MAX // values))


def add_up(
    x: Features, targets: npt.NDArray[Any], rows: int, loss_of: Callable[[Any, Any], LossSum]
) -> EvaluationResult:
    """Evaluate in batches of `rows`, the last one what is left: `loss_of(x, targets)`, summed up."""
    total = weight = 0.0
    right = labels = 0
    # A model that diverged shows in its loss; a warning for each batch would tell nobody more.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(x), rows):
            batch = slice(start, start + rows)
            found = loss_of(x[batch], targets[batch])
            total += found.total
            weight += found.weight
            right += found.right
            labels += found.labels
    if not weight:
        raise DataError("none of the examples to evaluate on counts: give some without the ignored label")
    return EvaluationResult(total / weight, right / labels if labels else None, len(x))


def mean_of(
    loss: float,
    labels: npt.NDArray[Any],
    classes: npt.NDArray[Any] | None,
    *,
    ignored_label: int | None = None,
) -> LossSum:
    """Return the mean loss of some examples as a sum, with the labels that `classes` has right.

    `classes` has the likeliest class for each label, of which an example may have several; without it there is no
    accuracy. Labels may be (n, 1) for classes (n,). An ignored label does not count. Raises `DataError` if there
    is not one class for each label.
    """
    if classes is not None and _sizes(classes) == _sizes(labels):
        labels = labels.reshape(classes.shape)
    counts = np.full(labels.shape, True) if ignored_label is None else labels != ignored_label
    weight = int(counts.sum())
    if not weight:
        return LossSum(0.0, 0.0)  # the mean of nothing is not a number
    if classes is None:
        return LossSum(loss * weight, weight)
    if classes.shape != labels.shape:
        raise DataError(
            f"the model tells classes of shape {classes.shape} for labels of shape {labels.shape}; scores are "
            "(n, classes) for labels (n,), and (n, classes, T) for labels (n, T)"
        )
    return LossSum(loss * weight, weight, int(((classes == labels) & counts).sum()), weight)


def _sizes(array: npt.NDArray[Any]) -> list[int]:
    return [size for size in array.shape if size != 1]
