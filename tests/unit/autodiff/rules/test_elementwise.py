"""Gradients of element-wise operators, with broadcasting on either side, against finite differences."""

import math

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import check, forward, numbers, run, session

BINARY = {
    "equal shapes": ((2, 3), (1, 2, 3)),
    "vector on the right": ((2, 3), (3,)),
    "scalar-like": ((2, 3), (1,)),
    "column": ((2, 3), (2, 1)),
    "ones in the middle and more": ((2, 3, 4), (1, 2, 1, 4)),
    "higher rank than the input": ((3,), (2, 1, 3)),
    "both sides": ((2, 1, 3), (4, 1)),
}


@pytest.mark.parametrize("shapes", BINARY.values(), ids=BINARY)
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"])
@pytest.mark.parametrize("order", ["h, w", "w, h"])
def test_two_operands(op, shapes, order):
    x, w = shapes
    check(f"y = {op}({order})", x, {"w": numbers(w, 9, positive=True)}, positive=True)


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
def test_several_operands_of_several_shapes(op):
    check(f"y = {op}(h, w, v)", (2, 3), {"w": numbers((3,), 9), "v": numbers((2, 1), 8)})
    check(f"y = {op}(h, h, w)", (2, 3), {"w": numbers((3,), 9)})
    check(f"y = {op}(h)", (2, 3))


UNARY = [
    "Neg", "Abs", "Exp", "Relu", "LeakyRelu", "LeakyRelu<alpha=0.3>", "Elu", "Elu<alpha=0.5>", "Sigmoid", "Tanh",
    "Sin", "Cos", "Softplus", "HardSigmoid", "HardSigmoid<alpha=0.1666667, beta=0.5>", "HardSwish", "Erf",
    "Identity", "Tan", "Sinh", "Cosh", "Atan", "Asinh",
]  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_one_operand(op):
    name, _, attributes = op.partition("<")
    check(f"a = {name}{'<' + attributes if attributes else ''}(h)\ny = Mul(a, w)", (7,), {"w": numbers((7,), 5)})


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    def formula(x, parameters):
        h = x * parameters["p"]
        if approximate == "tanh":
            return 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))

    check(f'y = Gelu<approximate="{approximate}">(h)', (9,), opset=20, reference=formula)


@pytest.mark.parametrize("op", ["Asin", "Acos", "Atanh"])
def test_of_values_between_minus_1_and_1(op):
    check(f"a = Tanh(h)\ny = {op}(a)", (7,))


def test_of_values_above_1():
    check("a = Cosh(h)\nb = Add(a, low)\ny = Acosh(b)", (7,), {"low": np.float32(0.1)})


@pytest.mark.parametrize(("op", "slope"), [("Asin", 1 / math.sqrt(2e-4)), ("Atanh", 1 / 2e-4)])
def test_slopes_near_1_keep_their_digits(op, slope):
    """1 - x^2 is computed as a product. Otherwise, half of the digits would be lost."""
    h = np.float32(1 - 1e-4)
    parameters = {"p": np.array([[h]])}
    found = built(f"h = Mul(x, p)\ny = {op}(h)", (1,), parameters, np.ones((1, 1), np.float32), target=1e6)
    exact = 1 / (1 - float(h) ** 2)
    exact = math.sqrt(exact) if op == "Asin" else exact
    assert exact == pytest.approx(slope, rel=1e-3)
    np.testing.assert_allclose(found["p.grad"] / -2e6, [[exact]], rtol=1e-4)


@pytest.mark.parametrize("shapes", BINARY.values(), ids=BINARY)
def test_remainders(shapes):
    """Also of negative values. The jumps at multiples of the divisor have no slope."""
    x, w = shapes
    check("y = Mod<fmod=1>(h, w)", x, {"w": numbers(w, 9, positive=True)})
    check("a = Neg(w)\ny = Mod<fmod=1>(h, a)", x, {"w": numbers(w, 9, positive=True)})


@pytest.mark.parametrize("op", ["Sqrt", "Log", "Reciprocal"])
def test_of_positive_values(op):
    check(f"y = {op}(h)", (7,), positive=True)


@pytest.mark.parametrize("power", [2.0, 3.0, 1.0, -1.0, 0.5, -0.5, 0.0])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_constant_powers(power, shape):
    check("y = Pow(h, e)", (5,), {"e": np.full(shape, power, np.float32)}, positive=True)


@pytest.mark.parametrize("power", [2, 3])
def test_whole_powers_of_negative_values(power):
    check("y = Pow(h, e)", (5,), {"e": np.int64(power)})


def test_powers_that_differ_by_place():
    check("y = Pow(h, e)", (3,), {"e": np.float32([1.5, 2.0, -1.0])}, positive=True)


def test_whole_powers_that_differ_by_place():
    check("y = Pow(h, e)", (3,), {"e": np.int64([3, 2, 1])})


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3.0])
def test_powers_of_zero_have_slopes(power):
    parameters = {"p": np.zeros((1, 3), np.float32), "e": np.float32(power)}
    found = built("h = Add(x, p)\ny = Pow(h, e)", (3,), parameters, np.zeros((2, 3), np.float32), target=1)
    slope = 1.0 if power == 1 else 0.0
    np.testing.assert_allclose(found["p.grad"], np.full((1, 3), 2 * (0.0 - 1.0) / 6 * 2 * slope), rtol=1e-6)


def test_a_trained_power_of_zero_has_the_slopes_of_torch():
    parameters = {"p": np.zeros((1, 4), np.float32), "v": np.float32([0, 1, 2, 0])}
    parameters["p"][0, 3] = 2.0
    model = forward("h = Add(x, p)\ny = Pow(h, v)", parameters, (4,))
    graph = build_training_graph(model, GraphSettings(loss="l1", train=("p", "v")))
    found = run(graph, {"x": np.zeros((1, 4), np.float32), "target": np.full((1, 4), -9, np.float32)})
    np.testing.assert_allclose(found["p.grad"][0] * 4, [0.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(found["v.grad"] * 4, [0.0, 0.0, 0.0, math.log(2.0)], rtol=1e-6)


def test_hard_swish_has_no_slope_of_its_bend_where_it_ends():
    parameters = {"p": np.float32([[-3, 0, 3]])}
    found = built("h = Mul(x, p)\ny = HardSwish(h)", (3,), parameters, np.ones((1, 3), np.float32), target=1e4)
    np.testing.assert_allclose(found["p.grad"][0] / (-2e4 / 3), [0.0, 0.5, 1.0], rtol=1e-3, atol=1e-6)


def test_a_trained_exponent():
    check("q = Exp(b)\ny = Pow(h, q)", (3,), {"b": numbers((3,), 4)}, positive=True)


@pytest.mark.parametrize("bounds", ["low, high", "low", "''", "'', high"])
def test_clip(bounds):
    given = bounds.replace("''", "")
    parameters = {"low": np.float32(-0.4), "high": np.float32(0.6)}
    check(f"a = Clip(h, {given})\ny = Mul(a, w)" if given else "a = Clip(h)\ny = Mul(a, w)", (9,),
          parameters | {"w": numbers((9,), 5)})  # fmt: skip


def test_where_by_a_constant_by_a_comparison_and_by_broadcasting():
    where = {"c": np.array([True, False, True]), "w": numbers((2, 1), 3)}
    check("y = Where(c, h, w)", (2, 3), where)
    check("y = Where(c, w, h)", (2, 3), where)
    check("z = Greater(h, w)\ny = Where(z, h, w)", (2, 3), where)


def built(text, x, parameters, given, target=0.0, **settings):
    """Run the training graph of a model; return its outputs."""
    graph = build_training_graph(forward(text, parameters, x), GraphSettings(loss="mse", **settings))
    session_target = np.broadcast_to(np.float32(target), given.shape).copy()
    return run(graph, {"x": given, "target": session_target}, 2)


@pytest.mark.parametrize(("op", "slope"), [("Max", 0.5), ("Min", 0.5)])
def test_inputs_that_tie_share_the_gradient(op, slope):
    parameters = {"p": np.float32([[1, 2]]), "w": np.float32([[1, 2]])}
    found = built(f"h = Mul(x, p)\ny = {op}(h, w)", (2,), parameters, np.ones((1, 2), np.float32))
    np.testing.assert_allclose(found["p.grad"], slope * np.float32([[1, 2]]))
    np.testing.assert_allclose(found["w.grad"], slope * np.float32([[1, 2]]))


KINKS = {
    "Relu(h)": [0.0, 0.0, 1.0],
    "LeakyRelu<alpha=0.25>(h)": [0.25, 0.25, 1.0],
    "Abs(h)": [-1.0, 0.0, 1.0],
    "Clip(h, low, high)": [1.0, 1.0, 1.0],
    "Elu<alpha=1.0>(h)": [math.exp(-1), 1.0, 1.0],
    "HardSwish(h)": [1 / 6, 0.5, 5 / 6],
}


@pytest.mark.parametrize(("text", "slopes"), KINKS.items(), ids=KINKS)
def test_slopes_at_kinks_are_those_of_torch(text, slopes):
    parameters = {"p": np.float32([[-1, 0, 1]]), "low": np.float32(-1), "high": np.float32(1)}
    given = np.ones((1, 3), np.float32)
    found = built(f"h = Mul(x, p)\na = {text}\nz = Mul(a, zero)\ny = Add(z, a)", (3,),
                  parameters | {"zero": np.float32(0)}, given, target=1e4)  # fmt: skip
    np.testing.assert_allclose(found["p.grad"][0] / (-2e4 / 3), slopes, rtol=1e-3, atol=1e-6)


def test_casts_keep_the_gradient_and_whole_numbers_stop_it():
    check("a = Cast<to=1>(h)\ny = Mul(a, w)", (3,), {"w": numbers((3,), 4)})
    graph = build_training_graph(
        forward("h = Mul(x, p)\na = Cast<to=7>(h)\nb = Cast<to=1>(a)\ny = Mul(b, w)",
                {"p": numbers((1, 3)), "w": numbers((3,), 4)}, (3,)),
        GraphSettings(loss="mse"),
    )  # fmt: skip
    assert [parameter.name for parameter in graph.spec.parameters] == ["w"]


@pytest.mark.parametrize("mode", ["True", "False"])
def test_dropout_drops_whatever_the_export_said_and_scales_what_is_left(mode):
    """The mask shows in the output: the loss target is 0, so the gradient follows the square of mask / (1 - r)."""
    parameters = {"p": np.ones((1, 4096), np.float32), "r": np.float32(0.25), "t": np.bool_(mode == "True")}
    text = "h = Mul(x, p)\ny = Dropout<seed=3>(h, r, t)"
    found = built(text, (4096,), parameters, np.ones((1, 4096), np.float32))
    kept = found["p.grad"] > 0
    assert 0.7 < kept.mean() < 0.8
    np.testing.assert_allclose(found["p.grad"][kept], 2 * (1 / 0.75) ** 2 / 4096, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], kept.mean() / 0.75**2, rtol=1e-5)


def test_a_dropout_of_ratio_0_and_one_of_ratio_1():
    parameters = {"p": np.ones((1, 8), np.float32), "t": np.bool_(1)}
    given = np.ones((1, 8), np.float32)
    text = "h = Mul(x, p)\ny = Dropout(h, r, t)"
    assert built(text, (8,), parameters | {"r": np.float32(0)}, given)["p.grad"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "text",
    [
        "d = Dropout(x, r, t)\ny = Mul(d, p)",
        "n = Neg(x)\nd = Dropout(n, r, t)\ny = Mul(d, p)",
        "h = Mul(x, p)\nd = Dropout(h, r, t)\ns = Sign(d)\ny = Mul(h, s)",
    ],
)
def test_a_dropout_through_which_no_gradient_passes_drops_anew_in_every_step(text):
    """A session on a device optimizes, and would remove a dropout whose mask nothing reads."""
    parameters = {"p": np.ones((1, 64), np.float32), "r": np.float32(0.5), "t": np.bool_(1)}
    graph = build_training_graph(forward(text, parameters, (64,)), GraphSettings(loss="mse"))
    check_graph(graph.model, bytes_max=1 << 20)
    opened = session(graph.model)
    feeds = {"x": np.ones((1, 64), np.float32), "target": np.zeros((1, 64), np.float32)}
    steps = [opened.run(["p.grad"], feeds | graph.spec.views(graph.initial))[0] for _ in range(2)]
    assert (steps[0] != steps[1]).any()
    assert all(0.2 < (step != 0).mean() < 0.8 for step in steps)


def test_a_dropout_of_something_frozen_drops_anew_every_time():
    """With a fixed batch the forward model is measured once, and chance must not be taken for a constant."""
    parameters = {"p": np.ones((1, 64), np.float32), "f": np.ones(64, np.float32), "r": np.float32(0.5),
                  "t": np.bool_(1)}  # fmt: skip
    model = forward("h = Mul(x, p)\nd = Dropout(f, r, t)\ny = Mul(h, d)", parameters, (64,), batch=1)
    graph = build_training_graph(model, GraphSettings(loss="mse", freeze=("f",)))
    feeds = {"x": np.ones((1, 64), np.float32), "target": np.zeros((1, 64), np.float32)}
    assert (run(graph, feeds)["p.grad"] != run(graph, feeds)["p.grad"]).any()


STOPPED = {
    "a Relu": ("Relu(h)", 0.0),
    "a Clip": ("Clip(h, zero, )", 0.0),
    "a maximum": ("Max(zero, h)", 0.0),
    "a hard swish": ("HardSwish(h)", -3.0),
}
STEEP = {
    "a root": "y = Sqrt(r)",
    "a power": "y = Pow(r, half)",
    "a root of a sum": "s = ReduceSum<keepdims=1>(r, axis)\ny = Sqrt(s)",
}


@pytest.mark.parametrize(("stop", "below"), STOPPED.values(), ids=STOPPED)
@pytest.mark.parametrize("text", STEEP.values(), ids=STEEP)
def test_an_infinite_gradient_ends_where_values_are_cut_off(stop, below, text):
    """In torch, too, Sqrt(Relu(x)) has the gradient 0 for a negative x, although 0 times infinity is NaN."""
    x = np.float32([[-5, -4, 4], [-6, -8, -9], [5, -4, 6]])
    parameters = {"p": np.ones(3, np.float32), "half": np.float32(0.5), "axis": np.array([1]),
                  "zero": np.float32(0)}  # fmt: skip
    model = forward(f"h = Mul(x, p)\nr = {stop}\n{text}", parameters, (3,))
    graph = build_training_graph(model, GraphSettings(loss="mse"))
    above, bent = x > below, (np.abs(x) < 3) & ("Swish" in stop)
    r = np.where(above, np.where(bent, x * (x + 3) / 6, x), 0).astype(np.float64)
    s = r.sum(1, keepdims=True) if "Sum" in text else r
    found = run(graph, {"x": x, "target": np.ones(s.shape, np.float32)})
    slope = 2 * (np.sqrt(s) - 1) / s.size * 0.5 * np.where(s > 0, s, np.inf) ** -0.5
    expected = slope * above * np.where(bent, x / 3 + 0.5, 1) * x
    np.testing.assert_allclose(found["p.grad"], expected.sum(0), rtol=1e-5)


@pytest.mark.parametrize("text", ["s = Add(r, one)\ny = Sqrt(s)", "y = Div(r, one)", "y = Pow(r, one)"])
def test_gradients_that_cannot_be_infinite_are_multiplied(text):
    """A selection takes four times as long."""
    parameters = {"p": numbers((3,)), "one": np.float32(1)}
    graph = build_training_graph(forward(f"h = Mul(x, p)\nr = Relu(h)\n{text}", parameters, (3,)),
                                 GraphSettings(loss="mse"))  # fmt: skip
    assert b"Where" not in graph.model
