"""The gradient of gated recurrent units (Cho et al. 2014, arXiv:1406.1078), in both forms that ONNX has."""

from edgeasync.autodiff.rules.recurrent import Direction, Local, differentiate
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


@rule("GRU")
def _gru(step: Step) -> Gradients:
    cell = _reset_after if step.attribute("linear_before_reset", 0) else _reset_before
    return differentiate(step, cell, ("Sigmoid", "Tanh"))


def _reset_after(direction: Direction) -> Local:
    """Each time, h' = (1 - z) n + z h, and n = tanh(x W + r q), where q is a linear map of h.

    z and r are sigmoids of linear maps of x and h. The slope of z is h - n = z' and so on: (h' - n) (1 - z).
    """
    graph, op, times, hidden = direction.graph, direction.graph.op, direction.times, direction.hidden
    previous, states = direction.rows(direction.previous), direction.rows(direction.states)
    (x_z, x_r, x_n), recurrent = _from_input(direction, 3), direction.gates(direction.recurrent, 3)
    own = [[name] for name in direction.gates(direction.biases[1], 3)] if direction.biases else [[]] * 3
    z = op("Sigmoid", _add_product(direction, previous, recurrent[0], x_z, own[0]))
    r = op("Sigmoid", _add_product(direction, previous, recurrent[1], x_r, own[1]))
    q = op("Gemm", previous, recurrent[2], *own[2], transB=1)
    n = op("Tanh", op("Add", x_n, op("Mul", r, q)))
    z_slope, n_slope = _shared_slopes(direction, states, z, n)
    q_slope = op("Mul", n_slope, r)
    r_slope = op("Mul", q_slope, q)
    slopes = op("Concat", z_slope, op("Sub", r_slope, op("Mul", r_slope, r)), q_slope, axis=1)

    def back(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        grad, (slope, to_n, share, *earlier) = carried[0], now
        gates = op("Mul", op("Concat", grad, grad, grad, axis=1), slope)
        kept = graph.total([op("Mul", grad, share), *earlier])
        return [op("Gemm", gates, direction.recurrent, kept)], [gates, op("Mul", grad, to_n)]

    initial, gates, candidate = direction.scan(
        [direction.last_gradient()],
        [times(slopes, 3 * hidden), times(n_slope), times(z), *direction.earlier_gradients()],
        back,
        reverse=True,
    )
    rows = direction.rows(gates, 3 * hidden)
    shared = op("Slice", rows, graph.ints(0), graph.ints(2 * hidden), graph.ints(1))
    return Local(
        before_input=op("Concat", shared, direction.rows(candidate), axis=1),
        recurrent=op("Gemm", rows, previous, transA=1),
        state_bias=op("ReduceSum", rows, graph.ints(0), keepdims=0),
        initial=[initial],
    )
