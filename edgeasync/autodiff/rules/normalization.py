"""Gradients of normalizations.

Trained batch norms use the statistics of the batch and update the running statistics.
"""

import math
from collections.abc import Sequence

import numpy as np

from edgeasync.autodiff.graph import Node
from edgeasync.autodiff.rules.registry import Gradients, StatisticsUpdate, Step, TrainingGraphBuilder, rule
from edgeasync.autodiff.rules.resampling import multiply


def _batch_norm_forward(step: Step) -> None:
    """Normalize by the batch's statistics, or by running statistics that stay fixed.

    The training mode of the BatchNormalization operator cannot be used. It overwrites its inputs if
    the statistics are not outputs of the graph. Also, onnxruntime supports it only on the CPU.
    """
    graph, op, node, x = step.graph, step.graph.op, step.node, step.input(0)
    epsilon = step.attribute("epsilon", 1e-5)
    del node.outputs[1:]
    names = step.input(3), step.input(4)
    if names[0] not in graph.live_statistics:
        graph.nodes.append(Node(node.op, node.inputs, node.outputs, {"epsilon": epsilon}, node.name))
        return
    axes = [axis for axis in range(len(step.shape(0))) if axis != 1]
    mean = op("ReduceMean", x, graph.ints(*axes), keepdims=1)
    centred = op("Sub", x, mean)
    # ReduceSumSquare is slower.
    total = op("ReduceSum", op("Mul", centred, centred), graph.ints(*axes), keepdims=0)
    count = _count(step)
    variance = op("Div", total, count)
    step.saved = {"centred": centred, "variance": variance, "count": count}
    inputs = [centred, step.input(1), step.input(2), _fill(step, 0.0), variance]
    graph.nodes.append(Node(node.op, inputs, node.outputs, {"epsilon": epsilon}, node.name))
    graph.updates.append(StatisticsUpdate(names, len(axes), mean, total, count, step.attribute("momentum", 0.9)))


def _fill(step: Step, value: float) -> str:
    """Return a constant with the same value for each channel."""
    return step.graph.constant(np.full(step.graph.static_shape(step.input(1), step.node.where), value, np.float32))


def _count(step: Step) -> str:
    """Return the number of values per channel, as a float32 vector of one value."""
    graph, op, shape = step.graph, step.graph.op, step.shape(0)
    channels = math.prod(graph.static_shape(step.input(1), step.node.where))
    if None not in shape:
        return graph.constant(np.array([math.prod(dim or 0 for dim in shape) / channels], np.float32))
    size = op("Cast", op("Size", step.input(0)), to=1)
    return op("Div", size, graph.constant(np.array([channels], np.float32)))


def update_statistics(graph: TrainingGraphBuilder) -> None:
    """Compute the next running statistics of all batch norms at once, which needs few nodes.

    If a norm is used twice, its second use updates the result of the first.
    """
    left = graph.updates
    while left:
        now, later, names = list[StatisticsUpdate](), list[StatisticsUpdate](), set[str]()
        for update in left:
            # Only means of the same rank can be concatenated.
            fits = update.rank == left[0].rank and names.isdisjoint(update.names)
            (now if fits else later).append(update)
            names.update(update.names)
        _update(graph, now)
        left = later


def _update(graph: TrainingGraphBuilder, updates: Sequence[StatisticsUpdate]) -> None:
    op = graph.op
    sizes = [math.prod(graph.static_shape(update.names[0], "batch norm")) for update in updates]
    kept = np.repeat(np.array([update.momentum for update in updates], np.float32), sizes)
    keep, share = graph.constant(kept), graph.constant(np.float32(1.0) - kept)
    mean = op("Reshape", op("Concat", *[update.mean for update in updates], axis=1), graph.ints(-1))
    counts = op("Concat", *[update.count for update in updates], axis=0)
    rest = op("Sub", counts, graph.scalar(1.0))
    rest = op("Gather", rest, graph.constant(np.repeat(np.arange(len(sizes)), sizes)))
    # Use the unbiased variance, as torch does; the difference matters for small batches.
    variance = op("Div", op("Concat", *[update.total for update in updates], axis=0), rest)
    for place, fresh in enumerate((mean, variance)):
        names = [update.names[place] for update in updates]
        old = op("Concat", *[graph.statistics.get(name, name) for name in names], axis=0)
        moved = op("Add", op("Mul", old, keep), op("Mul", fresh, share))
        if fresh == variance:
            # A single value has no variance, and the last batch of an epoch may be a single example.
            moved = op("Where", op("Greater", rest, graph.scalar(0.0)), moved, old)
        parts = graph.add("Split", moved, graph.ints(*sizes), outputs=len(sizes), axis=0)
        graph.statistics.update(zip(names, parts, strict=True))


@rule("BatchNormalization", forward=_batch_norm_forward)
def _batch_norm(step: Step) -> Gradients:
    """Compute dx = a (dy - mean(dy) - xhat mean(dy xhat)).

    See Ioffe and Szegedy 2015 (arXiv:1502.03167). Each pass over the values is a BatchNormalization
    that has no bias.
    """
    graph, op, gradient, scale = step.graph, step.graph.op, step.gradient, step.input(1)
    axes = graph.ints(*[axis for axis in range(len(step.shape(0))) if axis != 1])
    zero, live, epsilon = _fill(step, 0.0), bool(step.saved), step.attribute("epsilon", 1e-5)
    variance = step.saved["variance"] if live else step.input(4)

    def norm(value: str, scale: str, mean: str) -> str:
        return op("BatchNormalization", value, scale, zero, mean, variance, epsilon=epsilon)

    grad_bias = op("ReduceSum", gradient, axes, keepdims=0)
    if not live:
        normal = norm(step.input(0), _fill(step, 1.0), step.input(3))
        grad_scale = op("ReduceSum", op("Mul", gradient, normal), axes, keepdims=0)
        return [norm(gradient, scale, zero), grad_scale, grad_bias]
    centred, count = step.saved["centred"], step.saved["count"]
    inverse = op("Pow", op("Add", variance, graph.scalar(epsilon)), graph.scalar(-0.5))
    grad_scale = op("Mul", op("ReduceSum", op("Mul", gradient, centred), axes, keepdims=0), inverse)
    scaled = norm(gradient, scale, op("Div", grad_bias, count))
    slope = op("Mul", op("Mul", grad_scale, scale), op("Div", inverse, count))
    return [op("Sub", scaled, norm(centred, slope, zero)), grad_scale, grad_bias]


def _layer_norm_forward(step: Step) -> None:
    step.output(2)
    step.output(1)
    step.graph.nodes.append(step.node)


@rule("LayerNormalization", forward=_layer_norm_forward)
def _layer_norm(step: Step) -> Gradients:
    """Gradient of layer normalization (Ba et al. 2016, arXiv:1607.06450).

    The forward operator outputs the mean and the inverse standard deviation.
    """
    graph, op = step.graph, step.graph.op
    if any(step.gradients[1:]):
        raise step.refused("its mean or deviation is used as well")
    gradient = step.gradient
    inner = graph.ints(*range(step.axis(), len(step.shape(0))))
    normal = op("Mul", op("Sub", step.input(0), step.output(1)), step.output(2))
    grad_scale = op("Mul", gradient, normal)
    scaled = op("Mul", gradient, step.input(1))
    product = op("Mul", scaled, normal)
    mean = op("ReduceMean", scaled, inner, keepdims=1)
    projected = op("Mul", normal, op("ReduceMean", product, inner, keepdims=1))
    grad_x = op("Mul", op("Sub", op("Sub", scaled, mean), projected), step.output(2))
    return [grad_x, step.unbroadcast(grad_scale, 1), *([step.unbroadcast(gradient, 2)] if step.input(2) else [])]


@rule("InstanceNormalization")
def _instance_norm(step: Step) -> Gradients:
    """Gradient of instance normalization (Ulyanov et al. 2016, arXiv:1607.08022).

    It normalizes each channel of each example separately.
    """
    graph, op, gradient, x = step.graph, step.graph.op, step.gradient, step.input(0)
    rank = len(step.shape(0))
    inner = graph.ints(*range(2, rank))
    centred = op("Sub", x, op("ReduceMean", x, inner, keepdims=1))
    variance = op("ReduceMean", op("Mul", centred, centred), inner, keepdims=1)
    epsilon = graph.scalar(step.attribute("epsilon", 1e-5))
    inverse = op("Reciprocal", op("Sqrt", op("Add", variance, epsilon)))
    normal = op("Mul", centred, inverse)
    product = op("Mul", gradient, normal)
    mean = op("ReduceMean", gradient, inner, keepdims=1)
    projected = op("Mul", normal, op("ReduceMean", product, inner, keepdims=1))
    factor = op("Mul", op("Reshape", step.input(1), graph.ints(-1, *[1] * (rank - 2))), inverse)
    axes = graph.ints(0, *range(2, rank))
    return [
        op("Mul", factor, op("Sub", op("Sub", gradient, mean), projected)),
        op("ReduceSum", product, axes, keepdims=0),
        op("ReduceSum", gradient, axes, keepdims=0),
    ]


@rule("LRN")
def _local_response_norm(step: Step) -> Gradients:
    """Gradient of local response normalization (Krizhevsky et al. 2012).

    y = x s^-beta, where s is `bias` plus `alpha` times the mean square of neighbouring channels.
    """
    graph, op, x, shape = step.graph, step.graph.op, step.input(0), step.shape(0)
    channels, size = shape[1], step.attribute("size", 1)
    if channels is None:
        raise step.refused("its number of channels depends on the batch size")
    alpha, beta = step.attribute("alpha", 1e-4) / size, step.attribute("beta", 0.75)
    places = np.arange(channels)
    near = (np.abs(np.subtract.outer(places, places)) <= (size - 1) // 2).astype(np.float32)
    squares = op("Mul", multiply(graph, op("Mul", x, x), shape, 1, near), graph.scalar(alpha))
    s = op("Add", squares, graph.scalar(step.attribute("bias", 1.0)))
    scaled = op("Mul", step.gradient, op("Pow", s, graph.scalar(-beta)))
    shares = multiply(graph, op("Div", op("Mul", scaled, x), s), shape, 1, near)
    return [op("Sub", scaled, op("Mul", op("Mul", x, shares), graph.scalar(2 * alpha * beta)))]
