"""Writes and reads the interface of training graphs, called the contract.

- inputs: those of the forward model, `target`, and every trained parameter and running statistic;
- outputs: `loss`, `loss_weight`, the forward model's output unless the loss computes it in chunks,
  `<parameter>.grad` and `<statistic>.new`;
- everything that is not trained is an initializer.
"""

from collections.abc import Mapping

import onnx
from onnx import helper

from edgeasync.autodiff import serialization
from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Node, free_inputs, model_of, needed, value_info
from edgeasync.autodiff.losses import TARGET
from edgeasync.autodiff.rules import TrainingGraphBuilder
from edgeasync.errors import GraphError
from edgeasync.parameters import Parameter, ParameterSpec, Role

CONTRACT = "edgeasync.contract"
"""Metadata key that marks a training graph. Its value is the version of this interface."""

CONTRACT_VERSION = "2"

OUTPUT = "edgeasync.output"
"""Metadata key with the name of the forward model's tensor that the loss uses."""

CHUNKS = "edgeasync.chunks"
"""Metadata key with the number of chunks in which the loss computes the scores. Without this key, the
graph has the scores as an output.
"""

WEIGHT, GRADIENT, NEXT = "loss_weight", ".grad", ".new"

_ENDINGS: tuple[tuple[Role, str], ...] = (("trained", GRADIENT), ("statistic", NEXT))


def parameter_of(result: str) -> str:
    """Return the name of the parameter or statistic to which an output belongs.

    For other outputs, return a text that is not the name of a parameter or statistic.
    """
    return result.rpartition(".")[0]


def serialize(
    prepared: ForwardGraph,
    graph: TrainingGraphBuilder,
    spec: ParameterSpec,
    results: dict[str, str],
    metadata: dict[str, str],
) -> bytes:
    """Serialize a graph. `results` maps the output names in the contract to tensors.

    Nodes that do not contribute to an output are removed. Raises `GraphError` if the model uses a
    name that the contract reserves.
    """
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    _check_names(prepared, graph, shapes, results)
    scores = [] if CHUNKS in metadata else [prepared.prediction]
    graph.nodes = needed(graph.nodes, [*scores, *results.values()])
    rename: dict[str, str] = {}
    taken = {*shapes, *prepared.inputs, TARGET, *scores}
    for result, name in results.items():
        # A tensor that has two names, or that is also an input or a constant, needs an Identity
        # node.
        if name in rename or name in taken or name in graph.constants:
            graph.nodes.append(Node("Identity", [name], [result], {}, result))
        else:
            rename[name] = result
    used = {name for node in graph.nodes for name in free_inputs(node)}
    inputs = [value_info(name, prepared.dtypes[name], prepared.shapes[name]) for name in prepared.inputs]
    inputs.append(value_info(TARGET, graph.dtypes[TARGET], graph.shapes[TARGET]))
    inputs += [value_info(name, FLOAT, shape) for name, shape in shapes.items()]
    outputs = [value_info(name, FLOAT, shapes.get(parameter_of(name), ())) for name in results]
    for name in scores:
        # The sizes are left open, because onnxruntime rejects a graph if it infers different sizes.
        kind = helper.np_dtype_to_tensor_dtype(graph.dtypes[name])
        outputs.insert(2, helper.make_tensor_value_info(name, kind, [None] * len(graph.shapes[name])))
    proto = model_of(graph.nodes, inputs, outputs, [], opset=prepared.opset, rename=rename)
    helper.set_model_props(proto, metadata)
    constants = {name: value for name, value in graph.constants.items() if name in used}
    return serialization.serialize(proto, constants)


def _check_names(
    prepared: ForwardGraph, graph: TrainingGraphBuilder, shapes: Mapping[str, object], results: Mapping[str, str]
) -> None:
    """Raise `GraphError` if the model uses names that the contract reserves."""
    own = {*prepared.inputs, *shapes, *graph.constants}
    own.update(name for node in prepared.nodes for name in node.outputs)
    for name in (TARGET, *results):
        if name in own:
            raise GraphError(f"tensor name {name!r} is reserved for the training graph; rename it in the model")
    if both := set(prepared.inputs).intersection(shapes):
        raise GraphError(f"{both.pop()!r} names both an input and a parameter; rename one")


def is_training_graph(model: bytes) -> bool:
    """Return whether a serialized model is a training graph built by edgeasync."""
    try:
        metadata = serialization.detach(model).model.metadata_props
    except Exception:  # noqa: BLE001
        return False
    return any(entry.key == CONTRACT for entry in metadata)


def read_output(model: bytes) -> str | None:
    """Return the forward model's tensor that a training graph's loss uses."""
    entries = serialization.detach(model).model.metadata_props
    return next((entry.value for entry in entries if entry.key == OUTPUT), None)


def check_rows(model: bytes) -> None:
    """Raise `GraphError` unless axis 0 of the target belongs to the examples of the batch.

    It may be a multiple of the batch size, such as one row per word.
    """
    proto = serialization.detach(model).model
    own = {parameter.name for parameter in read_spec(proto).parameters}
    shapes = {
        entry.name: [dim.dim_value or None for dim in entry.type.tensor_type.shape.dim]
        for entry in proto.graph.input
        if entry.name not in own
    }
    target = shapes.pop(TARGET, None)
    if not shapes or target is None:
        return
    name, shape = next(iter(shapes.items()))
    rows, wanted = shape[0], target[0] if target else 0
    fits = wanted is None or (rows is not None and wanted > 0 and wanted % rows == 0)
    if not fits:
        output = next((entry.value for entry in proto.metadata_props if entry.key == OUTPUT), "")
        raise GraphError(
            f"output {output!r} has no axis for the examples of a batch: its targets have the shape {target}, but "
            f"input {name!r} has {shape}; choose an output with one row per example, or export the model with the "
            "batch as axis 0"
        )


def read_spec(proto: onnx.ModelProto) -> ParameterSpec:
    """Return the layout of the trained arrays in a training graph.

    Raises `GraphError` if the graph does not contain a layout.
    """
    results = {entry.name for entry in proto.graph.output}
    found = [
        Parameter(entry.name, tuple([dim.dim_value for dim in entry.type.tensor_type.shape.dim]), role)
        for role, ending in _ENDINGS
        for entry in proto.graph.input
        if entry.name + ending in results
    ]
    if not found or found[0].role != "trained":
        raise GraphError("the training graph has no output <parameter>.grad; build it again")
    return ParameterSpec(tuple(found))
