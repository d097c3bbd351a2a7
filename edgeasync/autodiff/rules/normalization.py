"""Gradients of normalizations.

Trained batch norms use the statistics of the batch and update the running statistics.
"""

import numpy as np

from edgeasync.autodiff.rules.reduction import count_of
from edgeasync.autodiff.rules.registry import Gradients, Step, rule
from edgeasync.autodiff.rules.resampling import multiply


def _batch_norm_forward(step: Step) -> None:
    """Normalize by the batch's statistics, or by running statistics that stay fixed.

    The training mode of the BatchNormalization operator cannot be used. It overwrites its inputs if
    the statistics are not outputs of the graph. Also, it does not output the mean and variance of
    the batch, which the gradient needs.
    """
    graph, op, node = step.graph, step.graph.op, step.node
    momentum = step.attribute("momentum", 0.9)
    node.attributes = {"epsilon": step.attribute("epsilon", 1e-5)}
    del node.outputs[1:]
    mean_name, variance_name = step.input(3), step.input(4)
    if mean_name not in graph.live_statistics:
        graph.nodes.append(node)
        return
    shape = step.shape(0)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    mean = op("ReduceMean", step.input(0), graph.ints(*axes), keepdims=1)
    centred = op("Sub", step.input(0), mean)
    variance = op("ReduceMean", op("Mul", centred, centred), graph.ints(*axes), keepdims=0)
    flat_mean = op("Reshape", mean, graph.ints(-1))
    count = count_of(step, shape, axes)
    step.saved = {"centred": centred, "variance": variance, "count": count}
    node.inputs[3:] = [flat_mean, variance]
    graph.nodes.append(node)
    # Use the unbiased variance, as torch does; the difference matters for small batches.
    several = op("Greater", count, graph.scalar(1.0))
    unbiased = op("Mul", variance, op("Div", count, op("Sub", count, graph.scalar(1.0))))
    for name, fresh in ((mean_name, flat_mean), (variance_name, unbiased)):
        # If a norm is used twice, the second use updates the result of the first.
        old = graph.statistics.get(name, name)
        kept = op("Mul", old, graph.scalar(momentum))
        moved = op("Add", kept, op("Mul", fresh, graph.scalar(1.0 - momentum)))
        # A single value has no variance, and the last batch of an epoch may be a single example.
        graph.statistics[name] = moved if name == mean_name else op("Where", several, moved, old)


@rule("BatchNormalization", forward=_batch_norm_forward)
def _batch_norm(step: Step) -> Gradients:
    """Compute dx = a (dy - mean(dy) - xhat mean(dy xhat)).

    See Ioffe and Szegedy 2015 (arXiv:1502.03167).
    """
    graph, op, gradient = step.graph, step.graph.op, step.gradient
    rank = len(step.shape(0))
    axes = graph.ints(*[axis for axis in range(rank) if axis != 1])
    spatial = graph.ints(-1, *[1] * (rank - 2))
    live = bool(step.saved)
    variance = step.saved["variance"] if live else step.input(4)
    epsilon = graph.scalar(step.attribute("epsilon", 1e-5))
    inverse = op("Reciprocal", op("Sqrt", op("Add", variance, epsilon)))
    centred = step.saved["centred"] if live else op("Sub", step.input(0), op("Reshape", step.input(3), spatial))
    grad_bias = op("ReduceSum", gradient, axes, keepdims=0)
    projected = op("Mul", op("ReduceSum", op("Mul", gradient, centred), axes, keepdims=0), inverse)
    factor = op("Mul", step.input(1), inverse)
    scaled = op("Mul", gradient, op("Reshape", factor, spatial))
    if not live:
        return [scaled, projected, grad_bias]
    share = op("Neg", op("Div", factor, step.saved["count"]))
    slope, offset = (op("Mul", value, share) for value in (op("Mul", projected, inverse), grad_bias))
    # slope * centred + offset in one pass, as a batch norm with mean 0 and variance 1.
    channels = graph.static_shape(step.input(1), step.node.where)
    zero, one = (graph.constant(np.full(channels, value, np.float32)) for value in (0.0, 1.0))
    rest = op("BatchNormalization", centred, slope, offset, zero, one, epsilon=0.0)
    return [op("Add", scaled, rest), projected, grad_bias]


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
