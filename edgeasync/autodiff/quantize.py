"""Quantizes the frozen weights of a forward model, as the setting `base` asks for.

Only weights are quantized, to the nearest value: in int8 with a scale per channel, or in int4 with
a scale per block of weights that are summed. Activations stay float32, so no data is needed.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

from edgeasync.autodiff import precision, reading
from edgeasync.autodiff.branches import resolve_branches
from edgeasync.autodiff.graph import IR_VERSION, Array, Node, free_inputs, read_nodes, refill
from edgeasync.autodiff.settings import Base
from edgeasync.errors import GraphError, argument, native_reason

VALUES_MIN = 4096
"""Number of values from which a weight is quantized. Smaller weights need little memory."""

BLOCK = 32
"""Number of int4 values that share a scale."""

INT4 = helper.tensor_dtype_to_np_dtype(TensorProto.INT4)

OPSETS: dict[Base, int] = {"int8": 13, "int4": 21}
"""The first opset in which DequantizeLinear supports the type with several scales."""

LARGE_VALUES = 1 << 14
"""Number of values from which tensors are not passed to onnx's converter of opsets, which would copy
them.
"""


class WeightAxes(NamedTuple):
    """How a node reads a weight."""

    outputs: int
    """The axis of output channels, or of the rows of a table."""
    inputs: int | None
    """The axis of the values that are multiplied and summed. A table of embeddings has none."""
    turned: bool = False
    """Whether the node reads the weight after a Transpose. The axes are those before it."""


class Weights(NamedTuple):
    """The weights of a model to quantize, and the type in which they are stored."""

    axes: dict[str, set[WeightAxes]]
    base: Base


def find_weights(model: onnx.ModelProto, trained: Collection[str], base: Base) -> Weights | None:
    """Return the frozen weights of a model that only products, convolutions and embeddings read.

    Return `None` if all of them are quantized already, as in the model of a resumed hub. Raises
    `GraphError` if there are none.
    """
    ranks = {
        entry.name: len(entry.dims)
        for entry in model.graph.initializer
        if entry.name not in trained
        and entry.data_type == TensorProto.FLOAT
        and math.prod(entry.dims) >= VALUES_MIN
        and np.isfinite(numpy_helper.to_array(entry)).all()
    }
    turned = _transposed(model.graph)
    found: dict[str, set[WeightAxes]] = {name: set() for name in ranks}
    others = {entry.name for entry in model.graph.output}
    for node in read_nodes(model.graph.node):
        if node.outputs[0] in turned:
            continue
        others.update(set(free_inputs(node)).difference(node.inputs))
        for position, name in enumerate(node.inputs):
            origin = turned.get(name, name)
            layout = _layout(node, position, ranks[origin]) if origin in ranks else None
            if layout is None:
                others.add(name)
            elif name not in turned:
                found[origin].add(layout)
            elif layout.inputs is not None:
                found[origin].add(WeightAxes(layout.inputs, layout.outputs, turned=True))
            else:
                others.add(name)
    unsuitable = {turned.get(name, name) for name in others}
    weights = {name: uses for name, uses in found.items() if uses and name not in unsuitable}
    if not weights and any(node.op_type == "DequantizeLinear" for node in model.graph.node):
        return None
    if not weights:
        raise GraphError(
            f"base {base!r} quantizes frozen weights of at least {VALUES_MIN} values, but there are none; train "
            "fewer parameters, or remove base"
        )
    return Weights(weights, base)


def _transposed(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the results of Transpose nodes that swap the axes of a stored matrix, with the matrix."""
    matrices = {entry.name for entry in graph.initializer if len(entry.dims) == 2}
    return {
        node.outputs[0]: node.inputs[0]
        for node in read_nodes(node for node in graph.node if node.op_type == "Transpose")
        if node.inputs[0] in matrices and node.attributes.get("perm", [1, 0]) == [1, 0]
    }


def _layout(node: Node, position: int, rank: int) -> WeightAxes | None:
    """Return the axes of a weight that is an input of a node, or `None` if the node is unsuitable."""
    match (node.domain, node.op, position, rank):
        case ("", "MatMul", 1, 2):
            return WeightAxes(1, 0)
        case ("", "Gemm", 1, 2):
            return WeightAxes(0, 1) if node.attributes.get("transB") else WeightAxes(1, 0)
        case ("", "Conv", 1, _):
            return WeightAxes(0, 1)
        case ("", "Gather", 0, 2) if node.attributes.get("axis", 0) == 0:
            return WeightAxes(0, None)
    return None


def quantize(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Return a new model in which a DequantizeLinear computes each of the weights. `model` changes, too.

    protobuf frees the values of a model only as a whole. So the new model shares none with `model`,
    and the caller should drop `model`. Weights that the model does not store as float32 initializers
    are skipped. Raises `GraphError` if the model cannot be converted to the opset that the type
    needs.
    """
    turned, stored = _transposed(model.graph), [*model.graph.initializer]
    made = _light_copy(model, OPSETS[weights.base])
    graph, small = made.graph, {entry.name: entry for entry in made.graph.initializer}
    kept, scales, nodes, replaced = list[TensorProto](), list[TensorProto](), list[onnx.NodeProto](), set[str]()
    for entry in stored:
        uses, name = weights.axes.get(entry.name), entry.name
        converted = small.pop(name, entry)
        if uses is None or entry.data_type != TensorProto.FLOAT:
            kept.append(converted)
            continue
        results = [result for result, origin in turned.items() if origin == name]
        values, scale, added = _quantized(entry, uses, weights.base, results)
        kept.append(values)
        scales.append(scale)
        nodes += added
        replaced.update([name, *results])
    refill(graph.initializer, [*kept, *small.values(), *scales])
    # Older files list initializers as inputs.
    refill(graph.input, [entry for entry in graph.input if entry.name not in replaced])
    refill(graph.node, [*nodes, *[node for node in graph.node if replaced.isdisjoint(node.output)]])
    return made


def _quantized(
    entry: TensorProto, uses: set[WeightAxes], base: Base, turned: list[str]
) -> tuple[TensorProto, TensorProto, list[onnx.NodeProto]]:
    """Quantize an initializer. Return the values, the scales, and the nodes that read them.

    `turned` names the results of Transpose nodes that read the weight. The transposition precedes
    the DequantizeLinear, because onnxruntime 1.20 cannot load the opposite. If every node reads the
    weight transposed, it is stored that way.
    """
    name, value = entry.name, numpy_helper.to_array(entry)
    outputs, inputs, always_turned = min(uses, key=_preference)
    if len(uses) > 1:
        inputs, always_turned = None, all(use.turned for use in uses)
    if always_turned:
        value, outputs, inputs = value.T, 1 - outputs, None if inputs is None else 1 - inputs
    axis, size = outputs, {}
    if base == "int4" and inputs is not None and value.shape[inputs] >= BLOCK:
        axis, size = inputs, {"block_size": BLOCK}
    values, scale = quantize_blocks(value, axis) if size else quantize_channels(value, axis)
    stored, scales = f"{name}_quantized", f"{name}_scale"
    value_tensor = numpy_helper.from_array(np.ascontiguousarray(values), stored)
    scale_tensor = numpy_helper.from_array(scale, scales)

    def dequantized(values: str, result: str, axis: int) -> onnx.NodeProto:
        attributes: dict[str, Any] = {"axis": axis, **size}
        node = f"{result}/dequantized"
        return helper.make_node("DequantizeLinear", [values, scales], [result], node, **attributes)

    if always_turned:
        return value_tensor, scale_tensor, [dequantized(stored, each, axis) for each in turned]
    nodes = [dequantized(stored, name, axis)]
    if turned:
        made = f"{name}_transposed"
        nodes.append(helper.make_node("Transpose", [stored], [made], made, perm=[1, 0]))
        nodes += [dequantized(made, each, 1 - axis) for each in turned]
    return value_tensor, scale_tensor, nodes


def _preference(layout: WeightAxes) -> tuple[bool, int, bool]:
    """Return a sort key. Tables come first, because each of their rows has a scale."""
    return layout.inputs is not None, layout.outputs, layout.turned


def quantize_file(data: bytes, weights: Weights) -> bytes:
    """Return a serialized forward model with these weights quantized, otherwise as it is.

    The model has been checked, because `weights` were found in it. Another check would copy it.
    """
    model = reading.read(data)
    reading.state_output_shapes(model)
    model = reading.inline_functions(model)
    resolve_branches(model)
    if reading.opset_of(model) < OPSETS["int8"]:
        model = reading.convert(model)
    precision.widen_halves(model, weights.axes)
    precision.widen_weights(model, weights.axes)
    return bytes(quantize(model, weights).SerializeToString())


def quantize_channels(value: Array, axis: int) -> tuple[Array, Array]:
    """Return a weight in int8, and the scale of each channel on `axis`."""
    others = tuple([other for other in range(value.ndim) if other != axis])
    scale = np.abs(value).max(axis=others, keepdims=True) / np.float32(127)
    scale[scale == 0.0] = 1.0
    return np.rint(value / scale).astype(np.int8), scale.reshape(-1)


def quantize_blocks(value: Array, axis: int) -> tuple[Array, Array]:
    """Return a weight in int4, and the scale of each block of values along `axis`.

    The value of a block that is furthest from 0 becomes -8, so a scale may be negative. The last
    block may be shorter.
    """
    length = value.shape[axis]
    starts = np.arange(0, length, BLOCK)
    highest, lowest = [pick.reduceat(value, starts, axis=axis) for pick in (np.maximum, np.minimum)]
    scale = np.where(highest > -lowest, highest, lowest) / np.float32(-8)
    scale[scale == 0.0] = 1.0
    wide = np.repeat(scale, BLOCK, axis=axis).take(range(length), axis)
    return np.rint(value / wide).clip(-8, 7).astype(INT4), scale


def _light_copy(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Return a copy of a model without its large initializers, converted if its opset is older.

    The initializers are removed from `model`, too. Raises `GraphError`.
    """
    large = [entry for entry in model.graph.initializer if math.prod(entry.dims) >= LARGE_VALUES]
    small = [entry for entry in model.graph.initializer if math.prod(entry.dims) < LARGE_VALUES]
    refill(model.graph.initializer, small)
    if reading.opset_of(model) >= opset:
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        return copied
    known = {entry.name for entry in model.graph.input}
    added = [
        helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
        for entry in large
        if entry.name not in known
    ]
    model.graph.input.extend(added)
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:
        raise GraphError(
            f"int4 needs opset {opset}, and onnx cannot convert the model ({native_reason(error)}); use "
            f"{argument('base', 'int8')}, or export the model with this opset"
        ) from error
    names = {entry.name for entry in added}
    refill(converted.graph.input, [entry for entry in converted.graph.input if entry.name not in names])
    converted.ir_version = max(converted.ir_version, IR_VERSION)
    return converted
