"""Replaces If nodes by the nodes of their branches.

If the condition is a constant, or depends only on fixed shapes, one branch is always taken, and
the other one is removed. If the condition depends on the data, both branches are computed, and a
Where node selects one of their results. So a condition with one value per example also works for
batches of several examples.
"""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import helper

from edgeasync.autodiff.forward import PROBES, SHAPE_OPERATORS, is_picked
from edgeasync.autodiff.graph import FLOAT, Array, Node, free_inputs, model_of, needed, read_nodes, refill
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.reading import array_of, nodes_within, opset_of, read_instead
from edgeasync.errors import GraphError

IFS_MAX = 1000
"""Maximum number of If nodes to replace, including those in branches."""

WHERE_SINCE = 9
"""First opset with the operator Where."""


class SelectedResult(msgspec.Struct, frozen=True):
    """A result of an If node that is selected by the data: `then` or `other`."""

    where: str
    then: str
    other: str


def resolve_branches(model: onnx.ModelProto) -> tuple[SelectedResult, ...]:
    """Replace all If nodes that can be replaced. Return the results that the data selects.

    Names of tensors stay as they are unless both branches, or a branch and the model, use the same
    name. Raises `GraphError` if there are too many.
    """
    count = sum(1 for node in nodes_within(model.graph) if node.op_type == "If")
    if count > IFS_MAX:
        raise GraphError(
            f"the model has {count} If nodes, over the limit of {IFS_MAX}; write the model with fewer branches"
        )
    selected: list[SelectedResult] = []
    for _ in range(IFS_MAX):
        for node in model.graph.node:
            if node.op_type == "If" and node.domain in ("", "ai.onnx") and _is_plain(node):
                decided = _decided(model, node)
                if decided is not None or opset_of(model) >= WHERE_SINCE:
                    selected += _replace(model.graph, node, decided=decided)
                    break
        else:
            break
    return tuple(selected)


def _branches(node: onnx.NodeProto) -> dict[bool, onnx.GraphProto]:
    return {entry.name == "then_branch": entry.g for entry in node.attribute}


def _is_plain(node: onnx.NodeProto) -> bool:
    """Return whether a node has two branches that contain only dense tensors."""
    found = _branches(node)
    return len(found) == 2 and not any(branch.sparse_initializer for branch in found.values())


def _replace(graph: onnx.GraphProto, node: onnx.NodeProto, *, decided: bool | None) -> list[SelectedResult]:
    """Replace an If node. Return the results that the data selects."""
    place = list(graph.node).index(node)
    before, after = list(graph.node)[:place], list(graph.node)[place + 1 :]
    condition, outputs = node.input[0], list(node.output)
    used = {name for each in (*before, *after) for name in each.output}
    used.update(entry.name for entry in (*graph.input, *graph.initializer))
    used.update(outputs)
    added: list[onnx.NodeProto] = []
    results: dict[bool, list[str]] = {}
    for taken, branch in _branches(node).items():
        if decided is None or decided == taken:
            results[taken] = _insert(branch, graph, used, f"{outputs[0]}::{'then' if taken else 'else'}", added)
    if decided is not None:
        added += [
            helper.make_node("Identity", [result], [output])
            for result, output in zip(results[decided], outputs, strict=True)
        ]
    else:
        makers = {name: each for each in (*before, *added) for name in each.output}
        for then, other, output in zip(results[True], results[False], outputs, strict=True):
            added += _where(condition, then, other, output, makers)
    where = read_nodes([node])[0].where
    refill(graph.node, [*before, *added, *after])
    if decided is not None:
        return []
    return [SelectedResult(where, then, other) for then, other in zip(results[True], results[False], strict=True)]


def _insert(
    branch: onnx.GraphProto, graph: onnx.GraphProto, used: set[str], scope: str, added: list[onnx.NodeProto]
) -> list[str]:
    """Append the nodes of a branch to `added`, and return the names of its results."""
    made = [name for node in branch.node for name in node.output if name]
    made += [entry.name for entry in branch.initializer]
    new = {name: f"{scope}::{name}" if name in used else name for name in made}
    read_instead(new, branch)
    for node in branch.node:
        node.output[:] = [new.get(name, name) for name in node.output]
    for entry in branch.initializer:
        entry.name = new[entry.name]
    used.update(new.values())
    graph.initializer.extend(branch.initializer)
    added.extend(branch.node)
    return [new.get(entry.name, entry.name) for entry in branch.output]


def _where(
    condition: str, then: str, other: str, output: str, makers: Mapping[str, onnx.NodeProto]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that select one of two results.

    If both are sigmoids, yield a sigmoid of the selected scores. So the scores are a tensor that a
    loss can use.
    """
    first, second = [_maker(name, makers) for name in (then, other)]
    if first is not None and second is not None and first.op_type == second.op_type == "Sigmoid":
        scores = f"{output}::scores"
        yield helper.make_node("Where", [condition, first.input[0], second.input[0]], [scores])
        yield helper.make_node("Sigmoid", [scores], [output])
    else:
        yield helper.make_node("Where", [condition, then, other], [output])


def _maker(name: str, makers: Mapping[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    node = makers.get(name)
    while node is not None and node.op_type == "Identity":
        node = makers.get(node.input[0])
    return node


# -- conditions ------------------------------------------------------------------------------------------------


def _decided(model: onnx.ModelProto, node: onnx.NodeProto) -> bool | None:
    """Return the value of an If node's condition, or `None` if it depends on the data.

    A condition that depends on the batch size, or on the values of weights, is not decided either.
    """
    condition = node.input[0]
    weights = {entry.name: entry for entry in model.graph.initializer}
    if condition in weights:
        return bool(array_of(weights[condition], f"tensor {condition!r}").all())
    nodes = needed(read_nodes(model.graph.node), [condition])
    if not nodes or _depends_on_values(model, nodes, condition):
        return None
    runs = _runs(model, nodes)
    if runs is None:
        return None
    varying: set[str] = set()
    for each in nodes:
        alike = all(_equal(runs, name) for name in each.outputs if name)
        if not alike or (not is_picked(each) and not varying.isdisjoint(free_inputs(each))):
            varying.update(each.outputs)
    return None if condition in varying else bool(np.asarray(runs[0][condition]).all())


def _equal(runs: list[dict[str, Array]], name: str) -> bool:
    first, second = [np.asarray(run[name]) for run in runs]
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def _depends_on_values(model: onnx.ModelProto, nodes: list[Node], condition: str) -> bool:
    """Return whether a condition depends on values of the data or of weights, not only on shapes."""
    changing = {entry.name for entry in model.graph.input}
    changing |= {entry.name for entry in model.graph.initializer if entry.data_type == FLOAT_TYPE and entry.dims}
    for node in nodes:
        if node.op not in SHAPE_OPERATORS and not changing.isdisjoint(free_inputs(node)):
            changing.update(node.outputs)
    return condition in changing


FLOAT_TYPE = helper.np_dtype_to_tensor_dtype(FLOAT)


def _runs(model: onnx.ModelProto, nodes: list[Node]) -> list[dict[str, Array]] | None:
    """Run nodes at two batch sizes. Return `None` if an axis besides the batch is dynamic."""
    graph = model.graph
    constants = {entry.name for entry in graph.initializer}
    used = {name for node in nodes for name in free_inputs(node)}
    inputs = [entry for entry in graph.input if entry.name not in constants and entry.name in used]
    names = [name for node in nodes for name in node.outputs if name]
    alone = model_of(
        nodes,
        inputs,
        [onnx.ValueInfoProto(name=name) for name in names],
        [entry for entry in graph.initializer if entry.name in used],
        opset=opset_of(model),
    )
    try:
        session = open_session(alone.SerializeToString())
        runs = []
        for batch in PROBES:
            feeds = {}
            for entry in inputs:
                kind = entry.type.tensor_type
                sizes = [dim.dim_value or (-1 if axis else batch) for axis, dim in enumerate(kind.shape.dim)]
                feeds[entry.name] = np.zeros(sizes, helper.tensor_dtype_to_np_dtype(kind.elem_type))
            runs.append(dict(zip(names, session.run(names, feeds), strict=True)) | feeds)
    except Exception:  # noqa: BLE001 - numpy and onnxruntime raise errors of their own
        return None
    return runs
