"""Gradients of grouped, strided, padded and dilated convolutions, with any number of axes."""

import math

from edgeasync.autodiff.rules.geometry import Convolution
from edgeasync.autodiff.rules.kernels import kernel_gradient
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


@rule("Conv")
def _conv(step: Step) -> Gradients:
    layer = Convolution.of(step, step.shape(0), step.output_shape)
    # The kernel's gradient comes first, because it needs several copies of the input for a moment.
    kernel = kernel_gradient(layer, step.input(0), step.gradient)
    return [_input_gradient(layer, step.gradient, step.input(1)), kernel, _bias_gradient(step)]


@rule("ConvTranspose")
def _conv_transpose(step: Step) -> Gradients:
    """Gradients of a transposed convolution: a convolution with input and output swapped."""
    if step.attribute("output_shape", None) or step.attribute("auto_pad", "NOTSET").startswith("SAME"):
        raise step.refused("its padding is automatic; export it with numbers in `pads`")
    layer = Convolution.of(step, step.output_shape, step.shape(0))
    geometry = layer.geometry
    kernel = kernel_gradient(layer, step.gradient, step.input(0))
    grad_x = layer.graph.op(
        "Conv", step.gradient, step.input(1), strides=list(geometry.strides), dilations=list(geometry.dilations),
        pads=geometry.pads, group=layer.group,
    )  # fmt: skip
    return [grad_x, kernel, _bias_gradient(step)]


def _bias_gradient(step: Step) -> str | None:
    if not step.input(2):
        return None
    axes = [axis for axis in range(len(step.output_shape)) if axis != 1]
    return step.graph.op("ReduceSum", step.gradient, step.graph.ints(*axes), keepdims=0)


def _input_gradient(layer: Convolution, gradient: str, weight: str) -> str:
    geometry = layer.geometry
    reach = [dilation * (kernel - 1) for dilation, kernel in zip(geometry.dilations, geometry.kernel, strict=True)]
    before = [whole - pad for whole, pad in zip(reach, geometry.before, strict=True)]
    after = [whole - pad for whole, pad in zip(reach, geometry.after, strict=True)]
    faster = layer.group > 1 or math.prod(geometry.kernel) == 1
    if geometry.dense and min(*before, *after, 0) == 0 and faster:
        # With stride 1, convolve with the flipped kernel. In these cases, onnxruntime computes that
        # faster than a ConvTranspose.
        return layer.graph.op(
            "Conv", gradient, _turned(layer, weight), dilations=list(geometry.dilations), pads=[*before, *after],
            group=layer.group,
        )  # fmt: skip
    return layer.graph.op(
        "ConvTranspose", gradient, weight, strides=list(geometry.strides), dilations=list(geometry.dilations),
        pads=geometry.pads, output_padding=geometry.rest, group=layer.group,
    )  # fmt: skip


def _turned(layer: Convolution, weight: str) -> str:
    """Swap a kernel's input and output channels within each group, and flip its spatial axes."""
    graph, op, group = layer.graph, layer.graph.op, layer.group
    outs, ins, *kernel = layer.shape
    spatial = range(2, len(layer.shape))
    if outs == group and ins == 1:
        pass  # one channel on either side of each group
    elif group > 1:
        weight = op("Reshape", weight, graph.ints(group, outs // group, ins, *kernel))
        weight = op("Transpose", weight, perm=[0, 2, 1, *[axis + 1 for axis in spatial]])
        weight = op("Reshape", weight, graph.ints(group * ins, outs // group, *kernel))
    else:
        weight = op("Transpose", weight, perm=[1, 0, *spatial])
    if math.prod(kernel) == 1:
        return weight
    backwards = graph.ints(*[-1] * len(kernel))
    ends = graph.ints(*[-(2**63)] * len(kernel))
    return op("Slice", weight, backwards, ends, graph.ints(*spatial), backwards)
