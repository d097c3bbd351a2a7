"""Extends a forward graph by the reverse pass, which computes gradients."""

from collections.abc import Collection, Mapping

import msgspec

from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Node, free_inputs, needed
from edgeasync.autodiff.recompute import recompute
from edgeasync.autodiff.rules import INSTEAD, RULES, STOPPING, Step, TrainingGraphBuilder
from edgeasync.autodiff.rules.normalization import update_statistics
from edgeasync.autodiff.segments import Reversed, recompute_segments
from edgeasync.autodiff.settings import patterns_for
from edgeasync.autodiff.steepness import is_steep
from edgeasync.errors import GraphError, argument


def begin(
    forward: ForwardGraph, trained: Collection[str], statistics: Collection[str]
) -> tuple[TrainingGraphBuilder, list[Step]]:
    """Copy the forward nodes, in training mode, into a new graph.

    Return the new graph, and one `Step` per node.

    Raises `GraphError` if the gradient of a trained parameter would have to pass through an
    operator that has no gradient rule.
    """
    graph = TrainingGraphBuilder()
    graph.constants = dict(forward.constants)
    graph.shapes, graph.dtypes = dict(forward.shapes), dict(forward.dtypes)
    graph.avoid(graph.shapes)
    graph.active = set(trained)
    graph.live_statistics = frozenset(statistics)
    steps, blocking = [], list[Node]()
    for node in forward.nodes:
        copied = msgspec.structs.replace(
            node, inputs=list(node.inputs), outputs=list(node.outputs), attributes=dict(node.attributes)
        )
        step = Step(graph, copied)
        steps.append(step)
        if caught := sorted(graph.active.intersection(free_inputs(node)).difference(node.inputs)):
            raise GraphError(
                f"{node.where}: {node.op} has no gradient, but its body uses the trained tensor {caught[0]!r}; "
                f"freeze that tensor, or write the model without {node.op}"
            )
        if (node.domain or node.op not in STOPPING) and any(
            step.active(position) for position in range(len(node.inputs))
        ):
            made = [name for name in node.outputs if name and graph.dtypes[name].kind == "f"]
            graph.active.update(made)
            if node.domain or node.op not in RULES:
                blocking.append(node)
                continue
            if node.op != "Cast" and (other := [name for name in made if graph.dtypes[name] != FLOAT]):
                raise GraphError(
                    f"{node.where} computes in {graph.dtypes[other[0]]}, but only float32 can be trained; "
                    "export the model in float32"
                )
        rule = None if node.domain else RULES.get(node.op)
        graph.enter(node.name or node.outputs[0])
        if rule is not None and rule.forward is not None:
            rule.forward(step)
        else:
            graph.nodes.append(step.node)
        step.end = len(graph.nodes)
    if blocking:
        raise GraphError(_blocked(forward, trained, blocking))
    graph.enter("statistics")
    update_statistics(graph)
    return graph, steps


def _blocked(forward: ForwardGraph, trained: Collection[str], nodes: list[Node]) -> str:
    """Return the error message for nodes without a gradient rule.

    It names the parameters to freeze.
    """
    results = [name for node in nodes for name in node.outputs]
    before = {name for earlier in needed(forward.nodes, results) for name in free_inputs(earlier)}
    frozen = [name for name in trained if name in before]
    rest = "write the model with other operators"
    if told := [f"{INSTEAD[op]} for {op}" for op in dict.fromkeys(node.op for node in nodes) if op in INSTEAD]:
        rest += f", such as {', '.join(told)}"
    if any(node.domain for node in nodes):
        rest = "use the original file, before onnxruntime optimized or quantized it"
    them = "them" if nodes[1:] else "it"
    operators = dict.fromkeys(
        node.op + (f" of the domain {node.domain!r}" if node.domain else "") for node in nodes
    )
    said = f"{', '.join(node.where for node in nodes)}: no gradient for {', '.join(operators)}; "
    if len(frozen) == len(trained):
        return f"{said}all trained parameters come before {them}, so {rest}"
    patterns = patterns_for(frozen, forward.parameters.keys() - before)
    return f"{said}{rest}, or freeze the parameters before {them}: {argument('freeze', *patterns)}"


def reverse(
    graph: TrainingGraphBuilder, steps: list[Step], gradients: Mapping[str, str], *, recomputed: bool = False
) -> dict[str, str]:
    """Append the computation of gradients for all tensors that depend on trained parameters.

    `gradients` are those of the loss, by tensor. If gradients reach a tensor on several paths, they are
    summed. Returns the gradients of those tensors that no node computes, such as parameters. With
    `recomputed`, segments of the forward pass are computed again instead of kept, or else the
    results of norms and activations.
    """
    start = len(graph.nodes)
    arrived = dict(gradients)
    infinite = set[str]()
    makers = {name: node for node in graph.nodes for name in node.outputs}
    operators = list[Reversed]()
    for step in reversed(steps):
        node = step.node
        outputs = [name for name in node.outputs if name in graph.active]
        if arrived.keys().isdisjoint(outputs):
            continue
        graph.enter(f"gradient/{node.name or node.outputs[0]}")
        step.gradients = [arrived.pop(name, None) for name in node.outputs]
        operators.append(Reversed(step.end, len(graph.nodes), next(filter(None, step.gradients))))
        step.may_be_infinite = not infinite.isdisjoint(outputs)
        if step.may_be_infinite or is_steep(graph, node, makers):
            infinite.update(node.inputs)
        found = RULES[node.op].gradient(step)
        for position, name in enumerate(node.inputs):
            if name not in graph.active:
                continue
            value = found[position] if position < len(found) else None
            if value is None:
                raise GraphError(
                    f"{node.where}: no gradient for its input {position}, {name!r}; make that input a constant, "
                    "or freeze the parameters it depends on"
                )
            # Add at once, so that a tensor with many readers needs memory for only one gradient.
            arrived[name] = graph.op("Add", arrived[name], value) if name in arrived else value
    if recomputed and not recompute_segments(graph, start, [step.end for step in steps], operators):
        recompute(graph, start, gradients)
    _keep_dropouts(graph)
    return arrived


def _keep_dropouts(graph: TrainingGraphBuilder) -> None:
    """Add a use of each dropout's mask, because onnxruntime removes dropouts with unused masks."""
    read = {name for node in graph.nodes for name in free_inputs(node)}
    for place, node in reversed([*enumerate(graph.nodes)]):
        if node.op == "Dropout" and node.outputs[1] not in read:
            result, node.outputs[0] = node.outputs[0], f"{node.outputs[0]}::dropped"
            kept = Node(
                "Where", [node.outputs[1], node.outputs[0], graph.scalar(0.0)], [result], {}, f"{result}::kept"
            )
            graph.nodes.insert(place + 1, kept)
