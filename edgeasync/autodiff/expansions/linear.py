"""Expansions of matrix products and convolutions that onnxruntime's optimizer fused with others."""

from collections.abc import Sequence

from edgeasync.autodiff.expansions.registry import ReplacedStep, expands_fused


@expands_fused("FusedMatMul", "TransposeMatMul")
def _fused_matmul(step: ReplacedStep) -> Sequence[str]:
    op, alpha = step.graph.op, step.attribute("alpha", 1.0)
    sides = [_turned(step, position, side) for position, side in enumerate("AB")]
    product = op("MatMul", *sides)
    return [product if alpha == 1.0 else op("Mul", product, step.graph.scalar(alpha))]


def _turned(step: ReplacedStep, position: int, side: str) -> str:
    """Return a factor after its transpositions.

    transBatch moves the first axis before the last one. trans swaps the last two axes after that.
    """
    order = list(range(step.rank(position)))
    if step.attribute(f"transBatch{side}", 0):
        order[:-1] = [*order[1:-1], 0]
    if step.attribute(f"trans{side}", 0) and len(order) > 1:
        order[-2:] = order[:-3:-1]
    if order == sorted(order):
        return step.input(position)
    return step.graph.op("Transpose", step.input(position), perm=order)


@expands_fused("FusedGemm")
def _fused_gemm(step: ReplacedStep) -> Sequence[str]:
    own = {"activation", "activation_alpha", "activation_beta", "activation_gamma"}
    given = {name: value for name, value in step.node.attributes.items() if name not in own}
    result = step.graph.op("Gemm", *[name for name in step.node.inputs if name], **given)
    parameters = [step.attribute(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")]
    return [_activated(step, result, [value for value in parameters if value is not None])]


@expands_fused("FusedConv")
def _fused_conv(step: ReplacedStep) -> Sequence[str]:
    """Compute a convolution, add the fourth input, if there is one, and apply the activation."""
    own = {"activation", "activation_params"}
    given = {name: value for name, value in step.node.attributes.items() if name not in own}
    result = step.graph.op("Conv", *[name for name in step.node.inputs[:3] if name], **given)
    if step.input(3):
        result = step.graph.op("Add", result, step.input(3))
    return [_activated(step, result, step.attribute("activation_params", []))]


def _activated(step: ReplacedStep, value: str, parameters: Sequence[float]) -> str:
    """Apply the attribute `activation`, with its parameters."""
    graph, op, name = step.graph, step.graph.op, step.attribute("activation", "")
    if not name:
        return value
    if name in ("Relu", "Sigmoid", "Tanh"):
        return op(name, value)
    if name in ("LeakyRelu", "Elu") and len(parameters) == 1:
        return op(name, value, alpha=parameters[0])
    if name == "HardSigmoid" and len(parameters) == 2:
        return op(name, value, alpha=parameters[0], beta=parameters[1])
    if name == "Clip" and len(parameters) == 2:
        return op(name, value, *[graph.scalar(bound) for bound in parameters])
    raise step.refused(
        f"its activation is {name} with {len(parameters)} parameters; use the original file, before onnxruntime "
        "optimized it"
    )
