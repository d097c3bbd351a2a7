"""Gradients of pooling and of nearest-neighbour resizing."""

import math

import numpy as np

from edgeasync.autodiff.graph import Array
from edgeasync.autodiff.rules.convolution import Geometry
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


def _with_indices(step: Step) -> None:
    step.output(1)
    step.graph.nodes.append(step.node)


@rule("MaxPool", forward=_with_indices)
def _max_pool(step: Step) -> Gradients:
    """Give the gradient of each window to its largest value, the first of equals."""
    graph, op = step.graph, step.graph.op
    if step.attribute("storage_order", 0):
        raise step.refused("storage_order 1; export it in row-major order")
    kernel = step.attribute("kernel_shape", [])
    strides = step.attribute("strides", [1] * len(kernel))
    overlapping = any(stride < width for stride, width in zip(strides, kernel, strict=True))
    zeros = op("ConstantOfShape", op("Reshape", op("Size", step.input(0)), graph.ints(1)))
    flat = op("Reshape", step.gradient, graph.ints(-1))
    indices = op("Reshape", step.output(1), graph.ints(-1))
    scattered = op("ScatterElements", zeros, indices, flat, axis=0, reduction="add" if overlapping else "none")
    return [graph.reshape_like(scattered, step.input(0))]


@rule("AveragePool")
def _average_pool(step: Step) -> Gradients:
    """Spread the gradient of each window evenly over it, all channels as one."""
    graph, op = step.graph, step.graph.op
    kernel = tuple(step.attribute("kernel_shape", []))
    geometry = Geometry.of(step, kernel, step.shape(0)[2:], step.output_shape[2:])
    shares = 1.0 / _window_sizes(geometry, padded=bool(step.attribute("count_include_pad", 0)))
    share = (
        graph.scalar(shares.flat[0]) if (shares == shares.flat[0]).all() else graph.constant(shares[None, None])
    )
    gradient = op("Mul", step.gradient, share)
    gradient = op("Reshape", gradient, graph.ints(-1, 1, *geometry.narrow))
    ones = graph.constant(np.ones((1, 1, *kernel), np.float32))
    rest = geometry.rest
    after = [pad + max(0, -over) for pad, over in zip(geometry.after, rest, strict=True)]
    spread = op(
        "ConvTranspose", gradient, ones, strides=list(geometry.strides), dilations=list(geometry.dilations),
        pads=[*geometry.before, *after], output_padding=[max(0, over) for over in rest],
    )  # fmt: skip
    return [graph.reshape_like(spread, step.input(0))]


def _window_sizes(geometry: Geometry, *, padded: bool) -> Array:
    """Return how many values the mean of each window is over, float32 (spatial sizes of the output)."""
    total: Array = np.ones((), np.float32)
    for axis, kernel in enumerate(geometry.kernel):
        first = np.arange(geometry.narrow[axis]) * geometry.strides[axis] - geometry.before[axis]
        places = first[:, None] + np.arange(kernel) * geometry.dilations[axis]
        size = geometry.wide[axis]
        low, high = (-geometry.before[axis], size + geometry.after[axis]) if padded else (0, size)
        counts = ((places >= low) & (places < high)).sum(axis=1).astype(np.float32)
        total = total[..., None] * counts
    return total


@rule("GlobalAveragePool")
def _global_average_pool(step: Step) -> Gradients:
    graph, op, sizes = step.graph, step.graph.op, step.shape(0)[2:]
    if None in sizes:
        raise step.refused("its spatial sizes follow the batch")
    share = op("Mul", step.gradient, graph.scalar(1.0 / math.prod(dim or 0 for dim in sizes)))
    return [op("Expand", share, graph.ints(1, 1, *[dim or 0 for dim in sizes]))]


@rule("GlobalMaxPool")
def _global_max_pool(step: Step) -> Gradients:
    """Share the gradient evenly among values that tie, as torch's amax does."""
    graph, op = step.graph, step.graph.op
    axes = graph.ints(*range(2, len(step.shape(0))))
    mask = op("Cast", op("Equal", step.input(0), step.output()), to=1)
    return [op("Mul", mask, op("Div", step.gradient, op("ReduceSum", mask, axes, keepdims=1)))]


@rule("Resize")
def _resize(step: Step) -> Gradients:
    """Sum the gradients of the copies of each value; only whole factors of nearest neighbours."""
    graph, op = step.graph, step.graph.op
    if step.attribute("mode", "nearest") != "nearest":
        raise step.refused("only mode 'nearest' has a gradient here")
    shape: list[int] = []
    axes: list[int] = []
    for axis, (size, out) in enumerate(zip(step.shape(0), step.output_shape, strict=True)):
        if size is None or out is None:
            if size is not out:
                raise step.refused("it resizes along the batch")
            shape.append(-1)
        elif size == out:
            shape.append(size)
        else:
            if out % size or not _repeats(step, size, out):
                raise step.refused("only whole factors that repeat every value have a gradient here")
            axes.append(len(shape) + 1)
            shape += [size, out // size]
    parts = op("Reshape", step.gradient, graph.ints(*shape))
    return [op("ReduceSum", parts, graph.ints(*axes), keepdims=0)]


def _repeats(step: Step, size: int, out: int) -> bool:
    """Return whether the node's coordinates choose `place // factor`."""
    factor = out // size
    places = np.arange(out, dtype=np.float64)
    mode = step.attribute("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        source = places / factor
    elif mode in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel"):
        source = (places + 0.5) / factor - 0.5
    else:
        return False
    rounded = {
        "round_prefer_floor": np.ceil(source - 0.5),
        "round_prefer_ceil": np.floor(source + 0.5),
        "floor": np.floor(source),
        "ceil": np.ceil(source),
    }[step.attribute("nearest_mode", "round_prefer_floor")]
    return bool((np.clip(rounded, 0, size - 1) == places // factor).all())
