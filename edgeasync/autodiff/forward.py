"""A forward model made ready for differentiation: checked, pruned, with constants folded and shapes known.

Shapes and shape-like values are not inferred but measured: the model runs at two batch sizes with every
intermediate tensor as an output, which tells what follows the batch and what does not.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, inliner, numpy_helper, version_converter

from edgeasync.autodiff.graph import (
    IR_VERSION,
    Array,
    Graph,
    Node,
    free_inputs,
    needed,
    opset_imports,
    read_nodes,
    write_nodes,
)
from edgeasync.autodiff.producers import Producer, producer_of
from edgeasync.errors import GraphError, argument, native_reason

OPSET_MIN, OPSET_MAX = 18, 23
"""Opsets whose operators we differentiate as they are; older models are converted to the first."""

PROBES = (2, 3)
"""Batch sizes of the two runs. Not 1, which broadcasting would hide."""

SHAPE_OPERATORS = frozenset({"Shape", "Size"})
RANDOM_OPERATORS = frozenset(
    {
        "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip

_KEPT = RANDOM_OPERATORS | {"DequantizeLinear"}
"""Operators whose results are not computed beforehand: quantized weights stay small in the training graph."""

_STANDARD = ("", "ai.onnx")
ONNXRUNTIME = "com.microsoft"
"""The domain of onnxruntime's own operators. Devices run some of them, which have no gradient."""

_DATA_KINDS = (TensorProto.FLOAT, TensorProto.INT64)
"""What a device's data may be."""

_WIDER = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.FLOAT16), TensorProto.FLOAT),
    **dict.fromkeys((TensorProto.INT32, TensorProto.INT16, TensorProto.INT8), TensorProto.INT64),
    **dict.fromkeys((TensorProto.UINT16, TensorProto.UINT8, TensorProto.BOOL), TensorProto.INT64),
}
"""What inputs of other kinds are fed as."""

_PICKING = SHAPE_OPERATORS | {"Gather", "Slice", "Split"}
"""Operators that may leave out what follows the batch. What another makes of it may be alike at two sizes only
by chance: a third of the batch, or whether it is above ten."""


class ForwardGraph(Graph):
    """A forward model: `inputs` of data, `parameters` that may be trained, constants, and one `output`.

    The `prediction` is what the loss compares with the target: the output, unless that is the loss itself.
    """

    def __init__(self, opset: int, output: str, prediction: str | None = None) -> None:
        super().__init__()
        self.opset = opset
        self.output = output
        self.prediction = prediction or output
        self.inputs: list[str] = []
        self.parameters: dict[str, Array] = {}
        self.output_sample: tuple[int, ...] = ()
        """The output's shape for a free batch of `PROBES[0]`: what follows the batch may be a multiple of it."""


def load(data: bytes) -> onnx.ModelProto:
    """Read a serialized model as it is; raises `GraphError` if it is none, or keeps values in other files."""
    model = read(data)
    for entry in model.graph.output:
        if entry.type.HasField("tensor_type"):
            entry.type.tensor_type.shape.SetInParent()  # onnx wants one there, and we measure them all
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise GraphError(f"not a readable ONNX model: {native_reason(error)}; export the model again") from error
    return model


def read(data: bytes) -> onnx.ModelProto:
    """Read a serialized model that need not be sound; raises `GraphError` if it keeps values in other files.

    Such a file would be one of this machine, and its content would travel to all devices.
    """
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:
        raise GraphError("not a readable ONNX model; choose another file, or export the model again") from error
    tensor = None
    for part in _parts(model):
        if not _is_text(part):
            raise GraphError("the model has a name or a text that is not UTF-8; export the model again")
        if isinstance(part, onnx.TensorProto) and (
            part.external_data or part.data_location == onnx.TensorProto.EXTERNAL
        ):
            tensor = part
    if tensor is not None:
        raise GraphError(
            f"tensor {tensor.name!r} lies in an external file; save the model as one file, as torch does with "
            "external_data=False, and onnx with onnx.save(onnx.load('model.onnx'), 'whole.onnx')"
        )
    return model


def _parts(model: onnx.ModelProto) -> Iterator[Any]:
    """Yield a model and every message in it, wherever that stands."""
    waiting: list[Any] = [model]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, onnx.TensorProto):
            continue  # its values need not be copied to be looked at
        for field, content in part.ListFields():
            if field.type == field.TYPE_MESSAGE:
                waiting += [content] if hasattr(content, "ListFields") else content


def _is_text(part: Any) -> bool:
    """Return whether all texts of a message are UTF-8: protobuf returns another one as bytes."""
    if isinstance(part, onnx.TensorProto):
        return isinstance(part.name, str)
    return all(
        isinstance(text, str)
        for field, content in part.ListFields()
        if field.type == field.TYPE_STRING
        for text in ([content] if isinstance(content, str | bytes) else content)
    )


def parse(data: bytes) -> onnx.ModelProto:
    """Read a serialized forward model and bring it to an opset we know; raises `GraphError`."""
    model = load(data)
    if not any(entry.domain in _STANDARD for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", OPSET_MIN))  # it has no standard operator
    opset = opset_of(model)
    if opset > OPSET_MAX:
        raise GraphError(f"the model is of opset {opset}; {producer_of(model).opset}")
    try:
        if model.functions:
            model = inliner.inline_local_functions(model)
        if opset < OPSET_MIN:
            model = version_converter.convert_version(model, OPSET_MIN)
    except Exception as error:
        raise GraphError(
            f"the model is of opset {opset} and onnx cannot convert it ({native_reason(error)}); "
            f"{producer_of(model).opset}"
        ) from error
    return model


def widen_inputs(model: onnx.ModelProto) -> None:
    """Make a model take what devices have, int64 or float32, where it takes int32, float64 and the like.

    A Cast in front of its nodes makes of that what they read.
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
    _read_instead({name: cast.output[0] for name, cast in casts.items()}, graph)
    nodes = [*casts.values(), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _read_instead(names: Mapping[str, str], graph: onnx.GraphProto) -> None:
    """Make all nodes read other tensors, also those in the bodies of loops and branches."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _read_instead(names, attribute.g)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard operators that a model is written in."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in _STANDARD), 1)


def choose_output(model: onnx.ModelProto, output: str | None) -> str:
    """Return the tensor that the loss reads: without a name, the only output of floating-point values.

    Raises `GraphError` if it is unclear or missing, or if a node before it is of a domain that no device runs.
    """
    names = [str(value.name) for value in model.graph.output]
    if not names:
        raise GraphError("the model has no output; export the model again")
    if output is None:
        chosen = [str(value.name) for value in model.graph.output if _may_be_float(value)] if names[1:] else names
        if len(chosen) != 1:
            dictionaries = [node.input[0] for node in model.graph.node if node.op_type == "ZipMap"]
            name = (*dictionaries, *chosen, *names)[0]
            _check_domains(model, name)  # else who follows the advice is refused again
            raise GraphError(
                f"the model has {len(names)} outputs ({', '.join(names)}); name the one to train: "
                f"{argument('output', name)}, "
                + ("of which a ZipMap makes dictionaries" if dictionaries else "for example")
            )
        output = chosen[0]
    elif output not in {made for node in model.graph.node for made in node.output}:
        raise GraphError(f"the model has no tensor {output!r}; its outputs are {', '.join(names)}")
    _check_domains(model, output)
    return output


def _check_domains(model: onnx.ModelProto, output: str) -> None:
    for node in needed(read_nodes(model.graph.node), [output]):
        if node.domain not in ("", ONNXRUNTIME):
            raise GraphError(
                f"{node.where} is of the domain {node.domain!r}, which devices do not run; "
                f"{producer_of(model).foreign}"
            )


def _may_be_float(value: onnx.ValueInfoProto) -> bool:
    """Return whether a loss may read an output, by its type."""
    floats = (TensorProto.UNDEFINED, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
    return value.type.WhichOneof("value") in (None, "tensor_type") and value.type.tensor_type.elem_type in floats


def prepare(
    model: onnx.ModelProto,
    output: str,
    trained: Iterable[str],
    statistics: Iterable[str],
    *,
    prediction: str | None = None,
) -> ForwardGraph:
    """Return the part of the model that `output` needs, measured and folded.

    `trained` and `statistics` are names of initializers that stay variable; all others become constants.
    Raises `GraphError` for what cannot run, for foreign operators, and for free sizes other than the batch's.
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
    if not forward.inputs:
        raise GraphError(f"output {output!r} depends on no input of the model")
    first, second = _measure(forward, nodes, producer_of(model), symbolic=bool(symbols))
    for name, value in first.items():
        measured: object = value
        if isinstance(measured, list):
            raise GraphError(
                f"tensor {name!r} is a sequence of tensors, as torch's newer exporter makes of chunk and split: "
                "export with dynamo=False, or with optimize=True, or cut by slices"
            )
        shape = value.shape
        other = second[name].shape
        if len(shape) != len(other):
            raise GraphError(f"tensor {name!r} changes its number of dimensions with the batch size")
        forward.shapes[name] = tuple([a if a == b else None for a, b in zip(shape, other, strict=True)])
        forward.dtypes[name] = value.dtype
    forward.output_sample = first[forward.output].shape
    _fold(forward, nodes, first, second)
    return forward


def _read_input(forward: ForwardGraph, entry: onnx.ValueInfoProto, symbols: set[str], advice: str) -> None:
    kind = entry.type.tensor_type
    if not entry.type.HasField("tensor_type") or kind.elem_type not in helper.get_all_tensor_dtypes():
        raise GraphError(f"input {entry.name!r} is not a tensor; only tensors can be trained on")
    if kind.elem_type not in _DATA_KINDS:
        found = TensorProto.DataType.Name(kind.elem_type).lower()
        raise GraphError(
            f"input {entry.name!r} is {found}; a device's data is float32 or int64: export the model with such "
            "inputs, and cast them inside"
        )
    dims: list[int | None] = []
    for axis, dim in enumerate(kind.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value > 0:
            dims.append(dim.dim_value)
            continue
        if axis:
            raise GraphError(
                f"input {entry.name!r} has a free size {dim.dim_param!r} at axis {axis}; only the batch, axis 0, "
                f"may be free: {advice}"
            )
        symbols.add(dim.dim_param)
        dims.append(None)
    if not dims:
        raise GraphError(f"input {entry.name!r} has no dimension for the batch")
    forward.inputs.append(entry.name)
    forward.shapes[entry.name] = tuple(dims)
    forward.dtypes[entry.name] = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))


def initial_values(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the model's initializers by name, and arrays that Constant nodes hold.

    Exporters store tensors that happen to be equal once, and name the others by Identity nodes. Those filled
    with a single value, as all scales and biases of a new model are, become initializers of their own again;
    others are weights that are tied on purpose.
    """
    values = {tensor.name: array_of(tensor, f"tensor {tensor.name!r}") for tensor in model.graph.initializer}
    values |= held_by_constants(model)
    for node in model.graph.node:
        if node.op_type != "Identity" or stops_gradient(node):
            continue
        if node.input[0] in values and is_uniform(values[node.input[0]]):
            values[node.output[0]] = values[node.input[0]].copy()
    return values


def stops_gradient(node: onnx.NodeProto) -> bool:
    """Return whether torch's newer exporter made this Identity of a `detach`.

    Of `torch.no_grad` it leaves nothing, nor does the older exporter of either.
    """
    made_of = next((entry.value for entry in node.metadata_props if entry.key == _MADE_OF), "")
    return node.op_type == "Identity" and made_of.endswith("'aten.detach.default']")


_MADE_OF = "pkg.torch.onnx.class_hierarchy"


def held_by_constants(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the float32 arrays of Constant nodes, by the tensors they make, as paddle2onnx keeps weights."""
    return {
        node.output[0]: array_of(entry.t, f"tensor {node.output[0]!r}")
        for node in model.graph.node
        if node.op_type == "Constant"
        for entry in node.attribute
        if entry.name == "value" and entry.t.data_type == TensorProto.FLOAT and entry.t.dims
    }


def array_of(tensor: onnx.TensorProto, where: str) -> Array:
    """Return the values of a tensor; raises `GraphError` if its type, shape and values contradict one another."""
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, KeyError, TypeError) as error:
        raise GraphError(f"{where} cannot be read ({native_reason(error)}); export the model again") from error


def is_uniform(value: Array) -> bool:
    """Return whether all values of an array are the same."""
    return bool((value == value.flat[0]).all()) if value.size else True


def _resolve(nodes: list[Node], forward: ForwardGraph, model: onnx.ModelProto) -> list[Node]:
    """Turn Constant nodes into constants, sequences into their parts, and read through Identity.

    An Identity that is left is one at which gradients stop.
    """
    same: dict[str, str] = {}
    stops = {node.output[0] for node in model.graph.node if stops_gradient(node)}
    kept = []
    sequences: dict[str, list[str]] = {}
    for node in nodes:
        node.inputs = [same.get(name, name) for name in node.inputs]
        if node.op == "Constant":
            if node.outputs[0] not in forward.parameters:
                forward.constants[node.outputs[0]] = _constant_value(node)
        elif node.op == "SplitToSequence" and (sizes := _split_sizes(node, forward, model)) is not None:
            # torch's newer exporter makes a sequence of what chunk and split give; plain parts can be trained.
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


def _part_at(node: Node, sequences: Mapping[str, list[str]], forward: ForwardGraph) -> str | None:
    """Return the part of a sequence that a SequenceAt takes, if that can be told before the model runs."""
    parts, place = sequences.get(node.inputs[0]), forward.constants.get(node.inputs[1])
    if parts is None or place is None:
        return None
    if place.size != 1 or not -len(parts) <= int(place.item()) < len(parts):
        raise GraphError(f"{node.where} takes a part that its sequence of {len(parts)} does not have")
    return parts[int(place.item())]


def _split_sizes(node: Node, forward: ForwardGraph, model: onnx.ModelProto) -> list[int] | None:
    """Return the sizes that a SplitToSequence cuts into, if they can be told before the model runs."""
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
    ((kind, value),) = node.attributes.items()
    if kind == "value":
        return array_of(value, node.where)
    if kind in ("value_float", "value_floats"):
        return np.asarray(value, np.float32)
    if kind in ("value_int", "value_ints"):
        return np.asarray(value, np.int64)
    raise GraphError(f"{node.where} holds a {kind}, which no training graph can")


def _measure(
    forward: ForwardGraph, nodes: list[Node], producer: Producer, *, symbolic: bool
) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """Run the forward model at two batch sizes; return every tensor of both runs."""
    variable = forward.constants | forward.parameters
    names = [output for node in nodes for output in node.outputs if output]
    graph = helper.make_graph(
        write_nodes(nodes, {}),
        "probe",
        [_probe_input(forward, name) for name in forward.inputs],
        [onnx.ValueInfoProto(name=name) for name in names],
        [numpy_helper.from_array(value, name) for name, value in variable.items()],
    )
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opset_imports(forward.opset, nodes))
    session: onnxruntime.InferenceSession | None = None

    def run(batch: int) -> Mapping[str, Array]:
        assert session is not None
        feeds = {
            name: np.zeros([batch if dim is None else dim for dim in forward.shapes[name]], forward.dtypes[name])
            for name in forward.inputs
        }
        return feeds | variable | dict(zip(names, session.run(names, feeds), strict=True))

    try:
        session = open_session(model.SerializeToString())
        runs = [run(batch) for batch in (PROBES if symbolic else PROBES[:1])]
    except Exception as error:
        fixed = symbolic and session is not None and _runs_at_a_size(run, str(error))
        advice = producer.batch if fixed else "write that part of the model with other operators"
        if "Could not find an implementation" in str(error):
            advice = "devices do not run that operator for values of this type; export that part in float32"
        raise GraphError(f"the forward model does not run: {native_reason(error)}; {advice}") from error
    return runs[0], runs[-1]


def _runs_at_a_size(run: Callable[[int], object], said: str) -> bool:
    """Return whether a model that fails runs at another batch size, one that the error names."""
    sizes = {int(number) for number in re.findall(r"\b\d{1,4}\b", said)}
    for size in sorted(sizes.union(PROBES))[:SIZES_MAX]:
        try:
            run(size)
        except Exception:  # noqa: BLE001, S112 - of onnxruntime
            continue
        return True
    return False


SIZES_MAX = 16
"""How many batch sizes are tried."""


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Return a session that runs a model as it is written, and says nothing."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def _probe_input(forward: ForwardGraph, name: str) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(forward.dtypes[name])
    return helper.make_tensor_value_info(
        name, kind, ["batch" if dim is None else dim for dim in forward.shapes[name]]
    )


def _fold(
    forward: ForwardGraph, nodes: list[Node], first: Mapping[str, Array], second: Mapping[str, Array]
) -> None:
    """Keep the nodes whose results depend on data, parameters or the batch size; the others are constants."""
    shape_like, varying = set(forward.constants), set[str]()
    for node in nodes:
        if node.op == "CastLike":
            kind = helper.np_dtype_to_tensor_dtype(forward.dtypes[node.outputs[0]])
            node.op, node.inputs, node.attributes = "Cast", node.inputs[:1], {"to": int(kind)}
        inputs = set(free_inputs(node))
        free = node.op not in _KEPT and (node.op in SHAPE_OPERATORS or inputs <= shape_like)
        if free:
            shape_like.update(node.outputs)
        alike = all(_same(first[name], second[name]) for name in node.outputs if name)
        if free and (not alike or (node.op not in _PICKING and not varying.isdisjoint(inputs))):
            varying.update(node.outputs)
            alike = False
        if free and alike:
            forward.constants |= {name: first[name] for name in node.outputs if name}
        else:
            forward.nodes.append(node)
    if forward.output in forward.constants:
        raise GraphError(f"output {forward.output!r} is a constant; nothing can be trained")
    forward.nodes = needed(forward.nodes, [forward.output])
    used = {name for node in forward.nodes for name in free_inputs(node)}
    forward.constants = {name: value for name, value in forward.constants.items() if name in used}
    forward.parameters = {name: value for name, value in forward.parameters.items() if name in used}


def _same(first: Array, second: Array) -> bool:
    return first.shape == second.shape and first.tobytes() == second.tobytes()
