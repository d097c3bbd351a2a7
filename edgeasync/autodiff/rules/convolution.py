"""Gradients of convolutions of any number of spatial dimensions, grouped, strided, padded and dilated."""

import math
from typing import Self

import msgspec

from edgeasync.autodiff.graph import Graph
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


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
    if geometry.dense and min(*before, *after, 0) == 0:
        # With stride 1 it is a convolution with the turned kernel, for which onnxruntime is faster.
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
    """Correlate the wide side with the narrow one: a convolution over the batch, strides and dilations exchanged."""
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
