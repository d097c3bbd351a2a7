"""Replaces loops by copies of their bodies, one per iteration, because devices do not run loops."""

import re
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff.graph import (
    RANDOM_OPERATORS,
    Array,
    Node,
    free_inputs,
    model_of,
    needed,
    read_nodes,
    tensor,
    write_nodes,
)
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.reading import array_of, read_instead, stops_gradient
from edgeasync.errors import GraphError, native_reason

UNROLLED_MAX = 4000
"""Maximum number of nodes of a model with unrolled loops. A device accepts 20,000 nodes, and a
training graph has several times the nodes of its forward model.
"""

DEPENDS = "depends on the batch size or on data"


def unroll(nodes: list[Node], constants: Mapping[str, Array], *, opset: int) -> list[Node]:
    """Return the nodes, with every Loop replaced by copies of the nodes in its body.

    Raises `GraphError` if the number of iterations depends on data, or is too large.
    """
    made: list[Node] = []
    for node in nodes:
        made += _copies(node, constants, opset) if node.op == "Loop" else [node]
    if len(made) > UNROLLED_MAX:
        loops = ", ".join([node.where for node in nodes if node.op == "Loop"])
        raise GraphError(
            f"{loops}: all iterations together have {len(made)} nodes, over the limit of {UNROLLED_MAX}; write "
            "the loop with fewer iterations, or as a recurrent layer"
        )
    return made


def _copies(node: Node, constants: Mapping[str, Array], opset: int) -> Iterator[Node]:
    """Yield the nodes of all iterations. Identity nodes compute the loop's outputs."""
    body: onnx.GraphProto = node.attributes["body"]
    prefix = f"{node.name or node.outputs[0]}::"
    count = _count(node, body, constants, opset)
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


def origin(node: Node) -> str:
    """Return a name that a node shares with its copies in other iterations of its loop."""
    return _TURN.sub("", node.outputs[0])


_TURN = re.compile(r"::\d+(?=::)")


def _constant(name: str, value: Array) -> Node:
    return Node("Constant", [], [name], {"value": numpy_helper.from_array(value)})


def _count(node: Node, body: onnx.GraphProto, constants: Mapping[str, Array], opset: int) -> int:
    """Return the number of iterations."""
    trips = node.inputs[0]
    if trips and trips not in constants:
        raise _refused(node, f"its number of iterations {DEPENDS}")
    if any(stops_gradient(inner) for inner in body.node):
        raise _refused(node, "its body detaches a tensor")
    most = UNROLLED_MAX // max(1, len(body.node))
    limit = min(int(constants[trips].item()), most + 1) if trips else most + 1
    count = _run_condition(node, body, constants, limit, opset)
    if count > most:
        raise _refused(node, f"it has more than {most} iterations, together over {UNROLLED_MAX} nodes")
    if count < 1:
        raise _refused(node, "it has no iterations")
    return count


def _run_condition(
    node: Node, body: onnx.GraphProto, constants: Mapping[str, Array], limit: int, opset: int
) -> int:
    """Return the number of iterations, at most `limit`, by running the part that computes the condition.

    For example, tf2onnx ends the loop of a recurrent layer when a counter reaches the length of the
    sequence. The counter is a state of the loop.
    """
    places = range(2, len(body.input))
    inner, wanted = read_nodes(body.node), {body.output[0].name}
    read = set[str]()
    while not wanted <= read:
        read |= wanted
        nodes = needed(inner, read)
        read.update(name for each in nodes for name in free_inputs(each))
        wanted = {body.output[place - 1].name for place in places if body.input[place].name in read}
    kept = [place for place in places if body.input[place].name in read]
    made = {name for each in nodes for name in each.outputs}
    outside = read - made - {entry.name for entry in (*body.input, *body.initializer)}
    outside.update(name for name in (node.inputs[1], *[node.inputs[place] for place in kept]) if name)
    if not constants.keys() >= outside or any(each.op in RANDOM_OPERATORS for each in nodes):
        raise _refused(node, f"the condition that ends it {DEPENDS}")
    ends = [body.output[place - 1].name for place in (1, *kept)] + [body.input[0].name]
    nodes += [Node("Identity", [name], [f"::{place}"]) for place, name in enumerate(ends)]
    part = helper.make_graph(
        write_nodes(nodes, {}), "condition",
        [body.input[place] for place in (0, 1, *kept)],
        [onnx.ValueInfoProto(name=f"::{place}") for place in range(len(ends))],
        [entry for entry in body.initializer if entry.name in read],
    )  # fmt: skip
    inputs = ["::limit", node.inputs[1], *[node.inputs[place] for place in kept]]
    loop = Node("Loop", inputs, [*[f"::last_{place}" for place in kept], "::turns"], {"body": part})
    values = {name: constants[name] for name in outside} | {"::limit": np.array(limit, np.int64)}
    tensors = [tensor(*item) for item in values.items()]
    model = model_of([loop], [], [onnx.ValueInfoProto(name="::turns")], tensors, opset=opset)
    try:
        (turns,) = open_session(model.SerializeToString()).run(None, {})
    except Exception as error:
        raise _refused(node, f"its condition does not run ({native_reason(error)})") from error
    return len(turns)


def _refused(node: Node, why: str) -> GraphError:
    return GraphError(
        f"{node.where} cannot be unrolled: {why}; write the loop with a fixed and small number of iterations"
    )
