"""Gradients of convolutions of any number of spatial dimensions, grouped, strided, padded and dilated."""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from edgeasync.autodiff.graph import Graph
from edgeasync.autodiff.rules.registry import Gradients, Step, rule

DEEP = 6
"""Input channels from which moving channels last pays for a kernel's gradient."""

COLUMNS_MAX = 64
"""Columns up to which a depthwise kernel's gradient is found by products of all pairs of columns."""


class Geometry(msgspec.Struct, frozen=True):
    """What a sliding window does along each spatial dimension, and the sizes of what it slides over."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    wide: tuple[int, ...]
    """Spatial sizes of the larger side: a convolution's input."""
    narrow: tuple[int, ...]
    """Spatial sizes of the smaller side: a convolution's output."""

    @classmethod
    def of(
        cls, step: Step, kernel: tuple[int, ...], wide: tuple[int | None, ...], narrow: tuple[int | None, ...]
    ) -> Self:
        """Read strides, dilations and padding of a node; raises `GraphError` if a spatial size is not fixed."""
        if None in wide or None in narrow:
            raise step.refused("its spatial sizes follow the batch")
        sizes = tuple([dim or 0 for dim in wide])
        outs = tuple([dim or 0 for dim in narrow])
        count = len(kernel)
        strides = tuple(step.attribute("strides", [1] * count))
        dilations = tuple(step.attribute("dilations", [1] * count))
        pads = list(step.attribute("pads", [0] * 2 * count))
        auto = step.attribute("auto_pad", "NOTSET")
        if auto.startswith("SAME"):
            for axis in range(count):
                reach = dilations[axis] * (kernel[axis] - 1) + 1
                total = max(0, (outs[axis] - 1) * strides[axis] + reach - sizes[axis])
                less = total // 2
                first = less if auto == "SAME_UPPER" else total - less
                pads[axis], pads[count + axis] = first, total - first
        return cls(kernel, strides, dilations, tuple(pads[:count]), tuple(pads[count:]), sizes, outs)

    @property
    def pads(self) -> list[int]:
        """Padding in ONNX's order."""
        return [*self.before, *self.after]

    @property
    def rest(self) -> list[int]:
        """Values at the end of the wide side that no window reaches; below 0 where windows reach beyond it."""
        return [
            wide - ((narrow - 1) * stride - before - after + dilation * (kernel - 1) + 1)
            for wide, narrow, stride, before, after, dilation, kernel in zip(
                self.wide,
                self.narrow,
                self.strides,
                self.before,
                self.after,
                self.dilations,
                self.kernel,
                strict=True,
            )
        ]

    @property
    def dense(self) -> bool:
        """Whether every stride is 1."""
        return all(stride == 1 for stride in self.strides)


@rule("Conv")
def _conv(step: Step) -> Gradients:
    graph, x, weight = step.graph, step.input(0), step.input(1)
    kernel = graph.static_shape(weight, step.node.where)
    geometry = Geometry.of(step, kernel[2:], step.shape(0)[2:], step.output_shape[2:])
    group = step.attribute("group", 1)
    return [
        _spread(graph, step.gradient, weight, kernel, geometry, group),
        _weight_gradient(step, x, step.gradient, kernel, geometry, group),
        _bias_gradient(step),
    ]


@rule("ConvTranspose")
def _conv_transpose(step: Step) -> Gradients:
    """The roles of input and output are those of a convolution, exchanged."""
    graph, x, weight = step.graph, step.input(0), step.input(1)
    if step.attribute("output_shape", None) or step.attribute("auto_pad", "NOTSET").startswith("SAME"):
        raise step.refused("its padding is not given by numbers; export it with `pads`")
    kernel = graph.static_shape(weight, step.node.where)
    geometry = Geometry.of(step, kernel[2:], step.output_shape[2:], step.shape(0)[2:])
    group = step.attribute("group", 1)
    grad_x = graph.op(
        "Conv", step.gradient, weight, strides=list(geometry.strides), dilations=list(geometry.dilations),
        pads=geometry.pads, group=group,
    )  # fmt: skip
    return [
        grad_x,
        _weight_gradient(step, step.gradient, x, kernel, geometry, group),
        _bias_gradient(step),
    ]


def _bias_gradient(step: Step) -> str | None:
    if not step.input(2):
        return None
    axes = [axis for axis in range(len(step.output_shape)) if axis != 1]
    return step.graph.op("ReduceSum", step.gradient, step.graph.ints(*axes), keepdims=0)


def _spread(
    graph: Graph, gradient: str, weight: str, shape: tuple[int, ...], geometry: Geometry, group: int
) -> str:
    """Return the gradient of a convolution's input."""
    reach = [dilation * (kernel - 1) for dilation, kernel in zip(geometry.dilations, geometry.kernel, strict=True)]
    before = [all_ - pad for all_, pad in zip(reach, geometry.before, strict=True)]
    after = [all_ - pad for all_, pad in zip(reach, geometry.after, strict=True)]
    if geometry.dense and min(*before, *after, 0) == 0 and (group > 1 or math.prod(geometry.kernel) == 1):
        # With stride 1 it is a convolution with the turned kernel, which onnxruntime does better in these two cases.
        turned = _turned(graph, weight, shape, group)
        return graph.op(
            "Conv", gradient, turned, dilations=list(geometry.dilations), pads=[*before, *after], group=group
        )
    rest = geometry.rest
    return graph.op(
        "ConvTranspose", gradient, weight, strides=list(geometry.strides), dilations=list(geometry.dilations),
        pads=geometry.pads, output_padding=rest, group=group,
    )  # fmt: skip


def _turned(graph: Graph, weight: str, shape: tuple[int, ...], group: int) -> str:
    """Exchange a kernel's input and output channels within each group, and turn it round in space."""
    outs, ins, *kernel = shape
    spatial = range(2, len(shape))
    if group > 1:
        weight = graph.op("Reshape", weight, graph.ints(group, outs // group, ins, *kernel))
        weight = graph.op("Transpose", weight, perm=[0, 2, 1, *[axis + 1 for axis in spatial]])
        weight = graph.op("Reshape", weight, graph.ints(group * ins, outs // group, *kernel))
    else:
        weight = graph.op("Transpose", weight, perm=[1, 0, *spatial])
    if math.prod(kernel) == 1:
        return weight
    ends = [-(2**63)] * len(kernel)
    return graph.op(
        "Slice", weight, graph.ints(*[-1] * len(kernel)), graph.ints(*ends), graph.ints(*spatial),
        graph.ints(*[-1] * len(kernel)),
    )  # fmt: skip


def _weight_gradient(
    step: Step, wide: str, narrow: str, shape: tuple[int, ...], geometry: Geometry, group: int
) -> str:
    """Correlate the wide side of a convolution with the gradient on its narrow side."""
    depthwise = group > 1 and shape[1] == 1 and shape[0] == group
    if len(geometry.kernel) <= 2 and depthwise and geometry.narrow[-1] <= COLUMNS_MAX:
        return _by_rows(step, wide, narrow, shape, geometry)
    if not geometry.dense or len(geometry.kernel) > 2:
        return _by_convolution(step, wide, narrow, shape, geometry, group)
    if group == 1 and shape[1] >= DEEP and math.prod(geometry.kernel) > 1:
        return _by_columns(step, wide, narrow, shape, geometry)
    return _by_shifts(step, wide, narrow, shape, geometry, group)


def _by_shifts(
    step: Step, wide: str, narrow: str, shape: tuple[int, ...], geometry: Geometry, group: int
) -> str:
    """Stride 1: one product of matrices over all places of the kernel.

    With rows padded to one width, moving in space is moving in a flat row of values; what runs over a row's
    end meets a zero on the other side.
    """
    graph, op = step.graph, step.graph.op
    outs, ins, *kernel = shape
    rows, columns = _as_two(geometry.wide), _as_two(geometry.narrow)
    high, width = _as_two(kernel)
    before, after, dilation = _as_two(geometry.before, 0), _as_two(geometry.after, 0), _as_two(geometry.dilations)
    stretch = rows[1] + before[1] + after[1]
    shifts = [i * dilation[0] * stretch + j * dilation[1] for i in range(high) for j in range(width)]
    length = columns[0] * stretch
    height = rows[0] + before[0] + after[0]
    spare = -(-(shifts[-1] + length - height * stretch) // stretch) if shifts[-1] + length > height * stretch else 0
    wide = op("Reshape", wide, graph.ints(-1, ins * group, *rows))
    if any((*before, *after, spare)):
        wide = op("Pad", wide, graph.ints(0, 0, *before, 0, 0, after[0] + spare, after[1]))
    wide = op("Reshape", wide, graph.ints(-1, group, ins, (height + spare) * stretch))
    narrow = op("Reshape", narrow, graph.ints(-1, outs, *columns))
    if stretch > columns[1]:
        narrow = op("Pad", narrow, graph.ints(0, 0, 0, 0, 0, 0, 0, stretch - columns[1]))
    narrow = op("Reshape", narrow, graph.ints(-1, group, outs // group, length))
    if len(shifts) > 1:
        parts = [op("Slice", wide, graph.ints(s), graph.ints(s + length), graph.ints(3)) for s in shifts]
        wide = op("Concat", *parts, axis=2)
    product = op("MatMul", narrow, op("Transpose", wide, perm=[0, 1, 3, 2]))
    found = op("ReduceSum", product, graph.ints(0), keepdims=0)
    if len(shifts) > 1:
        found = op("Reshape", found, graph.ints(outs, len(shifts), ins))
        found = op("Transpose", found, perm=[0, 2, 1])
    return op("Reshape", found, graph.ints(*shape))


def _as_two(sizes: Sequence[int], missing: int = 1) -> tuple[int, int]:
    """Return sizes of one or two dimensions as of two."""
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _by_columns(step: Step, wide: str, narrow: str, shape: tuple[int, ...], geometry: Geometry) -> str:
    """Stride 1 and many channels: channels last, so that a kernel's row is one run of values, and a product a row."""
    graph, op = step.graph, step.graph.op
    outs, ins, *kernel = shape
    (high, width), (rows, columns) = _as_two(kernel), _as_two(geometry.wide)
    out_rows, out_columns = _as_two(geometry.narrow)
    before, after, dilation = _as_two(geometry.before, 0), _as_two(geometry.after, 0), _as_two(geometry.dilations)
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
    turned = op("Transpose", op("Reshape", joined, graph.ints(outs, high * width, ins)), perm=[0, 2, 1])
    return op("Reshape", turned, graph.ints(*shape))


def _by_rows(step: Step, wide: str, narrow: str, shape: tuple[int, ...], geometry: Geometry) -> str:
    """Depthwise: for each row of the kernel the products of all pairs of columns, of which the kernel's are picked.

    That is more arithmetic than needed, but in large products of matrices, which take a fifth of the time that
    passes over all values for each place of the kernel do.
    """
    graph, op = step.graph, step.graph.op
    channels = shape[0]
    (high, width), (rows, columns) = _as_two(geometry.kernel), _as_two(geometry.wide)
    out_rows, out_columns = _as_two(geometry.narrow)
    stride, dilation = _as_two(geometry.strides), _as_two(geometry.dilations)
    before = _as_two(geometry.before, 0)
    swap = [1, 0, 2, 3]
    wide = op("Transpose", op("Reshape", wide, graph.ints(-1, channels, rows, columns)), perm=swap)
    narrow = op("Transpose", op("Reshape", narrow, graph.ints(-1, channels, out_rows, out_columns)), perm=swap)
    # For each column of the kernel and output: the input's column under it, if it is not padding.
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
        pairs = op("MatMul", op("Transpose", seen, perm=[0, 2, 1]), sums)
        found.append(op("MatMul", op("Reshape", pairs, graph.ints(channels, columns * out_columns)), pick))
    return op("Reshape", op("Concat", *found, axis=1), graph.ints(*shape))


def _rows(graph: Graph, value: str, rows: tuple[int, int, int, int]) -> str:
    """Return every `stride`-th row from the first to the last, inclusive, of so many."""
    count, first, last, stride = rows
    if first == 0 and last == count - 1 and stride == 1:
        return value
    return graph.op("Slice", value, graph.ints(first), graph.ints(last + 1), graph.ints(2), graph.ints(stride))


def _by_convolution(
    step: Step, wide: str, narrow: str, shape: tuple[int, ...], geometry: Geometry, group: int
) -> str:
    """Any stride: a convolution over the batch, with strides and dilations exchanged."""
    graph, op = step.graph, step.graph.op
    _, ins, *kernel = shape
    spatial = list(range(2, len(shape)))
    swap = [1, 0, *spatial]
    if group > 1:
        wide = op("Reshape", wide, graph.ints(-1, group, ins, *geometry.wide))
        wide = op("Transpose", wide, perm=[2, 1, 0, *[axis + 1 for axis in spatial]])
        wide = op("Reshape", wide, graph.ints(ins, -1, *geometry.wide))
    else:
        wide = op("Transpose", wide, perm=swap)
    found = op(
        "Conv", wide, op("Transpose", narrow, perm=swap), strides=list(geometry.dilations),
        dilations=list(geometry.strides), pads=geometry.pads, group=group,
    )  # fmt: skip
    if any(rest > 0 for rest in geometry.rest):
        found = op("Slice", found, graph.ints(*[0] * len(kernel)), graph.ints(*kernel), graph.ints(*spatial))
    return op("Transpose", found, perm=swap)
