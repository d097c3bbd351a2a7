"""The gradient of gated recurrent units (Cho et al. 2014, arXiv:1406.1078), in both ONNX variants.

At each time step, h' = (1 - z) n + z h. The gates z and r are sigmoids of linear maps of x and h.
The candidate n is the tanh of a sum. The first term is a linear map of x. The second term depends
on the variant: in torch, it is r times a linear map of h; in the paper, it is a linear map of r
times h.
"""

import msgspec

from edgeasync.autodiff.rules.recurrent import Local, RecurrentDirection, differentiate
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


@rule("GRU")
def _gru(step: Step) -> Gradients:
    cell = _reset_after if step.attribute("linear_before_reset", 0) else _reset_before
    return differentiate(step, cell, ("Sigmoid", "Tanh"))


class _Parts(msgspec.Struct, frozen=True):
    """Tensors that both variants of a GRU use. Each row belongs to one time step of one example."""

    previous: str
    states: str
    z: str
    r: str
    candidate: str
    """The first term in the candidate's tanh: the linear map of the input, including its bias."""
    state_weight: str
    """The candidate's recurrent weights, by which the state is multiplied."""
    state_bias: list[str]


def _parts(direction: RecurrentDirection) -> _Parts:
    op = direction.graph.op
    previous = direction.rows(direction.previous)
    weights, recurrent = direction.gates(direction.weights, 3), direction.gates(direction.recurrent, 3)
    input_biases: list[list[str]] = [[], [], []]
    state_bias = []
    if direction.biases:
        firsts, seconds = [direction.gates(bias, 3) for bias in direction.biases]
        input_biases = [[op("Add", firsts[0], seconds[0])], [op("Add", firsts[1], seconds[1])], [firsts[2]]]
        state_bias = [seconds[2]]
    z, r, candidate = [
        op("Gemm", direction.x, weight, *bias, transB=1)
        for weight, bias in zip(weights, input_biases, strict=True)
    ]
    return _Parts(
        previous,
        direction.rows(direction.states),
        op("Sigmoid", op("Gemm", previous, recurrent[0], z, transB=1)),
        op("Sigmoid", op("Gemm", previous, recurrent[1], r, transB=1)),
        candidate,
        recurrent[2],
        state_bias,
    )


def _shared_slopes(direction: RecurrentDirection, parts: _Parts, n: str) -> tuple[str, str]:
    """Return the derivatives of the new state h' with respect to the arguments of two functions.

    For the argument of the sigmoid that computes z, the derivative is z (1 - z) (h - n).
    For the argument of the tanh that computes n, it is (1 - z) (1 - n^2).
    """
    graph, op = direction.graph, direction.graph.op
    change = op("Sub", parts.states, n)
    rest = op("Sub", graph.scalar(1.0), parts.z)
    # z (h - n) equals h' - n, which is already known.
    return op("Mul", change, rest), op("Sub", rest, op("Mul", op("Mul", rest, n), n))


def _reset_after(direction: RecurrentDirection) -> Local:
    """Return the gradients for n = tanh(a + r q).

    q is a linear map of h with its own bias.
    """
    graph, op, times, hidden = direction.graph, direction.graph.op, direction.times, direction.hidden
    parts = _parts(direction)
    q = op("Gemm", parts.previous, parts.state_weight, *parts.state_bias, transB=1)
    n = op("Tanh", op("Add", parts.candidate, op("Mul", parts.r, q)))
    z_slope, n_slope = _shared_slopes(direction, parts, n)
    q_slope = op("Mul", n_slope, parts.r)
    reset = op("Mul", q_slope, q)
    slopes = op("Concat", z_slope, op("Sub", reset, op("Mul", reset, parts.r)), q_slope, axis=1)

    def back(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        grad, (slope, to_n, share, *earlier) = carried[0], now
        gates = op("Mul", op("Concat", grad, grad, grad, axis=1), slope)
        kept = graph.total([op("Mul", grad, share), *earlier])
        return [op("Gemm", gates, direction.recurrent, kept)], [gates, op("Mul", grad, to_n)]

    initial, gates, candidate = direction.scan(
        [direction.last_gradient()],
        [times(slopes, 3 * hidden), times(n_slope), times(parts.z), *direction.earlier_gradients()],
        back,
        reverse=True,
    )
    rows = direction.rows(gates, 3 * hidden)
    shared = op("Slice", rows, graph.ints(0), graph.ints(2 * hidden), graph.ints(1))
    return Local(
        before_input=op("Concat", shared, direction.rows(candidate), axis=1),
        recurrent=op("Gemm", rows, parts.previous, transA=1),
        state_bias=op("ReduceSum", rows, graph.ints(0), keepdims=0),
        initial=[initial],
    )


def _reset_before(direction: RecurrentDirection) -> Local:
    """Return the gradients for n = tanh(a + q).

    q is a linear map of r h.
    """
    graph, op, times, hidden = direction.graph, direction.graph.op, direction.times, direction.hidden
    parts = _parts(direction)
    reset = op("Mul", parts.r, parts.previous)
    bias = [op("Add", parts.candidate, name) for name in parts.state_bias] or [parts.candidate]
    n = op("Tanh", op("Gemm", reset, parts.state_weight, *bias, transB=1))
    z_slope, n_slope = _shared_slopes(direction, parts, n)
    r_slope = op("Sub", reset, op("Mul", reset, parts.r))
    before_n = op("Slice", direction.recurrent, graph.ints(0), graph.ints(2 * hidden), graph.ints(0))

    def back(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        grad, (to_z, to_r, to_n, share, r, *earlier) = carried[0], now
        candidate = op("Mul", grad, to_n)
        product = op("MatMul", candidate, parts.state_weight)
        gates = op("Concat", op("Mul", grad, to_z), op("Mul", product, to_r), axis=1)
        kept = graph.total([op("Mul", grad, share), op("Mul", product, r), *earlier])
        return [op("Gemm", gates, before_n, kept)], [gates, candidate]

    slices = [times(name) for name in (z_slope, r_slope, n_slope, parts.z, parts.r)]
    initial, gates, candidate = direction.scan(
        [direction.last_gradient()], [*slices, *direction.earlier_gradients()], back, reverse=True
    )
    rows, last = direction.rows(gates, 2 * hidden), direction.rows(candidate)
    by_state = op("Gemm", rows, parts.previous, transA=1)
    return Local(
        before_input=op("Concat", rows, last, axis=1),
        recurrent=op("Concat", by_state, op("Gemm", last, reset, transA=1), axis=0),
        state_bias="",
        initial=[initial],
    )
