"""Computes in float32 what a model file stores or computes in other precisions."""

from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.graph import refill
from edgeasync.autodiff.reading import (
    array_of,
    nodes_within,
    parts,
    read_instead,
    stored_tensors,
)

_WIDER = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.FLOAT16), TensorProto.FLOAT),
    **dict.fromkeys((TensorProto.INT32, TensorProto.INT16, TensorProto.INT8), TensorProto.INT64),
    **dict.fromkeys((TensorProto.UINT16, TensorProto.UINT8, TensorProto.BOOL), TensorProto.INT64),
}
"""The supported type that replaces each unsupported type of an input."""

_PRECISIONS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
"""Types of weights that are stored in float32, if the model casts them to it."""

_HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

_MOVING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def widen_halves(model: onnx.ModelProto, names: Collection[str] | None = None) -> bool:
    """Compute in float32 if a model computes in float16 or bfloat16. Return whether it does.

    Models that only store weights in these types, and cast them to float32, stay as they are. If
    `names` is set, only these weights decide.
    """
    readers, nodes = _readers(model.graph), [*nodes_within(model.graph)]
    scales = {node.input[1] for node in nodes if node.op_type == "DequantizeLinear"}
    halves = {name for name, tensor in stored_tensors(model.graph) if tensor.data_type in _HALVES} - scales
    narrowed = any(entry.i in _HALVES for node in nodes if node.op_type == "Cast" for entry in node.attribute)
    if names is not None:
        halves, narrowed = halves.intersection(names), False
    if not narrowed and all(_casts_of(name, readers) for name in halves):
        return False
    for part in parts(model):
        if isinstance(part, TensorProto) and part.data_type in _HALVES:
            part.CopyFrom(_in_float32(part))
        elif isinstance(part, onnx.TypeProto.Tensor) and part.elem_type in _HALVES:
            part.elem_type = TensorProto.FLOAT
        elif isinstance(part, onnx.AttributeProto) and part.name in _TYPES and part.i in _HALVES:
            part.i = TensorProto.FLOAT
    return True


_TYPES = frozenset({"dtype", "output_dtype", "to"})
"""Attributes whose value is an element type."""


def _in_float32(tensor: TensorProto) -> TensorProto:
    with np.errstate(over="ignore"):
        value = array_of(tensor, f"tensor {tensor.name!r}").astype(np.float32)
    return numpy_helper.from_array(value, tensor.name)


def widen_weights(model: onnx.ModelProto, names: Collection[str] | None = None) -> None:
    """Store weights in float32 that the model stores in another precision and casts to float32.

    Between a weight and its Cast nodes, there may be nodes that only move values, such as a
    Transpose. The Cast nodes are removed, so that a weight keeps its name. If `names` is set, only
    these weights change. A weight that other nodes read too stays as it is.
    """
    graph = model.graph
    same: dict[str, str] = {}
    wider = set[str]()
    readers = _readers(graph)
    for name, tensor in stored_tensors(graph):
        if tensor.data_type in _PRECISIONS and (names is None or name in names):
            found = _casts_of(name, readers)
            if found is not None:
                tensor.CopyFrom(_in_float32(tensor))
                same |= found
                wider.update((name, *found.values()))
    for entry in (*graph.input, *graph.value_info):
        if entry.name in wider:
            entry.type.tensor_type.elem_type = TensorProto.FLOAT
    results = {entry.name for entry in graph.output}
    kept = []
    for node in graph.node:
        if node.output[0] in same and node.output[0] in results:
            node.CopyFrom(helper.make_node("Identity", [same.pop(node.output[0])], node.output[:1]))
        if node.output[0] not in same:
            kept.append(node)
    read_instead(same, graph)
    refill(graph.node, kept)


def _casts_of(name: str, readers: Mapping[str, list[onnx.NodeProto | None]]) -> dict[str, str] | None:
    """Return the results of the Cast nodes to float32 that read a tensor, with their inputs.

    Return `None` if any other node computes with the tensor.
    """
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for node in readers.get(each := waiting.pop(), []):
            if node is None or node.input[0] != each:
                return None
            if node.op_type == "Cast" and any(entry.i == TensorProto.FLOAT for entry in node.attribute):
                found[node.output[0]] = each
            elif node.op_type in _MOVING:
                waiting.append(node.output[0])
            else:
                return None
    return found or None


def _readers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto | None]]:
    """Return the nodes that read each tensor, and `None` for nodes in loops and branches and outputs."""
    found: dict[str, list[onnx.NodeProto | None]] = {entry.name: [None] for entry in graph.output}
    for node in graph.node:
        for name in node.input:
            found.setdefault(name, []).append(node)
        for attribute in node.attribute:
            for inner in nodes_within(attribute.g):
                for name in inner.input:
                    found.setdefault(name, []).append(None)
    return found


def widen_inputs(model: onnx.ModelProto) -> None:
    """Change inputs with types such as int32 or float64 to int64 or float32, the types of datasets.

    For each changed input, a Cast node converts the data to the type that the model uses.
    """
    graph = model.graph
    values = {tensor.name for tensor in graph.initializer}
    casts: dict[str, onnx.NodeProto] = {}
    for entry in graph.input:
        kind = entry.type.tensor_type.elem_type
        if entry.name not in values and kind in _WIDER:
            casts[entry.name] = helper.make_node("Cast", [entry.name], [f"{entry.name}::cast"], to=kind)
            entry.type.tensor_type.elem_type = _WIDER[kind]
    if not casts:
        return
    read_instead({name: cast.output[0] for name, cast in casts.items()}, graph)
    refill(graph.node, [*casts.values(), *graph.node])
