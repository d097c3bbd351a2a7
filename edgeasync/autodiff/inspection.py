"""Describes model files, and counts the operations of a graph."""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff import published, reading
from edgeasync.autodiff.contents import ModelContents, TensorInfo
from edgeasync.autodiff.contract import GRADIENT, NEXT
from edgeasync.autodiff.expansions import EXPANSIONS
from edgeasync.autodiff.graph import Array, Node, free_inputs, read_nodes, refill, value_info
from edgeasync.autodiff.losses import TARGET
from edgeasync.autodiff.probing import run_every_tensor
from edgeasync.autodiff.rules import RULES, STOPPING
from edgeasync.autodiff.serialization import detach
from edgeasync.errors import GraphError, native_reason
from edgeasync.parameters import ParameterSpec


def describe(content: bytes, *, trains: bool) -> ModelContents:
    """List the contents of a forward model or training graph, even if it cannot be trained.

    For a training graph, the inputs and outputs do not include those of its parameters. If the file
    `trains`, no operators without a gradient are listed. Raises `GraphError` if the file cannot be
    read.
    """
    stated = model = reading.read(content)
    if not trains:
        with contextlib.suppress(GraphError):  # for example, the opset is unknown
            model = published.read(content).model
    if any(entry.type.WhichOneof("value") is None or not _states_shape(entry) for entry in stated.graph.output):
        with contextlib.suppress(Exception):  # an invalid model, which is described as far as possible
            stated = onnx.shape_inference.infer_shapes(stated)
    nodes = read_nodes(model.graph.node)
    own = {tensor.name for tensor in stated.graph.initializer}
    results = {entry.name for entry in stated.graph.output}
    inputs = [
        entry
        for entry in stated.graph.input
        if entry.name not in own and results.isdisjoint((entry.name + GRADIENT, entry.name + NEXT))
    ]
    of_parameters = {entry.name + ending for entry in stated.graph.input for ending in (GRADIENT, NEXT)}
    return ModelContents(
        opset=reading.opset_of(stated),
        inputs=[info_of(entry) for entry in inputs],
        outputs=[info_of(entry) for entry in stated.graph.output if entry.name not in of_parameters],
        weights=sum(
            math.prod(tensor.dims)
            for tensor in stated.graph.initializer
            if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims
        ),
        operators=_counted(nodes),
        without_gradient={} if trains else _counted(node for node in nodes if not _has_rule(node)),
    )


def _counted(nodes: Iterable[Node]) -> dict[str, int]:
    return dict(Counter(node.op for node in nodes).most_common())


_RESOLVED = frozenset({"CastLike", "Constant", "DequantizeLinear", "SequenceAt", "SplitToSequence"})
"""Operators that `forward.prepare` replaces, or whose inputs are integers. They need no rule."""


def _has_rule(node: Node) -> bool:
    """Return whether an operator has a gradient rule, needs none, or stops the gradient."""
    known = node.op in RULES or node.op in STOPPING or node.op in _RESOLVED
    return not node.inputs or (known and not node.domain) or (node.domain, node.op) in EXPANSIONS


def _states_shape(entry: onnx.ValueInfoProto) -> bool:
    return not entry.type.HasField("tensor_type") or entry.type.tensor_type.HasField("shape")


def info_of(entry: onnx.ValueInfoProto) -> TensorInfo:
    """Return the name, dtype and shape of an input or output."""
    if not entry.type.HasField("tensor_type"):
        kind = str(entry.type.WhichOneof("value") or "unknown").removesuffix("_type")
        return TensorInfo(str(entry.name), kind, None)
    tensor = entry.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    shape = [dim.dim_value if dim.HasField("dim_value") else str(dim.dim_param) for dim in tensor.shape.dim]
    return TensorInfo(str(entry.name), dtype, shape if tensor.HasField("shape") else None)


def frozen_values(proto: onnx.ModelProto) -> int:
    """Return how many values of a training graph are not trained.

    Constants in formulas and scales of quantized weights do not count.
    """
    makers = {name: node for node in proto.graph.node for name in node.output}
    scales = {node.input[1] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    scales |= {makers[name].input[0] for name in scales if name in makers}  # tied to another tensor
    # Names that start with two colons are constants of our own formulas.
    return sum(
        math.prod(entry.dims)
        for entry in proto.graph.initializer
        if entry.data_type in _WEIGHTS
        and entry.dims
        and not entry.name.startswith("::")
        and entry.name not in scales
    )


_WEIGHTS = frozenset(map(onnx.TensorProto.DataType.Value, ("FLOAT", "INT4", "INT8", "UINT4", "UINT8")))
"""Types of weights. All but the first are quantized."""


def frozen_arrays(model: bytes, trained: Collection[str]) -> Iterator[tuple[str, Array]]:
    """Yield the names and values of those initializers of a forward model that are not trained.

    Skips scalars, because they are constants in formulas, and int64 arrays, because they are shapes
    and axes.
    """
    light, values = detach(model)
    for entry in light.graph.initializer:
        if entry.name not in trained and entry.data_type != onnx.TensorProto.INT64 and math.prod(entry.dims) > 1:
            yield entry.name, values[entry.name] if entry.name in values else numpy_helper.to_array(entry)


def example_feeds(proto: onnx.ModelProto, spec: ParameterSpec, batch_size: int, seed: int = 0) -> dict[str, Array]:
    """Return random values for the graph's data inputs, and zeros for its parameters.

    Floats are normally distributed. If the graph uses an integer input as indices, its values are
    valid indices; otherwise, they are 0 or 1.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    feeds: dict[str, Array] = dict(spec.views(np.zeros(spec.length, np.float32)))
    limits = _index_limits(proto)
    for entry in proto.graph.input:
        if entry.name not in feeds:
            kind = entry.type.tensor_type
            shape = [dim.dim_value or batch_size for dim in kind.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            if np.issubdtype(dtype, np.floating):
                feeds[entry.name] = generator.standard_normal(shape).astype(dtype)
            else:
                feeds[entry.name] = generator.integers(0, limits.get(entry.name, 2), shape).astype(dtype)
    return feeds


def _index_limits(proto: onnx.ModelProto) -> dict[str, int]:
    """Return an upper limit for each integer input.

    The limit is the number of classes for the target, and the number of rows for indices into a
    table.
    """
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    limits = {TARGET: int(metadata["edgeasync.classes"])} if "edgeasync.classes" in metadata else {}
    shapes = {entry.name: tuple(entry.dims) for entry in proto.graph.initializer}
    for entry in proto.graph.input:
        shapes[entry.name] = tuple([dim.dim_value for dim in entry.type.tensor_type.shape.dim])
    same: dict[str, str] = {}
    for node in read_nodes(proto.graph.node):
        if node.op in _RESHAPING:
            same[node.outputs[0]] = same.get(node.inputs[0], node.inputs[0])
        elif node.op == "Gather" and (shape := shapes.get(node.inputs[0])):
            index = same.get(node.inputs[1], node.inputs[1])
            rows = shape[node.attributes.get("axis", 0)]
            limits[index] = min(rows, limits.get(index, rows))
    return limits


_RESHAPING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_MOVING = _RESHAPING | {
    "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Dropout", "Expand", "Gather", "GatherElements",
    "GatherND", "OneHot", "Pad", "Range", "ScatterElements", "ScatterND", "Shape", "Size", "Slice",
    "SpaceToDepth", "Split", "Tile",
}  # fmt: skip


def count_operations(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> int:
    """Run a graph and return its number of arithmetic operations.

    Matrix products and convolutions count as two operations per multiply-accumulate, reductions and
    pooling as one per input value, and all other operators as one per output value. Moving values
    costs no operations. The body of a Scan is counted once per iteration. Raises `GraphError` if
    the graph does not run.
    """
    known = dict(feeds) | {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    known |= run_with_every_tensor(proto, feeds)
    return sum(
        _operations_of_scan(node, known, proto) if node.op == "Scan" else _operations(node, known)
        for node in read_nodes(proto.graph.node)
    )


def _operations_of_scan(node: Node, known: Mapping[str, Array], proto: onnx.ModelProto) -> int:
    """Count the operations of the first iteration, multiplied by the number of iterations."""
    body: onnx.GraphProto = node.attributes["body"]
    states = len(node.inputs) - int(node.attributes["num_scan_inputs"])
    axes = node.attributes.get("scan_input_axes") or [0] * len(node.inputs)
    feeds = {name: known[name] for name in set(free_inputs(node)).difference(node.inputs)}
    feeds |= {entry.name: known[name] for entry, name in zip(body.input, node.inputs, strict=True)}
    for entry, axis in zip(body.input[states:], axes, strict=False):
        feeds[entry.name] = feeds[entry.name].take(0, axis)
    inner = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=body)
    refill(inner.graph.input, [value_info(name, value.dtype, value.shape) for name, value in feeds.items()])
    times: int = known[node.inputs[states]].shape[axes[0]]
    return times * count_operations(inner, feeds)


def run_with_every_tensor(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph, and return all tensors that it computes. Raises `GraphError` if it fails."""
    try:
        return run_every_tensor(proto, feeds)
    except Exception as error:
        raise GraphError(f"the graph does not run: {native_reason(error)}") from error


def _operations(node: Node, known: Mapping[str, Array]) -> int:
    if node.op in _MOVING:
        return 0
    values = [known[name] for name in node.inputs if name]
    out: int = known[node.outputs[0]].size
    match node.op:
        case "MatMul" | "Gemm" | "FusedMatMul":
            depth: int = values[0].shape[(0 if node.op == "Gemm" else -2) if node.attributes.get("transA") else -1]
            return 2 * out * depth
        case "Conv":
            return 2 * out * math.prod(values[1].shape[1:])
        case "ConvTranspose":
            return 2 * values[0].size * math.prod(values[1].shape[1:])
        case "LSTM" | "GRU" | "RNN":
            return 2 * (values[1].size + values[2].size) * math.prod(values[0].shape[:2])
        case "AveragePool" | "MaxPool" | "LpPool":
            kernel: list[int] = node.attributes["kernel_shape"]
            return out * math.prod(kernel)
        case "Max" | "Min" | "Sum" | "Mean":
            return out * max(1, len(values) - 1)
    return values[0].size if node.op.startswith(("Arg", "Global", "Reduce")) else out
