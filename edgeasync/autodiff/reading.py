"""Reads a model file and normalizes its opset, input types, output and initial values."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper, version_converter

from edgeasync.autodiff.graph import ONNXRUNTIME, Array, free_inputs, needed, read_nodes, refill
from edgeasync.autodiff.producers import UNCONVERTED, producer_of
from edgeasync.errors import GraphError, native_reason

OPSET_MIN, OPSET_MAX = 18, 24
"""The supported range of opsets. Models with an older opset are converted to the first one."""

NODES_MAX = 20_000
"""Maximum number of nodes of a model that has functions of its own. A device accepts no more."""

_NORMS = {"LayerNormalization": 17, "SimplifiedLayerNormalization": sys.maxsize}
"""Operators that onnxruntime has in all opsets, and the first opset of onnx that has them."""

_STANDARD = ("", "ai.onnx")

_FOREIGN = {
    "ai.onnx.contrib": "it comes from onnxruntime-extensions, which prepares texts, images and sound; export the "
    "model without it, and prepare the data before the device reads it",
    "ai.onnx.converters.tensorflow": UNCONVERTED,
}
"""Advice for operators of known domains outside ONNX."""

_LFS = b"version https://git-lfs.github.com/"

_MADE_OF = "pkg.torch.onnx.class_hierarchy"


def load(data: bytes) -> onnx.ModelProto:
    """Parse and check a serialized model.

    Raises `GraphError` if the model is invalid or uses external files.
    """
    model = read(data)
    if sparse := [entry.values.name for entry in model.graph.sparse_initializer]:
        raise GraphError(
            f"the model stores sparse tensors, which are not supported: {', '.join(sparse)}; store them densely"
        )
    _check_operators(model)
    _sort_nodes(model.graph)
    state_output_shapes(model)
    try:
        check(model)
    except Exception as error:
        raise GraphError(f"not a readable ONNX model: {native_reason(error)}; export the model again") from error
    return model


def _check_operators(model: onnx.ModelProto) -> None:
    """Raise `GraphError` if the standard domain does not have all operators that the model uses of it."""
    own = {function.name for function in model.functions if function.domain in _STANDARD}
    missing = {
        node.op_type: node
        for node in nodes_within(model.graph)
        if node.domain in _STANDARD
        and node.op_type not in own | _NORMS.keys()
        and not onnx.defs.has(node.op_type, opset_of(model))
    }
    if not missing:
        return
    where = ", ".join([node.where for node in read_nodes(missing.values())])
    if known := [onnx.defs.get_schema(op) for op in missing if onnx.defs.has(op)]:
        raise GraphError(
            f"{where}: the model says opset {opset_of(model)}, which does not have it; export it with opset "
            f"{max(schema.since_version for schema in known)}"
        )
    raise GraphError(f"{where}: not an operator of ONNX; {producer_of(model).foreign}")


def _sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort nodes by their inputs. onnxruntime does this itself, and its tools write unsorted files."""
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    reads = [{makers[name] for name in free_inputs(node) if name in makers} for node in read_nodes(graph.node)]
    if any(place <= max(needed, default=-1) for place, needed in enumerate(reads)):
        with contextlib.suppress(CycleError):  # the check reports it
            order = list(TopologicalSorter(dict(enumerate(reads))).static_order())
            refill(graph.node, [graph.node[place] for place in order])


def state_output_shapes(model: onnx.ModelProto) -> None:
    """Add empty shapes to outputs without one, which onnx refuses. All shapes are measured later."""
    for entry in model.graph.output:
        if entry.type.HasField("tensor_type"):
            entry.type.tensor_type.shape.SetInParent()


def check(model: onnx.ModelProto) -> None:
    """Check a model with onnx. Raises onnx's error if the model is invalid."""
    unknown = _hide_unknown_norms(model)
    try:
        onnx.checker.check_model(model)
    finally:
        for node in unknown:
            node.domain = ""


def _hide_unknown_norms(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Move nodes that onnx does not know to onnxruntime's domain. Return these nodes.

    onnxruntime's optimizer writes some operators to the standard domain that the model's opset does
    not have.
    """
    opset = opset_of(model)
    unknown = [
        node for node in model.graph.node if node.domain in _STANDARD and opset < _NORMS.get(node.op_type, opset)
    ]
    for node in unknown:
        node.domain = ONNXRUNTIME
    return unknown


def read(data: bytes) -> onnx.ModelProto:
    """Parse a serialized model without checking its graph.

    Raises `GraphError` if the model uses external files. Otherwise, a malicious model could name
    any file of this machine, whose content would then be sent to all devices.
    """
    model = read_message(data)
    for tensor in external_tensors(model):
        raise GraphError(
            f"tensor {tensor.name!r} is stored in an external file; save the model as one file, in torch with "
            "external_data=False, in onnx with onnx.save(onnx.load('model.onnx'), 'whole.onnx')"
        )
    return model


def read_message(data: bytes) -> onnx.ModelProto:
    """Parse a serialized model, whose tensors may be in external files. Raises `GraphError`."""
    if data.startswith(_LFS):
        raise GraphError("not a model, but a pointer of Git LFS; download the model, with git lfs pull")
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:
        raise GraphError("not a readable ONNX model; choose another file, or export the model again") from error
    if not all(map(_is_text, parts(model))):
        raise GraphError("the model contains text that is not UTF-8; export the model again")
    return model


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a model that are stored in external files."""
    for part in parts(model):
        if isinstance(part, onnx.TensorProto) and (
            part.external_data or part.data_location == onnx.TensorProto.EXTERNAL
        ):
            yield part


def parts(model: onnx.ModelProto) -> Iterator[Any]:
    """Yield a model and all messages within it."""
    waiting: list[Any] = [model]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, onnx.TensorProto):
            continue  # reading its fields would copy its values
        for field, content in part.ListFields():
            if field.type == field.TYPE_MESSAGE:
                waiting += [content] if hasattr(content, "ListFields") else content


def _is_text(part: Any) -> bool:
    """Return whether all text in a message is valid UTF-8.

    protobuf returns invalid text as bytes.
    """
    if isinstance(part, onnx.TensorProto):
        return all(isinstance(text, str) for text in (part.name, *[entry.value for entry in part.external_data]))
    return all(
        isinstance(text, str)
        for field, content in part.ListFields()
        if field.type == field.TYPE_STRING
        for text in ([content] if isinstance(content, str | bytes) else content)
    )


def parse(data: bytes) -> onnx.ModelProto:
    """Parse and check a serialized forward model, and convert it to a supported opset.

    Raises `GraphError`.
    """
    return convert(inline_functions(load(data)))


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace calls of the model's own functions by their nodes. Raises `GraphError`."""
    if not any(entry.domain in _STANDARD for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", OPSET_MIN))  # it has no standard operator
    _check_functions(model)
    try:
        return inliner.inline_local_functions(model) if model.functions else model
    except Exception as error:
        raise _unconverted(model, error) from error


def _check_functions(model: onnx.ModelProto) -> None:
    """Raise `GraphError` if calls of functions cannot be replaced by nodes.

    onnx has already refused recursive functions.
    """
    bodies = {(function.domain, function.name): function for function in model.functions}
    for domain, name in bodies:
        if domain in (*_STANDARD, ONNXRUNTIME):
            raise GraphError(
                f"the model defines the operator {name} anew, and runtimes differ in which definition they use; "
                "rename the function in the model"
            )
    calls = {key: [(node.domain, node.op_type) for node in body.node] for key, body in bodies.items()}
    sizes: dict[tuple[str, str], int] = {}
    for key in TopologicalSorter({key: bodies.keys() & made for key, made in calls.items()}).static_order():
        sizes[key] = sum(sizes.get(called, 1) for called in calls[key])
    count = sum(sizes.get((node.domain, node.op_type), 1) for node in model.graph.node)
    if bodies and count > NODES_MAX:
        raise GraphError(
            f"the model has {count} nodes if calls of its own functions are replaced, over the limit of "
            f"{NODES_MAX}; write it with fewer calls"
        )


def convert(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model to a supported opset. Raises `GraphError`."""
    opset = opset_of(model)
    if opset > OPSET_MAX:
        raise GraphError(
            f"the model has opset {opset}, but the newest supported is {OPSET_MAX}; {producer_of(model).opset}"
        )
    try:
        if opset < OPSET_MIN:
            _hide_unknown_norms(model)
            resized = _resized_before_11(model) if opset < 11 else {}
            model = version_converter.convert_version(model, OPSET_MIN)
            for node in model.graph.node:
                if (modes := resized.get(node.output[0])) is not None:
                    node.attribute.extend([helper.make_attribute(*item) for item in modes.items()])
    except Exception as error:
        raise _unconverted(model, error) from error
    for node in model.graph.node:
        if node.op_type in _NORMS:
            node.domain = ""
    return model


def _resized_before_11(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Return the attributes with which Resize computes the same as nodes of an opset before 11.

    onnx's converter omits them. The keys are the outputs of the nodes.
    """
    stored = dict(stored_tensors(model.graph))
    found = {}
    for node in model.graph.node:
        if node.op_type in ("Resize", "Upsample"):
            scales = [value for entry in node.attribute if entry.name == "scales" for value in entry.floats]
            if not scales and (tensor := stored.get(node.input[1])) is not None:
                scales = [*array_of(tensor, f"tensor {node.input[1]!r}")]
            shrunk = bool(scales) and all(scale <= 1.0 for scale in scales)
            rounding = {"nearest_mode": "ceil" if shrunk else "floor"}
            found[node.output[0]] = {"coordinate_transformation_mode": "asymmetric"} | rounding
    return found


def _unconverted(model: onnx.ModelProto, error: Exception) -> GraphError:
    return GraphError(
        f"the model has opset {opset_of(model)}, and onnx cannot convert it ({native_reason(error)}); "
        f"{producer_of(model).opset}"
    )


def replace_scalers(model: onnx.ModelProto) -> None:
    """Replace Scaler nodes, as which skl2onnx writes a StandardScaler, by nodes that devices support."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        given = {entry.name: list(entry.floats) for entry in node.attribute}
        if (node.domain, node.op_type) != ("ai.onnx.ml", "Scaler") or given.keys() != {"offset", "scale"}:
            nodes.append(node)
            continue
        (output,) = node.output
        names = {name: f"{output}::{name}" for name in ("float", "shifted", *given)}
        for name, values in given.items():
            value = numpy_helper.from_array(np.array(values, np.float32))
            nodes.append(helper.make_node("Constant", [], [names[name]], value=value))
        nodes += [
            helper.make_node("Cast", node.input, [names["float"]], to=TensorProto.FLOAT),
            helper.make_node("Sub", [names["float"], names["offset"]], [names["shifted"]]),
            helper.make_node("Mul", [names["shifted"], names["scale"]], [output]),
        ]
    refill(model.graph.node, nodes)


def stored_tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the tensors in initializers and Constant nodes, with their names in the graph."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], entry.t) for entry in node.attribute if entry.name == "value")


def nodes_within(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph, including nodes in loops and branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_within(attribute.g)


def read_instead(names: Mapping[str, str], graph: onnx.GraphProto) -> None:
    """Rename inputs of all nodes, including nodes in loops and branches."""
    for node in nodes_within(graph):
        node.input[:] = [names.get(name, name) for name in node.input]


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard opset that a model imports."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in _STANDARD), 1)


def check_domains(model: onnx.ModelProto, output: str) -> None:
    """Raise `GraphError` if devices do not support an operator that computes `output`."""
    for node in needed(read_nodes(model.graph.node), [output]):
        if node.domain not in ("", ONNXRUNTIME):
            raise GraphError(
                f"{node.where}: operators of the domain {node.domain!r} are not supported on devices; "
                + _FOREIGN.get(node.domain, producer_of(model).foreign)
            )


def initial_values(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the values of the model's initializers and Constant nodes, by name.

    Exporters store tensors with equal values only once, and refer to them by Identity nodes. If all
    values in such a tensor are equal, such as the scales and biases of a new model, each reference
    becomes a separate initializer again. Otherwise, the references are assumed to be weights that
    are tied on purpose.
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
    """Return whether a node is an Identity to which torch's newer exporter converted a `detach`.

    The newer exporter ignores `torch.no_grad`. The older exporter ignores `detach` and `no_grad`.
    """
    made_of = next((entry.value for entry in node.metadata_props if entry.key == _MADE_OF), "")
    return node.op_type == "Identity" and made_of.endswith("'aten.detach.default']")


def held_by_constants(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the float32 arrays in Constant nodes, by output. paddle2onnx stores weights there."""
    return {
        node.output[0]: array_of(entry.t, f"tensor {node.output[0]!r}")
        for node in model.graph.node
        if node.op_type == "Constant"
        for entry in node.attribute
        if entry.name == "value" and entry.t.data_type == TensorProto.FLOAT and entry.t.dims
    }


def array_of(tensor: onnx.TensorProto, where: str) -> Array:
    """Return the values of a tensor.

    Raises `GraphError` if its type, shape and values are inconsistent.
    """
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, KeyError, TypeError) as error:
        raise GraphError(f"{where} cannot be read ({native_reason(error)}); export the model again") from error


def is_uniform(value: Array) -> bool:
    """Return whether all values of an array are equal."""
    return bool((value == value.flat[0]).all()) if value.size else True
