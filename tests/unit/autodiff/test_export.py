"""The exported file gives what the trained model predicts: trained values, running statistics, no dropout."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, ModelMismatchError
from tests.support.models.gradients import forward, numbers

X = numbers((5, 3), 1)
STATISTICS = {"mean": numbers((3,), 2), "var": numbers((3,), 3, positive=True)}
NORM = {name: numbers((3,), seed) for seed, name in enumerate(("scale", "shift", "old_mean"), 4)}
NORM["old_var"] = np.ones(3, np.float32)
TRAINED = {"w": numbers((3, 3), 7), "scale": numbers((3,), 8), "shift": numbers((3,), 9)}
TRAINING_MODE = """
    m = MatMul(x, w)
    n, new_mean, new_var = BatchNormalization <training_mode=1, epsilon=0.01> (m, scale, shift, old_mean, old_var)
    training = Constant <value = bool {1}> ()
    ratio = Constant <value = float {0.5}> ()
    y = Dropout(n, ratio, training)
"""


def run(model, x=X, outputs=None):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    return session.run(outputs, {session.get_inputs()[0].name: x})


def export(model, trained):
    """Export, and look at what every export must be."""
    exported = export_model(model, trained)
    before, after = onnx.load_model_from_string(model), onnx.load_model_from_string(exported)
    onnx.checker.check_model(after, full_check=True)
    assert (after.ir_version, after.opset_import) == (before.ir_version, before.opset_import)
    assert [entry.name for entry in after.graph.output] == [entry.name for entry in before.graph.output]
    assert not any(entry.name == "training_mode" for node in after.graph.node for entry in node.attribute)
    return exported


def normed(w, scale, shift, mean, var):
    return (X @ w - mean) / np.sqrt(var + 0.01) * scale + shift


@pytest.mark.parametrize("opset", [14, 17, 18, 20, 22])
def test_a_model_exported_in_training_mode(opset):
    model = forward(TRAINING_MODE, {"w": numbers((3, 3))} | NORM, (3,), opset=opset)
    exported = export(model, TRAINED | {"old_mean": STATISTICS["mean"], "old_var": STATISTICS["var"]})
    (y,) = run(exported)
    np.testing.assert_allclose(y, normed(*TRAINED.values(), *STATISTICS.values()), rtol=1e-5, atol=1e-6)
    assert [node.op_type for node in onnx.load_model_from_string(exported).graph.node] == [
        "MatMul", "BatchNormalization", "Dropout",
    ]  # fmt: skip


def test_opset_13_tells_training_by_the_number_of_outputs():
    model = forward(
        """m = MatMul(x, w)
        y, a, b, c, d = BatchNormalization <epsilon = 0.01> (m, scale, shift, old_mean, old_var)""",
        {"w": numbers((3, 3))} | NORM, (3,), opset=13,
    )  # fmt: skip
    (y,) = run(export(model, TRAINED | {"old_mean": STATISTICS["mean"], "old_var": STATISTICS["var"]}))
    np.testing.assert_allclose(y, normed(*TRAINED.values(), *STATISTICS.values()), rtol=1e-5, atol=1e-6)


def test_a_result_that_only_training_gives_stays_what_it_was():
    model = onnx.load_model_from_string(forward(TRAINING_MODE, {"w": numbers((3, 3))} | NORM, (3,)))
    model.graph.output.append(helper.make_tensor_value_info("new_mean", TensorProto.FLOAT, [3]))
    _, mean = run(export(model.SerializeToString(), TRAINED | {"old_mean": STATISTICS["mean"]}))
    np.testing.assert_array_equal(mean, STATISTICS["mean"])


NORMED = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
)
LAYERS = {
    "normed": (NORMED, (1, 6, 6)),
    "recurrent": (nn.Sequential(nn.GRU(4, 5), nn.Linear(5, 3)), (6, 4)),
    "tokens": (nn.Sequential(nn.Embedding(9, 4), nn.MeanOverTime(), nn.Linear(4, 3)), (5,)),
}


@pytest.mark.parametrize(("layers", "shape"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("train", [("*",), ("*.weight", "*.bias")], ids=["all", "some"])
def test_what_was_trained_is_what_predicts(layers, shape, train):
    """The same as the forward model with the values put in by hand; its batch norms are in inference mode."""
    model = nn.to_onnx(layers, shape).SerializeToString()
    graph = build_training_graph(model, GraphSettings(train=train))
    moved = graph.initial + 0.1 * np.abs(numbers(graph.spec.length))
    by_hand = onnx.load_model_from_string(model)
    for entry in by_hand.graph.initializer:
        if entry.name in graph.spec.views(moved):
            entry.CopyFrom(numpy_helper.from_array(graph.spec.views(moved)[entry.name], entry.name))
    x = numbers((4, *shape)) if layers.input_type == "float32" else np.arange(20).reshape(4, 5) % 9
    x = x.astype(np.int64) if layers is LAYERS["tokens"][0] else x.astype(np.float32)
    np.testing.assert_array_equal(
        run(export(model, graph.spec.views(moved)), x)[0], run(by_hand.SerializeToString(), x)[0]
    )


SHARED = "h = MatMul(x, w)\nb = Identity(a)\nc = Identity(b)\nha = Add(h, a)\nhb = Mul(ha, b)\ny = Sub(hb, c)"


@pytest.mark.parametrize("changed", [{"a"}, {"b"}, {"c"}, {"a", "c"}, {"a", "b", "c"}, set()])
def test_values_that_an_exporter_shared_go_their_own_ways(changed):
    model = forward(SHARED, {"w": numbers((3, 3)), "a": np.ones(3, np.float32)}, (3,))
    values = {name: numbers(3, ord(name)) if name in changed else np.ones(3, np.float32) for name in "abc"}
    (y,) = run(export(model, {name: values[name] for name in changed}))
    expected = (X @ numbers((3, 3)) + values["a"]) * values["b"] - values["c"]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_values_that_are_tied_stay_tied():
    tied = numbers(3)
    model = forward("b = Identity(a)\nh = Add(x, a)\ny = Mul(h, b)", {"a": tied}, (3,))
    (y,) = run(export(model, {"a": 2 * tied}))
    np.testing.assert_allclose(y, (X + 2 * tied) * 2 * tied, rtol=1e-6)


def test_several_outputs_and_graphs_inside():
    """A constant that only the body of an If reads is still read."""

    def branch(name, op):
        nodes = [helper.make_node(op, ["h", "two"], [name])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    model = onnx.load_model_from_string(forward("h = Mul(x, w)\ny = Relu(h)", {"w": numbers(3)}, (3,)))
    model.graph.node.extend([
        parser.parse_node("two = Constant <value = float {2.0}> ()"),
        parser.parse_node("yes = Constant <value = bool {1}> ()"),
        helper.make_node(
            "If", ["yes"], ["z"], then_branch=branch("then", "Mul"), else_branch=branch("else", "Add")
        ),
    ])  # fmt: skip
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 3]))
    w = numbers(3, 5)
    y, z = run(export(model.SerializeToString(), {"w": w}))
    np.testing.assert_allclose(y, np.maximum(X * w, 0), rtol=1e-6)
    np.testing.assert_allclose(z, 2 * X * w, rtol=1e-6)


@pytest.mark.parametrize(
    ("trained", "error", "words"),
    [
        ({"v": np.ones(3, np.float32)}, ModelMismatchError, "'v' is not a parameter"),
        ({"w": np.ones(4, np.float32)}, ModelMismatchError, r"'w' .* shape \(4,\).* shape \(3,\)"),
        ({"w": np.ones(3)}, ModelMismatchError, "'w' is float64 .* float32"),
        ({"w": np.array([1, np.nan, 1], np.float32)}, GraphError, "'w' .* not finite"),
    ],
)
def test_values_that_are_not_the_models(trained, error, words):
    with pytest.raises(error, match=words):
        export_model(forward("y = Mul(x, w)", {"w": numbers(3)}, (3,)), trained)


def test_a_file_that_is_no_forward_model():
    graph = build_training_graph(forward("y = Mul(x, w)", {"w": numbers(3)}, (3,)), GraphSettings(loss="mse"))
    with pytest.raises(GraphError, match="training graph"):
        export_model(graph.model, {})
    with pytest.raises(GraphError, match="not a readable"):
        export_model(b"\x00nothing", {})


def test_metadata_is_added_to_the_models_own_and_wins_over_it():
    model = onnx.load_model_from_string(forward("y = MatMul(x, w)", {"w": numbers((3, 3))}, (3,)))
    helper.set_model_props(model, {"maker": "torch", "edgeasync.version": "1"})
    trained = {"w": numbers((3, 3), 7)}
    exported = export_model(model.SerializeToString(), trained, {"edgeasync.version": "42"})
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == {"maker": "torch", "edgeasync.version": "42"}
    again = onnx.load_model_from_string(export_model(model.SerializeToString(), trained))
    assert {entry.key: entry.value for entry in again.metadata_props} == {
        "maker": "torch",
        "edgeasync.version": "1",
    }
