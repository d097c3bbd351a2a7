"""Gradients of elementwise operators, including broadcasting."""

import math
from collections.abc import Callable

import numpy as np

from edgeasync.autodiff.graph import Graph, Node
from edgeasync.autodiff.rules.registry import Gradients, Step, rule

STEEP = 3e38
"""A slope close to the largest float32. Multiplied by the smallest normal float32, it exceeds 1."""


@rule("Add", "Sum")
def _add(step: Step) -> Gradients:
    return [step.unbroadcast(step.gradient, position) for position in range(len(step.node.inputs))]


@rule("Mean")
def _mean(step: Step) -> Gradients:
    count = len(step.node.inputs)
    share = step.graph.op("Div", step.gradient, step.graph.scalar(count))
    return [step.unbroadcast(share, position) for position in range(count)]


@rule("Sub")
def _sub(step: Step) -> Gradients:
    negative = step.graph.op("Neg", step.gradient)
    return [step.unbroadcast(step.gradient, 0), step.unbroadcast(negative, 1)]


@rule("Mul")
def _mul(step: Step) -> Gradients:
    op, gradient = step.graph.op, step.gradient
    return [
        step.unbroadcast(op("Mul", gradient, step.input(1)), 0),
        step.unbroadcast(op("Mul", gradient, step.input(0)), 1),
    ]


@rule("Div")
def _div(step: Step) -> Gradients:
    op = step.graph.op
    numerator = op("Div", step.gradient, step.input(1))
    denominator = op("Neg", op("Mul", numerator, step.output()))
    return [step.unbroadcast(numerator, 0), step.unbroadcast(denominator, 1)]


@rule("Neg")
def _neg(step: Step) -> Gradients:
    return [step.graph.op("Neg", step.gradient)]


@rule("Reciprocal")
def _reciprocal(step: Step) -> Gradients:
    op = step.graph.op
    return [op("Neg", op("Mul", step.gradient, op("Mul", step.output(), step.output())))]


@rule("Sqrt")
def _sqrt(step: Step) -> Gradients:
    op = step.graph.op
    return [op("Div", op("Mul", step.gradient, step.graph.scalar(0.5)), step.output())]


@rule("Log")
def _log(step: Step) -> Gradients:
    return [step.graph.op("Div", step.gradient, step.input(0))]


@rule("Cos")
def _cos(step: Step) -> Gradients:
    op = step.graph.op
    return [op("Neg", op("Mul", step.gradient, op("Sin", step.input(0))))]


@rule("Pow")
def _pow(step: Step) -> Gradients:
    graph, op = step.graph, step.graph.op
    base, exponent = step.input(0), step.input(1)
    if exponent in graph.constants:
        power = graph.constants[exponent].astype(np.float32)
        if (power == 2.0).all():
            slope = op("Mul", base, graph.scalar(2.0))
        else:
            # The power 0 has derivative 0 everywhere, including at 0.
            less = np.where(power == 0.0, np.float32(0.0), power - np.float32(1.0))
            slope = op("Mul", op("Pow", base, graph.constant(less)), graph.constant(power))
        return [step.unbroadcast(op("Mul", step.gradient, slope), 0)]
    lower = op("Sub", exponent, graph.scalar(1.0))
    slope = op("Mul", op("Pow", base, lower), exponent)
    # The power 0 has derivative 0 everywhere, including at 0.
    slope = op("Where", op("Equal", exponent, graph.scalar(0.0)), graph.scalar(0.0), slope)
    # 0 to any power does not depend on the exponent, but log(0) would produce a NaN.
    growth = op("Where", op("Equal", base, graph.scalar(0.0)), graph.scalar(0.0),
                op("Mul", step.output(), op("Log", base)))  # fmt: skip
    return [
        step.unbroadcast(op("Mul", step.gradient, slope), 0),
        step.unbroadcast(op("Mul", step.gradient, growth), 1),
    ]


@rule("Mod")
def _mod(step: Step) -> Gradients:
    """Gradient of a remainder x - n d, whose multiple n is constant almost everywhere."""
    op, divisor = step.graph.op, step.input(1)
    count = op("Round", op("Div", op("Sub", step.input(0), step.output()), divisor))
    return [step.unbroadcast(step.gradient, 0), step.unbroadcast(op("Neg", op("Mul", step.gradient, count)), 1)]


@rule("Max", "Min")
def _extreme(step: Step) -> Gradients:
    """Divide the gradient among inputs that are equal, as torch does for two inputs."""
    graph, op = step.graph, step.graph.op
    kind = _onnx_float(graph.dtypes[step.output()])
    equal = [op("Equal", name, step.output()) for name in step.node.inputs]
    masks = [op("Cast", each, to=kind) for each in equal]
    share = op("Div", step.gradient, graph.total(masks)) if len(masks) > 1 else step.gradient
    shares = [
        step.where(each, share) if step.may_be_infinite else op("Mul", share, mask)
        for each, mask in zip(equal, masks, strict=True)
    ]
    return [step.unbroadcast(each, position) for position, each in enumerate(shares)]


@rule("Where")
def _where(step: Step) -> Gradients:
    op, zero = step.graph.op, step.graph.scalar(0.0)
    chosen = op("Where", step.input(0), step.gradient, zero)
    other = op("Where", step.input(0), zero, step.gradient)
    return [None, step.unbroadcast(chosen, 1), step.unbroadcast(other, 2)]


@rule("Cast")
def _cast(step: Step) -> Gradients:
    return [step.graph.op("Cast", step.gradient, to=_onnx_float(step.graph.dtypes[step.input(0)]))]


def _onnx_float(dtype: "np.dtype[np.generic]") -> int:
    return {"float32": 1, "float64": 11, "float16": 10}[dtype.name]


# -- activations -----------------------------------------------------------------------------------------------


def is_positive(graph: Graph, value: str) -> str:
    """Return a tensor with 1.0 where `value` is positive, and 0.0 elsewhere.

    It is computed by a HardSigmoid that is so steep that no normal float32 is on its ramp.
    HardSigmoid needs one pass over the values. Sign takes eight times as long, and Greater followed
    by Cast needs two passes.
    """
    return graph.op("HardSigmoid", value, alpha=STEEP, beta=0.0)


def _beyond_square(graph: Graph, x: str) -> str:
    """Return 1 - x^2, without the cancellation that would lose digits if x is close to 1 or -1."""
    one = graph.scalar(1.0)
    return graph.op("Mul", graph.op("Sub", one, x), graph.op("Add", one, x))


def _square_and_one(graph: Graph, x: str) -> str:
    return graph.op("Add", graph.op("Mul", x, x), graph.scalar(1.0))


def _inverse_root(graph: Graph, x: str) -> str:
    return graph.op("Reciprocal", graph.op("Sqrt", x))


SLOPES: dict[str, Callable[[Graph, str, str], str]] = {
    "Abs": lambda graph, x, _: graph.op("Sign", x),
    "Acos": lambda graph, x, _: graph.op("Neg", _inverse_root(graph, _beyond_square(graph, x))),
    "Acosh": lambda graph, x, _: _inverse_root(graph, graph.op("Neg", _beyond_square(graph, x))),
    "Asin": lambda graph, x, _: _inverse_root(graph, _beyond_square(graph, x)),
    "Asinh": lambda graph, x, _: _inverse_root(graph, _square_and_one(graph, x)),
    "Atan": lambda graph, x, _: graph.op("Reciprocal", _square_and_one(graph, x)),
    "Atanh": lambda graph, x, _: graph.op("Reciprocal", _beyond_square(graph, x)),
    "Cosh": lambda graph, x, _: graph.op("Sinh", x),
    "Exp": lambda _, __, y: y,
    "Relu": lambda graph, _, y: is_positive(graph, y),
    "Sigmoid": lambda graph, _, y: graph.op("Sub", y, graph.op("Mul", y, y)),
    "Sin": lambda graph, x, _: graph.op("Cos", x),
    "Sinh": lambda graph, x, _: graph.op("Cosh", x),
    "Softplus": lambda graph, x, _: graph.op("Sigmoid", x),
    "Tan": lambda graph, _, y: _square_and_one(graph, y),
    "Tanh": lambda graph, _, y: graph.op("Sub", graph.scalar(1.0), graph.op("Mul", y, y)),
}
"""Derivatives of operators, as functions of the operator's input and output."""


@rule(*SLOPES)
def _sloped(step: Step) -> Gradients:
    graph, y = step.graph, step.output()
    if step.node.op == "Relu" and step.may_be_infinite:
        return [step.where(graph.op("Greater", y, graph.scalar(0.0)), step.gradient)]
    return [graph.op("Mul", step.gradient, SLOPES[step.node.op](graph, step.input(0), y))]


@rule("LeakyRelu")
def _leaky_relu(step: Step) -> Gradients:
    graph, op = step.graph, step.graph.op
    alpha = step.attribute("alpha", 0.01)
    if 0.0 <= alpha <= 1.0:
        # The output is positive where the input is. Unlike the input, it is kept in memory anyway.
        return [op("Mul", step.gradient, op("Max", is_positive(graph, step.output()), graph.scalar(alpha)))]
    positive = op("Greater", step.input(0), graph.scalar(0.0))
    return [op("Where", positive, step.gradient, op("Mul", step.gradient, graph.scalar(alpha)))]


@rule("Elu")
def _elu(step: Step) -> Gradients:
    graph, op = step.graph, step.graph.op
    alpha = step.attribute("alpha", 1.0)
    # With a positive alpha, input and output have the same sign. Only the output is kept in memory anyway.
    positive = op("Greater", step.output() if alpha > 0.0 else step.input(0), graph.scalar(0.0))
    slope = op("Add", step.output(), graph.scalar(alpha))
    return [op("Where", positive, step.gradient, op("Mul", step.gradient, slope))]


def _clip_forward(step: Step) -> None:
    """Compare input and output at once, so that only the comparison is kept for the gradient."""
    step.graph.nodes.append(step.node)
    step.saved["inside"] = step.graph.op("Equal", step.input(0), step.output())


@rule("Clip", forward=_clip_forward)
def _clip(step: Step) -> Gradients:
    """Pass the gradient where the input is within or equal to the bounds, as torch does."""
    for position in (1, 2):
        step.constant(position)
    if step.may_be_infinite:
        return [step.where(step.saved["inside"], step.gradient)]
    # Where takes four times as long.
    return [step.graph.op("Mul", step.gradient, step.graph.op("Cast", step.saved["inside"], to=1))]


@rule("HardSigmoid")
def _hard_sigmoid(step: Step) -> Gradients:
    graph, op, y = step.graph, step.graph.op, step.output()
    inside = op("And", op("Greater", y, graph.scalar(0.0)), op("Less", y, graph.scalar(1.0)))
    slope = graph.scalar(step.attribute("alpha", 0.2))
    return [op("Where", inside, op("Mul", step.gradient, slope), graph.scalar(0.0))]


def _hard_swish_forward(step: Step) -> None:
    """Compute x times a sigmoid of x, because the gradient needs the sigmoid, too."""
    sigmoid = step.graph.op("HardSigmoid", step.input(0), alpha=1 / 6, beta=0.5)
    step.saved["sigmoid"] = sigmoid
    step.graph.nodes.append(Node("Mul", [step.input(0), sigmoid], step.node.outputs, {}, step.node.name))


@rule("HardSwish", forward=_hard_swish_forward)
def _hard_swish(step: Step) -> Gradients:
    """Gradient of HardSwish (Howard et al. 2019, arXiv:1905.02244).

    The derivative is 0 below -3, 1 above 3, and x / 3 + 1 / 2 in between.
    """
    graph, op, x = step.graph, step.graph.op, step.input(0)
    # 1 inside and 0 outside. Powers of two, so that the sum is exact.
    inside = op("HardSigmoid", op("Abs", x), alpha=-(2.0**100), beta=3 * 2.0**100)
    rise = op("Mul", op("Mul", x, graph.scalar(1 / 6)), inside)
    slope = op("Mul", step.gradient, op("Add", step.saved["sigmoid"], rise))
    return [step.where(op("Greater", x, graph.scalar(-3.0)), slope) if step.may_be_infinite else slope]


@rule("Erf")
def _erf(step: Step) -> Gradients:
    graph, op, x = step.graph, step.graph.op, step.input(0)
    bell = op("Exp", op("Neg", op("Mul", x, x)))
    return [op("Mul", step.gradient, op("Mul", bell, graph.scalar(2 / math.sqrt(math.pi))))]


@rule("Gelu")
def _gelu(step: Step) -> Gradients:
    """Gradient of GELU, exact or approximated by tanh.

    See Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    """
    graph, op, x = step.graph, step.graph.op, step.input(0)
    square = op("Mul", x, x)
    if step.attribute("approximate", "none") == "none":
        area = op("Mul", op("Add", op("Erf", op("Mul", x, graph.scalar(math.sqrt(0.5)))), graph.scalar(1.0)),
                  graph.scalar(0.5))  # fmt: skip
        density = op(
            "Mul", op("Exp", op("Mul", square, graph.scalar(-0.5))), graph.scalar(1 / math.sqrt(2 * math.pi))
        )
        return [op("Mul", step.gradient, op("Add", area, op("Mul", x, density)))]
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    inner = op("Mul", x, op("Add", op("Mul", square, graph.scalar(scale * cubic)), graph.scalar(scale)))
    tanh = op("Tanh", inner)
    area = op("Mul", op("Add", tanh, graph.scalar(1.0)), graph.scalar(0.5))
    inner_slope = op("Add", op("Mul", square, graph.scalar(3 * scale * cubic)), graph.scalar(scale))
    tanh_slope = op("Sub", graph.scalar(1.0), op("Mul", tanh, tanh))
    rest = op("Mul", op("Mul", x, graph.scalar(0.5)), op("Mul", tanh_slope, inner_slope))
    return [op("Mul", step.gradient, op("Add", area, rest))]


def _keep_mask(step: Step) -> None:
    """Enable dropout, regardless of the mode in which the forward model was exported."""
    ratio = step.constant(1, np.float32(0.5))
    if not 0.0 <= float(ratio) < 1.0:
        raise step.refused(f"its ratio is {float(ratio)}; set one of at least 0 and below 1")
    # A separate constant, so that the gradient check can set it to 0.
    name = step.saved["ratio"] = step.graph.new_name("ratio")
    step.graph.constants[name] = np.asarray(ratio, np.float32)
    step.node.inputs = [step.input(0), name, step.graph.constant(np.array(True))]
    step.saved["mask"] = step.output(1)
    step.graph.nodes.append(step.node)


@rule("Dropout", forward=_keep_mask)
def _dropout(step: Step) -> Gradients:
    """Apply the mask and scale of the forward pass to the gradient (Srivastava et al. 2014)."""
    graph, op = step.graph, step.graph.op
    kept = op("Cast", step.saved["mask"], to=1)
    scaled = op("Div", step.gradient, op("Sub", graph.scalar(1.0), step.saved["ratio"]))
    return [op("Mul", scaled, kept)]
