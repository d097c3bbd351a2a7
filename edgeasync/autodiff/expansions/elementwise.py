"""Expansions of activations."""

import math
from collections.abc import Sequence

from edgeasync.autodiff.expansions.registry import ReplacedStep, expands, expands_fused


@expands("Celu")
def _celu(step: ReplacedStep) -> Sequence[str]:
    """Compute alpha times the Elu of x / alpha (Barron 2017, arXiv:1704.07483)."""
    graph, op, alpha = step.graph, step.graph.op, step.attribute("alpha", 1.0)
    if alpha <= 0.0:
        raise step.refused(f"its alpha is {alpha}; set a positive one")
    bent = op("Elu", op("Div", step.input(0), graph.scalar(alpha)))
    return [op("Mul", bent, graph.scalar(alpha))]


@expands("Selu")
def _selu(step: ReplacedStep) -> Sequence[str]:
    """Compute a scaled Elu (Klambauer et al. 2017, arXiv:1706.02515)."""
    graph, op = step.graph, step.graph.op
    bent = op("Elu", step.input(0), alpha=step.attribute("alpha", 1.6732632423543772))
    return [op("Mul", bent, graph.scalar(step.attribute("gamma", 1.0507009873554805)))]


@expands("Mish")
def _mish(step: ReplacedStep) -> Sequence[str]:
    """Compute x tanh(softplus(x)) (Misra 2019, arXiv:1908.08681)."""
    op = step.graph.op
    return [op("Mul", step.input(0), op("Tanh", op("Softplus", step.input(0))))]


@expands("PRelu")
def _prelu(step: ReplacedStep) -> Sequence[str]:
    """Multiply by the slope where x is not positive. At 0 the derivative is the slope, as in torch."""
    graph, op, x = step.graph, step.graph.op, step.input(0)
    return [op("Where", op("Greater", x, graph.scalar(0.0)), x, op("Mul", x, step.input(1)))]


@expands("Softsign")
def _softsign(step: ReplacedStep) -> Sequence[str]:
    graph, op, x = step.graph, step.graph.op, step.input(0)
    return [op("Div", x, op("Add", op("Abs", x), graph.scalar(1.0)))]


@expands("ThresholdedRelu")
def _thresholded_relu(step: ReplacedStep) -> Sequence[str]:
    graph, op, x = step.graph, step.graph.op, step.input(0)
    above = op("Greater", x, graph.scalar(step.attribute("alpha", 1.0)))
    return [op("Where", above, x, graph.scalar(0.0))]


@expands("Shrink")
def _shrink(step: ReplacedStep) -> Sequence[str]:
    graph, op, x = step.graph, step.graph.op, step.input(0)
    limit, bias = step.attribute("lambd", 0.5), graph.scalar(step.attribute("bias", 0.0))
    above = op("Where", op("Greater", x, graph.scalar(limit)), op("Sub", x, bias), graph.scalar(0.0))
    return [op("Where", op("Less", x, graph.scalar(-limit)), op("Add", x, bias), above)]


@expands("Swish")
@expands_fused("QuickGelu")
def _swish(step: ReplacedStep) -> Sequence[str]:
    """Compute x sigmoid(alpha x)."""
    graph, op, x = step.graph, step.graph.op, step.input(0)
    alpha = step.attribute("alpha", 1.702 if step.node.op == "QuickGelu" else 1.0)
    scaled = x if alpha == 1.0 else op("Mul", x, graph.scalar(alpha))
    return [op("Mul", x, op("Sigmoid", scaled))]


@expands_fused("Gelu", "BiasGelu", "FastGelu")
def _gelu(step: ReplacedStep) -> Sequence[str]:
    """Add the bias, if there is one, and apply an exact GELU. FastGelu approximates it by tanh."""
    graph, op, x = step.graph, step.graph.op, step.input(0)
    if step.input(1):
        x = op("Add", x, step.input(1))
    fast = step.node.op == "FastGelu"
    if step.opset >= 20:
        return [op("Gelu", x, approximate="tanh" if fast else "none")]
    if fast:
        square = op("Mul", x, x)
        factor = op("Add", op("Mul", square, graph.scalar(0.044715)), graph.scalar(1.0))
        share = op("Tanh", op("Mul", op("Mul", x, factor), graph.scalar(math.sqrt(2 / math.pi))))
    else:
        share = op("Erf", op("Mul", x, graph.scalar(math.sqrt(0.5))))
    return [op("Mul", op("Mul", x, graph.scalar(0.5)), op("Add", share, graph.scalar(1.0)))]
