"""Evaluates a flat vector of parameters on held-out data: its loss and accuracy.

Examples are processed in order and in batches of bounded size, so evaluating the same vector twice
yields the same result. An evaluator may be called from any thread, but only from one thread at a
time. It does not change the vector.
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
"""Largest number of examples per batch of an evaluation. Larger batches are not faster."""

VALUES_MAX = 1 << 20
"""Largest number of values in the widest array of a batch: 4 MiB. Batches of large examples are
smaller.
"""


class EvaluationResult(msgspec.Struct, frozen=True):
    """The mean loss over a dataset, and the fraction of labels that were predicted correctly.

    `accuracy` is `None` unless the targets are labels. If the model has diverged, the loss is not
    finite.
    """

    loss: float
    accuracy: float | None
    examples: int


def plain(found: EvaluationResult) -> EvaluationResult:
    """Convert the numbers in an evaluation result to Python numbers.

    Raises `DataError` if the result is invalid.
    """
    try:
        accuracy = None if found.accuracy is None else float(found.accuracy)
        return EvaluationResult(float(found.loss), accuracy, operator.index(found.examples))
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"an evaluator returned {found!r}; return EvaluationResult(loss, accuracy, examples), "
            "where only the accuracy may be None"
        ) from error


class Evaluator(Protocol):
    """A function that evaluates parameter vectors of one model on one dataset."""

    def __call__(self, parameters: Vector) -> EvaluationResult:
        """Evaluate the vector. Raises `ModelMismatchError` if it does not match the model."""


class NumpyEvaluator:
    """An `Evaluator` of a numpy model. One forward pass yields both loss and accuracy.

    Raises `DataError` if the data does not match the model.
    """

    def __init__(self, model: Model, dataset: Dataset) -> None:
        model.check_data(dataset)
        self._model = model
        self._dataset = dataset
        self._rows = rows_at_once(max(max(parameter.shape) for parameter in model.spec.parameters))

    def __call__(self, parameters: Vector) -> EvaluationResult:
        """Evaluate the vector. Raises `ModelMismatchError` if it does not match the model."""

        def loss_of(x: Any, y: Any) -> LossSum:
            return cross_entropy(self._model.scores(parameters, x), y)

        return add_up(self._dataset.x, self._dataset.y, self._rows, loss_of)


def rows_at_once(values: int) -> int:
    """Return the batch size for a model whose widest array has `values` values per example."""
    return max(1, min(ROWS_MAX, VALUES_MAX // values))


def add_up(
    x: Features, targets: npt.NDArray[Any], rows: int, loss_of: Callable[[Any, Any], LossSum]
) -> EvaluationResult:
    """Evaluate in batches of `rows` examples, and add up the results of `loss_of(x, targets)`.

    The last batch may be smaller than the others.
    """
    total = weight = 0.0
    right = labels = 0
    # If the model diverged, the loss shows it, so a warning per batch is not useful.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(x), rows):
            batch = slice(start, start + rows)
            found = loss_of(x[batch], targets[batch])
            total += found.total
            weight += found.weight
            right += found.right
            labels += found.labels
    if not weight:
        raise DataError(
            "all labels are the ignored label, so the loss is undefined; add examples with other labels"
        )
    return EvaluationResult(total / weight, right / labels if labels else None, len(x))


def mean_of(
    loss: float,
    labels: npt.NDArray[Any],
    classes: npt.NDArray[Any] | None,
    *,
    ignored_label: int | None = None,
) -> LossSum:
    """Convert the mean loss of some examples to a `LossSum`, and count the correct labels.

    `classes` contains the most likely class for each label; an example may have several labels. If
    `classes` is `None`, no correct labels are counted. Ignored labels are never counted. Raises
    `DataError` if classes and labels differ in shape; axes of size 1 do not count as a difference.
    """
    if classes is not None and _sizes(classes) == _sizes(labels):
        labels = labels.reshape(classes.shape)
    counts = np.full(labels.shape, True) if ignored_label is None else labels != ignored_label
    weight = int(counts.sum())
    if not weight:
        return LossSum(0.0, 0.0)  # avoid a mean of no values
    if classes is None:
        return LossSum(loss * weight, weight)
    if classes.shape != labels.shape:
        raise DataError(
            f"the model predicts classes of shape {classes.shape} for labels of shape {labels.shape}; scores must "
            "be (n, classes) for labels (n,), and (n, classes, T) for labels (n, T)"
        )
    return LossSum(loss * weight, weight, int(((classes == labels) & counts).sum()), weight)


def _sizes(array: npt.NDArray[Any]) -> list[int]:
    return [size for size in array.shape if size != 1]
