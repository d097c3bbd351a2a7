"""Reductions that are replaced by others: values of onnxruntime's operators, and finite differences."""

import numpy as np
import pytest

from tests.support.models.gradients import assert_same_values, check, forward, numbers


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, (1,), (-1, 1), (0,), ()], ids=str)
def test_the_logarithm_of_a_sum(axes, keepdims):
    given = {} if axes is None else {"axes": np.array(axes, np.int64)}
    check(f"y = ReduceLogSum<keepdims={keepdims}>(h{', axes' if given else ''})", (2, 3), given, positive=True)


def test_the_logarithm_of_no_sum():
    axes = {"axes": np.zeros(0, np.int64)}
    check("y = ReduceLogSum<noop_with_empty_axes=1>(h, axes)", (3,), axes, positive=True,
          reference=lambda x, parameters: np.log(x * parameters["p"]))  # fmt: skip


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_a_division_by_a_norm(p, axis):
    def formula(x, parameters):
        h = x * parameters["p"]
        return h / np.linalg.norm(h, p, axis, keepdims=True) * parameters["w"]

    check(f"a = LpNormalization<p={p}, axis={axis}>(h)\ny = Mul(a, w)", (3, 4), {"w": numbers((3, 4), 5)},
          reference=formula)  # fmt: skip
    model = forward(
        f"h = Mul(x, p)\ny = LpNormalization<p={p}, axis={axis}>(h)", {"p": numbers((1, 3, 4))}, (3, 4)
    )
    assert_same_values(model, np.zeros((2, 3, 4), np.float32))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", ["", ", ignore_index=-1", ", ignore_index=0"])
@pytest.mark.parametrize("weights", ["", ", weights"])
@pytest.mark.parametrize("places", [(), (2,)], ids=["one label", "labels at places"])
def test_a_likelihood_inside_a_model(reduction, ignored, weights, places):
    """Of which a function is trained, as of a focal loss."""
    kept = {"weights": np.float32([0.5, 2, 1])} if weights else {}
    check(
        "labels = ArgMin<axis=1, keepdims=0>(x)\ng = LogSoftmax<axis=1>(h)\n"
        f'l = NegativeLogLikelihoodLoss<reduction="{reduction}"{ignored}>(g, labels{weights})\n'
        "e = Exp(l)\nu = Mul(e, l)\ns = ReduceSum<keepdims=0>(u)\ny = Add(h, s)",
        (3, *places),
        kept,
        freeze=tuple(kept),
    )
