"""Gradients of reductions and of softmax."""

import math

import numpy as np

from edgeasync.autodiff.graph import Shape
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


def _axes(step: Step) -> list[int]:
    given = step.constant(1, step.attribute("axes", None))
    rank = len(step.shape(0))
    if given is None or len(given) == 0:
        return [] if step.attribute("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(int(axis) % rank for axis in given)


def _kept(step: Step, value: str, axes: list[int]) -> str:
    """Restore the axes that a reduction removed from a tensor, with size 1."""
    if step.attribute("keepdims", 1) or not axes:
        return value
    return step.graph.op("Unsqueeze", value, step.graph.ints(*axes))


def _spread(step: Step, value: str) -> str:
    return step.graph.op("Expand", value, _whole_shape(step))


def _whole_shape(step: Step) -> str:
    shape = step.shape(0)
    if None in shape:
        return step.graph.op("Shape", step.input(0))
    return step.graph.ints(*[dim for dim in shape if dim is not None])


@rule("ReduceSum")
def _reduce_sum(step: Step) -> Gradients:
    return [_spread(step, _kept(step, step.gradient, _axes(step)))]


@rule("ReduceMean")
def _reduce_mean(step: Step) -> Gradients:
    axes = _axes(step)
    share = step.graph.op("Div", step.gradient, count_of(step, step.shape(0), axes))
    return [_spread(step, _kept(step, share, axes))]


@rule("ReduceL2")
def _reduce_l2(step: Step) -> Gradients:
    """Use the derivative of the norm: each value divided by the norm.

    It is 0 if the norm is 0, as in torch.
    """
    graph, op, axes = step.graph, step.graph.op, _axes(step)
    length = _kept(step, step.output(), axes)
    safe = op("Where", op("Equal", length, graph.scalar(0.0)), graph.scalar(1.0), length)
    return [op("Mul", op("Div", step.input(0), safe), _kept(step, step.gradient, axes))]


@rule("ReduceL1")
def _reduce_l1(step: Step) -> Gradients:
    op, axes = step.graph.op, _axes(step)
    return [op("Mul", op("Sign", step.input(0)), _kept(step, step.gradient, axes))]


@rule("ReduceSumSquare")
def _reduce_sum_square(step: Step) -> Gradients:
    graph, op, axes = step.graph, step.graph.op, _axes(step)
    return [op("Mul", op("Mul", step.input(0), graph.scalar(2.0)), _kept(step, step.gradient, axes))]


@rule("ReduceLogSumExp")
def _reduce_log_sum_exp(step: Step) -> Gradients:
    """Use the derivative: each exponential divided by the sum, which is a softmax."""
    op, axes = step.graph.op, _axes(step)
    shares = op("Exp", op("Sub", step.input(0), _kept(step, step.output(), axes)))
    return [op("Mul", shares, _kept(step, step.gradient, axes))]


@rule("ReduceProd")
def _reduce_prod(step: Step) -> Gradients:
    """Use the derivative of a product: the product of all other values.

    It is computed as the total product divided by each value, unless a value is 0.
    """
    graph, op, axes = step.graph, step.graph.op, _axes(step)
    if not axes:
        return [step.gradient]
    is_zero = op("Equal", step.input(0), graph.scalar(0.0))
    rest = op("Where", is_zero, graph.scalar(1.0), step.input(0))
    product = op("ReduceProd", rest, graph.ints(*axes), keepdims=1)
    zeros = op("ReduceSum", op("Cast", is_zero, to=1), graph.ints(*axes), keepdims=1)
    at_zero = op("Where", op("Equal", zeros, graph.scalar(1.0)), product, graph.scalar(0.0))
    elsewhere = op("Where", op("Equal", zeros, graph.scalar(0.0)), op("Div", product, rest), graph.scalar(0.0))
    others = op("Where", is_zero, at_zero, elsewhere)
    return [op("Mul", others, _kept(step, step.gradient, axes))]


def count_of(step: Step, shape: Shape, axes: list[int]) -> str:
    """Return the number of values that a reduction over `axes` of the first input combines.

    The result is a float32 scalar.
    """
    graph, count, follows = step.graph, 1, []
    for axis in axes:
        dim = shape[axis]
        if dim is None:
            follows.append(axis)
        else:
            count *= dim
    if not follows:
        return graph.scalar(count)
    kept = [dim for axis, dim in enumerate(shape) if axis not in axes]
    if None not in kept:
        size = graph.op("Cast", graph.op("Size", step.input(0)), to=1)
        return graph.op("Div", size, graph.scalar(math.prod(dim or 0 for dim in kept)))
    sizes = graph.op("Gather", graph.op("Shape", step.input(0)), graph.ints(*follows))
    total = graph.op("Cast", graph.op("ReduceProd", sizes, keepdims=0), to=1)
    return graph.op("Mul", total, graph.scalar(count)) if count != 1 else total


@rule("ReduceMax", "ReduceMin")
def _reduce_extreme(step: Step) -> Gradients:
    """Divide the gradient evenly among values that equal the extreme, as torch's amax does."""
    graph, op, axes = step.graph, step.graph.op, _axes(step)
    if not axes:
        return [step.gradient]
    mask = op("Cast", op("Equal", step.input(0), _kept(step, step.output(), axes)), to=1)
    ties = op("ReduceSum", mask, graph.ints(*axes), keepdims=1)
    return [op("Mul", mask, op("Div", _kept(step, step.gradient, axes), ties))]


@rule("Softmax")
def _softmax(step: Step) -> Gradients:
    graph, op, y = step.graph, step.graph.op, step.output()
    product = op("Mul", step.gradient, y)
    total = op("ReduceSum", product, graph.ints(step.axis()), keepdims=1)
    return [op("Sub", product, op("Mul", y, total))]


@rule("LogSoftmax")
def _log_softmax(step: Step) -> Gradients:
    graph, op = step.graph, step.graph.op
    total = op("ReduceSum", step.gradient, graph.ints(step.axis()), keepdims=1)
    return [op("Sub", step.gradient, op("Mul", op("Exp", step.output()), total))]


def counted_labels(step: Step) -> tuple[str, str | None]:
    """Return the labels of a loss, and how much each counts, or `None` if all count equally.

    Ignored labels, which need not be classes, are replaced by class 0 and count 0.
    """
    graph, op, labels = step.graph, step.graph.op, step.input(1)
    kind = graph.dtypes[labels]
    counts = None
    if (ignored := step.attribute("ignore_index", None)) is not None:
        kept = op("Not", op("Equal", labels, graph.constant(np.array(ignored, kind))))
        labels = op("Where", kept, labels, graph.constant(np.array(0, kind)))
        counts = op("Cast", kept, to=1)
    if step.input(2):
        weights = op("Gather", step.input(2), labels)
        counts = weights if counts is None else op("Mul", weights, counts)
    return labels, counts


@rule("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy(step: Step) -> Gradients:
    """Return the gradient of the scores: softmax minus one-hot label, times the label's weight."""
    graph, op = step.graph, step.graph.op
    if any(gradient is not None for gradient in step.gradients[1:]):
        raise step.refused("its second output, the log-probabilities, is used")
    classes, (labels, counts) = step.shape(0)[1], counted_labels(step)
    gradient = step.gradient
    if step.attribute("reduction", "mean") == "mean":
        size = op("Cast", op("Size", labels), to=1) if counts is None else op("ReduceSum", counts, keepdims=0)
        gradient = op("Div", gradient, size)
    if counts is not None:
        gradient = op("Mul", gradient, counts)
    if counts is not None or step.attribute("reduction", "mean") == "none":
        gradient = op("Unsqueeze", gradient, graph.ints(1))
    label = op(
        "OneHot",
        labels,
        graph.constant(np.int64(classes or 0)),
        graph.constant(np.array([0, 1], np.float32)),
        axis=1,
    )
    return [op("Mul", op("Sub", op("Softmax", step.input(0), axis=1), label), gradient)]
