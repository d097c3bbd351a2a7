"""The gradient of simple recurrent layers (Elman 1990): h' = f(W x + R h), with f tanh or ReLU."""

from functools import partial

from edgeasync.autodiff.rules.elementwise import SLOPES
from edgeasync.autodiff.rules.recurrent import Local, RecurrentDirection, differentiate
from edgeasync.autodiff.rules.registry import Gradients, Step, rule


@rule("RNN")
def _rnn(step: Step) -> Gradients:
    """Differentiate a layer whose directions all have the same activation, tanh or ReLU."""
    first = next(iter(step.attribute("activations", [])), b"Tanh")
    function = "Relu" if first.lower() in (b"relu", "relu") else "Tanh"
    return differentiate(step, partial(_cell, function), (function,))


def _cell(function: str, direction: RecurrentDirection) -> Local:
    """Return the gradients of a cell. The derivative of f is computed from f's result."""
    graph, op, states = direction.graph, direction.graph.op, direction.states
    slope = SLOPES[function](graph, "", states)

    def back(carried: list[str], now: list[str]) -> tuple[list[str], list[str]]:
        sums = op("Mul", carried[0], now[0])
        return [op("Gemm", sums, direction.recurrent, *now[1:])], [sums]

    slices = [slope, *direction.earlier_gradients()]
    initial, sums = direction.scan([direction.last_gradient()], slices, back, reverse=True)
    rows = direction.rows(sums)
    recurrent = op("Gemm", rows, direction.rows(direction.previous), transA=1)
    return Local(before_input=rows, recurrent=recurrent, state_bias="", initial=[initial])
