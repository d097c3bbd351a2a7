"""The gradient of LSTMs (Hochreiter & Schmidhuber 1997) with forget gates (Gers et al. 2000)."""

from edgeasync.autodiff.rules.recurrent import Local, RecurrentDirection, differentiate
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


@rule("LSTM")
def _lstm(step: Step) -> Gradients:
    return differentiate(step, _cell, ("Sigmoid", "Tanh", "Tanh"))


def _cell(direction: RecurrentDirection) -> Local:
    """Return the gradients of an LSTM cell, with c' = f c + i g and h' = o tanh(c') at each step.

    The gates i, o and f are sigmoids of linear maps of x and h, and g is the tanh of such a map.
    The derivatives reuse values that are already known, for example o (1 - tanh^2) = o - h' tanh.
    """
    graph, op, times, hidden = direction.graph, direction.graph.op, direction.times, direction.hidden
    previous, states = direction.rows(direction.previous), direction.rows(direction.states)
    sums = _sums(direction, previous)
    i, o, f = [op("Sigmoid", name) for name in sums[:3]]
    g = op("Tanh", sums[3])
    new, forget = op("Mul", i, g), times(f)
    kept = direction.rows(_kept_cells(direction, forget, times(new)))
    squashed = op("Tanh", op("Add", kept, new))
    slopes = op(
        "Concat",
        op("Sub", new, op("Mul", new, i)),
        op("Sub", states, op("Mul", states, o)),
        op("Sub", kept, op("Mul", kept, f)),
        op("Sub", i, op("Mul", new, g)),
        axis=1,
    )
    to_cells = op("Sub", o, op("Mul", states, squashed))

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


def _sums(direction: RecurrentDirection, previous: str) -> list[str]:
    """Return the linear maps of all gates, as rows.

    There is one product per gate, because a joint product would have to be split.
    """
    op, bias = direction.graph.op, direction.bias()
    biases = [[name] for name in direction.gates(bias, 4)] if bias else [[]] * 4
    weights, recurrent = direction.gates(direction.weights, 4), direction.gates(direction.recurrent, 4)
    return [
        op("Gemm", previous, state, op("Gemm", direction.x, weight, *own, transB=1), transB=1)
        for weight, state, own in zip(weights, recurrent, biases, strict=True)
    ]


def _kept_cells(direction: RecurrentDirection, forget: str, new: str) -> str:
    """Return f c for all time steps, the part of the previous cells that remains.

    This is the only recurrence that is computed forward again.
    """
    op = direction.graph.op

    def forward(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        kept = op("Mul", carried[0], now[0])
        return [op("Add", kept, now[1])], [kept]

    return direction.scan([direction.initial_c or direction.zeros()], [forget, new], forward, reverse=False)[1]
