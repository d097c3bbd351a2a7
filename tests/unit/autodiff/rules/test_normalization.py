"""Gradients of normalizations against finite differences, and what becomes of running statistics."""

import numpy as np
import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import BATCH, check, forward, numbers, run


def norm(channels=3, seed=20):
    return {
        "scale": numbers((channels,), seed, positive=True),
        "bias": numbers((channels,), seed + 1),
        "mean": numbers((channels,), seed + 2),
        "var": numbers((channels,), seed + 3, positive=True),
    }


BATCH_NORM = "h = Tanh(a)\ny = BatchNormalization<{}>(h, scale, bias, mean, var)"
"""After a bend: it takes no notice of how large its input is, and all that is left of the gradient is rounding."""
BEFORE = "a = Mul(x, p)"


def normalized(x, parameters, epsilon=1e-5, *, frozen=False):
    h = np.tanh(x * parameters["p"])
    axes = tuple(axis for axis in range(h.ndim) if axis != 1)
    wide = (-1, *[1] * (h.ndim - 2))
    mean = parameters["mean"].reshape(wide) if frozen else h.mean(axes, keepdims=True)
    var = parameters["var"].reshape(wide) if frozen else h.var(axes, keepdims=True)
    return (h - mean) / np.sqrt(var + epsilon) * parameters["scale"].reshape(wide) + parameters["bias"].reshape(
        wide
    )


@pytest.mark.parametrize("x", [(3,), (3, 5), (3, 4, 5), (3, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_a_trained_batch_norm_normalizes_by_the_batch_and_moves_its_statistics(x, epsilon):
    """Of a batch of one or two the deviation is 0 or all there is, and the gradient is rounding: not asked for."""
    attributes = f"epsilon={epsilon}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.models.gradients.ALONE", (3,))
        graph = check(BATCH_NORM.format(attributes), x, norm(), before=BEFORE, compared=False,
                      reference=lambda x, parameters: normalized(x, parameters, epsilon))  # fmt: skip
    assert [(entry.name, entry.role) for entry in graph.spec.parameters] == [
        ("p", "trained"), ("scale", "trained"), ("bias", "trained"), ("mean", "statistic"), ("var", "statistic"),
    ]  # fmt: skip


@pytest.mark.parametrize("momentum", [None, 0.9, 0.7])
@pytest.mark.parametrize("mode", [0, 1])
def test_statistics_move_by_the_momentum_and_the_variance_is_unbiased(momentum, mode):
    parameters = norm() | {"p": numbers((1, 3, 4), 1)}
    attributes = f"training_mode={mode}" + (f", momentum={momentum}" if momentum else "")
    outputs = "y, m, v" if mode else "y"
    text = f"h = Mul(x, p)\n{outputs} = BatchNormalization<{attributes}>(h, scale, bias, mean, var)"
    graph = build_training_graph(forward(text, parameters, (3, 4)), GraphSettings(loss="mse"))
    keep = momentum or 0.9
    for rows in (1, 5):
        x = numbers((rows, 3, 4), 2)
        h = (x * parameters["p"]).astype(np.float64)
        found = run(graph, {"x": x, "target": x}, 2)
        np.testing.assert_allclose(
            found["mean.new"], keep * parameters["mean"] + (1 - keep) * h.mean((0, 2)), rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            found["var.new"], keep * parameters["var"] + (1 - keep) * h.var((0, 2), ddof=1), rtol=1e-4, atol=1e-6
        )


def test_a_batch_of_one_value_has_no_variance_to_learn_from():
    parameters = norm() | {"p": numbers((1, 3), 1)}
    text = ("h = Mul(x, p)\na = BatchNormalization(h, scale, bias, mean, var)\n"
            "y = BatchNormalization(a, scale, bias, mean, var)")  # fmt: skip
    graph = build_training_graph(forward(text, parameters, (3,)), GraphSettings(loss="mse"))
    x = numbers((1, 3), 2)
    found = run(graph, {"x": x, "target": x})
    np.testing.assert_array_equal(found["var.new"], parameters["var"])
    assert all(np.isfinite(array).all() for array in found.values())
    mean = 0.9 * (0.9 * parameters["mean"] + 0.1 * (x * parameters["p"])[0]) + 0.1 * parameters["bias"]
    np.testing.assert_allclose(found["mean.new"], mean, rtol=1e-4)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("x", [(3,), (3, 4, 2)], ids=str)
def test_a_frozen_batch_norm_uses_what_is_stored(mode, x):
    outputs = "y, m, v" if mode else "y"
    text = f"h = Tanh(a)\n{outputs} = BatchNormalization<training_mode={mode}>(h, scale, bias, mean, var)"
    graph = check(text, x, norm(), before=BEFORE, compared=False,
                  freeze=("scale", "bias", "mean", "var"),
                  reference=lambda x, parameters: normalized(x, parameters, frozen=True))  # fmt: skip
    assert [entry.name for entry in graph.spec.parameters] == ["p"]


@pytest.mark.parametrize("frozen", ["scale", "bias"])
def test_a_batch_norm_of_which_a_part_is_trained_is_live(frozen):
    graph = check(BATCH_NORM.format("epsilon=0.1"), (3, 4), norm(), before=BEFORE, compared=False,
                  freeze=(frozen,), reference=lambda x, parameters: normalized(x, parameters, 0.1))  # fmt: skip
    assert {"mean", "var"} <= {entry.name for entry in graph.spec.parameters}


def test_a_batch_norm_before_everything_that_is_trained():
    """Its statistics move if it is asked for, although nothing depends on the gradient of its input."""
    text = "b = BatchNormalization(x, scale, bias, mean, var)\ny = Mul(b, p)"
    graph = build_training_graph(
        forward(text, norm() | {"p": numbers((1, 3, 4))}, (3, 4)), GraphSettings(loss="mse")
    )
    x = numbers((BATCH, 3, 4), 2)
    found = run(graph, {"x": x, "target": x})
    assert {"p.grad", "scale.grad", "bias.grad", "mean.new", "var.new", "loss", "loss_weight", "y"} == set(found)


def test_two_batch_norms_that_share_their_statistics_move_them_twice():
    parameters = norm() | {"p": numbers((1, 3), 1)}
    text = ("h = Mul(x, p)\na = BatchNormalization(h, scale, bias, mean, var)\n"
            "b = BatchNormalization(x, scale, bias, mean, var)\ny = Add(a, b)")  # fmt: skip
    graph = build_training_graph(forward(text, parameters, (3,)), GraphSettings(loss="mse"))
    x = numbers((5, 3), 2)
    found = run(graph, {"x": x, "target": x})
    mean = 0.9 * (0.9 * parameters["mean"] + 0.1 * (x * parameters["p"]).mean(0)) + 0.1 * x.mean(0)
    np.testing.assert_allclose(found["mean.new"], mean, rtol=1e-4)


@pytest.mark.parametrize("axis", [-1, 2, 1, -2])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_layer_norm(axis, bias):
    inner = (4, 5)[axis - 1 if axis > 0 else axis :]
    parameters = {"w": numbers(inner, 5)} | ({"b": numbers(inner, 6)} if bias else {})
    check(f"y = LayerNormalization<axis={axis}, epsilon=0.001>(h, w{', b' if bias else ''})", (4, 5), parameters)


def wide_norm(x, parameters):
    h = x * parameters["p"]
    centred = h - h.mean((1, 2), keepdims=True)
    return centred / np.sqrt((centred**2).mean((1, 2), keepdims=True) + 1e-5) * parameters["w"] + parameters["b"]


def test_layer_norm_with_a_scale_that_is_broadcast():
    check("y = LayerNormalization<axis=1>(h, w, b)", (4, 5), {"w": numbers((5,), 5), "b": numbers((4, 1), 6)},
          reference=wide_norm)  # fmt: skip


def test_other_outputs_of_a_layer_norm_that_are_read_are_refused():
    text = "h = Mul(x, p)\na, m = LayerNormalization(h, w)\ny = Mul(a, m)"
    with pytest.raises(GraphError, match="LayerNormalization"):
        build_training_graph(
            forward(text, {"p": numbers((1, 4)), "w": numbers((4,))}, (4,)), GraphSettings(loss="mse")
        )


@pytest.mark.parametrize("x", [(3, 5), (3, 4, 5), (2, 2, 3, 2)], ids=str)
def test_instance_norm(x):
    parameters = {"w": numbers(x[:1], 5), "b": numbers(x[:1], 6)}
    check("y = InstanceNormalization<epsilon=0.01>(h, w, b)", x, parameters)


def test_a_group_norm_as_torch_writes_it():
    parameters = {"s": np.array([0, 2, -1]), "w": numbers((2,), 5), "b": numbers((2,), 6),
                  "u": numbers((4, 1, 1), 7), "v": numbers((4, 1, 1), 8)}  # fmt: skip
    check("a = Reshape(h, s)\nb1 = InstanceNormalization(a, w, b)\nn = Shape(h)\nc = Reshape(b1, n)\n"
          "d = Mul(c, u)\ny = Add(d, v)", (4, 3, 2), parameters)  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)], ids=str)
def test_responses_of_neighbouring_channels(size, sizes):
    def formula(x, parameters):
        h = x * parameters["p"]
        wide = np.pad(h**2, [(0, 0), (size // 2, size // 2), *[(0, 0)] * len(sizes)])
        near = sum(wide[:, place : place + h.shape[1]] for place in range(size))
        return h / (2.0 + 0.3 / size * near) ** 0.6

    text = f"y = LRN<size={size}, alpha=0.3, beta=0.6, bias=2.0>(h)"
    check(text, (5, *sizes), reference=formula)


def test_another_batch_norm_adds_few_nodes():
    """Each node needs time in every step and at the start. Statistics are updated for all norms at once."""

    def count(norms):
        parameters, lines = {"p": numbers((1, 3, 4))}, ["h0 = Mul(x, p)"]
        for place in range(norms):
            names = [f"{name}{place}" for name in norm()]
            parameters |= zip(names, norm().values(), strict=True)
            lines.append(f"h{place + 1} = BatchNormalization(h{place}, {', '.join(names)})")
        lines.append(f"y = Tanh(h{norms})")
        model = forward("\n".join(lines), parameters, (3, 4))
        graph = onnx.load_model_from_string(build_training_graph(model, GraphSettings(loss="mse")).model).graph
        return len(graph.node)

    assert count(5) - count(4) <= 22
