"""Gradients of pooling."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from edgeasync.autodiff.graph import Array
from edgeasync.autodiff.rules.geometry import Geometry
from edgeasync.autodiff.rules.registry import Gradients, Step, rule

WINDOW_MAX = 16
"""Maximum number of values per window for comparing each value with the window's maximum. For
larger windows, requesting the indices of the maxima from onnxruntime is faster.
"""


def _max_pool_forward(step: Step) -> None:
    """Request the indices of the maxima only if necessary.

    With indices, the operator takes ten times as long.
    """
    kernel = step.attribute("kernel_shape", [])
    fixed = None not in (*step.shape(0)[2:], *step.output_shape[2:])
    if not fixed or math.prod(kernel) > WINDOW_MAX or any(d != 1 for d in step.attribute("dilations", [1])):
        step.saved["indices"] = step.output(1)
    step.graph.nodes.append(step.node)


@rule("MaxPool", forward=_max_pool_forward)
def _max_pool(step: Step) -> Gradients:
    """Pass each window's gradient to its maximum, or to the first maximum if there are several."""
    if step.attribute("storage_order", 0):
        raise step.refused("storage_order is 1; export it in row-major order")
    if "indices" in step.saved:
        return [_by_indices(step)]
    kernel = tuple(step.attribute("kernel_shape", []))
    geometry = Geometry.of(step, kernel, step.shape(0)[2:], step.output_shape[2:])
    tiled = geometry.kernel == geometry.strides and not any(geometry.pads) and min(geometry.rest) >= 0
    return [_by_tiles(step, geometry) if tiled and len(kernel) == 2 else _by_places(step, geometry)]


def _by_indices(step: Step) -> str:
    graph, op = step.graph, step.graph.op
    zeros = op("ConstantOfShape", op("Reshape", op("Size", step.input(0)), graph.ints(1)))
    flat = op("Reshape", step.gradient, graph.ints(-1))
    indices = op("Reshape", step.saved["indices"], graph.ints(-1))
    return graph.reshape_like(op("ScatterElements", zeros, indices, flat, axis=0, reduction="add"), step.input(0))


def _by_tiles(step: Step, geometry: Geometry) -> str:
    """For windows that tile the input: compare the input with the upsampled output.

    If several values of a window equal the maximum, ranks select the first one.
    """
    graph, op = step.graph, step.graph.op
    kernel = list(geometry.kernel)
    covered = [narrow * width for narrow, width in zip(geometry.narrow, kernel, strict=True)]
    x = step.input(0)
    rest = [wide - cover for wide, cover in zip(geometry.wide, covered, strict=True)]
    if any(rest):
        x = op("Slice", x, graph.ints(0, 0), graph.ints(*covered), graph.ints(2, 3))
    matches = op("Cast", op("Equal", x, _spread_tiles(step, step.output(), kernel)), to=1)
    ranks = np.arange(math.prod(kernel), 0, -1, dtype=np.float32).reshape(kernel)
    ranked = op("Mul", matches, graph.constant(np.tile(ranks, geometry.narrow)[None, None]))
    # If the maximum is NaN, no value matches it, and all ranks are 0. Without the 0.5, every value
    # in the window would then count as the first match.
    best = op("Max", op("MaxPool", ranked, kernel_shape=kernel, strides=kernel), graph.scalar(0.5))
    first = op("Cast", op("Equal", ranked, _spread_tiles(step, best, kernel)), to=1)
    found = op("Mul", first, _spread_tiles(step, step.gradient, kernel))
    return op("Pad", found, graph.ints(0, 0, 0, 0, 0, 0, *rest)) if any(rest) else found


def _spread_tiles(step: Step, value: str, kernel: list[int]) -> str:
    scales = step.graph.constant(np.array([1, 1, *kernel], np.float32))
    return step.graph.op(
        "Resize",
        value,
        "",
        scales,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def _by_places(step: Step, geometry: Geometry) -> str:
    """For overlapping windows: compare the values at each window position with the maximum.

    The first match of a window receives the gradient.
    """
    return _put_back(step, geometry, _shares(step, geometry))


def _shares(step: Step, geometry: Geometry) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield each window position, and the gradients of the windows whose maximum is there."""
    op, left = step.graph.op, step.gradient
    look = _phases(step, geometry) if _has_phases(geometry) else _windows(step, geometry)
    places = list(np.ndindex(*geometry.kernel))
    for place in places[:-1]:
        share = op("Mul", op("Cast", op("Equal", look(place), step.output()), to=1), left)
        yield place, share
        left = op("Sub", left, share)
    yield places[-1], left


def _put_back(step: Step, geometry: Geometry, given: Iterable[tuple[tuple[int, ...], str]]) -> str:
    """Sum the gradients from all window positions, because windows may overlap.

    Each is added before the next one is computed, which saves memory.

    Values whose positions are equal modulo the stride form a grid. If a window is moved by one
    stride, each of its positions moves to the next value on the same grid. Finally, a transposed
    convolution with non-overlapping windows interleaves the grids.
    """
    graph, op = step.graph, step.graph.op
    grid = [-(-wide // stride) for wide, stride in zip(geometry.wide, geometry.strides, strict=True)]
    grids: dict[tuple[int, ...], str] = {}
    for place, share in given:
        moved = [at - pad for at, pad in zip(place, geometry.before, strict=True)]
        steps = [at // stride for at, stride in zip(moved, geometry.strides, strict=True)]
        phase = tuple([at % stride for at, stride in zip(moved, geometry.strides, strict=True)])
        ends = [size - shift - narrow for size, shift, narrow in zip(grid, steps, geometry.narrow, strict=True)]
        shifted = op("Pad", share, graph.ints(0, 0, *steps, 0, 0, *ends)) if any((*steps, *ends)) else share
        grids[phase] = op("Add", grids[phase], shifted) if phase in grids else shifted
    one_hot = np.zeros((len(grids), 1, *geometry.strides), np.float32)
    for number, phase in enumerate(grids):
        one_hot[(number, 0, *phase)] = 1.0
    parts = [op("Reshape", total, graph.ints(-1, 1, *grid)) for total in grids.values()]
    joined = op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    woven = op("ConvTranspose", joined, graph.constant(one_hot), strides=list(geometry.strides))
    over = [size * stride - wide for size, stride, wide in zip(grid, geometry.strides, geometry.wide, strict=True)]
    if any(over):
        axes = range(2, 2 + len(over))
        woven = op("Slice", woven, graph.ints(*[0] * len(over)), graph.ints(*geometry.wide), graph.ints(*axes))
    return graph.reshape_like(woven, step.input(0))


Look = Callable[[tuple[int, ...]], str]
"""A function that maps a position in the window to a tensor with each window's value there."""


def _windows(step: Step, geometry: Geometry) -> Look:
    graph, op = step.graph, step.graph.op
    axes = graph.ints(*range(2, 2 + len(geometry.kernel)))
    ends = [max(0, pad, pad - rest) for pad, rest in zip(geometry.after, geometry.rest, strict=True)]
    x = op("Pad", step.input(0), graph.ints(0, 0, *geometry.before, 0, 0, *ends), graph.scalar(-np.inf))

    def look(place: tuple[int, ...]) -> str:
        stops = [
            start + (narrow - 1) * stride + 1
            for start, narrow, stride in zip(place, geometry.narrow, geometry.strides, strict=True)
        ]
        return op("Slice", x, graph.ints(*place), graph.ints(*stops), axes, graph.ints(*geometry.strides))

    return look


def _has_phases(geometry: Geometry) -> bool:
    return len(geometry.kernel) == 2 and len(set(geometry.strides)) == 1 and not geometry.dense


def _phases(step: Step, geometry: Geometry) -> Look:
    """Group values by their position modulo the stride.

    Slices with a step, such as every second value, would take seven times as long.
    """
    graph, op = step.graph, step.graph.op
    channels = step.shape(0)[1]
    assert channels is not None
    stride = geometry.strides[0]
    blocks = [
        max(narrow + (kernel - 1) // stride, -(-(wide + pad) // stride))
        for narrow, kernel, wide, pad in zip(
            geometry.narrow, geometry.kernel, geometry.wide, geometry.before, strict=True
        )
    ]
    ends = [
        block * stride - wide - pad
        for block, wide, pad in zip(blocks, geometry.wide, geometry.before, strict=True)
    ]
    x = op("Pad", step.input(0), graph.ints(0, 0, *geometry.before, 0, 0, *ends), graph.scalar(-np.inf))
    sorted_ = op("SpaceToDepth", x, blocksize=stride)

    def look(place: tuple[int, ...]) -> str:
        phase = (place[0] % stride) * stride + place[1] % stride
        starts = [phase * channels, place[0] // stride, place[1] // stride]
        stops = [starts[0] + channels, starts[1] + geometry.narrow[0], starts[2] + geometry.narrow[1]]
        return op("Slice", sorted_, graph.ints(*starts), graph.ints(*stops), graph.ints(1, 2, 3))

    return look


@rule("AveragePool")
def _average_pool(step: Step) -> Gradients:
    """Distribute the gradient of each window evenly over the window."""
    graph, op = step.graph, step.graph.op
    kernel = tuple(step.attribute("kernel_shape", []))
    geometry = Geometry.of(step, kernel, step.shape(0)[2:], step.output_shape[2:])
    shares = 1.0 / _window_sizes(geometry, padded=bool(step.attribute("count_include_pad", 0)))
    share = (
        graph.scalar(shares.flat[0]) if (shares == shares.flat[0]).all() else graph.constant(shares[None, None])
    )
    return [_spread_windows(step, geometry, op("Mul", step.gradient, share))]


def _spread_windows(step: Step, geometry: Geometry, value: str) -> str:
    """Sum for each value of the input the values of all windows that contain it.

    Channels are treated as additional examples.
    """
    graph, op = step.graph, step.graph.op
    value = op("Reshape", value, graph.ints(-1, 1, *geometry.narrow))
    ones = graph.constant(np.ones((1, 1, *geometry.kernel), np.float32))
    rest = geometry.rest
    after = [pad + max(0, -over) for pad, over in zip(geometry.after, rest, strict=True)]
    spread = op(
        "ConvTranspose", value, ones, strides=list(geometry.strides), dilations=list(geometry.dilations),
        pads=[*geometry.before, *after], output_padding=[max(0, over) for over in rest],
    )  # fmt: skip
    return graph.reshape_like(spread, step.input(0))


def _window_sizes(geometry: Geometry, *, padded: bool) -> Array:
    """Return the number of values that each window averages.

    The result is float32 and has the spatial shape of the output.
    """
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
        raise step.refused("its spatial sizes depend on the batch size")
    share = op("Mul", step.gradient, graph.scalar(1.0 / math.prod(dim or 0 for dim in sizes)))
    return [op("Expand", share, graph.ints(1, 1, *[dim or 0 for dim in sizes]))]


@rule("GlobalMaxPool")
def _global_max_pool(step: Step) -> Gradients:
    """Divide the gradient evenly among values that equal the maximum, as torch's amax does."""
    graph, op = step.graph, step.graph.op
    axes = graph.ints(*range(2, len(step.shape(0))))
    mask = op("Cast", op("Equal", step.input(0), step.output()), to=1)
    return [op("Mul", mask, op("Div", step.gradient, op("ReduceSum", mask, axes, keepdims=1)))]


@rule("LpPool", "GlobalLpPool")
def _lp_pool(step: Step) -> Gradients:
    """Use the derivative of a norm y of values x with the power p: sign(x) (abs(x) / y)^(p - 1)."""
    graph, op, x = step.graph, step.graph.op, step.input(0)
    power = graph.scalar(step.attribute("p", 2) - 1)
    base = op("Where", op("Equal", step.output(), graph.scalar(0.0)), graph.scalar(1.0), step.output())
    share = op("Div", step.gradient, op("Pow", base, power))
    if step.node.op == "LpPool":
        kernel = tuple(step.attribute("kernel_shape", []))
        geometry = Geometry.of(step, kernel, step.shape(0)[2:], step.output_shape[2:])
        share = _spread_windows(step, geometry, share)
    slope = op("Mul", op("Sign", x), op("Pow", op("Abs", x), power))
    return [op("Mul", slope, share)]
