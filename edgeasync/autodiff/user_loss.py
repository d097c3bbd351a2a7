"""Appends a user-defined loss, which is an ONNX graph, to a forward model."""

from typing import NamedTuple

import numpy as np
import onnx
from onnx import version_converter

from edgeasync.autodiff import reading
from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Shape
from edgeasync.autodiff.losses import TARGET, LossParts
from edgeasync.autodiff.rules import TrainingGraphBuilder
from edgeasync.errors import GraphError, native_reason

PREDICTION = "prediction"
"""Name of the loss graph's input for the model's output. The other input is `target`."""

_PREFIX = "loss::"


class ModelWithLoss(NamedTuple):
    """A model with an appended loss.

    `total` is the tensor that contains the loss, and `prediction` is the shape that the loss
    expects.
    """

    model: onnx.ModelProto
    total: str
    prediction: Shape


def join(model: onnx.ModelProto, output: str, loss: bytes) -> ModelWithLoss:
    """Append a loss graph to a model's output. Raises `GraphError` if the graph is not a loss."""
    try:
        own = reading.parse(loss)
    except GraphError as error:
        raise GraphError(f"loss: {error}") from error
    constants = {tensor.name for tensor in own.graph.initializer}
    inputs = {entry.name: entry for entry in own.graph.input if entry.name not in constants}
    if inputs.keys() != {PREDICTION, TARGET} or len(own.graph.output) != 1:
        raise GraphError(
            "the loss must have two inputs, prediction and target, and one output; found inputs: "
            f"{', '.join(inputs) or '(none)'}; outputs: {len(own.graph.output)}. To train several outputs of the "
            "model, concatenate them in its forward, for example with torch.cat, and concatenate their targets in "
            "the data's y"
        )
    if any(attribute.HasField("g") for node in own.graph.node for attribute in node.attribute):
        raise GraphError("the loss contains a subgraph (a loop or a branch); write the loss without one")
    version = max(reading.opset_of(model), reading.opset_of(own))
    joined, own = _to_opset(model, version), _to_opset(own, version)
    names = {PREDICTION: output, TARGET: TARGET, "": ""}
    for node in own.graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, _PREFIX + name) for name in field]
        node.name = _PREFIX + (node.name or node.output[0])
    for tensor in own.graph.initializer:
        tensor.name = _PREFIX + tensor.name
    joined.graph.node.extend(own.graph.node)
    joined.graph.initializer.extend(own.graph.initializer)
    joined.graph.input.append(inputs[TARGET])
    total = own.graph.output[0].name
    dims = inputs[PREDICTION].type.tensor_type.shape.dim
    return ModelWithLoss(joined, names.get(total, _PREFIX + total), tuple([dim.dim_value or None for dim in dims]))


def add(graph: TrainingGraphBuilder, prepared: ForwardGraph) -> LossParts:
    """Return the tensors of a loss that is already part of the graph."""
    graph.enter("loss")
    rows = graph.op("Gather", graph.op("Shape", TARGET), graph.constant(np.int64(0)))
    return LossParts(prepared.output, graph.op("Cast", rows, to=1), {prepared.output: graph.scalar(1.0)})


def take_target(prepared: ForwardGraph, prediction: Shape) -> None:
    """Remove the target of the loss from the model's inputs, after checking the loss.

    Raises `GraphError` if the loss is invalid.
    """
    if prepared.prediction not in prepared.shapes:
        raise GraphError(
            "the loss does not depend on its input prediction, so nothing would be trained; use prediction in the "
            "loss"
        )
    found = prepared.shapes[prepared.prediction]
    if len(found) != len(prediction) or any(a != b for a, b in zip(found, prediction, strict=True) if a and b):
        raise GraphError(
            f"the loss expects a prediction of shape {prediction}, but the model's output "
            f"{prepared.prediction!r} has shape {found}; export the loss for that shape"
        )
    if prepared.shapes[prepared.output] != ():
        raise GraphError(
            f"the loss has shape {prepared.shapes[prepared.output]}, but must be a scalar, the mean over the "
            "batch; use ReduceMean<keepdims=0>"
        )
    if TARGET not in prepared.inputs:
        raise GraphError(
            "the loss does not depend on its input target, so the data's y would have no effect; use target in "
            "the loss"
        )
    kind = prepared.dtypes[TARGET]
    if kind not in (FLOAT, np.dtype(np.int64)):
        raise GraphError(
            f"the loss's input target is {kind}, but a device's data is float32 or int64; export the loss with "
            "one of these types"
        )
    prepared.inputs.remove(TARGET)


def _to_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    if reading.opset_of(model) != version:
        try:
            return version_converter.convert_version(model, version)
        except Exception as error:
            raise GraphError(
                f"the model and the loss have different opsets, and onnx cannot convert one to opset {version} "
                f"({native_reason(error)}); export both with the same opset"
            ) from error
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied
