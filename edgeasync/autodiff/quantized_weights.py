"""Keeps quantized weights in their types, and dequantizes them where a node reads them.

onnxruntime dequantizes a weight as soon as it can, which is at the start of a step, and keeps the
result until its last use. So a graph would need the memory of all weights in float32. Therefore,
every use of a weight gets a DequantizeLinear of its own, tied to another tensor that the use reads:
an activation in the forward pass, the arriving gradient in the backward pass. Then only the weight
of one layer is in memory in float32.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from onnx import TensorProto

from edgeasync.autodiff.graph import FLOAT, Array, Graph, Node, free_inputs, needed
from edgeasync.autodiff.ties import tie

TYPES = frozenset({"int4", "int8", "uint4", "uint8"})
"""Types of quantized weights. Biases of int32 are not smaller than float32, so they are folded."""


def is_quantized(node: Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node dequantizes a constant of 8 or 4 bits."""
    return node.op == "DequantizeLinear" and not node.domain and _is_narrow(node.inputs[0], constants)


def is_transposed(node: Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node swaps the axes of a quantized matrix, which would be stored a second time."""
    swaps = node.op == "Transpose" and node.attributes.get("perm", [1, 0]) == [1, 0]
    return swaps and _is_narrow(node.inputs[0], constants) and constants[node.inputs[0]].ndim == 2


def _is_narrow(name: str, constants: Mapping[str, Array]) -> bool:
    return name in constants and constants[name].dtype.name in TYPES


def simplify(graph: Graph, outputs: list[str]) -> None:
    """Replace operators that would copy a dequantized weight. `outputs` names the tensors to keep.

    A MatMul by a transposed weight becomes a Gemm, which transposes while it multiplies. So does one
    by a float weight whose transposition is stored, too. A Gather of rows dequantizes only the rows,
    so that a table of embeddings is never in memory in float32. A matrix whose scales change along
    its rows is stored transposed, because onnxruntime then dequantizes it up to 50 times as fast.
    """
    simplifier = _Simplifier(graph, {node.inputs[0] for node in graph.nodes if node.op == "Gather"})
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        simplifier.add(node)
    graph.nodes = needed(graph.nodes, outputs)


class _Simplifier:
    """Appends nodes to a graph, with others instead of those that would copy a weight."""

    def __init__(self, graph: Graph, gathered: Collection[str]) -> None:
        self._graph = graph
        self._gathered = gathered
        """Tensors of which nodes read rows."""
        self._weights: dict[str, Node] = {}
        self._transposed = _stored_twice(graph)
        """For each transposed weight, the weight."""
        self._swapped: dict[str, str] = {}
        """For each transposed constant, the constant."""

    def add(self, node: Node) -> None:
        graph = self._graph
        graph.enter(f"quantized/{node.name or node.outputs[0]}")
        if is_transposed(node, graph.constants):
            self._swapped[node.outputs[0]] = node.inputs[0]
        if self._is_turned(node):
            node = self._transposed_last(node, self._swapped[node.inputs[0]], node.inputs[1:])
        elif self._is_slow(node):
            inputs = [self._stored_transposed(name) for name in node.inputs if name]
            node = self._transposed_last(node, inputs[0], inputs[1:])
        if is_quantized(node, graph.constants) and set(node.inputs) - {""} <= graph.constants.keys():
            self._weights[node.outputs[0]] = self._add_weight(node)
            return
        if node.op == "Transpose" and node.inputs[0] in self._weights and len(graph.shapes[node.inputs[0]]) == 2:
            self._transposed[node.outputs[0]] = node.inputs[0]
        if node.op == "MatMul" and node.inputs[1] in self._transposed:
            self._add_product(node)
        elif node.op == "Gemm" and node.inputs[1] in self._transposed:
            turned = {**node.attributes, "transB": 1 - node.attributes.get("transB", 0)}
            inputs = [node.inputs[0], self._transposed[node.inputs[1]], *node.inputs[2:]]
            graph.nodes.append(replace(node, inputs=inputs, attributes=turned))
        elif node.op == "Gather" and node.inputs[0] in self._weights and node.attributes.get("axis", 0) == 0:
            self._add_rows(node, self._weights[node.inputs[0]])
        else:
            graph.nodes.append(node)

    def _transposed_last(self, node: Node, values: str, scales: list[str]) -> Node:
        """Dequantize `values` and transpose the result, instead of what a node dequantizes.

        Appends all nodes but the last one, which is returned.
        """
        graph, (after,) = self._graph, node.outputs
        before, axis = graph.new_name("DequantizeLinear"), 1 - int(node.attributes.get("axis", 1)) % 2
        graph.shapes[before], graph.dtypes[before] = graph.shapes[after][::-1], graph.dtypes[after]
        attributes = {**node.attributes, "axis": axis}
        self.add(replace(node, inputs=[values, *scales], outputs=[before], attributes=attributes))
        return Node("Transpose", [before], [after], {"perm": [1, 0]}, node.name)

    def _is_turned(self, node: Node) -> bool:
        """Return whether a node dequantizes a transposed matrix, with scales that need not be transposed."""
        known = node.op == "DequantizeLinear" and node.inputs[0] in self._swapped
        return known and self._graph.constants[node.inputs[1]].ndim < 2

    def _is_slow(self, node: Node) -> bool:
        """Return whether a node dequantizes a matrix with several scales in each row."""
        constants = self._graph.constants
        if not is_quantized(node, constants) or not set(node.inputs) - {""} <= constants.keys():
            return False
        scale, rank = constants[node.inputs[1]], constants[node.inputs[0]].ndim
        in_rows = rank == 2 and scale.size > 1 and int(node.attributes.get("axis", 1)) % rank == 1
        return in_rows and node.outputs[0] not in self._gathered

    def _stored_transposed(self, name: str) -> str:
        """Return a constant that is the transposition of another, or `name` if that is a vector."""
        constants = self._graph.constants
        if constants[name].ndim < 2:
            return name
        made = f"{name}::transposed"
        constants[made] = np.ascontiguousarray(constants[name].T)
        self._graph.shapes[made], self._graph.dtypes[made] = constants[made].shape, constants[made].dtype
        return made

    def _add_weight(self, node: Node) -> Node:
        """Append a DequantizeLinear whose scale is float32, because onnxruntime cannot tie others."""
        graph = self._graph
        attributes = {name: value for name, value in node.attributes.items() if (name, value) != ("block_size", 0)}
        attributes.pop("output_dtype", None)
        scale, offsets = graph.constants[node.inputs[1]], [name for name in node.inputs[2:] if name]
        if not any(graph.constants[name].any() for name in offsets):
            node = replace(node, inputs=node.inputs[:2])
        if scale.dtype == FLOAT:
            made = replace(node, attributes=attributes)
            graph.nodes.append(made)
            return made
        kind = TensorProto.FLOAT16 if scale.dtype == np.float16 else TensorProto.BFLOAT16
        wide = graph.constant(scale.astype(FLOAT))
        made = replace(node, inputs=[node.inputs[0], wide, *node.inputs[2:]], attributes=attributes)
        made.outputs = [graph.new_name("DequantizeLinear")]
        graph.nodes += [made, Node("Cast", [made.outputs[0]], node.outputs, {"to": int(kind)}, node.name)]
        return made

    def _add_product(self, node: Node) -> None:
        """Append a Gemm instead of a MatMul by a transposed weight."""
        graph, (x, turned), (result,) = self._graph, node.inputs, node.outputs
        weight = self._transposed[turned]
        shape = graph.shapes[x]
        if len(shape) == 1:
            graph.nodes.append(node)
        elif len(shape) == 2:
            graph.nodes.append(Node("Gemm", [x, weight], [result], {"transB": 1}, node.name))
        else:
            rows = None if None in shape[:-1] else int(np.prod([dim or 0 for dim in shape[:-1]]))
            flat = graph.op("Reshape", x, graph.ints(-1, shape[-1] or 0))
            product = graph.op("Gemm", flat, weight, transB=1)
            for name, width in ((flat, shape[-1]), (product, graph.shapes[result][-1])):
                graph.shapes[name], graph.dtypes[name] = (rows, width), FLOAT
            graph.nodes.append(Node("Reshape", [product, graph.shape_like(result)], [result], {}, node.name))

    def _add_rows(self, node: Node, weight: Node) -> None:
        """Append a Gather of quantized rows, which are dequantized afterwards."""
        graph, index, (result,) = self._graph, node.inputs[1], node.outputs
        values, scale, *rest = weight.inputs
        scales, axis = graph.constants[scale], int(weight.attributes.get("axis", 1))
        by_row = scales.ndim == 1 and axis % graph.constants[values].ndim == 0
        if graph.constants[values].dtype.name not in ("int8", "uint8") or not (scales.size == 1 or by_row):
            graph.nodes.append(node)  # onnxruntime has no Gather of 4 bits
            return
        rows = graph.op("Gather", values, index)
        if scales.size == 1:
            graph.nodes.append(Node("DequantizeLinear", [rows, scale, *rest], [result], {}, node.name))
            return
        found = graph.op("Cast", rows, to=int(TensorProto.FLOAT))
        if rest:
            offset = graph.op("Cast", self._column(rest[0], index, result), to=int(TensorProto.FLOAT))
            found = graph.op("Sub", found, offset)
        graph.nodes.append(Node("Mul", [found, self._column(scale, index, result)], [result], {}, node.name))

    def _column(self, name: str, index: str, result: str) -> str:
        """Return one value per gathered row, in a shape that broadcasts to `result`."""
        graph = self._graph
        picked, width = graph.op("Gather", name, index), len(graph.shapes[result]) - len(graph.shapes[index])
        return graph.op("Unsqueeze", picked, graph.ints(*range(-width, 0)))


def _stored_twice(graph: Graph) -> dict[str, str]:
    """Return float matrices that only products read and whose transposition is stored, with the latter.

    The weight of the last layer and a tied table of embeddings are such a pair.
    """
    products, others = set[str](), set[str]()
    for node in graph.nodes:
        is_product = node.op in ("MatMul", "Gemm") and not node.domain
        weights = set(node.inputs[1:2]) if is_product else set()
        others |= set(free_inputs(node)) - weights
        products |= weights
    matrices = {name: value for name, value in graph.constants.items() if value.ndim == 2 and value.dtype == FLOAT}
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, value in matrices.items():
        by_shape.setdefault(value.shape, []).append(name)
    found: dict[str, str] = {}
    for name in [name for name in matrices if name in products - others]:
        value = matrices[name]
        for other in by_shape.get(value.shape[::-1], []):
            known, is_free = matrices[other], other != name and other not in found
            # A column is compared first, because it differs in almost all pairs.
            if is_free and np.array_equal(known[:, 0], value[0]) and np.array_equal(known.T, value):
                found[name] = other
                break
    return found


def add_part(graph: Graph, weight: str, axis: int, span: tuple[int, int], start: str) -> str:
    """Append the computation of a part of a weight, and return its name.

    The part is `span` on the axis. `start` names a vector with the first number of `span`. If it is
    tied to another tensor, the part is computed after that one.
    """
    maker = next((node for node in graph.nodes if weight in node.outputs), None)

    def sliced(name: str, along: int) -> str:
        return graph.op("Slice", name, start, graph.ints(span[1]), graph.ints(along))

    def cut(name: str, along: int) -> str:
        """Return a part as a constant, because onnxruntime has no Slice of 4 bits."""
        made = f"{name}::{span[0]}"
        graph.constants[made] = np.ascontiguousarray(graph.constants[name].take(range(*span), along))
        return made

    if maker is None or not is_quantized(maker, graph.constants):
        return sliced(weight, axis)
    values, *scales = [name for name in maker.inputs if name]
    rank, wide = graph.constants[values].ndim, graph.constants[scales[0]]
    of_blocks, of_axis = bool(maker.attributes.get("block_size")), int(maker.attributes.get("axis", 1)) % rank
    if of_blocks and of_axis == axis:
        return sliced(weight, axis)
    part = cut if graph.constants[values].dtype.name.endswith("4") else sliced
    if of_blocks or (wide.ndim and of_axis == axis):
        scales = [part(name, axis if of_blocks else 0) for name in scales]
    rows = part(values, axis)
    if part is cut:
        scales[0] = tie(graph, scales[0], start)
    return graph.op("DequantizeLinear", rows, *scales, **maker.attributes)


def dequantize_late(graph: Graph) -> None:
    """Dequantize every weight again for each node that reads it, after the node's other inputs.

    A node that only transposes, casts or slices weights is repeated with them.
    """
    makers: dict[str, Node] = {}
    computed = set[str]()
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        inputs = set(free_inputs(node))
        if inputs <= makers.keys() | graph.constants.keys() and (
            is_quantized(node, graph.constants) or not inputs.isdisjoint(makers)
        ):
            makers |= dict.fromkeys(node.outputs, node)
        elif not makers.keys().isdisjoint(node.inputs):
            others = [name for name in free_inputs(node) if name not in makers and name not in graph.constants]
            to = next((name for name in others if name in computed), others[0])
            graph.enter(f"dequantized/{node.name or node.outputs[0]}")
            copier = _Copier(graph, makers, to)
            node.inputs = [copier.copy(name) for name in node.inputs]
        graph.nodes.append(node)
        if node.outputs[0] not in makers:
            computed.update(node.outputs)


class _Copier:
    """Adds computations of weights that onnxruntime does not begin before a tensor is computed."""

    def __init__(self, graph: Graph, makers: Mapping[str, Node], to: str) -> None:
        self._graph = graph
        self._makers = makers
        self._to = to
        self._copies: dict[str, str] = {}

    def copy(self, name: str) -> str:
        """Return a copy of a weight that is tied, or `name` if it is not a weight."""
        maker = self._makers.get(name)
        if maker is None:
            return name
        if name not in self._copies:
            inputs = [self.copy(each) for each in maker.inputs]
            if inputs == maker.inputs:
                inputs[1] = tie(self._graph, inputs[1], self._to)
            attributes: dict[str, Any] = maker.attributes
            made = self._graph.add(maker.op, *inputs, outputs=len(maker.outputs), **attributes)
            self._copies |= dict(zip(maker.outputs, made, strict=True))
        return self._copies[name]
