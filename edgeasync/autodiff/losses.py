"""Losses and metrics: from the model's output and the targets to a scalar, and the gradient it begins with."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from edgeasync.autodiff.graph import FLOAT, Graph, Shape
from edgeasync.autodiff.settings import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
)
from edgeasync.errors import GraphError

TARGET = "target"


class LossParts(msgspec.Struct, frozen=True):
    """What a loss adds to the graph, by tensor: the loss, metrics by name, and the output's gradient."""

    loss: str
    metrics: dict[str, str]
    gradient: str


def target_type(loss: Loss, output: Shape) -> tuple["np.dtype[Any]", Shape]:
    """Return dtype and shape of the targets for a model's output; raises `GraphError` if none fit it."""
    if isinstance(loss, CrossEntropy):
        if len(output) < 2 or output[1] is None:
            raise GraphError(f"cross_entropy needs scores of shape (batch, classes, ...), the output has {output}")
        if loss.class_weights is not None and len(loss.class_weights) != output[1]:
            raise GraphError(f"{len(loss.class_weights)} class weights, but the output has {output[1]} classes")
        return np.dtype(np.int64), (output[0], *output[2:])
    return FLOAT, output


def add_loss(graph: Graph, loss: Loss, output: str) -> LossParts:
    """Append a loss of `output` against the tensor `target`."""
    graph.enter("loss")
    add: Callable[..., LossParts] = _ADDERS[type(loss)]
    return add(graph, loss, output)


def _cross_entropy(graph: Graph, loss: CrossEntropy, scores: str) -> LossParts:
    op, shape = graph.op, graph.shape(scores)
    classes = shape[1]
    assert classes is not None
    # What each class counts in the label: (1 - smoothing) [+ smoothing / classes for all], times its weight.
    off = loss.label_smoothing / classes
    values = graph.constant(np.array([off, 1.0 - loss.label_smoothing + off], np.float32))
    label = op("OneHot", TARGET, graph.constant(np.int64(classes)), values, axis=1)
    if loss.class_weights is None:
        count = op("Cast", op("Size", TARGET), to=1)
        sums = None
    else:
        weights = np.array(loss.class_weights, np.float32)
        label = op("Mul", label, graph.constant(weights.reshape(-1, *[1] * (len(shape) - 2))))
        count = op("ReduceSum", op("Gather", graph.constant(weights), TARGET), keepdims=0)
        sums = op("ReduceSum", label, graph.ints(1), keepdims=1)
    log_probabilities = op("LogSoftmax", scores, axis=1)
    total = op("ReduceSum", op("Mul", label, log_probabilities), keepdims=0)
    probabilities = op("Exp", log_probabilities)
    if sums is not None:
        probabilities = op("Mul", probabilities, sums)
    gradient = op("Div", op("Sub", probabilities, label), count)
    hits = op("Equal", op("ArgMax", scores, axis=1, keepdims=0), TARGET)
    return LossParts(
        op("Neg", op("Div", total, count)), {"accuracy": _mean(graph, op("Cast", hits, to=1))}, gradient
    )


def _mse(graph: Graph, loss: MeanSquaredError, output: str) -> LossParts:  # noqa: ARG001
    op = graph.op
    difference = op("Sub", output, TARGET)
    count = op("Cast", op("Size", TARGET), to=1)
    gradient = op("Mul", difference, op("Div", graph.scalar(2.0), count))
    value = _mean(graph, op("Mul", difference, difference))
    return LossParts(value, {"error": _mean(graph, op("Abs", difference))}, gradient)


def _l1(graph: Graph, loss: MeanAbsoluteError, output: str) -> LossParts:  # noqa: ARG001
    op = graph.op
    difference = op("Sub", output, TARGET)
    count = op("Cast", op("Size", TARGET), to=1)
    value = _mean(graph, op("Abs", difference))
    return LossParts(value, {"error": value}, op("Div", op("Sign", difference), count))


def _huber(graph: Graph, loss: Huber, output: str) -> LossParts:
    """With c the difference clipped to delta: c (difference - c / 2), and its slope is c."""
    op = graph.op
    difference = op("Sub", output, TARGET)
    count = op("Cast", op("Size", TARGET), to=1)
    clipped = op("Clip", difference, graph.scalar(-loss.delta), graph.scalar(loss.delta))
    rest = op("Sub", difference, op("Mul", clipped, graph.scalar(0.5)))
    value = _mean(graph, op("Mul", clipped, rest))
    return LossParts(value, {"error": _mean(graph, op("Abs", difference))}, op("Div", clipped, count))


def _bce_with_logits(graph: Graph, loss: BinaryCrossEntropy, scores: str) -> LossParts:  # noqa: ARG001
    """max(s, 0) - s t + log(1 + exp(-|s|)), which overflows for no score."""
    op = graph.op
    count = op("Cast", op("Size", TARGET), to=1)
    tail = op("Log", op("Add", op("Exp", op("Neg", op("Abs", scores))), graph.scalar(1.0)))
    value = _mean(graph, op("Add", op("Sub", op("Relu", scores), op("Mul", scores, TARGET)), tail))
    gradient = op("Div", op("Sub", op("Sigmoid", scores), TARGET), count)
    yes, wanted = op("Greater", scores, graph.scalar(0.0)), op("Greater", TARGET, graph.scalar(0.5))
    hits = op("Cast", op("Equal", yes, wanted), to=1)
    return LossParts(value, {"accuracy": _mean(graph, hits)}, gradient)


def _mean(graph: Graph, value: str) -> str:
    return graph.op("ReduceMean", value, keepdims=0)


_ADDERS: dict[type, Callable[..., LossParts]] = {
    CrossEntropy: _cross_entropy,
    MeanSquaredError: _mse,
    MeanAbsoluteError: _l1,
    Huber: _huber,
    BinaryCrossEntropy: _bce_with_logits,
}
