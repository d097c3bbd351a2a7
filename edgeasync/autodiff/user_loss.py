"""A loss of the user's own: an ONNX graph that is put behind the output of a forward model."""

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
"""The input of the loss that is the model's output; the other one is `target`."""

_PREFIX = "loss::"


class ModelWithLoss(NamedTuple):
    """A model with a loss behind its output, what the loss computes, and what it takes for a prediction."""

    model: onnx.ModelProto
    total: str
    prediction: Shape


def join(model: onnx.ModelProto, output: str, loss: bytes) -> ModelWithLoss:
    """Put a loss behind a model's output; raises `GraphError` for a graph that is no loss."""
    try:
        own = reading.parse(loss)
    except GraphError as error:
        raise GraphError(f"the loss: {error}") from error
    constants = {tensor.name for tensor in own.graph.initializer}
    inputs = {entry.name: entry for entry in own.graph.input if entry.name not in constants}
    if inputs.keys() != {PREDICTION, TARGET} or len(own.graph.output) != 1:
        raise GraphError(
            f"the loss has the inputs {', '.join(inputs) or '(none)'} and {len(own.graph.output)} outputs; "
            "give it the inputs prediction and target, and one output; join several outputs of the model to one "
            "in its forward, such as by torch.cat, and their targets in the data's y"
        )
    if any(attribute.HasField("g") for node in own.graph.node for attribute in node.attribute):
        raise GraphError("the loss holds a graph of its own (a loop or a branch); write it without")
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
    """Return what a loss that was joined is, of a graph that computes it already."""
    graph.enter("loss")
    rows = graph.op("Gather", graph.op("Shape", TARGET), graph.constant(np.int64(0)))
    return LossParts(prepared.output, graph.op("Cast", rows, to=1), graph.scalar(1.0))


def take_target(prepared: ForwardGraph, prediction: Shape) -> None:
    """Make the loss's target what it is in a training graph; raises `GraphError` for what is no loss."""
    if prepared.prediction not in prepared.shapes:
        raise GraphError("the loss does not depend on its prediction; nothing could be trained")
    found = prepared.shapes[prepared.prediction]
    if len(found) != len(prediction) or any(a != b for a, b in zip(found, prediction, strict=True) if a and b):
        raise GraphError(
            f"the loss takes a prediction of shape {prediction}, the model's output {prepared.prediction!r} "
            f"is {found}"
        )
    if prepared.shapes[prepared.output] != ():
        raise GraphError(
            f"the loss is of shape {prepared.shapes[prepared.output]}; give one number, the mean over the batch: "
            "ReduceMean<keepdims=0>"
        )
    if TARGET not in prepared.inputs:
        raise GraphError("the loss does not depend on its target; nothing could be learnt from the data's y")
    kind = prepared.dtypes[TARGET]
    if kind not in (FLOAT, np.dtype(np.int64)):
        raise GraphError(f"the loss's target is {kind}; a device's data has float32 or int64")
    prepared.inputs.remove(TARGET)


def _to_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    if reading.opset_of(model) != version:
        try:
            return version_converter.convert_version(model, version)
        except Exception as error:
            raise GraphError(
                f"the model and the loss are of different opsets, and onnx cannot convert one to opset {version} "
                f"({native_reason(error)}); export both with the same opset"
            ) from error
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied
