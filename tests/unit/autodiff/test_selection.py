"""Which parameters are trained: patterns, frozen parameters, and hints of an exporter."""

import numpy as np
import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import Reference, assert_slopes, forward, numbers, run, squares
from tests.support.models.small_models import KIND, MSE, dense, edited, frozen, model, names, noted, refused


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["w1", "b1", "w2", "b2"]),
        ({"train": ("w2", "b2")}, ["w2", "b2"]),
        ({"freeze": ("w1", "b1")}, ["w2", "b2"]),
        ({"train": ("*2",)}, ["w2", "b2"]),
        ({"train": ("w*", "b*"), "freeze": ("b?",)}, ["w1", "w2"]),
        ({"train": ("w[1]",)}, ["w1"]),
        ({"output": "h"}, ["w1", "b1"]),
        ({"output": "a", "train": ("*",)}, ["w1", "b1"]),
    ],
)
def test_patterns_choose_what_is_trained_and_the_rest_is_constant(settings, expected):
    data = model()
    graph = build_training_graph(data, GraphSettings(loss="mse", **settings))
    assert names(graph) == expected
    constants = {entry.name for entry in onnx.load_model_from_string(graph.model).graph.initializer}
    assert not constants.intersection(expected)
    if "output" not in settings:
        assert set(dense()) - set(expected) <= constants
        x, target = numbers((4, 4), 7), numbers((4, 3), 8)
        found = run(graph, {"x": x, "target": target})
        assert_slopes({name: found[f"{name}.grad"] for name in expected}, Reference(data), x,
                      lambda y: squares(y, target))  # fmt: skip


def test_what_is_frozen_is_not_differentiated():
    head = build_training_graph(model(), GraphSettings(train=("*2",)))
    assert all("::Relu" not in node.name and "gradient/a" not in node.name
               for node in onnx.load_model_from_string(head.model).graph.node)  # fmt: skip


@pytest.mark.parametrize("settings", [{"train": ("v*",)}, {"freeze": ("v*",)}, {"train": ("*", "v*")}])
def test_a_pattern_that_matches_nothing_is_a_mistake(settings):
    with pytest.raises(GraphError, match=r"no parameter matches 'v\*'; the parameters are w1, b1, w2, b2"):
        build_training_graph(model(), GraphSettings(**settings))


def test_nothing_left_to_train_and_nothing_that_reaches_the_output():
    with pytest.raises(GraphError, match="no trained parameter affects output 'y'; no parameter is selected"):
        build_training_graph(model(), GraphSettings(freeze=("*",)))
    with pytest.raises(GraphError, match="no trained parameter affects output 'h'"):
        build_training_graph(model(), GraphSettings(output="h", loss="mse", train=("*2",)))


def test_scalars_whole_numbers_and_infinite_masks_are_no_parameters():
    more = {"t": np.float32(2), "i": np.array([1, 0]), "m": np.float32([[0, -np.inf, 0]])}
    text = "a = Gather<axis=1>(x, i)\nb = Mul(a, t)\nc = Gemm(b, w)\ny = Add(c, m)"
    graph = build_training_graph(model(text, {"w": numbers((2, 3), 1)} | more), MSE)
    assert names(graph) == ["w"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["w2", "b2"]),
        ({"freeze": ("b2",)}, ["w2"]),
        ({"train": ("*",)}, ["w1", "b1", "w2", "b2"]),
        ({"train": ("*1",)}, ["w1", "b1"]),
        ({"train": ("*",), "freeze": ("w?",)}, ["b1", "b2"]),
    ],
)
def test_what_the_file_says_is_frozen_stays_so_unless_train_is_given(settings, expected):
    graph = build_training_graph(frozen("w1", "b1", "gone"), GraphSettings(loss="mse", **settings))
    assert names(graph) == expected
    told = (
        ()
        if "train" in settings
        else ("not trained, because frozen in torch: w1, b1; to train them, name them in train",)
    )
    assert (graph.notes, graph.warnings) == (told, ())


def test_scales_of_quantized_weights_are_no_parameters():
    """They are vectors if each channel has its own."""
    parameters = {"q": np.arange(-10, 10, dtype=np.int8).reshape(4, 5), "s": numbers((5,), positive=True),
                  "z": np.zeros(5, np.int8), "w": numbers((5, 3), 1)}  # fmt: skip
    text = "v = DequantizeLinear<axis=1>(q, s, z)\nh = MatMul(x, v)\ny = MatMul(h, w)"
    assert names(build_training_graph(model(text, parameters), MSE)) == ["w"]


def test_a_name_with_brackets_selects_itself():
    """As a name of JAX or a list of layers has; in a pattern, brackets are alternatives."""
    one, two = "layers[0]['w']", "layers[1]['w']"
    data = edited(model("h = MatMul(x, a)\ny = MatMul(h, b)", {"a": numbers((4, 5)), "b": numbers((5, 3))}),
                  lambda proto: _rename(proto, {"a": one, "b": two}))  # fmt: skip
    assert names(build_training_graph(data, MSE)) == [one, two]
    assert names(build_training_graph(data, GraphSettings(loss="mse", freeze=(one,)))) == [two]
    assert names(build_training_graph(data, GraphSettings(loss="mse", train=(one,)))) == [one]


def _rename(proto, new):
    for tensor in proto.graph.initializer:
        tensor.name = new[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]


def test_a_file_in_which_all_is_frozen():
    refused(
        frozen("w1", "b1", "w2", "b2"),
        r"to train w1, b1, w2, b2, which torch had frozen, set train=\['w1', 'b1', 'w2', 'b2'\]",
    )
    broken = edited(model(), lambda proto: proto.metadata_props.add(key="edgeasync.frozen", value="w1"))
    refused(broken, "the model's metadata 'edgeasync.frozen' is not a list of names")


def test_buffers_and_constants_that_the_exporter_knows_are_not_trained():
    parameters = {"p": numbers((1, 3)), "k": numbers((3,), 3), "c": numbers((3,), 4)}
    data = model("h = Mul(x, p)\na = Add(h, k)\ny = Mul(a, c)", parameters, (3,))
    assert names(build_training_graph(data, MSE)) == ["p", "k", "c"]
    known = noted(data, p=(KIND, "PARAMETER"), k=(KIND, "BUFFER"), c=(KIND, "CONSTANT_TENSOR"))
    assert names(build_training_graph(known, MSE)) == ["p"]


def test_a_scalar_and_an_exponent_are_trained_if_they_are_named_in_full():
    parameters = {"w": numbers((3,), 1), "s": np.float32(2.0), "e": np.float32([3.0])}
    data = forward("h = Mul(x, w)\nr = Relu(h)\nq = Pow(r, e)\ny = Mul(q, s)", parameters, (3,))
    assert names(build_training_graph(data, MSE)) == ["w"]
    graph = build_training_graph(data, GraphSettings(loss="mse", train=("*", "s", "e")))
    assert names(graph) == ["w", "s", "e"]
    found = run(graph, {"x": numbers((8, 3), 2), "target": numbers((8, 3), 3)})
    assert all(np.isfinite(value).all() for value in found.values())  # a rectified base is 0 here and there


@pytest.mark.parametrize(
    ("value", "settings", "trained"),
    [(0.0, {}, False), (0.5, {}, True), (0.0, {"train": ("w", "h0")}, True), (0.0, {"train": ("*",)}, False)],
)
def test_zeros_as_the_initial_state_of_a_recurrent_layer_are_trained_if_they_are_named(value, settings, trained):
    text = "a = Transpose<perm=[1, 0, 2]>(x)\nq, h = RNN<hidden_size=3>(a, w, r, , , h0)\ny = Squeeze(h, zero)"
    parameters = {"w": numbers((1, 3, 4), 1), "r": numbers((1, 3, 3), 2), "zero": np.array([0])}
    parameters["h0"] = np.full((1, 2, 3), value, np.float32)
    graph = build_training_graph(forward(text, parameters, (6, 4), batch=2), GraphSettings(loss="mse", **settings))
    assert ("h0" in names(graph)) == trained


def test_parameters_that_are_all_infinite():
    refused(
        model("y = MatMul(x, w)", {"w": np.full((4, 3), np.inf, np.float32)}), "contain NaN or infinite values"
    )
