"""The gradient of LSTMs (Hochreiter & Schmidhuber 1997) with forget gates (Gers et al. 2000)."""

from functools import partial

from edgeasync.autodiff.graph import Graph
from edgeasync.autodiff.rules.elementwise import is_positive
from edgeasync.autodiff.rules.recurrent import (
    INITIAL_C,
    INITIAL_H,
    B,
    Local,
    R,
    RecurrentDirection,
    W,
    X,
    check,
    differentiate,
    direction_count,
    initial_state,
    pick,
    scan,
    stack,
    ways,
)
from edgeasync.autodiff.rules.registry import Gradients, Step, rule
from edgeasync.errors import GraphError

KEPT = ("i", "o", "f", "g", "kept", "squashed")
"""What the forward loop stores for the gradient, at each time step: the gates, f c, and tanh(c')."""


def _forward(step: Step) -> None:
    """Replace the operator by a loop that also outputs the gates, which the gradient needs.

    Computing them again from the states would take longer.
    """
    graph, node = step.graph, step.node
    if not _has_gradient(step):
        graph.nodes.append(node)
        return
    results = [_run(step, index, backwards=backwards) for index, backwards in enumerate(ways(step))]
    step.output()
    for position, (name, parts) in enumerate(zip(node.outputs, zip(*results, strict=True), strict=False)):
        if name:
            stack(graph, list(parts), axis=1 if position == 0 else 0)
            graph.nodes[-1].outputs = [name]  # not by an Identity, which would stop gradients


def _has_gradient(step: Step) -> bool:
    try:
        check(step, _activations(step))
    except GraphError:  # raised again if a gradient arrives
        return False
    return any(name in step.graph.active for name in step.node.outputs)


def _activations(step: Step) -> tuple[str, str, str]:
    """Return the activations that all directions should have: Tanh or ReLU, except in the gates."""
    given = [str(name.decode() if isinstance(name, bytes) else name) for name in step.attribute("activations", [])]
    inner, outer = ["Relu" if name.lower() == "relu" else "Tanh" for name in [*given, "", "", ""][1:3]]
    return "Sigmoid", inner, outer


def _run(step: Step, index: int, *, backwards: bool) -> tuple[str, str, str]:
    """Append the loop of one direction. Return all states, the last state and the last cell state."""
    graph, op, count = step.graph, step.graph.op, direction_count(step)
    hidden = graph.static_shape(step.input(R), step.node.where)[-1]
    _, inner, outer = _activations(step)
    weights, recurrent = (pick(graph, step.input(position), index, count, 0) for position in (W, R))
    bias = []
    if step.input(B):
        halves = graph.add("Split", pick(graph, step.input(B), index, count, 0), outputs=2, axis=0, num_outputs=2)
        bias = [op("Add", *halves)]
    # One product of the state and the input, because two need more time than joining them.
    joined = op("Transpose", op("Concat", recurrent, weights, axis=1), perm=[1, 0])

    def body(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        sums = op("Gemm", op("Concat", carried[0], *now, axis=1), joined, *bias)
        *gates, g = graph.add("Split", sums, outputs=4, axis=1, num_outputs=4)
        i, o, f = [op("Sigmoid", name) for name in gates]
        g = op(inner, g)
        kept = op("Mul", f, carried[1])
        c = op("Add", kept, op("Mul", i, g))
        squashed = op(outer, c)
        h = op("Mul", o, squashed)
        return [h, c], [op("Identity", h), i, o, f, g, kept, squashed]

    initial = [
        initial_state(step, position, index, count)
        or op(
            "ConstantOfShape", op("Concat", op("Shape", step.input(X), start=1, end=2), graph.ints(hidden), axis=0)
        )
        for position in (INITIAL_H, INITIAL_C)
    ]
    last_h, last_c, states, *stored = scan(graph, initial, [step.input(X)], body, backwards=backwards)
    step.saved |= {f"{name}{int(backwards)}": value for name, value in zip(KEPT, stored, strict=True)}
    return states, last_h, last_c


@rule("LSTM", forward=_forward)
def _lstm(step: Step) -> Gradients:
    activations = _activations(step)
    return differentiate(step, partial(_cell, step.saved, activations), activations)


def _cell(saved: dict[str, str], activations: tuple[str, str, str], direction: RecurrentDirection) -> Local:
    """Return the gradients of an LSTM cell, with c' = f c + i g and h' = o tanh(c') at each step.

    The gates i, o and f are sigmoids of linear maps of x and h, and g is the tanh of such a map.
    Either tanh may be a ReLU instead. The derivatives reuse values that are already known, for
    example o (1 - tanh^2) = o - h' tanh.
    """
    graph, op, times, hidden = direction.graph, direction.graph.op, direction.times, direction.hidden
    previous, states = direction.rows(direction.previous), direction.rows(direction.states)
    stored = [saved[f"{name}{int(direction.backwards)}"] for name in KEPT]
    i, o, f, g, kept, squashed = [direction.rows(name) for name in stored]
    new, forget = op("Mul", i, g), stored[KEPT.index("f")]
    slopes = op(
        "Concat",
        op("Sub", new, op("Mul", new, i)),
        op("Sub", states, op("Mul", states, o)),
        op("Sub", kept, op("Mul", kept, f)),
        _slope(graph, activations[1], i, new, g),
        axis=1,
    )
    to_cells = _slope(graph, activations[2], o, states, squashed)

    def back(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        (grad_h, grad_kept), (slope, to_cell, kept_share, *earlier) = carried, now
        grad_c = op("Add", grad_kept, op("Mul", grad_h, to_cell))
        gates = op("Mul", op("Concat", grad_c, grad_h, grad_c, grad_c, axis=1), slope)
        return [op("Gemm", gates, direction.recurrent, *earlier), op("Mul", grad_c, kept_share)], [gates]

    initial_h, initial_c, gates = direction.scan(
        [direction.last_gradient(), direction.gradients[2] or direction.zeros()],
        [times(slopes, 4 * hidden), times(to_cells), forget, *direction.earlier_gradients()],
        back,
        reverse=True,
    )
    rows = direction.rows(gates, 4 * hidden)
    recurrent = graph.op("Gemm", rows, previous, transA=1)
    return Local(before_input=rows, recurrent=recurrent, state_bias="", initial=[initial_h, initial_c])


def _slope(graph: Graph, function: str, factor: str, product: str, value: str) -> str:
    """Return the derivative of `factor` f, where f has the result `value`, and `product` is factor f."""
    if function == "Relu":
        return graph.op("Mul", factor, is_positive(graph, value))
    return graph.op("Sub", factor, graph.op("Mul", product, value))
