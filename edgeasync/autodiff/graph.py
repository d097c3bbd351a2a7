"""Graphs under construction: nodes, constants, and the known shapes and dtypes of tensors.

A dimension of a shape is an `int`, or `None` if it depends on the batch size.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeasync.errors import GraphError

Array = npt.NDArray[Any]
Shape = tuple[int | None, ...]

IR_VERSION = 10
"""IR version of written files. All supported versions of onnxruntime can read it."""

FLOAT = np.dtype(np.float32)

ONNXRUNTIME = "com.microsoft"
"""The domain of onnxruntime's own operators. Devices support some of them, but they have no
gradient rules.
"""

RANDOM_OPERATORS = frozenset(
    {
        "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip

RUN_MIN, RUN_MAX = 16, 128
"""Lengths of the runs in which gradients are summed over rows.

onnxruntime adds rows one by one, so that equal rows can lose a digit or two. With runs, errors are
near those of torch, and a sum takes no longer.
"""


class Node(msgspec.Struct):
    """A node of the graph. Inputs and outputs are tensor names; "" is an omitted optional input."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = {}
    name: str = ""
    domain: str = ""
    """Domain of the operator, empty for standard operators."""

    @property
    def where(self) -> str:
        """A description of the node for messages: its name, or the tensor that it computes."""
        return (
            f"node {self.name!r} ({self.op})" if self.name else f"the {self.op} that computes {self.outputs[0]!r}"
        )


class Graph:
    """Nodes in topological order, constants by name, and the known shapes and dtypes of tensors."""

    constants_prefix = ""
    """Prefix of the names of new constants."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self._count = 0
        self._scope = ""
        self._shared: dict[tuple[str, Shape, bytes], str] = {}

    def avoid(self, names: Iterable[str]) -> None:
        """Give no new name that is among `names`, which may come from another build."""
        numbers = [found[1] for name in names if (found := re.search(r"::\w*_(\d{1,9})$", name))]
        self._count = max(map(int, numbers), default=self._count)

    def enter(self, scope: str) -> None:
        """From now on, prefix the names of new tensors with `scope`.

        This makes the graph and its profiles easier to read.
        """
        self._scope = scope

    def new_name(self, hint: str) -> str:
        """Return an unused name. The double colon prevents conflicts with names of the model."""
        self._count += 1
        return f"{self._scope}::{hint}_{self._count}"

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Append a node with several outputs, and return their names."""
        names = [self.new_name(op) for _ in range(outputs)]
        self.nodes.append(Node(op, list(inputs), names, attributes, names[0]))
        return names

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output, and return its name."""
        return self.add(op, *inputs, **attributes)[0]

    def constant(self, value: npt.ArrayLike) -> str:
        """Add a constant and return its name. Equal constants share one name."""
        array = np.ascontiguousarray(value)
        array = array.reshape(np.shape(value))  # ascontiguousarray converts a scalar to a vector
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            self._count += 1
            self._shared[key] = name = f"{self.constants_prefix}::constant_{self._count}"
            self.constants[name] = array
            self.shapes[name], self.dtypes[name] = array.shape, array.dtype
        return self._shared[key]

    def scalar(self, value: float) -> str:
        """Add a float32 scalar and return its name."""
        return self.constant(np.float32(value))

    def ints(self, *values: int) -> str:
        """Add an int64 vector and return its name."""
        return self.constant(np.array(values, np.int64))

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape. Raises `KeyError` for tensors that gradient rules added."""
        return self.shapes[name]

    def static_shape(self, name: str, where: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises `GraphError` if it depends on the batch size."""
        shape = self.shapes[name]
        if None in shape:
            raise GraphError(
                f"{where}: tensor {name!r} has a shape that depends on the batch size; write the model with a "
                "fixed shape there"
            )
        return tuple(dim for dim in shape if dim is not None)

    def shape_like(self, name: str) -> str:
        """Return the name of an int64 vector that contains the shape of `name`, for a Reshape."""
        shape = self.shapes[name]
        if sum(dim is None for dim in shape) > 1:
            return self.op("Shape", name)
        return self.ints(*[-1 if dim is None else dim for dim in shape])

    def reshape_like(self, value: str, name: str) -> str:
        """Reshape a tensor to the shape of `name`, which has the same number of values."""
        return self.op("Reshape", value, self.shape_like(name))

    def total(self, values: list[str]) -> str:
        """Return the elementwise sum of tensors that have the same shape."""
        if len(values) == 1:
            return values[0]
        return self.op("Add" if len(values) == 2 else "Sum", *values)

    def reduce_to(self, value: str, shape: Shape, to: Shape) -> str:
        """Sum a tensor of `shape` over broadcast axes, so that the result has the shape `to`."""
        extra = len(shape) - len(to)
        axes = list(range(extra))
        axes += [extra + axis for axis, dim in enumerate(to) if dim == 1 and shape[extra + axis] != 1]
        if not axes:
            return value
        if axes == list(range(len(axes))) and (runs := self._sum_runs(value, shape, len(axes))) is not None:
            value, left = runs
            total = self.op("ReduceSum", value, self.ints(*range(left)), keepdims=0)
            return total if len(axes) == extra else self.op("Reshape", total, self.ints(*(dim or 0 for dim in to)))
        if len(axes) == extra:
            return self.op("ReduceSum", value, self.ints(*axes), keepdims=0)
        summed = self.op("ReduceSum", value, self.ints(*axes), keepdims=1)
        return self.op("Squeeze", summed, self.ints(*range(extra))) if extra else summed

    def _sum_runs(self, value: str, shape: Shape, count: int) -> tuple[str, int] | None:
        """Sum runs of rows, where the first `count` axes are the rows.

        Returns the sums of the runs, and the number of axes that these have instead of `count`. A run
        has a fixed length that divides the number of rows, or else it is the last of the axes. Returns
        `None` if both are short.
        """
        kept, fixed = [dim for dim in shape[count:] if dim is not None], [dim for dim in shape[:count] if dim]
        rows, last = math.prod(fixed), shape[count - 1]
        if count + len(kept) < len(shape) or math.prod(kept) == 1 or (len(fixed) == count and rows <= RUN_MAX):
            return None
        run = max(size for size in range(1, RUN_MAX + 1) if rows % size == 0)
        if run >= RUN_MIN:
            if shape[1:count] != (run,):
                value = self.op("Reshape", value, self.ints(-1, run, *kept))
            return self.op("ReduceSum", value, self.ints(1), keepdims=0), 1
        if count > 1 and (last is None or last >= RUN_MIN):
            return self.op("ReduceSum", value, self.ints(count - 1), keepdims=0), count - 1
        return None


def refill(field: Any, entries: Iterable[Any]) -> None:
    """Replace all entries of a repeated field, such as the nodes of a graph."""
    entries = [*entries]
    del field[:]
    field.extend(entries)


def needed(nodes: Iterable[Node], outputs: Iterable[str]) -> list[Node]:
    """Return the nodes that `outputs` depend on, in their original order."""
    wanted, kept = set(outputs), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(free_inputs(node))
    return kept[::-1]


def free_inputs(node: Node) -> Iterator[str]:
    """Yield the inputs of a node, including tensors that its subgraphs read from outside."""
    yield from (name for name in node.inputs if name)
    for value in node.attributes.values():
        if isinstance(value, onnx.GraphProto):
            yield from _read_from_outside(value)


def _read_from_outside(body: onnx.GraphProto) -> Iterator[str]:
    """Yield the tensors that a subgraph, including those nested in it, reads from outside."""
    made = {output for inner in body.node for output in inner.output}
    made.update(entry.name for entry in (*body.input, *body.initializer))
    for inner in body.node:
        yield from (name for name in inner.input if name and name not in made)
        nested = [entry.g for entry in inner.attribute if entry.HasField("g")]
        yield from (name for graph in nested for name in _read_from_outside(graph) if name not in made)


def read_nodes(nodes: Iterable[onnx.NodeProto]) -> list[Node]:
    """Convert ONNX nodes to `Node`."""
    return [
        Node(
            node.op_type,
            list(node.input),
            list(node.output),
            {attribute.name: _attribute_value(attribute) for attribute in node.attribute},
            node.name,
            "" if node.domain == "ai.onnx" else node.domain,
        )
        for node in nodes
    ]


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def write_nodes(nodes: Iterable[Node], rename: Mapping[str, str]) -> list[onnx.NodeProto]:
    """Convert nodes to ONNX nodes, and rename tensors by `rename`."""
    return [
        helper.make_node(
            node.op,
            [rename.get(name, name) for name in node.inputs],
            [rename.get(name, name) for name in node.outputs],
            name=node.name,
            domain=node.domain,
            **node.attributes,
        )
        for node in nodes
    ]


def opset_imports(opset: int, nodes: Iterable[Node]) -> list[onnx.OperatorSetIdProto]:
    """Return the opset imports that these nodes need.

    Besides the standard domain, only onnxruntime's own domain is used, which has only version 1.
    """
    others = sorted({node.domain for node in nodes if node.domain})
    return [helper.make_opsetid("", opset), *[helper.make_opsetid(domain, 1) for domain in others]]


def model_of(
    nodes: Iterable[Node],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[TensorProto],
    *,
    opset: int,
    rename: Mapping[str, str] = {},
) -> onnx.ModelProto:
    """Return an ONNX model that contains these nodes, with tensors renamed by `rename`."""
    nodes = list(nodes)
    graph = helper.make_graph(write_nodes(nodes, rename), "training", inputs, outputs, constants)
    imports = opset_imports(opset, nodes)
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=imports, producer_name="edgeasync")


def value_info(name: str, dtype: npt.DTypeLike, shape: Shape) -> onnx.ValueInfoProto:
    """Return the ONNX description of a graph input or output.

    Dimensions that depend on the batch size are named `batch`.
    """
    dims = ["batch" if dim is None else dim for dim in shape]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)


def tensor(name: str, value: Array) -> TensorProto:
    """Return an ONNX initializer."""
    return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
