"""Gradients of reductions and of softmax against finite differences."""

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import check, forward, numbers, run

REDUCTIONS = [
    "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
]  # fmt: skip


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [(1,), (-1,), (1, 3), (3, 1), (0,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_axes_as_an_input(op, keepdims, axes):
    check(f"a = Mul(h, w)\ny = {op}<keepdims={keepdims}>(a, axes)", (2, 3, 4),
          {"axes": np.array(axes), "w": numbers((2, 1, 4), 3)})  # fmt: skip


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", ["", "axes"])
def test_no_axes_are_all_of_them(op, keepdims, axes):
    more = f"a, {axes}" if axes else "a"
    parameters = {"w": 3.0 + numbers((2, 3), 3)}  # a product of all must not be tiny
    if axes:
        parameters[axes] = np.zeros(0, np.int64)
    check(f"a = Mul(h, w)\ny = {op}<keepdims={keepdims}>({more})", (2, 3), parameters)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_or_none_where_the_model_says_so(op):
    parameters = {"axes": np.zeros(0, np.int64)}
    check(f"y = {op}<noop_with_empty_axes=1>(h, axes)", (2, 3), parameters)


def test_a_length_of_0_has_the_gradient_0():
    model = forward("h = Mul(x, w)\nn = ReduceL2(h, axes)\ny = Add(n, b)",
                    {"w": numbers((3,), 1), "b": numbers((1,), 2), "axes": np.array([1])}, (3,))  # fmt: skip
    graph = build_training_graph(model, GraphSettings(loss="mse"))
    found = run(graph, {"x": np.zeros((2, 3), np.float32), "target": np.ones((2, 1), np.float32)})
    np.testing.assert_array_equal(found["w.grad"], 0)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("opset", [11, 12, 13, 17])
def test_axes_as_an_attribute_of_an_older_opset(op, opset):
    """ReduceSum took them as an input from opset 13 on, the others from 18."""
    if op == "ReduceSum" and opset >= 13:
        check("y = ReduceSum<keepdims=0>(h, axes)", (2, 3), {"axes": np.array([-1])}, opset=opset)
    else:
        check(f"y = {op}<axes=[-1], keepdims=0>(h)", (2, 3), opset=opset)


@pytest.mark.parametrize(("op", "best"), [("ReduceMax", 2.0), ("ReduceMin", -2.0)])
def test_values_that_tie_share_the_gradient(op, best):
    parameters = {"p": np.float32([[best, 0, best, best / 2]]), "axes": np.array([1])}
    graph = build_training_graph(
        forward(f"h = Mul(x, p)\ny = {op}(h, axes)", parameters, (4,)), GraphSettings(loss="mse")
    )
    found = run(graph, {"x": np.ones((1, 4), np.float32), "target": np.float32([[0.0]])})
    np.testing.assert_allclose(found["p.grad"], [[best, 0, best, 0]])


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [None, 1, 2, -1, -2, 0])
def test_softmax(op, axis):
    attribute = "" if axis is None else f"<axis={axis}>"
    check(f"a = {op}{attribute}(h)\ny = Mul(a, w)", (3, 4), {"w": numbers((3, 4), 5)})


@pytest.mark.parametrize("axis", [1, 2])
def test_softmax_of_an_old_opset_is_over_all_axes_from_its_own(axis):
    def formula(x, parameters):
        h = x * parameters["p"]
        powers = np.exp(h)
        return powers / powers.sum(axis=tuple(range(axis, 3)), keepdims=True) * parameters["w"]

    check(f"a = Softmax<axis={axis}>(h)\ny = Mul(a, w)", (3, 4), {"w": numbers((3, 4), 5)}, opset=11,
          reference=formula)  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", ["", ", ignore_index=-100", ", ignore_index=0"])
@pytest.mark.parametrize("weights", ["", ", weights"])
@pytest.mark.parametrize("places", [(), (2,)], ids=["one label", "labels at places"])
def test_a_cross_entropy_inside_a_model(reduction, ignored, weights, places):
    """Of which a function is trained, as of a focal loss."""
    kept = {"weights": np.float32([0.5, 2, 1])} if weights else {}
    check(
        "labels = ArgMin<axis=1, keepdims=0>(x)\n"
        f'l = SoftmaxCrossEntropyLoss<reduction="{reduction}"{ignored}>(h, labels{weights})\n'
        "e = Exp(l)\nu = Mul(e, l)\ns = ReduceSum<keepdims=0>(u)\ny = Add(h, s)",
        (3, *places),
        kept,
        freeze=tuple(kept),
    )


@pytest.mark.parametrize(
    ("values", "slopes"), [([2, 3, 4], [12, 8, 6]), ([2, 0, 4], [0, 8, 0]), ([0, 0, 4], [0] * 3)]
)
def test_products_of_zeros(values, slopes):
    parameters = {"p": np.float32([values]), "axes": np.array([1])}
    graph = build_training_graph(
        forward("h = Mul(x, p)\ny = ReduceProd(h, axes)", parameters, (3,)), GraphSettings(loss="mse")
    )
    found = run(graph, {"x": np.ones((1, 3), np.float32), "target": np.float32([[np.prod(values) - 0.5]])})
    np.testing.assert_allclose(found["p.grad"], [slopes])
