"""Replaces operators without a gradient rule by equivalent operators that have one."""

from collections.abc import Collection, Sequence
from functools import partial

from edgeasync.autodiff.expansions.registry import EXPANSIONS, Expansion, ReplacedStep
from edgeasync.autodiff.graph import FLOAT, Graph, Node, free_inputs, needed
from edgeasync.autodiff.rules.registry import STOPPING, TrainingGraphBuilder
from edgeasync.errors import GraphError
from edgeasync.protocol.operators import ALLOWED, ALLOWED_OWN


class _Builder(TrainingGraphBuilder):
    constants_prefix = "expanded"


def expand(
    graph: Graph, nodes: list[Node], trained: Collection[str], outputs: Collection[str], *, opset: int
) -> list[Node]:
    """Return the nodes, in which those with an expansion are replaced.

    A node is replaced if it depends on a trained parameter, or if devices do not support it. All
    other nodes stay, because fused operators are faster and quantized ones are smaller. The shapes
    and dtypes of all tensors must be known. New constants are added to `graph`. `outputs` names the
    tensors that are read besides those that nodes read.

    Raises `GraphError` if a node cannot be replaced by an exact equivalent.
    """
    builder = _Builder()
    builder.constants, builder.shapes, builder.dtypes = graph.constants, graph.shapes, graph.dtypes
    builder.active = set(trained)
    read = {name for node in nodes for name in free_inputs(node)}.union(outputs)
    for node in nodes:
        active = not builder.active.isdisjoint(node.inputs)
        if active and (node.domain or node.op not in STOPPING):
            builder.active.update(name for name in node.outputs if name)
        expansion = EXPANSIONS.get((node.domain, node.op))
        if expansion is None or not (active or node.op not in (ALLOWED_OWN if node.domain else ALLOWED)):
            builder.nodes.append(node)
            continue
        before = partial(_trained_before, nodes, node, trained)
        _replace(ReplacedStep(builder, node, opset, before), expansion, read)
    return builder.nodes


def _trained_before(nodes: list[Node], node: Node, trained: Collection[str]) -> list[str]:
    """Return the trained parameters that a node depends on, or [] if it depends on all of them."""
    used = {name for earlier in needed(nodes, node.outputs) for name in free_inputs(earlier)}
    before = [name for name in trained if name in used]
    return before if len(before) < len(trained) else []


def _replace(step: ReplacedStep, expansion: Expansion, read: Collection[str]) -> None:
    """Append the nodes that replace a node. Their results have the names of the node's outputs."""
    graph, node = step.graph, step.node
    for name in node.outputs:
        if name and graph.dtypes[name].kind == "f" and graph.dtypes[name] != FLOAT:
            raise GraphError(
                f"{node.where} computes in {graph.dtypes[name]}, but only float32 can be trained; export the "
                "model in float32"
            )
    graph.enter(f"expanded/{node.name or node.outputs[0]}")
    begin = len(graph.nodes)
    made: Sequence[str | None] = expansion(step)
    names: dict[str, str] = {}
    for position, output in enumerate(node.outputs):
        result = made[position] if position < len(made) else None
        if result is not None:
            names[result] = output or result
        elif output in read:
            raise step.refused(f"its output {position}, {output!r}, is used; export the model without that output")
    for new in graph.nodes[begin:]:
        new.inputs = [names.get(name, name) for name in new.inputs]
        new.outputs = [names.get(name, name) for name in new.outputs]
