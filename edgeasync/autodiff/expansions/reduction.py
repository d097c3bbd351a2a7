"""Expansions of reductions, and of what is computed with them."""

from collections.abc import Sequence

from edgeasync.autodiff.expansions.registry import ReplacedStep, expands
from edgeasync.autodiff.rules.reduction import counted_labels


@expands("ReduceLogSum")
def _reduce_log_sum(step: ReplacedStep) -> Sequence[str]:
    given = [name for name in step.node.inputs if name]
    return [step.graph.op("Log", step.graph.op("ReduceSum", *given, **step.node.attributes))]


@expands("LpNormalization")
def _lp_normalization(step: ReplacedStep) -> Sequence[str]:
    """Divide by the norm along an axis. Values whose norm is 0 stay 0."""
    graph, op, x = step.graph, step.graph.op, step.input(0)
    norm = op("ReduceL1" if step.attribute("p", 2) == 1 else "ReduceL2", x, graph.ints(step.axis()), keepdims=1)
    divisor = op("Where", op("Equal", norm, graph.scalar(0.0)), graph.scalar(1.0), norm)
    return [op("Div", x, divisor)]


@expands("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(step: ReplacedStep) -> Sequence[str]:
    graph, op = step.graph, step.graph.op
    labels, counts = counted_labels(step)
    chosen = op("GatherElements", step.input(0), op("Unsqueeze", labels, graph.ints(1)), axis=1)
    losses = op("Neg", op("Squeeze", chosen, graph.ints(1)))
    if counts is not None:
        losses = op("Mul", losses, counts)
    reduction = step.attribute("reduction", "mean")
    if reduction == "none":
        return [losses]
    if reduction == "mean" and counts is None:
        return [op("ReduceMean", losses, keepdims=0)]
    total = op("ReduceSum", losses, keepdims=0)
    if reduction == "sum" or counts is None:
        return [total]
    return [op("Div", total, op("ReduceSum", counts, keepdims=0))]
