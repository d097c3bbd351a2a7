"""Activations that are replaced by others: values of onnxruntime's operators, and finite differences."""

import math

import numpy as np
import pytest

from tests.support.models.gradients import assert_same_values, check, forward, numbers
from tests.support.models.small_models import names, refused

EDGES = np.float32([[-100, -1, -0.5, -0.25, -1e-30, 0, 1e-30, 0.25, 0.5, 1, 100]])
"""Where functions bend, and where exponentials overflow."""

SELU = 1.6732632423543772, 1.0507009873554805


def elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def shrink(x, limit=0.5, bias=0.0):
    return np.where(x < -limit, x + bias, np.where(x > limit, x - bias, 0))


FORMULAS = {
    "Celu": elu,
    "Celu<alpha=0.5>": lambda x: 0.5 * elu(2 * x),
    "Selu": lambda x: SELU[1] * elu(x, SELU[0]),
    "Selu<alpha=0.7, gamma=1.3>": lambda x: 1.3 * elu(x, 0.7),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Softsign": lambda x: x / (1 + abs(x)),
    "ThresholdedRelu": lambda x: np.where(x > 1, x, 0),
    "ThresholdedRelu<alpha=0.25>": lambda x: np.where(x > 0.25, x, 0),
    "Shrink": shrink,
    "Shrink<lambd=0.25, bias=0.1>": lambda x: shrink(x, 0.25, 0.1),
    "Shrink<lambd=0.5, bias=0.5>": lambda x: shrink(x, 0.5, 0.5),
    "Swish": lambda x: x / (1 + np.exp(-x)),
    "Swish<alpha=0.5>": lambda x: x / (1 + np.exp(-0.5 * x)),
    "com.microsoft.QuickGelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "com.microsoft.QuickGelu<alpha=1.0>": lambda x: x / (1 + np.exp(-x)),
    "com.microsoft.Gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "com.microsoft.FastGelu": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


@pytest.mark.parametrize("op", FORMULAS)
def test_one_operand(op):
    name, _, attributes = op.partition("<")
    text = f"a = {name}{'<' + attributes if attributes else ''}(h)\ny = Mul(a, w)"
    check(text, (7,), {"w": numbers((7,), 5)}, opset=24 if name == "Swish" else 18,
          reference=lambda x, parameters: FORMULAS[op](x * parameters["p"]) * parameters["w"])  # fmt: skip


@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("op", FORMULAS)
def test_edges(op, opset):
    name, _, attributes = op.partition("<")
    opset = 24 if name == "Swish" else opset
    text = f"h = Mul(x, p)\ny = {name}{'<' + attributes if attributes else ''}(h)"
    model = forward(text, {"p": np.ones(EDGES.shape, np.float32)}, EDGES.shape[1:], opset=opset)
    assert_same_values(model, EDGES)


@pytest.mark.parametrize("slope", [(1,), (3, 1), (3, 4), (4,)], ids=str)
@pytest.mark.parametrize("uniform", [False, True])
def test_a_prelu_trains_its_slope(slope, uniform):
    def formula(x, parameters):
        h = x * parameters["p"]
        return np.where(h > 0, h, h * parameters["slope"])

    given = np.full(slope, 0.25, np.float32) if uniform else numbers(slope, 9)
    graph = check("y = PRelu(h, slope)", (3, 4), {"slope": given}, reference=formula)
    assert names(graph) == ["p", "slope"]


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
def test_a_gelu_with_a_bias(op, opset):
    function = FORMULAS["com.microsoft." + op.removeprefix("Bias")]
    check(f"y = com.microsoft.{op}(h, b)", (3, 5), {"b": numbers((5,), 4)}, opset=opset,
          reference=lambda x, parameters: function(x * parameters["p"] + parameters["b"]))  # fmt: skip


def test_a_celu_whose_alpha_is_negative():
    model = forward("h = Mul(x, p)\ny = Celu<alpha=-1.0>(h)", {"p": numbers((1, 3))}, (3,))
    refused(model, "the Celu that computes 'y' cannot be .* its alpha is -1.0; set a positive one$")
