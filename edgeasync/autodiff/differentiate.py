"""The reverse pass: a forward graph becomes one that also computes gradients."""

from collections import defaultdict
from collections.abc import Collection

from edgeasync.autodiff.forward import Forward
from edgeasync.autodiff.graph import FLOAT, Node, free_inputs
from edgeasync.autodiff.rules import RULES, STOPPING, Step, TrainingGraphBuilder
from edgeasync.errors import GraphError


def begin(
    forward: Forward, trained: Collection[str], statistics: Collection[str]
) -> tuple[TrainingGraphBuilder, list[Step]]:
    """Copy the forward nodes into a new graph, in the form that training needs; return it and every step.

    Raises `GraphError` for an operator without a rule where something trained depends on it.
    """
    graph = TrainingGraphBuilder()
    graph.constants = dict(forward.constants)
    graph.shapes, graph.dtypes = dict(forward.shapes), dict(forward.dtypes)
    graph.active = set(trained)
    graph.live_statistics = frozenset(statistics)
    steps = []
    for node in forward.nodes:
        step = Step(graph, Node(node.op, list(node.inputs), list(node.outputs), dict(node.attributes), node.name))
        steps.append(step)
        if caught := sorted(graph.active.intersection(free_inputs(node)).difference(node.inputs)):
            raise GraphError(
                f"{node.where}: its body reads {caught[0]!r}, which is trained, and there is no gradient for "
                f"{node.op}; freeze what its body reads, or write the model without it"
            )
        if node.op not in STOPPING and any(step.active(position) for position in range(len(node.inputs))):
            if node.op not in RULES:
                raise GraphError(
                    f"{node.where}: there is no gradient for {node.op}; "
                    "write the model without it, train only what comes after it, or freeze what is before it"
                )
            made = [name for name in node.outputs if name and graph.dtypes[name].kind == "f"]
            graph.active.update(made)
            if node.op != "Cast" and (other := [name for name in made if graph.dtypes[name] != FLOAT]):
                raise GraphError(
                    f"{node.where} computes in {graph.dtypes[other[0]]}; only float32 can be trained: "
                    "export the model in float32"
                )
        rule = RULES.get(node.op)
        graph.enter(node.name or node.outputs[0])
        if rule is not None and rule.forward is not None:
            rule.forward(step)
        else:
            graph.nodes.append(step.node)
    return graph, steps


def reverse(graph: TrainingGraphBuilder, steps: list[Step], output: str, gradient: str) -> dict[str, str]:
    """Append the gradients of everything active; return the gradient of each tensor that no node makes.

    `gradient` is that of `output`. Gradients that reach a tensor by several ways are summed.
    """
    arrived: dict[str, list[str]] = defaultdict(list)
    arrived[output].append(gradient)
    for step in reversed(steps):
        node = step.node
        outputs = [name for name in node.outputs if name in graph.active]
        if not any(arrived[name] for name in outputs):
            continue
        graph.enter(f"gradient/{node.name or node.outputs[0]}")
        step.gradients = [
            graph.total(arrived.pop(name)) if name in graph.active and arrived[name] else None
            for name in node.outputs
        ]
        found = RULES[node.op].gradient(step)
        for position, name in enumerate(node.inputs):
            if name not in graph.active:
                continue
            value = found[position] if position < len(found) else None
            if value is None:
                raise GraphError(
                    f"{node.where}: there is no gradient for its input {position}, {name!r}; "
                    "make that input a constant, or freeze what it depends on"
                )
            arrived[name].append(value)
    graph.enter("gradient")
    return {name: graph.total(values) for name, values in arrived.items() if values}
