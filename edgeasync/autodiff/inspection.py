"""What a training graph holds and costs: parameters, operators, arithmetic and memory of one step."""

import math
from collections import Counter

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff import forward
from edgeasync.autodiff.graph import Array
from edgeasync.errors import GraphError
from edgeasync.parameters import ParameterSpec


class Inspection(msgspec.Struct, frozen=True):
    """What `edgeasync model inspect` tells. Bytes and operations are of one step with `batch_size` examples."""

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


def inspect_graph(model: bytes, spec: ParameterSpec, batch_size: int) -> Inspection:
    """Run one step with every tensor as an output, and add up; raises `GraphError` if the graph does not run.

    The memory is that of parameters, gradients, constants, and of the tensors alive at once when the nodes run in
    the order they stand in: what a runtime with its own allocator needs comes on top. Operations are two for
    each multiply-and-add of products and convolutions, and one for each value of everything else.
    """
    proto = onnx.load_model_from_string(model)
    feeds = example_feeds(proto, spec, batch_size)
    made = run_with_every_tensor(proto, feeds)
    constants = {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    known = made | feeds | constants
    return Inspection(
        inputs={
            entry.name: [dim.dim_param or dim.dim_value for dim in entry.type.tensor_type.shape.dim]
            for entry in proto.graph.input
        },
        outputs=[entry.name for entry in proto.graph.output],
        parameters=spec.trained_length,
        statistics=spec.length - spec.trained_length,
        frozen=sum(value.size for value in constants.values() if value.dtype == np.float32 and value.ndim > 0),
        operators=dict(Counter(node.op_type for node in proto.graph.node).most_common()),
        nodes=len(proto.graph.node),
        file_bytes=len(model),
        batch_size=batch_size,
        floating_point_operations=sum(_operations(node, known) for node in proto.graph.node),
        memory_bytes=_peak_bytes(proto, made)
        + sum(value.nbytes for value in (*feeds.values(), *constants.values())),
    )


def example_feeds(proto: onnx.ModelProto, spec: ParameterSpec, batch_size: int, seed: int = 0) -> dict[str, Array]:
    """Return normally distributed inputs, whole ones 0 or 1, for everything but parameters, which are at 0."""
    generator = np.random.Generator(np.random.PCG64(seed))
    feeds: dict[str, Array] = dict(spec.views(np.zeros(spec.length, np.float32)))
    for entry in proto.graph.input:
        if entry.name not in feeds:
            kind = entry.type.tensor_type
            shape = [dim.dim_value or batch_size for dim in kind.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            if np.issubdtype(dtype, np.floating):
                feeds[entry.name] = generator.standard_normal(shape).astype(dtype)
            else:
                feeds[entry.name] = generator.integers(0, 2, shape).astype(dtype)
    return feeds


def run_with_every_tensor(proto: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    """Return every tensor that the nodes make; raises `GraphError` if the graph does not run."""
    whole = onnx.ModelProto()
    whole.CopyFrom(proto)
    names = [output for node in proto.graph.node for output in node.output if output]
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        return dict(zip(names, forward.open_session(whole.SerializeToString()).run(names, feeds), strict=True))
    except Exception as error:
        raise GraphError(f"the graph does not run: {forward.first_line(error)}") from error


def _operations(node: onnx.NodeProto, known: dict[str, Array]) -> int:
    out = sum(known[name].size for name in node.output if name)
    match node.op_type:
        case "MatMul" | "Gemm":
            transposed = any(entry.name == "transA" and entry.i for entry in node.attribute)
            depth: int = known[node.input[0]].shape[0 if transposed else -1]
            return 2 * out * depth
        case "Conv":
            return 2 * out * math.prod(known[node.input[1]].shape[1:])
        case "ConvTranspose":
            return 2 * known[node.input[0]].size * math.prod(known[node.input[1]].shape[1:])
        case "LSTM" | "GRU":
            weights = known[node.input[1]].size + known[node.input[2]].size
            return 2 * weights * math.prod(known[node.input[0]].shape[:2])
        case "Reshape" | "Transpose" | "Slice" | "Concat" | "Shape" | "Identity" | "Squeeze" | "Unsqueeze":
            return 0
    return out


def _peak_bytes(proto: onnx.ModelProto, made: dict[str, Array]) -> int:
    """Return the most bytes of intermediate tensors alive at once; results stay alive."""
    last = {name: position for position, node in enumerate(proto.graph.node) for name in node.input}
    last |= {entry.name: len(proto.graph.node) for entry in proto.graph.output}
    alive = peak = 0
    ending: dict[int, int] = Counter()
    for position, node in enumerate(proto.graph.node):
        for name in node.output:
            if name:
                alive += made[name].nbytes
                ending[last.get(name, position)] += made[name].nbytes
        peak = max(peak, alive)
        alive -= ending[position]
    return peak
