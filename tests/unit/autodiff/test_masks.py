"""Masks of stochastic depth: drawn anew in every step, and gone from an exported model."""

import numpy as np
import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import forward, numbers, session

SHAPE = "s = Shape<end=1>(h)\nt = Concat<axis=0>(s, unit)\ne = ConstantOfShape(t)\n"
DRAWN = f"{SHAPE}u = RandomUniformLike(e)\n"
CONSTANTS = {
    "unit": np.array([1]),
    "wide": np.array([3]),
    "keep": np.float32(0.75),
    "inverse": np.float32(4 / 3),
    "rest": np.float32(0.25),
}
MASKS = {
    "less, divided": DRAWN + "b = Less(u, keep)\nm = Cast<to=1>(b)\nk = Div(m, keep)\ny = Mul(h, k)",
    "greater, multiplied": DRAWN + "b = Greater(keep, u)\nm = Cast<to=1>(b)\nk = Mul(inverse, m)\ny = Mul(k, h)",
    "not below": DRAWN + "b = GreaterOrEqual(u, rest)\nm = CastLike(b, keep)\nk = Div(m, keep)\ny = Mul(k, h)",
    "floor, data divided": DRAWN + "a = Add(keep, u)\nm = Floor(a)\nd = Div(h, keep)\ny = Mul(d, m)",
    "data multiplied": DRAWN + "b = Less(u, keep)\nm = Cast<to=1>(b)\nd = Mul(h, inverse)\ny = Mul(m, d)",
    "a draw of its own": SHAPE.replace("e = ConstantOfShape(t)\n", "")
    + "q = Expand(keep, t)\nm = Bernoulli(q)\nk = Div(m, keep)\ny = Mul(h, k)",
}


def model_of(text, parameters=CONSTANTS):
    used = {name: value for name, value in parameters.items() if name in text.replace("(", " ").replace(")", " ")
            .replace(",", " ").split()}  # fmt: skip
    return forward(f"h = Mul(x, p)\n{text}", {"p": numbers((1, 3), 1), **used}, (3,))


@pytest.mark.parametrize("text", MASKS.values(), ids=MASKS)
def test_a_step_drops_anew_and_its_gradient_alike(text):
    graph = build_training_graph(model_of(text), GraphSettings(loss="mse"))
    check_graph(graph.model, bytes_max=1 << 20)
    opened = session(graph.model)
    x = np.ones((64, 3), np.float32)
    feeds = {"x": x, "target": np.zeros((64, 3), np.float32)} | graph.spec.views(graph.initial)
    steps = [opened.run(["y", "p.grad"], feeds) for _ in range(2)]
    assert (steps[0][0] != steps[1][0]).any()
    p = graph.spec.views(graph.initial)["p"]
    for y, gradient in steps:
        kept = y[:, 0] != 0
        assert 0.5 < kept.mean() < 0.95
        np.testing.assert_allclose(y, kept[:, None] * p / 0.75, rtol=1e-5)
        np.testing.assert_allclose(
            gradient, 2 * (y / 0.75 * kept[:, None]).sum(0, keepdims=True) / y.size, rtol=1e-5
        )


@pytest.mark.parametrize("text", MASKS.values(), ids=MASKS)
def test_an_exported_model_drops_nothing(text):
    model = export_model(model_of(text), {})
    kinds = {node.op_type for node in onnx.load_model_from_string(model).graph.node}
    assert kinds <= {"Mul", "Identity"}
    x = numbers((5, 3), 2)
    np.testing.assert_array_equal(session(model).run(["y"], {"x": x})[0], x * numbers((1, 3), 1))


OTHERS = {
    "noise that is added": DRAWN + "y = Add(h, u)",
    "noise that scales": DRAWN + "y = Mul(h, u)",
    "a mean that is not the data": DRAWN + "b = Less(u, keep)\nm = Cast<to=1>(b)\ny = Mul(h, m)",
    "odds that the data computes": DRAWN + "o = Sigmoid(h)\nb = Less(u, o)\nm = Cast<to=1>(b)\ny = Mul(h, m)",
    "other random numbers": f"{SHAPE}u = RandomUniformLike<high=2.0>(e)\nb = Less(u, keep)\nm = Cast<to=1>(b)\n"
    "k = Div(m, keep)\ny = Mul(h, k)",
    "a mask of a parameter, which has no batch": DRAWN
    + "b = Less(u, keep)\nm = Cast<to=1>(b)\nk = Div(m, keep)\nv = Mul(p, k)\ny = Mul(h, v)",
    "a mask that is wider than the data": DRAWN.replace("unit", "wide")
    + "g = ReduceSum<keepdims=1>(h, unit)\nb = Less(u, keep)\nm = Cast<to=1>(b)\nk = Div(m, keep)\ny = Mul(g, k)",
    "a mask that is the divisor": DRAWN + "b = Less(u, keep)\nm = Cast<to=1>(b)\nk = Div(keep, m)\ny = Mul(h, k)",
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_all_other_random_numbers_stay(text):
    given = onnx.load_model_from_string(model_of(text))
    made = onnx.load_model_from_string(export_model(given.SerializeToString(), {}))
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in given.graph.node]


def test_two_masks_differ():
    """A session on a device optimizes, and must not merge equal random nodes."""
    second = MASKS["less, divided"].split(DRAWN)[1]
    for name in "bmk":
        second = second.replace(f"{name} =", f"{name}2 =").replace(f"({name})", f"({name}2)")
    second = second.replace("Div(m,", "Div(m2,").replace("(u,", "(u2,").replace("y = Mul(h, k)", "z = Mul(h, k2)")
    text = f"{MASKS['less, divided'].replace('y =', 'v =')}\nu2 = RandomUniformLike(e)\n{second}\ny = Sub(v, z)"
    graph = build_training_graph(model_of(text), GraphSettings(loss="mse"))
    feeds = {"x": np.ones((64, 3), np.float32), "target": np.zeros((64, 3), np.float32)}
    (y,) = session(graph.model).run(["y"], feeds | graph.spec.views(graph.initial))
    assert (y != 0).any()
