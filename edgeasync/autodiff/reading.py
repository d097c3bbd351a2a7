"""Reads a model file and normalizes its opset, input types, output and initial values."""

from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper, inliner, numpy_helper, version_converter

from edgeasync.autodiff.graph import ONNXRUNTIME, Array, needed, read_nodes
from edgeasync.autodiff.producers import producer_of
from edgeasync.errors import GraphError, argument, native_reason

OPSET_MIN, OPSET_MAX = 18, 23
"""The supported range of opsets. Models with an older opset are converted to the first one."""

_STANDARD = ("", "ai.onnx")

_WIDER = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.FLOAT16), TensorProto.FLOAT),
    **dict.fromkeys((TensorProto.INT32, TensorProto.INT16, TensorProto.INT8), TensorProto.INT64),
    **dict.fromkeys((TensorProto.UINT16, TensorProto.UINT8, TensorProto.BOOL), TensorProto.INT64),
}
"""Unsupported input types, and the supported type that replaces each."""

_MADE_OF = "pkg.torch.onnx.class_hierarchy"


def load(data: bytes) -> onnx.ModelProto:
    """Parse and check a serialized model.

    Raises `GraphError` if the model is invalid or uses external files.
    """
    model = read(data)
    for entry in model.graph.output:
        if entry.type.HasField("tensor_type"):
            entry.type.tensor_type.shape.SetInParent()  # onnx requires a shape; all shapes are measured later
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise GraphError(f"not a readable ONNX model: {native_reason(error)}; export the model again") from error
    return model


def read(data: bytes) -> onnx.ModelProto:
    """Parse a serialized model without checking its graph.

    Raises `GraphError` if the model uses external files. Otherwise, a malicious model could name
    any file of this machine, whose content would then be sent to all devices.
    """
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:
        raise GraphError("not a readable ONNX model; choose another file, or export the model again") from error
    tensor = None
    for part in _parts(model):
        if not _is_text(part):
            raise GraphError("the model contains text that is not UTF-8; export the model again")
        if isinstance(part, onnx.TensorProto) and (
            part.external_data or part.data_location == onnx.TensorProto.EXTERNAL
        ):
            tensor = part
    if tensor is not None:
        raise GraphError(
            f"tensor {tensor.name!r} is stored in an external file; save the model as one file, in torch with "
            "external_data=False, in onnx with onnx.save(onnx.load('model.onnx'), 'whole.onnx')"
        )
    return model


def _parts(model: onnx.ModelProto) -> Iterator[Any]:
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
        return isinstance(part.name, str)
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
    model = load(data)
    if not any(entry.domain in _STANDARD for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", OPSET_MIN))  # it has no standard operator
    opset = opset_of(model)
    if opset > OPSET_MAX:
        raise GraphError(
            f"the model has opset {opset}, but the newest supported is {OPSET_MAX}; {producer_of(model).opset}"
        )
    try:
        if model.functions:
            model = inliner.inline_local_functions(model)
        if opset < OPSET_MIN:
            model = version_converter.convert_version(model, OPSET_MIN)
    except Exception as error:
        raise GraphError(
            f"the model has opset {opset}, and onnx cannot convert it ({native_reason(error)}); "
            f"{producer_of(model).opset}"
        ) from error
    return model


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
    _read_instead({name: cast.output[0] for name, cast in casts.items()}, graph)
    nodes = [*casts.values(), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _read_instead(names: Mapping[str, str], graph: onnx.GraphProto) -> None:
    """Rename inputs of all nodes, including nodes in loops and branches."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _read_instead(names, attribute.g)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard opset that a model imports."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in _STANDARD), 1)


def choose_output(model: onnx.ModelProto, output: str | None) -> str:
    """Return the tensor that the loss uses: `output`, or else the only floating-point output.

    Raises `GraphError` if the output is ambiguous, missing, or computed by operators that devices
    do not support.
    """
    names = [str(value.name) for value in model.graph.output]
    if not names:
        raise GraphError("the model has no output; export the model again")
    if output is None:
        chosen = [str(value.name) for value in model.graph.output if _may_be_float(value)] if names[1:] else names
        if len(chosen) != 1:
            dictionaries = [node.input[0] for node in model.graph.node if node.op_type == "ZipMap"]
            name = (*dictionaries, *chosen, *names)[0]
            _check_domains(model, name)  # otherwise following the advice would fail again
            raise GraphError(
                f"the model has {len(names)} outputs ({', '.join(names)}); choose the one to train: "
                f"{argument('output', name)}, "
                + ("the input of the ZipMap node, which makes dictionaries" if dictionaries else "for example")
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
                f"{node.where}: operators of the domain {node.domain!r} are not supported on devices; "
                f"{producer_of(model).foreign}"
            )


def _may_be_float(value: onnx.ValueInfoProto) -> bool:
    """Return whether the type of an output permits its use by a loss."""
    floats = (TensorProto.UNDEFINED, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
    return value.type.WhichOneof("value") in (None, "tensor_type") and value.type.tensor_type.elem_type in floats


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
