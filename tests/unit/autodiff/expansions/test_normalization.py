"""Normalizations that are replaced: values of onnxruntime's operators, and finite differences."""

import numpy as np
import pytest
from onnx import TensorProto

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import assert_same_values, check, forward, numbers, run
from tests.support.models.small_models import names, refused


def normalized(x, axes, epsilon):
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon)


@pytest.mark.parametrize("opset", [21, 23])
@pytest.mark.parametrize("x", [(6,), (6, 4), (6, 2, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_group_norm(opset, x, groups):
    def formula(x, parameters):
        h = x * parameters["p"]
        apart = normalized(h.reshape(len(h), groups, -1), 2, 0.01).reshape(len(h), 6, -1)
        return (apart * parameters["w"][:, None] + parameters["b"][:, None]).reshape(h.shape)

    graph = check(f"y = GroupNormalization<num_groups={groups}, epsilon=0.01>(h, w, b)", x,
                  {"w": numbers((6,), 5), "b": numbers((6,), 6)}, opset=opset,
                  reference=formula)  # fmt: skip
    assert names(graph) == ["p", "w", "b"]


def test_a_group_norm_whose_scale_is_per_group():
    model = forward("h = Mul(x, p)\ny = GroupNormalization<num_groups=2>(h, w, b)",
                    {"p": numbers((1, 6)), "w": numbers((2,)), "b": numbers((2,))}, (6,), opset=20)  # fmt: skip
    refused(model, "GroupNormalization is deprecated in domain_version of 20; export the model again")


@pytest.mark.parametrize("axis", [-1, 1, 2])
@pytest.mark.parametrize("wide", [True, False])
def test_a_division_by_the_root_of_the_mean_square(axis, wide):
    inner = (4, 5)[axis - 1 if axis > 0 else axis :]

    def formula(x, parameters):
        h = x * parameters["p"]
        axes = tuple(range(axis % 3, 3))
        return h / np.sqrt((h**2).mean(axes, keepdims=True) + 0.001) * parameters["w"]

    check(f"y = RMSNormalization<axis={axis}, epsilon=0.001>(h, w)", (4, 5),
          {"w": numbers(inner if wide else inner[-1:], 5)}, opset=23, reference=formula)  # fmt: skip


@pytest.mark.parametrize("axes", [None, [2, 3], [1], [-1, 0]], ids=str)
def test_mean_and_variance(axes):
    def formula(x, parameters):
        return normalized(x * parameters["p"], tuple(axes or [0, 2, 3]), 0.0) * parameters["w"]

    attribute = f"<axes={axes}>" if axes else ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.models.gradients.ALONE", (3,))  # of one value there is no deviation
        check(f"a = MeanVarianceNormalization{attribute}(h)\ny = Mul(a, w)", (3, 4, 2),
              {"w": numbers((3, 4, 2), 5)}, reference=formula)  # fmt: skip


def test_where_all_values_are_the_same_the_variance_has_the_gradient_0():
    model = forward("h = Mul(x, p)\ny = MeanVarianceNormalization<axes=[2, 3]>(h)",
                    {"p": np.full((1, 3, 1, 1), 0.5, np.float32)}, (3, 2, 2))  # fmt: skip
    graph = build_training_graph(model, GraphSettings(loss="mse", train=("*",)))
    ones = np.ones((2, 3, 2, 2), np.float32)
    found = run(graph, {"x": ones, "target": ones})
    np.testing.assert_array_equal(found["y"], 0)  # onnxruntime's own is NaN
    np.testing.assert_array_equal(found["p.grad"], 0)


SKIPPED = {"g": numbers((5,), 5), "b": numbers((5,), 6), "c": numbers((5,), 7), "s": numbers((4, 5), 8)}


@pytest.mark.parametrize("skip", ["s", "h"])
@pytest.mark.parametrize(("more", "bias"), [("", ""), (", b", ""), (", b, c", "c"), (", , c", "c")])
def test_a_layer_norm_of_a_sum(more, bias, skip):
    def formula(x, parameters):
        h = x * parameters["p"]
        total = h + (parameters["s"] if skip == "s" else h) + (parameters["c"] if bias else 0)
        return normalized(total, 2, 0.001) * parameters["g"] + (parameters["b"] if ", b" in more else 0) + total

    used = {name: value for name, value in SKIPPED.items() if name in f"g, {skip}{more}"}
    check(f"a, m, i, t = com.microsoft.SkipLayerNormalization<epsilon=0.001>(h, {skip}, g{more})\ny = Add(a, t)",
          (4, 5), used, reference=formula)  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_a_simplified_layer_norm_of_a_sum(bias):
    def formula(x, parameters):
        total = x * parameters["p"] + parameters["s"] + (parameters["c"] if bias else 0)
        return total / np.sqrt((total**2).mean(2, keepdims=True) + 0.001) * parameters["g"] + total

    used = {name: value for name, value in SKIPPED.items() if name in ("gsc" if bias else "gs")}
    check("a, m, i, t = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.001>"
          f"(h, s, g{', c' if bias else ''})\ny = Add(a, t)", (4, 5), used, reference=formula)  # fmt: skip


def test_other_outputs_that_are_used_are_refused():
    text = "h = Mul(x, p)\na, m = com.microsoft.SkipLayerNormalization(h, h, g)\ny = Add(a, m)"
    why = (
        r"\(SkipLayerNormalization|the SkipLayerNormalization that computes 'a' cannot be written with "
        "operators that have a gradient: its output 1, 'm', is used; export the model without that output"
    )
    refused(forward(text, {"p": numbers((1, 4)), "g": numbers((4,))}, (4,)), why)


TABLES = {"words": numbers((7, 5), 1), "places": numbers((6, 5), 2), "kinds": numbers((2, 5), 3),
          "g": numbers((5,), 4), "b": numbers((5,), 5)}  # fmt: skip


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kinds", [True, False])
@pytest.mark.parametrize("positions", ["", "positions"])
def test_embeddings_of_words_positions_and_segments(trained, kinds, positions):
    """Indices of words are data, from which the model computes the rest."""
    text = (
        "words32 = Cast<to=6>(x)\nmask = Cast<to=6>(x)\none = Cast<to=6>(u)\nsegments = Min(words32, one)\n"
        "positions = Add(segments, segments)\n"
        f"e, k = com.microsoft.EmbedLayerNormalization<epsilon=0.001>(words32, {'segments' if kinds else ''}, "
        f"words, places, {'kinds' if kinds else ''}, g, b, mask, {positions})\n"
        "f = Cast<to=1>(k)\nr = Unsqueeze(f, axes)\nz = Add(e, r)\ny = Mul(z, p)"
    )
    parameters = TABLES | {"p": numbers((4, 5), 6), "axes": np.array([1, 2]), "u": np.array([1])}
    if not kinds:
        del parameters["kinds"]
    model = forward(text, parameters, (4,), kind=TensorProto.INT64)
    x = np.array([[0, 1, 2, 1], [6, 1, 0, 0], [1, 1, 1, 1]])
    settings = {} if trained else {"train": ("p",)}
    graph = assert_same_values(model, x, **settings)
    target = numbers((3, 4, 5), 9)
    found = run(graph, {"x": x, "target": target})
    if not trained:
        assert names(graph) == ["p"]
        return

    def loss(values):
        segments = np.minimum(x, 1)
        total = values["words"][x] + (values["places"][2 * segments] if positions else values["places"][:4])
        if kinds:
            total = total + values["kinds"][segments]
        y = normalized(total, 2, 0.001) * values["g"] + values["b"] + (x == 1).sum(1)[:, None, None]
        return ((y * values["p"] - target) ** 2).mean()

    exact = {name: value.astype(np.float64) for name, value in parameters.items()}
    for name in names(graph):
        way = numbers(exact[name].shape, 11).astype(np.float64)
        ahead, behind = (loss(exact | {name: exact[name] + sign * 1e-6 * way}) for sign in (1, -1))
        assert (found[f"{name}.grad"] * way).sum() == pytest.approx((ahead - behind) / 2e-6, rel=1e-4, abs=1e-6)


def test_a_model_in_double_precision():
    text = "h = Mul(x, p)\na = Cast<to=11>(h)\nb = RMSNormalization(a, w)\ny = Cast<to=1>(b)"
    model = forward(text, {"p": numbers((1, 4)), "w": np.ones(4, np.float64)}, (4,), opset=23)
    refused(model, "computes in float64, but only float32 can be trained; export the model in float32")
