"""Losses of training graphs in numpy, as sums over examples that can be added across batches.

`docs/reference/training_graph.md` defines the losses. Scores and targets are float32 arrays of the
same shape. Only `cross_entropy` expects scores (n, classes, ...) and int64 labels (n, ...).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class LossSum(msgspec.Struct, frozen=True):
    """The summed loss of some examples. The mean loss is `total / weight`.

    If the targets are labels, `labels` is how many there are, and `right` is how many of them were
    predicted correctly. Otherwise, both are 0.
    """

    total: float
    weight: float
    right: int = 0
    labels: int = 0


def cross_entropy(
    scores: Array,
    labels: Labels,
    *,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    ignored_label: int | None = None,
) -> LossSum:
    """Sum the softmax cross-entropy.

    If set, `class_weights` scale both the loss and its divisor.
    """
    classes = scores.shape[1]
    if ignored_label is not None:
        counts = labels != ignored_label
        scores, labels = (
            np.moveaxis(scores, 1, -1)[counts],
            labels[counts],
        )  # each position is an example from here on
        if not labels.size:
            return LossSum(0.0, 0.0)
    right = int((scores.argmax(axis=1) == labels).sum())
    # Subtract the maximum, so that the exponentials cannot overflow.
    logarithms = scores - scores.max(axis=1, keepdims=True)
    logarithms -= np.log(np.exp(logarithms).sum(axis=1, keepdims=True))
    own = np.take_along_axis(logarithms, np.expand_dims(labels, 1), 1)[:, 0]
    weight = float(labels.size)
    if class_weights is not None:
        weights = np.array(class_weights, np.float32)
        label_weights = weights[labels]
        weight = _sum(label_weights)
        own *= label_weights
        if label_smoothing:
            logarithms *= weights.reshape(-1, *[1] * (scores.ndim - 2))
    total = (1.0 - label_smoothing) * _sum(own)
    if label_smoothing:
        total += label_smoothing / classes * _sum(logarithms)
    return LossSum(-total, weight, right, labels.size)


def squared_error(scores: Array, targets: Array) -> LossSum:
    """Sum the squared differences."""
    difference = scores - targets
    return LossSum(_sum(np.square(difference, out=difference)), targets.size)


def absolute_error(scores: Array, targets: Array) -> LossSum:
    """Sum the absolute differences."""
    difference = scores - targets
    return LossSum(_sum(np.abs(difference, out=difference)), targets.size)


def huber(scores: Array, targets: Array, *, delta: float) -> LossSum:
    """Sum half the squared differences up to `delta`, and a linear term for larger differences."""
    difference = scores - targets
    clipped = np.clip(difference, np.float32(-delta), np.float32(delta))
    return LossSum(_sum(clipped * (difference - clipped * np.float32(0.5))), targets.size)


def binary_cross_entropy(scores: Array, targets: Array) -> LossSum:
    """Sum the cross-entropy of binary scores before a sigmoid."""
    tail = np.log1p(np.exp(-np.abs(scores)))
    return LossSum(_sum(np.maximum(scores, np.float32(0.0)) - scores * targets + tail), targets.size)


def _sum(values: npt.NDArray[Any]) -> float:
    return float(values.sum(dtype=np.float64))
