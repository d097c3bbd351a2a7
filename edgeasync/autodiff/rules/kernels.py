"""Computes the gradient of a convolution's kernel by one of five methods.

onnxruntime's own convolution operator would be slow for this.

Each method correlates the input of a convolution (the wide side) with the gradient at its output
(the narrow side). The choice of the method is based on measurements on x86-64 with `python -m
benchmarks.train_step`.
"""

import math
from collections.abc import Sequence

import numpy as np

from edgeasync.autodiff.graph import ONNXRUNTIME, Graph, Node
from edgeasync.autodiff.rules.geometry import Convolution, as_two

DEEP = 6
"""Minimum number of input channels for which it is faster to move the channel axis to the end."""

COLUMNS_MIN = 14
"""Minimum output width for which it is faster to move the channel axis to the front, if there are
not more output channels than input channels.
"""

PLACES_MAX = 9
"""Maximum number of kernel positions for which the input is copied once per position. More copies
would use too much memory.
"""

COLUMNS_MAX = 64
"""Maximum output width for which the gradient of a depthwise kernel is computed by multiplying all
pairs of columns.
"""


def kernel_gradient(layer: Convolution, wide: str, narrow: str) -> str:
    """Return the gradient of a convolution's kernel.

    `wide` is the input of the convolution, and `narrow` is the gradient at its output.
    """
    geometry, (outs, ins) = layer.geometry, layer.shape[:2]
    flat = len(geometry.kernel) <= 2
    if flat and layer.group > 1 and ins == 1 and outs == layer.group and geometry.narrow[-1] <= COLUMNS_MAX:
        return _by_rows(layer, wide, narrow)
    if not flat or not geometry.dense:
        return _by_convolution(layer, wide, narrow)
    places = math.prod(geometry.kernel)
    square = min(as_two(geometry.kernel)) > 1 and geometry.narrow[-1] >= COLUMNS_MIN
    if layer.group == 1 and square and ins >= max(outs, DEEP):
        return _by_planes(layer, wide, narrow)
    if layer.group == 1 and (places > PLACES_MAX or (ins >= DEEP and places > 1)):
        return _by_columns(layer, wide, narrow)
    return _by_shifts(layer, wide, narrow)


def _by_shifts(layer: Convolution, wide: str, narrow: str) -> str:
    """For stride 1: copy the input once per kernel position, and use one matrix product for all."""
    graph, op, geometry = layer.graph, layer.graph.op, layer.geometry
    outs, ins, *kernel = layer.shape
    rows, columns = as_two(geometry.wide), as_two(geometry.narrow)
    before, after, dilation = as_two(geometry.before, 0), as_two(geometry.after, 0), as_two(geometry.dilations)
    high, width = as_two(kernel)
    wide = op("Reshape", wide, graph.ints(-1, layer.group, ins, *rows))
    if any((*before, *after)):
        wide = op("Pad", wide, graph.ints(0, 0, 0, *before, 0, 0, 0, *after))
    parts = []
    for place in np.ndindex(high, width):
        starts = [at * step for at, step in zip(place, dilation, strict=True)]
        stops = [start + size for start, size in zip(starts, columns, strict=True)]
        whole = not any(starts) and stops == [sum(sizes) for sizes in zip(rows, before, after, strict=True)]
        parts.append(
            wide if whole else op("Slice", wide, graph.ints(*starts), graph.ints(*stops), graph.ints(3, 4))
        )
    seen = op("Concat", *parts, axis=2) if len(parts) > 1 else parts[0]
    seen = op("Reshape", seen, graph.ints(-1, layer.group, len(parts) * ins, math.prod(columns)))
    narrow = op("Reshape", narrow, graph.ints(-1, layer.group, outs // layer.group, math.prod(columns)))
    product = _product(graph, narrow, seen, transB=1)
    found = op("ReduceSum", product, graph.ints(0), keepdims=0)
    return _channels_first(layer, found) if len(parts) > 1 else op("Reshape", found, graph.ints(*layer.shape))


def _product(graph: Graph, left: str, right: str, **transposed: int) -> str:
    """Return a batched matrix product, of which one side is transposed.

    onnxruntime would fuse a Transpose and a MatMul to the same operator. But it runs nodes that it
    has created after all others, and would keep their inputs in memory until then.
    """
    name = graph.new_name("FusedMatMul")
    graph.nodes.append(Node("FusedMatMul", [left, right], [name], dict(transposed), name, ONNXRUNTIME))
    return name


def _channels_first(layer: Convolution, found: str) -> str:
    """Return a kernel's gradient whose last axes are the kernel's positions and input channels.

    The transposition comes last, so that it writes directly into the output of the graph.
    """
    outs, ins, *kernel = layer.shape
    last = len(layer.shape) - 1
    found = layer.graph.op("Reshape", found, layer.graph.ints(outs, *kernel, ins))
    return layer.graph.op("Transpose", found, perm=[0, last, *range(1, last)])


def _by_planes(layer: Convolution, wide: str, narrow: str) -> str:
    """For stride 1, many channels and wide rows: use one matrix product for all kernel positions.

    The channel axis comes first, and all values of a channel follow each other. If the rows and the
    images of both sides are padded to the same sizes, a spatial shift is a shift of these values.
    The input is copied once per kernel column, and the gradient once per kernel row.
    """
    graph, op, geometry = layer.graph, layer.graph.op, layer.geometry
    outs, ins, *kernel = layer.shape
    rows, columns = as_two(geometry.wide), as_two(geometry.narrow)
    before, after, dilation = as_two(geometry.before, 0), as_two(geometry.after, 0), as_two(geometry.dilations)
    high, width = as_two(kernel)
    # The padding behind a row is also the padding before the next row.
    size = [max(row + max(first, last), column)
            for row, first, last, column in zip(rows, before, after, columns, strict=True)]  # fmt: skip
    wide, narrow = (
        _plane(graph, value, channels, sizes, size)
        for value, channels, sizes in ((wide, ins, rows), (narrow, outs, columns))
    )
    seen = [_moved(graph, wide, before[1] - at * dilation[1]) for at in range(width)]
    sums = [_moved(graph, narrow, (at * dilation[0] - before[0]) * size[1]) for at in range(high)]
    product = op("Gemm", op("Concat", *sums, axis=0), op("Concat", *seen, axis=0), transB=1)
    product = op("Reshape", product, graph.ints(high, outs, width, ins))
    return op("Transpose", product, perm=[1, 3, 0, 2])


def _plane(graph: Graph, value: str, channels: int, sizes: Sequence[int], padded: Sequence[int]) -> str:
    """Return one row per channel, with the values of all images padded to the size `padded`."""
    value = graph.op("Reshape", value, graph.ints(-1, channels, *sizes))
    value = graph.op("Transpose", value, perm=[1, 0, 2, 3])
    rest = [whole - part for whole, part in zip(padded, sizes, strict=True)]
    if any(rest):
        value = graph.op("Pad", value, graph.ints(0, 0, 0, 0, 0, 0, *rest))
    return graph.op("Reshape", value, graph.ints(channels, -1))


def _moved(graph: Graph, value: str, places: int) -> str:
    """Shift each row to the right by a number of values, or to the left if it is negative."""
    return graph.op("Pad", value, graph.ints(0, places, 0, -places)) if places else value


def _by_columns(layer: Convolution, wide: str, narrow: str) -> str:
    """For stride 1 and many channels or a large kernel: use one matrix product per kernel row.

    The channel axis is moved to the end.
    """
    graph, op, geometry = layer.graph, layer.graph.op, layer.geometry
    outs, ins, *kernel = layer.shape
    (high, width), (rows, columns) = as_two(kernel), as_two(geometry.wide)
    out_rows, out_columns = as_two(geometry.narrow)
    before, after, dilation = as_two(geometry.before, 0), as_two(geometry.after, 0), as_two(geometry.dilations)
    wide = op("Transpose", op("Reshape", wide, graph.ints(-1, ins, rows, columns)), perm=[0, 2, 3, 1])
    if any((*before, *after)):
        wide = op("Pad", wide, graph.ints(0, *before, 0, 0, *after, 0))
    narrow = op("Transpose", op("Reshape", narrow, graph.ints(-1, outs, out_rows * out_columns)), perm=[1, 0, 2])
    narrow = op("Reshape", narrow, graph.ints(outs, -1))
    starts = [place * dilation[1] for place in range(width)]
    parts = [op("Slice", wide, graph.ints(at), graph.ints(at + out_columns), graph.ints(2)) for at in starts]
    runs = op("Concat", *parts, axis=3) if width > 1 else parts[0]
    found = []
    for place in range(high):
        at = place * dilation[0]
        row = op("Slice", runs, graph.ints(at), graph.ints(at + out_rows), graph.ints(1))
        found.append(op("MatMul", narrow, op("Reshape", row, graph.ints(-1, width * ins))))
    joined = op("Concat", *found, axis=1) if high > 1 else found[0]
    return _channels_first(layer, joined)


def _by_rows(layer: Convolution, wide: str, narrow: str) -> str:
    """For depthwise convolutions: for each kernel row, multiply all pairs of columns.

    Of these products, only those that belong to a kernel column are added up.

    This does more arithmetic than necessary. However, a few large matrix products take only a fifth
    of the time of one pass over all values per kernel position.
    """
    graph, op, geometry = layer.graph, layer.graph.op, layer.geometry
    channels = layer.shape[0]
    (high, width), (rows, columns) = as_two(geometry.kernel), as_two(geometry.wide)
    out_rows, out_columns = as_two(geometry.narrow)
    stride, dilation = as_two(geometry.strides), as_two(geometry.dilations)
    before = as_two(geometry.before, 0)
    swap = [1, 0, 2, 3]
    wide = op("Transpose", op("Reshape", wide, graph.ints(-1, channels, rows, columns)), perm=swap)
    narrow = op("Transpose", op("Reshape", narrow, graph.ints(-1, channels, out_rows, out_columns)), perm=swap)
    # For each kernel column and output column: the input column below it, unless that is padding.
    picked = np.zeros((columns, out_columns, width), np.float32)
    for column, place in np.ndindex(out_columns, width):
        source = column * stride[1] + place * dilation[1] - before[1]
        if 0 <= source < columns:
            picked[source, column, place] = 1.0
    pick = graph.constant(picked.reshape(-1, width))
    found = []
    for row in range(high):
        offset = row * dilation[0] - before[0]
        first = max(0, -(offset // stride[0]))
        last = min(out_rows - 1, (rows - 1 - offset) // stride[0])
        if last < first:
            found.append(graph.constant(np.zeros((channels, width), np.float32)))
            continue
        seen = _rows(graph, wide, (rows, first * stride[0] + offset, last * stride[0] + offset, stride[0]))
        sums = _rows(graph, narrow, (out_rows, first, last, 1))
        seen = op("Reshape", seen, graph.ints(channels, -1, columns))
        sums = op("Reshape", sums, graph.ints(channels, -1, out_columns))
        pairs = _product(graph, seen, sums, transA=1)
        found.append(op("MatMul", op("Reshape", pairs, graph.ints(channels, columns * out_columns)), pick))
    return op("Reshape", op("Concat", *found, axis=1), graph.ints(*layer.shape))


def _rows(graph: Graph, value: str, rows: tuple[int, int, int, int]) -> str:
    """Return every `stride`-th of `count` rows, from the first to the last, inclusive."""
    count, first, last, stride = rows
    if first == 0 and last == count - 1 and stride == 1:
        return value
    return graph.op("Slice", value, graph.ints(first), graph.ints(last + 1), graph.ints(2), graph.ints(stride))


def _by_convolution(layer: Convolution, wide: str, narrow: str) -> str:
    """For any stride: use a convolution over the batch, with strides and dilations swapped."""
    graph, op, geometry = layer.graph, layer.graph.op, layer.geometry
    _, ins, *kernel = layer.shape
    spatial = list(range(2, len(layer.shape)))
    swap = [1, 0, *spatial]
    if layer.group > 1:
        wide = op("Reshape", wide, graph.ints(-1, layer.group, ins, *geometry.wide))
        wide = op("Transpose", wide, perm=[2, 1, 0, *[axis + 1 for axis in spatial]])
        wide = op("Reshape", wide, graph.ints(ins, -1, *geometry.wide))
    else:
        wide = op("Transpose", wide, perm=swap)
    found = op(
        "Conv", wide, op("Transpose", narrow, perm=swap), strides=list(geometry.dilations),
        dilations=list(geometry.strides), pads=geometry.pads, group=layer.group,
    )  # fmt: skip
    if any(rest > 0 for rest in geometry.rest):
        found = op("Slice", found, graph.ints(*[0] * len(kernel)), graph.ints(*kernel), graph.ints(*spatial))
    return op("Transpose", found, perm=swap)
