"""Adds a loss to a graph, and the gradient of the loss with respect to the model's output."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from edgeasync.autodiff.graph import FLOAT, Graph, Shape
from edgeasync.errors import GraphError
from edgeasync.losses import BinaryCrossEntropy, CrossEntropy, Huber, Loss, MeanAbsoluteError, MeanSquaredError

TARGET = "target"


class LossParts(msgspec.Struct, frozen=True):
    """Tensor names of the mean loss, its divisor, and its gradients by the tensor that they belong to."""

    loss: str
    weight: str
    gradients: dict[str, str]


def target_type(loss: Loss, output: Shape) -> tuple["np.dtype[Any]", Shape]:
    """Return the dtype and shape of the targets that a loss needs for a model's output.

    Raises `GraphError` if the loss cannot be used with this output.
    """
    if isinstance(loss, CrossEntropy):
        if len(output) < 2 or output[1] is None:
            way = "transpose it, or use another loss" if output else "choose the scores as the output, not a loss"
            raise GraphError(
                f"cross_entropy needs scores of shape (batch, classes, ...), but the output has shape {output}; "
                f"{way}"
            )
        if loss.class_weights is not None and len(loss.class_weights) != output[1]:
            raise GraphError(
                f"class_weights has length {len(loss.class_weights)}, but the output has {output[1]} classes; set "
                "one weight per class"
            )
        return np.dtype(np.int64), (output[0], *output[2:])
    return FLOAT, output


def add_loss(graph: Graph, loss: Loss, output: str) -> LossParts:
    """Append the loss that compares `output` with the tensor `target`."""
    graph.enter("loss")
    add: Callable[..., LossParts] = _ADDERS[type(loss)]
    return add(graph, loss, output)


def _cross_entropy(graph: Graph, loss: CrossEntropy, scores: str) -> LossParts:
    op, shape = graph.op, graph.shape(scores)
    classes = shape[1]
    assert classes is not None
    weights = None if loss.class_weights is None else np.array(loss.class_weights, np.float32)
    target, counts = TARGET, None
    if loss.ignored_label is not None:
        ignored = op("Equal", TARGET, graph.constant(np.int64(loss.ignored_label)))
        target = op("Where", ignored, graph.constant(np.int64(0)), TARGET)  # the label may not be a class number
        counts = op("Cast", op("Not", ignored), to=1)
    # Convert each label to one weight per class: smoothing / classes, plus 1 - smoothing for the
    # class of the label. Each weight is later multiplied by the class weight.
    off = loss.label_smoothing / classes
    values = graph.constant(np.array([off, 1.0 - loss.label_smoothing + off], np.float32))
    label = op("OneHot", target, graph.constant(np.int64(classes)), values, axis=1)
    weight = op("Cast", op("Size", TARGET), to=1)
    if weights is not None:
        label = op("Mul", label, graph.constant(weights.reshape(-1, *[1] * (len(shape) - 2))))
        own = op("Gather", graph.constant(weights), target)
        weight = op("ReduceSum", own if counts is None else op("Mul", own, counts), keepdims=0)
    elif counts is not None:
        weight = op("ReduceSum", counts, keepdims=0)
    if counts is not None:
        label = op("Mul", label, op("Unsqueeze", counts, graph.ints(1)))
    log_probabilities = op("LogSoftmax", scores, axis=1)
    total = op("ReduceSum", op("Mul", label, log_probabilities), keepdims=0)
    probabilities = op("Exp", log_probabilities)
    divisor = weight
    if weights is not None or counts is not None:
        probabilities = op("Mul", probabilities, op("ReduceSum", label, graph.ints(1), keepdims=1))
        # A batch without counted examples must have gradient 0, also with smoothed labels.
        divisor = op("Where", op("Greater", weight, graph.scalar(0.0)), weight, graph.scalar(np.inf))
    gradient = op("Div", op("Sub", probabilities, label), divisor)
    return LossParts(op("Neg", op("Div", total, divisor)), weight, {scores: gradient})


def _mse(graph: Graph, loss: MeanSquaredError, output: str) -> LossParts:  # noqa: ARG001
    op = graph.op
    difference, count = _difference(graph, output)
    gradient = op("Mul", difference, op("Div", graph.scalar(2.0), count))
    return LossParts(_mean(graph, op("Mul", difference, difference)), count, {output: gradient})


def _l1(graph: Graph, loss: MeanAbsoluteError, output: str) -> LossParts:  # noqa: ARG001
    op = graph.op
    difference, count = _difference(graph, output)
    return LossParts(
        _mean(graph, op("Abs", difference)), count, {output: op("Div", op("Sign", difference), count)}
    )


def _huber(graph: Graph, loss: Huber, output: str) -> LossParts:
    """Return the Huber loss c (d - c / 2) and its derivative c.

    d is the difference between output and target, and c is d clipped to `delta`.
    """
    op = graph.op
    difference, count = _difference(graph, output)
    clipped = op("Clip", difference, graph.scalar(-loss.delta), graph.scalar(loss.delta))
    rest = op("Sub", difference, op("Mul", clipped, graph.scalar(0.5)))
    return LossParts(_mean(graph, op("Mul", clipped, rest)), count, {output: op("Div", clipped, count)})


def _bce_with_logits(graph: Graph, loss: BinaryCrossEntropy, scores: str) -> LossParts:  # noqa: ARG001
    """Return the loss max(s, 0) - s t + log(1 + exp(-|s|)), a form that cannot overflow."""
    op = graph.op
    count = op("Cast", op("Size", TARGET), to=1)
    tail = op("Log", op("Add", op("Exp", op("Neg", op("Abs", scores))), graph.scalar(1.0)))
    value = _mean(graph, op("Add", op("Sub", op("Relu", scores), op("Mul", scores, TARGET)), tail))
    return LossParts(value, count, {scores: op("Div", op("Sub", op("Sigmoid", scores), TARGET), count)})


def _difference(graph: Graph, output: str) -> tuple[str, str]:
    """Return output minus target, and the number of values."""
    return graph.op("Sub", output, TARGET), graph.op("Cast", graph.op("Size", TARGET), to=1)


def _mean(graph: Graph, value: str) -> str:
    return graph.op("ReduceMean", value, keepdims=0)


_ADDERS: dict[type, Callable[..., LossParts]] = {
    CrossEntropy: _cross_entropy,
    MeanSquaredError: _mse,
    MeanAbsoluteError: _l1,
    Huber: _huber,
    BinaryCrossEntropy: _bce_with_logits,
}
