"""Prepares a forward model for differentiation by removing unused nodes and folding constants.

Shapes and shape-like values are measured, not inferred. The model is run at two batch sizes, in
parts whose tensors are all outputs. A comparison of the two runs shows what depends on the batch
size.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgeasync.autodiff.expansions import expand
from edgeasync.autodiff.graph import (
    RANDOM_OPERATORS,
    Array,
    Graph,
    Node,
    free_inputs,
    needed,
    read_nodes,
)
from edgeasync.autodiff.losses import TARGET
from edgeasync.autodiff.probing import PartedModel
from edgeasync.autodiff.producers import Producer, producer_of
from edgeasync.autodiff.quantized_weights import is_quantized, is_transposed
from edgeasync.autodiff.reading import array_of, initial_values, opset_of, read_instead, stops_gradient
from edgeasync.autodiff.unrolling import unroll
from edgeasync.errors import GraphError, native_reason

PROBES = (2, 3)
"""Batch sizes of the two runs. They exclude 1, because axes of size 1 would be broadcast."""

SHAPE_OPERATORS = frozenset({"Shape", "Size"})

_DATA_KINDS = (TensorProto.FLOAT, TensorProto.INT64)
"""Element types that a device's data may have."""

_PICKING = SHAPE_OPERATORS | {"Gather", "Slice", "Split"}
"""Operators whose result may be independent of the batch size although an input depends on it. For
all other operators, equal results at both batch sizes may be a coincidence. For example, a third of
either batch size rounds to 1.
"""


def is_picked(node: Node) -> bool:
    """Return whether a node's result may be independent of the batch size although an input is not."""
    return node.op in _PICKING


class ForwardGraph(Graph):
    """A prepared forward model: inputs, trainable parameters, constants, nodes and one output.

    `prediction` is the tensor that the loss compares with the target. It is the same as `output`,
    unless `output` is itself the loss.
    """

    def __init__(self, opset: int, output: str, prediction: str | None = None) -> None:
        super().__init__()
        self.opset = opset
        self.output = output
        self.prediction = prediction or output
        self.inputs: list[str] = []
        self.parameters: dict[str, Array] = {}
        self.output_sample: tuple[int, ...] = ()
        """The output's shape at batch size `PROBES[0]`, if the batch size is dynamic. The size of
        an axis may be a multiple of the batch size.
        """


def prepare(
    model: onnx.ModelProto,
    output: str,
    trained: Collection[str],
    statistics: Iterable[str],
    *,
    prediction: str | None = None,
) -> ForwardGraph:
    """Return the part of the model that `output` depends on.

    Shapes are measured, constants are folded, and loops are unrolled.

    `trained` and `statistics` name the initializers that stay variable. All other initializers
    become constants. Raises `GraphError` if the model does not run, contains operators of unknown
    domains, or has dynamic axes other than the batch axis.
    """
    forward = ForwardGraph(opset_of(model), output, prediction)
    variable = {*trained, *statistics}
    for name, value in initial_values(model).items():
        (forward.parameters if name in variable else forward.constants)[name] = value
    nodes = _resolve(needed(read_nodes(model.graph.node), [output]), forward, model)
    used = {name for node in nodes for name in free_inputs(node)}
    symbols: set[str] = set()
    for entry in model.graph.input:
        if entry.name not in forward.parameters and entry.name not in forward.constants and entry.name in used:
            _read_input(forward, entry, symbols, producer_of(model).sizes)
    sizes = {name: forward.shapes[name][0] for name in forward.inputs if name != TARGET}
    if len(set(sizes.values())) > 1:
        told = ", ".join([f"{name}: {size or 'dynamic'}" for name, size in sizes.items()])
        raise GraphError(
            f"axis 0 of all inputs must be the batch, but their sizes differ ({told}); export the model with one "
            "batch size for all inputs, best a dynamic one"
        )
    if not forward.inputs:
        raise GraphError(f"output {output!r} does not depend on any input of the model; choose another output")
    producer, symbolic = producer_of(model), bool(symbols)
    _measure_and_fold(forward, nodes, producer, symbolic=symbolic)
    while any(node.op == "Loop" for node in forward.nodes):  # nested loops appear one after the other
        nodes = _resolve(unroll(forward.nodes, forward.constants, opset=forward.opset), forward, model)
        _measure_and_fold(forward, nodes, producer, symbolic=symbolic)
    nodes = expand(forward, forward.nodes, trained, (forward.output, forward.prediction), opset=forward.opset)
    if nodes != forward.nodes:
        _measure_and_fold(forward, nodes, producer, symbolic=symbolic)
    return forward


def _measure_and_fold(forward: ForwardGraph, nodes: list[Node], producer: Producer, *, symbolic: bool) -> None:
    """Record the shape and dtype of each tensor, and fold constants."""
    first, second = _measure(forward, nodes, producer, symbolic=symbolic)
    for name, shape in first.shapes.items():
        other = second.shapes[name]
        if len(shape) != len(other):
            raise GraphError(
                f"the number of dimensions of tensor {name!r} depends on the batch size; write that part of the "
                "model with a fixed number"
            )
        forward.shapes[name] = tuple([a if a == b else None for a, b in zip(shape, other, strict=True)])
    forward.dtypes |= first.dtypes
    forward.output_sample = first.shapes[forward.output]
    _fold(forward, nodes, second.values)


def _read_input(forward: ForwardGraph, entry: onnx.ValueInfoProto, symbols: set[str], advice: str) -> None:
    kind = entry.type.tensor_type
    if not entry.type.HasField("tensor_type") or kind.elem_type not in helper.get_all_tensor_dtypes():
        raise GraphError(f"input {entry.name!r} is not a tensor; export the model with tensors as inputs")
    if kind.elem_type not in _DATA_KINDS:
        found = TensorProto.DataType.Name(kind.elem_type).lower()
        raise GraphError(
            f"input {entry.name!r} is {found}, but a device's data is float32 or int64; export the model with "
            "an input of one of these types, and cast it inside the model"
        )
    dims: list[int | None] = []
    for axis, dim in enumerate(kind.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value > 0:
            dims.append(dim.dim_value)
            continue
        if axis:
            which = f"--dim_param {shlex.quote(dim.dim_param)} --dim_value SIZE"
            if not dim.dim_param:
                which = f"--input_name {shlex.quote(entry.name)} --input_shape 1,SIZE,..."
            raise GraphError(
                f"input {entry.name!r} has the dynamic axis {axis} ({dim.dim_param!r}), but only axis 0, the "
                "batch, may be dynamic; fix its size with python -m onnxruntime.tools.make_dynamic_shape_fixed "
                f"{which} MODEL.onnx FIXED.onnx, or {advice}"
            )
        symbols.add(dim.dim_param)
        dims.append(None)
    if not dims:
        raise GraphError(f"input {entry.name!r} has no batch dimension; export the model with the batch as axis 0")
    forward.inputs.append(entry.name)
    forward.shapes[entry.name] = tuple(dims)
    forward.dtypes[entry.name] = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _resolve(nodes: list[Node], forward: ForwardGraph, model: onnx.ModelProto) -> list[Node]:
    """Remove Constant and Identity nodes, and replace sequences of tensors by separate tensors.

    The values of Constant nodes become constants. Identity nodes at which gradients stop are kept.
    """
    same: dict[str, str] = {}
    stops = {node.output[0] for node in model.graph.node if stops_gradient(node)}
    kept = []
    sequences: dict[str, list[str]] = {}
    for node in chain.from_iterable(map(_supported, nodes)):
        node.inputs = [same.get(name, name) for name in node.inputs]
        _read_in_bodies(node, same)
        if node.op == "Constant":
            if node.outputs[0] not in forward.parameters:
                forward.constants[node.outputs[0]] = _constant_value(node)
        elif node.op == "SplitToSequence" and (sizes := _split_sizes(node, forward, model)) is not None:
            # torch's newer exporter writes a sequence for chunk and split. Plain tensors can be
            # trained.
            parts = [f"{node.outputs[0]}::{place}" for place in range(len(sizes))]
            cut = f"{node.outputs[0]}::sizes"
            forward.constants[cut] = np.array(sizes, np.int64)
            attributes = {"axis": node.attributes.get("axis", 0)}
            kept.append(Node("Split", [node.inputs[0], cut], parts, attributes, node.name))
            sequences[node.outputs[0]] = parts
        elif node.op == "SequenceAt" and (part := _part_at(node, sequences, forward)) is not None:
            same[node.outputs[0]] = part
        elif node.op != "Identity" or node.outputs[0] in stops:
            kept.append(node)
        elif node.outputs[0] not in forward.parameters and node.outputs[0] not in forward.constants:
            same[node.outputs[0]] = node.inputs[0]
    forward.output = same.get(forward.output, forward.output)
    forward.prediction = same.get(forward.prediction, forward.prediction)
    return kept


def _read_in_bodies(node: Node, same: Mapping[str, str]) -> None:
    """Rename the inputs of nodes in loops and branches."""
    for body in node.attributes.values():
        if isinstance(body, onnx.GraphProto):
            read_instead(same, body)


def _supported(node: Node) -> list[Node]:
    """Return a node, or several instead of Bernoulli, which devices do not support."""
    if node.op != "Bernoulli":
        return [node]
    odds, (made,) = node.inputs[0], node.outputs
    seed = {name: value for name, value in node.attributes.items() if name == "seed"}
    kind = {"to": node.attributes["dtype"]} if "dtype" in node.attributes else None
    return [
        Node("RandomUniformLike", [odds], [f"{made}::uniform"], seed, node.name and f"{node.name}::uniform"),
        Node("Less", [f"{made}::uniform", odds], [f"{made}::below"], {}, node.name and f"{node.name}::below"),
        Node("Cast", [f"{made}::below"], [made], kind, node.name)
        if kind
        else Node("CastLike", [f"{made}::below", odds], [made], {}, node.name),
    ]


def _part_at(node: Node, sequences: Mapping[str, list[str]], forward: ForwardGraph) -> str | None:
    """Return the tensor that a SequenceAt node selects, if this can be determined without a run."""
    parts, place = sequences.get(node.inputs[0]), forward.constants.get(node.inputs[1])
    if parts is None or place is None:
        return None
    if place.size != 1 or not -len(parts) <= int(place.item()) < len(parts):
        raise GraphError(
            f"{node.where} selects a tensor outside its sequence of {len(parts)} tensors; correct the index in "
            "the model"
        )
    return parts[int(place.item())]


def _split_sizes(node: Node, forward: ForwardGraph, model: onnx.ModelProto) -> list[int] | None:
    """Return the sizes of a SplitToSequence node, if they can be determined without a run."""
    given = forward.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if given is None or given.ndim:
        return None if given is None else [int(size) for size in given]
    step, axis = int(given), node.attributes.get("axis", 0)
    known = {info.name: info.type.tensor_type.shape.dim for info in model.graph.value_info}
    dims = known.get(node.inputs[0])
    if dims is None or not -len(dims) <= axis < len(dims) or not dims[axis].dim_value or step < 1:
        return None
    whole, rest = divmod(dims[axis].dim_value, step)
    return [step] * whole + [rest] * bool(rest)


def _constant_value(node: Node) -> Array:
    given: tuple[str, Any] = next(iter(node.attributes.items()), ("", None))
    kind, value = given
    if kind == "value":
        return array_of(value, node.where)
    if kind in ("value_float", "value_floats"):
        return np.asarray(value, np.float32)
    if kind in ("value_int", "value_ints"):
        return np.asarray(value, np.int64)
    raise GraphError(
        f"{node.where} has {f'the attribute {kind}' if kind else 'no value'}, which is not supported in a "
        "training graph; store the constant as a dense tensor of numbers"
    )


class _Measured:
    """The shapes and dtypes of all tensors of a run, and the values of those that may be folded."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.values: dict[str, Array] = {}

    def add(self, name: str, value: Array) -> None:
        measured: object = value
        if isinstance(measured, list):
            raise GraphError(
                f"tensor {name!r} is a sequence of tensors, which torch's newer exporter writes for chunk and "
                "split; export with dynamo=False or optimize=True, or use slices instead"
            )
        self.shapes[name], self.dtypes[name] = value.shape, value.dtype


def _measure(
    forward: ForwardGraph, nodes: list[Node], producer: Producer, *, symbolic: bool
) -> tuple[_Measured, _Measured]:
    """Run the forward model at two batch sizes.

    The second result has only those values that are equal in both runs.
    """
    variable = forward.constants | forward.parameters
    model = PartedModel(nodes, variable, opset=forward.opset)
    foldable = _foldable(nodes, forward.constants)

    def run(batch: int, before: _Measured | None = None) -> _Measured:
        feeds = {
            name: np.zeros([batch if dim is None else dim for dim in forward.shapes[name]], forward.dtypes[name])
            for name in forward.inputs
        }
        found = _Measured()
        for name, value in chain(feeds.items(), variable.items(), model.run(feeds)):
            found.add(name, value)
            if name in foldable and (before is None or _same(before.values[name], value)):
                found.values[name] = value
        return found

    try:
        first = run(PROBES[0])
        second = run(PROBES[1], first) if symbolic else first
    except GraphError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "Failed to allocate memory" in str(error):
            raise GraphError(f"not enough memory to run the forward model: {native_reason(error)}") from error
        fixed = symbolic and _runs_at_a_size(run, str(error))
        advice = producer.batch if fixed else "write that part of the model with other operators"
        if "Could not find an implementation" in str(error):
            advice = "that operator is not supported for this type on devices; export that part in float32"
        raise GraphError(f"the forward model does not run: {native_reason(error)}; {advice}") from error
    return first, second


def _runs_at_a_size(run: Callable[[int], object], said: str) -> bool:
    """Return whether a failed model runs at a batch size named in its error message."""
    sizes = {int(number) for number in re.findall(r"\b\d{1,4}\b", said)}
    for size in sorted(sizes.union(PROBES))[:SIZES_MAX]:
        try:
            run(size)
        except Exception:  # noqa: BLE001, S112 - of onnxruntime
            continue
        return True
    return False


SIZES_MAX = 16
"""Maximum number of batch sizes to try."""


def _may_fold(node: Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node that reads only constants is one itself. Quantized weights stay small."""
    if node.op == "DequantizeLinear" and not node.domain:
        return node.inputs[0] in constants and not is_quantized(node, constants)
    return node.op not in RANDOM_OPERATORS and not is_transposed(node, constants)


def _foldable(nodes: list[Node], constants: Mapping[str, Array]) -> set[str]:
    """Return the results of nodes that depend on nothing but constants and the shapes of tensors."""
    known = set(constants)
    found = set[str]()
    for node in nodes:
        inputs = node.inputs[:1] if node.op == "CastLike" else free_inputs(node)
        if _may_fold(node, constants) and (node.op in SHAPE_OPERATORS or known.issuperset(inputs)):
            known.update(node.outputs)
            found.update(name for name in node.outputs if name)
    return found


def _fold(forward: ForwardGraph, nodes: list[Node], values: Mapping[str, Array]) -> None:
    """Keep only the nodes that depend on data, parameters or the batch size.

    The results of all other nodes become constants. `values` are those that may be folded, and are
    equal at both batch sizes.
    """
    forward.nodes, varying = [], set[str]()
    foldable = _foldable(nodes, forward.constants)
    for node in nodes:
        if node.op == "CastLike":
            kind = helper.np_dtype_to_tensor_dtype(forward.dtypes[node.outputs[0]])
            node.op, node.inputs, node.attributes = "Cast", node.inputs[:1], {"to": int(kind)}
        made = [name for name in node.outputs if name]
        free = foldable.issuperset(made)
        alike = values.keys() >= set(made)
        if free and (not alike or (not is_picked(node) and not varying.isdisjoint(free_inputs(node)))):
            varying.update(node.outputs)
            alike = False
        if free and alike:
            forward.constants |= {name: values[name] for name in made}
        else:
            forward.nodes.append(node)
    if forward.output in forward.constants:
        raise GraphError(
            f"output {forward.output!r} is a constant, so there is nothing to train; choose another output"
        )
    forward.nodes = needed(forward.nodes, [forward.output])
    used = {name for node in forward.nodes for name in free_inputs(node)}
    forward.constants = {name: value for name, value in forward.constants.items() if name in used}
    forward.parameters = {name: value for name, value in forward.parameters.items() if name in used}


def _same(first: Array, second: Array) -> bool:
    if first.dtype.kind == "O" or first.shape != second.shape:  # texts
        return np.array_equal(first, second)
    # Compare bytes, because NaNs differ from themselves, and -0.0 equals 0.0.
    ones, others = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in (first, second)]
    return np.array_equal(ones, others)
