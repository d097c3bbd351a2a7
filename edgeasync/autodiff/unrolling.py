"""Replaces loops by copies of their bodies, one per iteration, because devices do not run loops."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from edgeasync.autodiff.graph import Array, Node, read_nodes
from edgeasync.autodiff.reading import array_of, read_instead, stops_gradient
from edgeasync.errors import GraphError

UNROLLED_MAX = 4000
"""Maximum number of nodes of a model with unrolled loops. A device accepts 20,000 nodes, and a
training graph has several times the nodes of its forward model.
"""


def unroll(nodes: list[Node], constants: Mapping[str, Array]) -> list[Node]:
    """Return the nodes, with every Loop replaced by copies of the nodes in its body.

    Raises `GraphError` if the number of iterations depends on data, or is too large.
    """
    made: list[Node] = []
    for node in nodes:
        made += _copies(node, constants) if node.op == "Loop" else [node]
    if len(made) > UNROLLED_MAX:
        loops = ", ".join([node.where for node in nodes if node.op == "Loop"])
        raise GraphError(
            f"{loops}: all iterations together have {len(made)} nodes, over the limit of {UNROLLED_MAX}; write "
            "the loop with fewer iterations, or as a recurrent layer"
        )
    return made


def _copies(node: Node, constants: Mapping[str, Array]) -> Iterator[Node]:
    """Yield the nodes of all iterations. Identity nodes compute the loop's outputs."""
    body: onnx.GraphProto = node.attributes["body"]
    prefix = f"{node.name or node.outputs[0]}::"
    count = _count(node, body, constants)
    number, condition, *states = [entry.name for entry in body.input]
    results = [entry.name for entry in body.output][1:]
    own = {entry.name: f"{prefix}{entry.name}" for entry in body.initializer}
    for entry in body.initializer:
        yield _constant(own[entry.name], array_of(entry, f"tensor {entry.name!r} in {node.where}"))
    going = f"{prefix}continues"
    yield _constant(going, np.array(True))
    carried, stacked = node.inputs[2:], list[list[str]]()
    for turn in range(count):
        place = f"{prefix}{turn}::"
        names = own | dict(zip((number, condition, *states), (f"{place}turn", going, *carried), strict=True))
        names |= {name: f"{place}{name}" for inner in body.node for name in inner.output if name}
        yield _constant(names[number], np.array(turn, np.int64))
        copied = onnx.GraphProto()
        copied.CopyFrom(body)
        read_instead(names, copied)
        for inner in read_nodes(copied.node):
            inner.outputs = [names.get(name, name) for name in inner.outputs]
            inner.name = inner.name and place + inner.name
            yield inner
        found = [names.get(name, name) for name in results]
        carried = found[: len(states)]
        stacked.append(found[len(states) :])
    for name, output in zip(carried, node.outputs, strict=False):
        if output:
            yield Node("Identity", [name], [output])
    for output, parts in zip(node.outputs[len(states) :], zip(*stacked, strict=True), strict=False):
        if not output:
            continue
        yield _constant(f"{output}::axes", np.array([0], np.int64))
        wide = [f"{output}::{turn}" for turn in range(count)]
        for part, name in zip(parts, wide, strict=True):
            yield Node("Unsqueeze", [part, f"{output}::axes"], [name])
        yield Node("Concat", wide, [output], {"axis": 0})


def _constant(name: str, value: Array) -> Node:
    return Node("Constant", [], [name], {"value": numpy_helper.from_array(value)})


def _count(node: Node, body: onnx.GraphProto, constants: Mapping[str, Array]) -> int:
    """Return the number of iterations."""
    trips = node.inputs[0]
    if not _continues(node, body, constants):
        raise _refused(node, "a condition ends it")
    if trips not in constants:
        raise _refused(node, "its number of iterations depends on the batch size or on data")
    if any(stops_gradient(inner) for inner in body.node):
        raise _refused(node, "its body detaches a tensor")
    count = int(constants[trips].item())
    if count * len(body.node) > UNROLLED_MAX:
        raise _refused(node, f"its {count} iterations have over {UNROLLED_MAX} nodes")
    if count < 1:
        raise _refused(node, "it has no iterations")
    return count


def _refused(node: Node, why: str) -> GraphError:
    return GraphError(
        f"{node.where} cannot be unrolled: {why}; write the loop with a fixed and small number of iterations"
    )


def _continues(node: Node, body: onnx.GraphProto, constants: Mapping[str, Array]) -> bool:
    """Return whether the loop's condition is always true."""
    first, name = node.inputs[1], body.output[0].name
    if first and not (first in constants and constants[first].all()):
        return False
    values = dict(constants) | {entry.name: array_of(entry, node.where) for entry in body.initializer}
    makers = {output: inner for inner in body.node for output in inner.output}
    while name in makers and makers[name].op_type in ("Cast", "Identity"):
        name = makers[name].input[0]
    if name in makers and makers[name].op_type == "Constant":
        return any(each.name == "value" and array_of(each.t, node.where).all() for each in makers[name].attribute)
    return name == body.input[1].name or (name in values and bool(values[name].all()))
