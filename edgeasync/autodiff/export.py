"""Exports a trained model by inserting the trained values into the forward model."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff import adapters, contract, precision, reading
from edgeasync.autodiff.branches import resolve_branches
from edgeasync.autodiff.graph import Array, refill
from edgeasync.autodiff.masks import without_masks
from edgeasync.errors import GraphError, ModelMismatchError, native_reason


def export_model(model: bytes, trained: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the serialized forward model with the arrays of `trained`, in inference mode.

    `metadata` is added to the model's own metadata, and overrides entries with the same key. Batch
    norms use their running statistics, and dropouts are inactive, regardless of the mode in which
    the model was exported. The opset and the IR version do not change. If a branch of an If
    node contains a trained array, the nodes of the branches replace the node. LoRA adapters are
    merged into float weights; beside quantized weights, they stay as they are. Raises
    `ModelMismatchError` if the model lacks an array or the array differs in shape or dtype, and
    `GraphError` if the model is invalid or values are not finite.
    """
    if contract.is_training_graph(model):
        raise GraphError("this is a training graph; pass the forward model that it was built from")
    proto = reading.load(model)
    if trained.keys() - reading.initial_values(proto).keys():  # some are in the branch of an If
        proto = reading.inline_functions(proto)
        resolve_branches(proto)
    insert(proto, trained)
    adapters.merge(proto)
    if metadata:
        helper.set_model_props(proto, {entry.key: entry.value for entry in proto.metadata_props} | dict(metadata))
    try:
        reading.check(proto)
    except onnx.checker.ValidationError as error:
        raise GraphError(f"the exported model is not valid: {native_reason(error)}") from error
    return bytes(proto.SerializeToString())


def insert(model: onnx.ModelProto, trained: Mapping[str, Array]) -> None:
    """Replace arrays of a model by those of `trained`, and switch the model to inference mode.

    A weight that the model stores in float16 or float64 and casts to float32 is replaced by its
    trained values in float32, without the Cast. If the model computes with a trained weight in
    float16, it then computes in float32. Raises the same errors as `export_model`.
    """
    precision.widen_halves(model, trained.keys())
    precision.widen_weights(model, trained.keys())
    values = reading.initial_values(model)
    _check_values(values, trained)
    _replace_values(model.graph, values, trained)
    before = _read_names(model.graph)
    settle(model.graph)
    for function in model.functions:
        settle(function)
    _remove_unread(model.graph, before)


def _check_values(values: Mapping[str, Array], trained: Mapping[str, Array]) -> None:
    for name, value in trained.items():
        if name not in values:
            raise ModelMismatchError(
                f"{name!r} is not a parameter of the forward model; pass the model that was trained"
            )
        own = values[name]
        if (own.shape, own.dtype) != (value.shape, value.dtype):
            raise ModelMismatchError(
                f"{name!r} is {value.dtype} of shape {value.shape}, but {own.dtype} of shape {own.shape} in the "
                "forward model; pass the model that was trained"
            )
        if not np.isfinite(value).all():
            raise GraphError(
                f"{name!r} contains values that are not finite because training diverged; train again with "
                "smaller steps"
            )


def _replace_values(graph: onnx.GraphProto, values: Mapping[str, Array], trained: Mapping[str, Array]) -> None:
    """Insert the trained values into the graph.

    If a tensor shared its value with a parameter before training, it receives a copy of the old
    value.
    """
    new = dict(trained)
    nodes = []
    for node in graph.node:
        output = node.output[0]
        if node.op_type == "Identity" and output in values and (output in trained or node.input[0] in new):
            new.setdefault(output, values[output])
        elif node.op_type != "Constant" or output not in trained:
            nodes.append(node)
    kept = [entry for entry in graph.initializer if entry.name not in new]
    refill(graph.initializer, [*kept, *[numpy_helper.from_array(value, name) for name, value in new.items()]])
    refill(graph.node, nodes)


def settle(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Switch every node to inference mode."""
    read = _read_names(graph)
    nodes = []
    for node in without_masks(graph):
        nodes.append(node)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                settle(attribute.g)
        if node.op_type == "Dropout":
            del node.input[1:]
        elif node.op_type == "BatchNormalization":
            refill(node.attribute, [entry for entry in node.attribute if entry.name != "training_mode"])
            moved = [*zip(node.input[3:5], node.output[1:3], strict=False)]
            del node.output[1:]
            nodes += [helper.make_node("Identity", [old], [new]) for old, new in moved if new in read]
    refill(graph.node, nodes)


def _remove_unread(graph: onnx.GraphProto, before: set[str]) -> None:
    """Remove nodes and constants that were read `before`, but only in training mode."""
    while True:
        names = before - _read_names(graph)
        nodes = [node for node in graph.node if not names.issuperset(filter(None, node.output))]
        if len(nodes) == len(graph.node):
            break
        refill(graph.node, nodes)
    refill(graph.initializer, [entry for entry in graph.initializer if entry.name not in names])
    there = {name for node in graph.node for name in node.output}
    there.update(entry.name for entry in graph.initializer)  # value_info records the kind of each initializer
    refill(graph.value_info, [entry for entry in graph.value_info if entry.name in there])


def _read_names(graph: onnx.GraphProto | onnx.FunctionProto) -> set[str]:
    """Return the names of all tensors that nodes, nested graphs or graph outputs use."""
    bodies = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    names = {name for node in graph.node for name in node.input}
    names.update(output if isinstance(output, str) else output.name for output in graph.output)
    return names.union(*map(_read_names, bodies))
