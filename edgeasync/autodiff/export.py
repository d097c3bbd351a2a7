"""The trained model as a plain inference file: the forward model with trained values in place of its own."""

from collections.abc import Mapping

import onnx
from onnx import numpy_helper

from edgeasync.autodiff import forward
from edgeasync.autodiff.graph import Array
from edgeasync.errors import GraphError, ModelMismatchError


def export_model(model: bytes, trained: Mapping[str, Array]) -> bytes:
    """Return the serialized forward model with the arrays of `trained` as initializers, in inference mode.

    Batch norms use their running statistics and dropouts let everything through, whatever mode the model was
    exported in. Raises `ModelMismatchError` if an array is not one of the model's, or has another shape.
    """
    proto = forward.load(model)
    initial = forward.initial_values(proto)
    for name, value in trained.items():
        if name not in initial:
            raise ModelMismatchError(
                f"{name!r} is not a parameter of the forward model; give the one it was trained from"
            )
        if initial[name].shape != value.shape:
            raise ModelMismatchError(
                f"{name!r} has shape {value.shape}, in the forward model {initial[name].shape}"
            )
    kept = [entry for entry in proto.graph.initializer if entry.name not in trained]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(
        [*kept, *[numpy_helper.from_array(value, name) for name, value in trained.items()]]
    )
    nodes = [node for node in proto.graph.node if not (node.op_type == "Identity" and node.output[0] in trained)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for node in proto.graph.node:
        _settle(node)
    unused = {name for node in nodes for name in node.output}.difference(
        name for node in nodes for name in node.input
    ).difference(value.name for value in proto.graph.output)
    nodes = [node for node in nodes if not (node.op_type == "Constant" and node.output[0] in unused)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise GraphError(f"the exported model is not valid: {forward.first_line(error)}") from error
    return bytes(proto.SerializeToString())


def _settle(node: onnx.NodeProto) -> None:
    """Bring one node to inference mode."""
    if node.op_type == "BatchNormalization":
        mode = [attribute for attribute in node.attribute if attribute.name == "training_mode"]
        for attribute in mode:
            node.attribute.remove(attribute)
        del node.output[1:]
    elif node.op_type == "Dropout":
        del node.input[1:]
