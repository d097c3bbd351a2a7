"""Gradients of operators that move or copy values without changing them."""

import math
from collections.abc import Sequence

import numpy as np

from edgeasync.autodiff.graph import Graph, Shape
from edgeasync.autodiff.rules.registry import Gradients, Step, rule
from edgeasync.autodiff.rules.resampling import sum_padding


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(step: Step) -> Gradients:
    return [step.graph.reshape_like(step.gradient, step.input(0))]


@rule("Transpose")
def _transpose(step: Step) -> Gradients:
    order = step.attribute("perm", list(range(len(step.shape(0))))[::-1])
    return [step.graph.op("Transpose", step.gradient, perm=[int(axis) for axis in np.argsort(order)])]


@rule("Expand")
def _expand(step: Step) -> Gradients:
    return [step.unbroadcast(step.gradient, 0)]


@rule("Tile")
def _tile(step: Step) -> Gradients:
    """Sum the gradients of all copies.

    A tensor that is repeated along the batch axis must have size 1 on that axis.
    """
    graph, shape, repeated = step.graph, step.shape(0), step.output_shape
    if step.input(1) not in graph.constants:
        if any(dim not in (1, wide) for dim, wide in zip(shape, repeated, strict=True)):
            raise step.refused("its number of repeats depends on the batch size; repeat an axis of size 1 instead")
        return [step.unbroadcast(step.gradient, 0)]
    parts, copies = list[int](), list[int]()
    for dim, count in zip(shape, step.constant(1), strict=True):
        if count != 1:
            copies.append(len(parts))
            parts.append(int(count))
        parts.append(-1 if dim is None else dim)
    if 0 in parts or parts.count(-1) > 1:
        raise step.refused(
            "it repeats nothing" if 0 in parts else "two of its dimensions depend on the batch size"
        )
    if not copies:
        return [step.gradient]
    apart = graph.op("Reshape", step.gradient, graph.ints(*parts))
    return [graph.op("ReduceSum", apart, graph.ints(*copies), keepdims=0)]


@rule("DepthToSpace")
def _depth_to_space(step: Step) -> Gradients:
    """Move each spatial block of the gradient back into channels, in CRD or DCR order."""
    graph, size = step.graph, int(step.attribute("blocksize", 1))
    _, channels, rows, columns = [_fixed(step, 0, axis) if axis else 0 for axis in range(4)]
    blocks = [-1, channels // size**2, rows, size, columns, size]
    order = [0, 3, 5, 1, 2, 4] if step.attribute("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    apart = graph.op("Reshape", step.gradient, graph.ints(*blocks))
    return [graph.op("Reshape", graph.op("Transpose", apart, perm=order), graph.ints(-1, channels, rows, columns))]


@rule("SpaceToDepth")
def _space_to_depth(step: Step) -> Gradients:
    return [step.graph.op("DepthToSpace", step.gradient, blocksize=int(step.attribute("blocksize", 1)))]


@rule("ReverseSequence")
def _reverse_sequence(step: Step) -> Gradients:
    """Reverse the gradient in the same way, because this reverses the values back."""
    axes = {name: int(value) for name, value in step.node.attributes.items()}
    return [step.graph.op("ReverseSequence", step.gradient, step.input(1), **axes), None]


@rule("Concat")
def _concat(step: Step) -> Gradients:
    axis = step.axis()
    sizes = [_fixed(step, position, axis) for position in range(len(step.node.inputs))]
    if len(sizes) == 1:
        return [step.gradient]
    return step.graph.add("Split", step.gradient, step.graph.ints(*sizes), outputs=len(sizes), axis=axis)


@rule("Split")
def _split(step: Step) -> Gradients:
    """Concatenate the gradients of all parts. If a part is unused, its gradient is zero."""
    op = step.graph.op
    parts = [
        gradient or op("ConstantOfShape", op("Shape", output))
        for output, gradient in zip(step.node.outputs, step.gradients, strict=True)
    ]
    return [parts[0] if len(parts) == 1 else op("Concat", *parts, axis=step.axis(0))]


_OPEN_END = 1_000_001
"""A slice of the batch axis covers the whole batch if its end is at least this number, because a
batch has at most a million examples.
"""


@rule("Slice")
def _slice(step: Step) -> Gradients:
    """Insert the gradient at the positions that were sliced, and zeros elsewhere.

    If a step is negative, flip the gradient. If its size is above 1, insert zeros between the
    values. A slice of size 0, as torch writes for a roll by 0, has a gradient of zeros.
    """
    graph, gradient = step.graph, step.gradient
    rank = len(step.shape(0))
    if step.input(2) not in graph.constants and step.output_shape == step.shape(0):
        return [_whole(step)]
    starts, ends = step.constant(1), step.constant(2)
    axes = step.constant(3, np.arange(len(starts)))
    strides = step.constant(4, np.ones(len(starts), np.int64))
    before, after = [0] * rank, [0] * rank
    shape = list(step.output_shape)
    for start, end, raw_axis, stride in zip(starts, ends, axes, strides, strict=True):
        axis = int(raw_axis) % rank
        if step.shape(0)[axis] is None:
            if int(start) == 0 and int(stride) == 1 and int(end) >= _OPEN_END:
                continue
            raise step.refused("it slices the batch axis")
        size = _fixed(step, 0, axis)
        chosen = range(size)[int(start) : _end(int(end), size, int(stride)) : int(stride)]
        if not chosen:
            return [graph.op("Expand", graph.scalar(0.0), graph.op("Shape", step.node.inputs[0]))]
        if stride < 0:
            gradient = _flip(graph, gradient, axis)
        if abs(stride) > 1:
            gradient = _stuff(graph, gradient, axis, abs(int(stride)), shape)
            shape[axis] = (len(chosen) - 1) * abs(int(stride)) + 1
        low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
        before[axis], after[axis] = low, size - 1 - high
    return [_pad(graph, gradient, before, after)]


def _whole(step: Step) -> str:
    """Return the gradient of a slice of the batch axis that seems to cover the whole batch.

    This is known only from runs at two batch sizes. If the slice ends earlier at another batch
    size, the gradient of the remaining examples is zero.
    """
    if step.constant(1).any() or (step.constant(4, np.ones(1)) != 1).any():
        raise step.refused("it slices the batch axis")
    op, rank = step.graph.op, len(step.shape(0))
    after = op("Sub", op("Shape", step.input(0)), op("Shape", step.output()))
    return op("Pad", step.gradient, op("Concat", step.graph.ints(*[0] * rank), after, axis=0))


def _end(end: int, size: int, stride: int) -> int | None:
    """Convert the end of an ONNX slice to Python.

    In Python, only `None` can denote an end before the first value.
    """
    return None if stride < 0 and end < -size else end


def _flip(graph: Graph, value: str, axis: int) -> str:
    first, last = graph.ints(-1), graph.ints(np.iinfo(np.int64).min)
    return graph.op("Slice", value, first, last, graph.ints(axis), graph.ints(-1))


def _stuff(graph: Graph, value: str, axis: int, stride: int, shape: Sequence[int | None]) -> str:
    """Insert `stride - 1` zeros between adjacent values along an axis.

    `shape` is the shape of the tensor.
    """
    rank, count = len(shape), shape[axis]
    assert count is not None
    wide = graph.op("Unsqueeze", value, graph.ints(axis + 1))
    wide = _pad(graph, wide, [0] * (rank + 1), [0] * (axis + 1) + [stride - 1] + [0] * (rank - axis - 1))
    # A 0 in Reshape keeps the size of the axis at that position. This is correct only before the
    # joined axes.
    joined = [*[0] * axis, count * stride, *[-1 if dim is None else dim for dim in shape[axis + 1 :]]]
    wide = graph.op("Reshape", wide, graph.ints(*joined))
    return graph.op("Slice", wide, graph.ints(0), graph.ints((count - 1) * stride + 1), graph.ints(axis))


def _pad(graph: Graph, value: str, before: list[int], after: list[int]) -> str:
    if not any(before) and not any(after):
        return value
    return graph.op("Pad", value, graph.ints(*before, *after))


@rule("Pad")
def _pad_rule(step: Step) -> Gradients:
    graph, rank = step.graph, len(step.shape(0))
    pads = step.constant(1)
    axes = [int(axis) % rank for axis in step.constant(3, np.arange(rank))]
    if (pads < 0).any():
        raise step.refused("its padding is negative; use Slice")
    cut = [(axis, int(low), int(high)) for axis, low, high in
           zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True) if low or high]  # fmt: skip
    if not cut:
        return [step.gradient]
    if (mode := step.attribute("mode", "constant")) != "constant":
        return [sum_padding(step, cut, mode)]
    ends = [-high if high else np.iinfo(np.int64).max for _, _, high in cut]
    return [graph.op("Slice", step.gradient, graph.ints(*[low for _, low, _ in cut]), graph.ints(*ends),
                     graph.ints(*[axis for axis, _, _ in cut]))]  # fmt: skip


@rule("Trilu")
def _trilu(step: Step) -> Gradients:
    kept = [step.input(1)] if step.input(1) else []
    return [step.graph.op("Trilu", step.gradient, *kept, upper=step.attribute("upper", 1))]


@rule("CumSum")
def _cumulative_sum(step: Step) -> Gradients:
    """Sum the gradients from the other end, because each value is part of all later sums."""
    backwards, exclusive = 1 - step.attribute("reverse", 0), step.attribute("exclusive", 0)
    return [step.graph.op("CumSum", step.gradient, step.input(1), reverse=backwards, exclusive=exclusive)]


ONE_HOT_MAX = 128
"""Maximum number of rows in a table whose gradient is computed by a product with one-hot rows. For
larger tables, scattering is faster.
"""


@rule("Gather")
def _gather(step: Step) -> Gradients:
    """Sum the gradients of all indices that selected the same row.

    ScatterND is not used, because it has a race condition and may lose additions if indices repeat.
    Indices into the batch axis must not be constant, because they would select fixed examples of
    each batch.
    """
    graph, op = step.graph, step.graph.op
    axis, shape, places = step.axis(0), step.shape(0), step.shape(1)
    size, constant = shape[axis], step.input(1) in graph.constants
    if size is None and constant:
        raise step.refused("it selects from the batch axis")
    if size is not None and not places and constant:
        index = int(graph.constants[step.input(1)]) % size
        before, after = [0] * len(shape), [0] * len(shape)
        before[axis], after[axis] = index, size - 1 - index
        return [_pad(graph, op("Unsqueeze", step.gradient, graph.ints(axis)), before, after)]
    indices = op("Reshape", step.input(1), graph.ints(-1))
    if graph.dtypes[step.input(1)] != np.int64:
        indices = op("Cast", indices, to=7)  # onnxruntime has no OneHot with int32 for these values
    width = shape[axis + 1 :]
    if axis == 0 and size is not None and size <= ONE_HOT_MAX and None not in width:
        values = graph.constant(np.array([0, 1], np.float32))
        rows = op("OneHot", indices, graph.constant(np.int64(size)), values, axis=0)
        flat = op("Reshape", step.gradient, graph.ints(-1, math.prod(dim for dim in width if dim is not None)))
        return [graph.reshape_like(op("MatMul", rows, flat), step.input(0))]
    base = op("ConstantOfShape", op("Shape", step.input(0)))
    if len(places) == 1:
        flat = step.gradient
    else:
        # Merge the dimensions of the indices into one.
        joined = [0] * axis + [-1] + [_need(step, dim) for dim in width]
        flat = op("Reshape", step.gradient, graph.ints(*joined))
    column = op("Reshape", indices, graph.ints(*[1] * axis, -1, *[1] * len(width)))
    spread = op("Expand", column, op("Shape", flat))
    return [op("ScatterElements", base, spread, flat, axis=axis, reduction="add")]


@rule("GatherElements", "TopK")
def _picked(step: Step) -> Gradients:
    """Scatter the gradients to the positions of the selected values."""
    op = step.graph.op
    places, axis = (step.output(1), step.axis()) if step.node.op == "TopK" else (step.input(1), step.axis(0))
    if step.shape(0)[axis] is None:
        raise step.refused("it selects from the batch axis")
    base = op("ConstantOfShape", op("Shape", step.input(0)))
    return [op("ScatterElements", base, places, step.gradient, axis=axis, reduction="add")]


@rule("GatherND")
def _gather_nd(step: Step) -> Gradients:
    """Sum the gradients of all indices that selected the same values.

    For this, the data is flattened to a table in which each index selects a row. With `batch_dims`,
    each of the first axes has its own indices, which select rows of its own part of the table.
    """
    graph, op = step.graph, step.graph.op
    apart, depth = step.attribute("batch_dims", 0), step.shape(1)[-1]
    if depth is None:
        raise step.refused("the number of its indices depends on the batch size")
    indices, inner = step.input(1), [_fixed(step, 0, axis) for axis in range(apart + 1, apart + depth)]
    steps = [math.prod(inner[axis:]) for axis in range(depth)]
    sizes = op("Slice", op("Shape", step.input(0)), graph.ints(apart), graph.ints(apart + depth))
    indices = op("Where", op("Less", indices, graph.constant(np.int64(0))), op("Add", indices, sizes), indices)
    rows = op("ReduceSum", op("Mul", indices, graph.ints(*steps)), graph.ints(-1), keepdims=0)
    if apart:
        parts = op("ReduceProd", op("Shape", step.input(0), end=apart), keepdims=0)
        one = graph.constant(np.int64(1))
        first = op("Mul", op("Range", graph.constant(np.int64(0)), parts, one),
                   graph.constant(np.int64(_fixed(step, 0, apart) * steps[0])))  # fmt: skip
        below = math.prod(_fixed(step, 1, axis) for axis in range(apart, len(step.shape(1)) - 1))
        rows = op("Add", op("Reshape", rows, graph.ints(-1, below)), op("Unsqueeze", first, graph.ints(1)))
    base = _table(step, op("ConstantOfShape", op("Shape", step.input(0))), step.shape(0), apart + depth)
    flat = _table(step, step.gradient, step.output_shape, len(step.shape(1)) - 1)
    spread = op("Expand", op("Reshape", rows, graph.ints(-1, 1)), op("Shape", flat))
    return [graph.reshape_like(op("ScatterElements", base, spread, flat, axis=0, reduction="add"), step.input(0))]


def _table(step: Step, value: str, shape: Shape, axes: int) -> str:
    """Flatten the first `axes` axes of a tensor of `shape` into rows, and all others into columns."""
    sizes = [-1 if None in part else math.prod(dim or 0 for dim in part) for part in (shape[:axes], shape[axes:])]
    if sizes == [-1, -1]:
        raise step.refused("both its rows and its columns depend on the batch size")
    return step.graph.op("Reshape", value, step.graph.ints(*sizes))


@rule("ScatterND", "ScatterElements")
def _scatter(step: Step) -> Gradients:
    """At the positions that were written, pass the gradient only to the updates."""
    op, indices, kind = step.graph.op, step.input(1), step.attribute("reduction", "none")
    if kind not in ("none", "add"):
        raise step.refused(f"reduction={kind!r}; only 'none' and 'add' have a gradient")
    along = {"axis": step.axis(0)} if step.node.op == "ScatterElements" else {}
    read = "GatherElements" if along else "GatherND"
    kept = step.gradient
    if kind == "none" and step.active(0):
        nothing = op("ConstantOfShape", op("Shape", step.input(2)))
        kept = op(step.node.op, kept, indices, nothing, **along)
    return [kept, None, op(read, step.gradient, indices, **along) if step.active(2) else None]


def _need(step: Step, dim: int | None) -> int:
    if dim is None:
        raise step.refused("a dimension after its axis depends on the batch size")
    return dim


def _fixed(step: Step, position: int, axis: int) -> int:
    dim = step.shape(position)[axis]
    if dim is None:
        raise step.refused(f"axis {axis} of its input {position} depends on the batch size")
    return dim
