"""Measures a training graph: parameters, operators, and the operations and memory of a step."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff.graph import FLOAT, Array, Node, free_inputs, read_nodes, value_info
from edgeasync.autodiff.losses import TARGET
from edgeasync.autodiff.probing import open_session
from edgeasync.errors import GraphError, native_reason
from edgeasync.parameters import ParameterSpec


class Inspection(msgspec.Struct, frozen=True):
    """The figures that `edgeasync model inspect` shows.

    `memory_bytes` and `floating_point_operations` are for one step with `batch_size` examples.
    """

    inputs: dict[str, list[int | str]]
    outputs: list[str]
    parameters: int
    statistics: int
    frozen: int
    operators: dict[str, int]
    nodes: int
    file_bytes: int
    batch_size: int
    floating_point_operations: int
    memory_bytes: int


class Cost(msgspec.Struct, frozen=True):
    """The cost of one run of a graph: arithmetic operations, and peak memory of node outputs."""

    operations: int
    peak_bytes: int


def inspect_graph(model: bytes, spec: ParameterSpec, batch_size: int) -> Inspection:
    """Run one step with all tensors as outputs, and add up the costs of the nodes.

    Raises `GraphError` if the graph does not run.

    If the graph has a fixed batch size, it overrides `batch_size`. The memory includes parameters,
    gradients and constants, and the peak of live tensors if the nodes run in the order of the
    graph. The allocator of a runtime needs more.

    Matrix products and convolutions count as two operations per multiply-accumulate, reductions and
    pooling as one per input value, and all other operators as one per output value. Moving values
    costs no operations. The body of a Scan is counted once per iteration.
    """
    proto = onnx.load_model_from_string(model)
    feeds = example_feeds(proto, spec, batch_size)
    cost = measure(proto, feeds)
    constants = {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    return Inspection(
        inputs={
            entry.name: [dim.dim_param or dim.dim_value for dim in entry.type.tensor_type.shape.dim]
            for entry in proto.graph.input
        },
        outputs=[entry.name for entry in proto.graph.output],
        parameters=spec.trained_length,
        statistics=spec.length - spec.trained_length,
        # Names that start with two colons are constants of our own formulas.
        frozen=sum(
            value.size
            for name, value in constants.items()
            if value.dtype == FLOAT and value.ndim and not name.startswith("::")
        ),
        operators=dict(Counter(node.op_type for node in proto.graph.node).most_common()),
        nodes=len(proto.graph.node),
        file_bytes=len(model),
        batch_size=fixed_batch(proto) or batch_size,
        floating_point_operations=cost.operations,
        memory_bytes=cost.peak_bytes + sum(value.nbytes for value in (*feeds.values(), *constants.values())),
    )


def frozen_arrays(model: bytes, trained: Collection[str]) -> Iterator[tuple[str, Array]]:
    """Yield the names and values of those initializers of a forward model that are not trained.

    Skips scalars, because they are constants in formulas, and int64 arrays, because they are shapes
    and axes.
    """
    for entry in onnx.load_model_from_string(model).graph.initializer:
        if entry.name not in trained and entry.data_type != onnx.TensorProto.INT64 and math.prod(entry.dims) > 1:
            yield entry.name, numpy_helper.to_array(entry)


def fixed_batch(proto: onnx.ModelProto) -> int | None:
    """Return the fixed batch size of a training graph, or `None` if it accepts any batch size."""
    for entry in proto.graph.input:
        if entry.name != TARGET:  # the data inputs come first
            return entry.type.tensor_type.shape.dim[0].dim_value or None
    return None


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


def measure(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> Cost:
    """Run a graph and return its cost. Raises `GraphError` if it does not run."""
    known = dict(feeds) | {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    known |= run_with_every_tensor(proto, feeds)
    nodes = read_nodes(proto.graph.node)
    last = {name: position for position, node in enumerate(nodes) for name in free_inputs(node)}
    last |= {entry.name: len(nodes) for entry in proto.graph.output}  # outputs live until the end
    operations = alive = peak = 0
    ending: dict[int, int] = Counter()
    for position, node in enumerate(nodes):
        inside = _measure_scan(node, known, proto) if node.op == "Scan" else Cost(_operations(node, known), 0)
        operations += inside.operations
        for name in filter(None, node.outputs):
            alive += known[name].nbytes
            ending[last.get(name, position)] += known[name].nbytes
        peak = max(peak, alive + inside.peak_bytes)
        alive -= ending[position]
    return Cost(operations, peak)


def _measure_scan(node: Node, known: Mapping[str, Array], proto: onnx.ModelProto) -> Cost:
    """Measure the first iteration of a Scan, and multiply its cost by the number of iterations."""
    body: onnx.GraphProto = node.attributes["body"]
    states = len(node.inputs) - int(node.attributes["num_scan_inputs"])
    axes = node.attributes.get("scan_input_axes") or [0] * len(node.inputs)
    feeds = {name: known[name] for name in set(free_inputs(node)).difference(node.inputs)}
    feeds |= {entry.name: known[name] for entry, name in zip(body.input, node.inputs, strict=True)}
    for entry, axis in zip(body.input[states:], axes, strict=False):
        feeds[entry.name] = feeds[entry.name].take(0, axis)
    inner = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=body)
    del inner.graph.input[:]
    inner.graph.input.extend(value_info(name, value.dtype, value.shape) for name, value in feeds.items())
    once = measure(inner, feeds)
    times = known[node.inputs[states]].shape[axes[0]]
    return Cost(times * once.operations, once.peak_bytes)


def run_with_every_tensor(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph, and return all tensors that it computes. Raises `GraphError` if it fails."""
    whole = onnx.ModelProto()
    whole.CopyFrom(proto)
    names = [output for node in proto.graph.node for output in node.output if output]
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        return dict(zip(names, open_session(whole.SerializeToString()).run(names, feeds), strict=True))
    except Exception as error:
        raise GraphError(f"the graph does not run: {native_reason(error)}") from error


def _operations(node: Node, known: Mapping[str, Array]) -> int:
    if node.op in _MOVING:
        return 0
    values = [known[name] for name in node.inputs if name]
    out: int = known[node.outputs[0]].size
    match node.op:
        case "MatMul" | "Gemm":
            depth: int = values[0].shape[0 if node.attributes.get("transA") else -1]
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
