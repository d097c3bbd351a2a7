"""Files that real exporters and onnxruntime's real optimizer wrote train as told; what changed is told."""

import io

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch")
skl2onnx = pytest.importorskip("skl2onnx")
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import edgeasync
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.producers import kind_of_producer
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.exported import keras_gru
from tests.support.models.followed import assert_trains, examples, follow
from tests.support.models.gradients import numbers, run, session

pytestmark = pytest.mark.filterwarnings("ignore")  # of exporters, and of fits that are stopped early

X, LABELS = numbers((60, 4), 1), np.arange(60) % 3


def scikit_learn(estimator, targets, **options):
    estimator.fit(X, targets)
    return skl2onnx.to_onnx(estimator, X[:1], options=options or None, target_opset=18)


@pytest.mark.parametrize("before", [[], [StandardScaler()]])
@pytest.mark.parametrize("zipmap", [True, False])
def test_a_network_of_scikit_learn(zipmap, before):
    """Its loss and its gradients are those of the estimator's probabilities."""
    estimator = make_pipeline(*before, MLPClassifier((8,), max_iter=3, random_state=0))
    model = scikit_learn(estimator, LABELS, zipmap=zipmap)
    graph, settings, refusals = follow(model.SerializeToString())
    assert (settings, refusals) == ({}, [])
    assert any("trains the scores before it, 'add_result1'" in said for said in graph.notes)
    assert_trains(graph)
    feeds = examples(graph)
    expected = -np.log(estimator.predict_proba(feeds["X"])[np.arange(16), feeds["target"]]).mean()
    np.testing.assert_allclose(run(graph, feeds)["loss"], expected, rtol=1e-5)


def test_a_yes_or_no_network_of_scikit_learn():
    model = scikit_learn(MLPClassifier((8,), max_iter=3, random_state=0), LABELS > 0, zipmap=False)
    graph, settings, _ = follow(model.SerializeToString())
    assert settings["loss"] == "bce_with_logits"
    assert_trains(graph)


def test_several_yes_or_no_answers_of_scikit_learn():
    targets = np.stack([LABELS > 0, LABELS > 1], 1).astype(int)
    model = scikit_learn(MLPClassifier((8,), max_iter=3, random_state=0), targets)
    graph, settings, refusals = follow(model.SerializeToString())
    assert len(refusals) == 1
    assert settings["loss"] == "bce_with_logits"
    assert_trains(graph)


def test_a_regression_of_scikit_learn():
    model = scikit_learn(MLPRegressor(hidden_layer_sizes=(8,), max_iter=3, random_state=0), X[:, 0])
    assert_trains(build_training_graph(model.SerializeToString(), GraphSettings(loss="mse")), rate=0.01)


@pytest.mark.parametrize("zipmap", [True, False])
def test_an_operator_of_scikit_learn(zipmap):
    model = scikit_learn(LogisticRegression(), LABELS, zipmap=zipmap).SerializeToString()
    told = (
        r"\(LinearClassifier\): operators of the domain 'ai.onnx.ml'.* train an SGDClassifier .*edgeasync.sklearn"
    )
    with pytest.raises(AssertionError, match=told):
        follow(model)
    estimator = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01)
    instead = edgeasync.sklearn.model(estimator, features=4, classes=3)
    assert edgeasync.train(instead, (X, LABELS), until=edgeasync.Stop(updates=5)).updates >= 5


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
        self.second, self.head = torch.nn.LayerNorm(6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.second(torch.nn.functional.gelu(self.norm(self.first(x)))))


def exported(module, *, dynamo):
    options = {"dynamo": True, "optimize": False, "external_data": False, "verbose": False,
               "dynamic_shapes": ({0: torch.export.Dim("batch")},)}  # fmt: skip
    if not dynamo:
        options = {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False,
                   "opset_version": 18, "input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}  # fmt: skip
    target = io.BytesIO()
    torch.onnx.export(module.train(), (torch.ones(4, 6) * 3 + torch.randn(4, 6),), target, **options)
    return target.getvalue()


@pytest.mark.parametrize("dynamo", [True, False])
def test_tracing_that_moves_running_statistics_is_told_and_only_that(dynamo):
    torch.manual_seed(0)
    module = Block()
    content = exported(module, dynamo=dynamo)
    model = onnx.load_model_from_string(content)
    assert kind_of_producer(model) == ("dynamo" if dynamo else "torchscript")
    graph = build_training_graph(content, GraphSettings())
    moved = bool(graph.spec.views(graph.initial)["norm.running_mean"].any())
    assert moved == (not dynamo)
    assert ["so the running statistics" in said for said in graph.warnings] == [True] * moved
    assert_trains(graph)


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
def test_a_file_that_onnxruntime_optimized(level, tmp_path):
    torch.manual_seed(0)
    torch.onnx.export(
        torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.LayerNorm(6),
                            torch.nn.Linear(6, 3)),
        (torch.randn(4, 6),), str(tmp_path / "plain.onnx"), dynamo=False, opset_version=18, input_names=["x"],
        do_constant_folding=False, dynamic_axes={"x": {0: "batch"}},
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(tmp_path / "plain.onnx", options, providers=["CPUExecutionProvider"])
    model = onnx.load(tmp_path / "optimized.onnx")
    assert kind_of_producer(model) == "onnxruntime"
    graph, settings, refusals = follow(model.SerializeToString())
    assert "use the original file, before onnxruntime optimized it" in refusals[0]
    assert settings["freeze"]
    assert_trains(graph)
    feeds = examples(graph)
    (scores,) = session(model.SerializeToString()).run(None, {"x": feeds["x"]})
    shifted = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    expected = -shifted[np.arange(16), feeds["target"]].mean()
    np.testing.assert_allclose(run(graph, feeds)["loss"], expected, rtol=1e-4)


def test_a_recurrent_layer_of_keras():
    """tf2onnx writes a loop that ends by a condition. Keras orders the gates z, r, h, and torch r, z, h."""
    file = keras_gru()
    graph = build_training_graph(file.SerializeToString(), GraphSettings())
    assert graph.warnings == ()
    stored = {entry.name: torch.tensor(onnx.numpy_helper.to_array(entry)) for entry in file.graph.initializer}
    parameters = {name: stored[name].requires_grad_() for name in graph.spec.views(graph.initial)}

    def swapped(value):
        update, reset, new = value.chunk(3, dim=-1)
        return torch.cat([reset, update, new], dim=-1)

    weights = {
        "weight_ih_l0": swapped(parameters["kernel"]).T,
        "weight_hh_l0": swapped(parameters["recurrent"]).T,
        "bias_ih_l0": swapped(parameters["bias"][0]),
        "bias_hh_l0": swapped(parameters["bias"][1]),
    }
    feeds = examples(graph)
    _, last = torch.func.functional_call(torch.nn.GRU(4, 8, batch_first=True), weights, torch.tensor(feeds["x"]))
    scores = last[0] @ parameters["dense"] + parameters["dense_bias"]
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(feeds["target"]))
    loss.backward()
    found = run(graph, feeds)
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    for name, value in parameters.items():
        np.testing.assert_allclose(found[f"{name}.grad"], value.grad, rtol=1e-4, atol=1e-6, err_msg=name)
