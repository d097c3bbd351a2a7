"""A loss of the user's own: a known loss written as a graph trains and evaluates alike; and what is no loss."""

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, DataError, GraphError
from edgeasync.graphs.evaluation import OnnxEvaluator
from edgeasync.graphs.graph_model import load_graph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.source import with_source
from edgeasync.losses import CrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError, OnnxLoss
from edgeasync.policies.optimizers import SGD
from tests.support.models.gradients import numbers
from tests.support.models.trainers import onnx_trainer

LAYERS = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
MODEL = nn.to_onnx(LAYERS, (6,)).SerializeToString()
X = numbers((40, 6), 1)
VALUES = numbers((40, 3), 2)
LABELS = np.arange(40) % 3

SQUARES = "d = Sub(prediction, target) s = Mul(d, d) total = ReduceMean<keepdims = 0>(s)"
ABSOLUTE = "d = Sub(prediction, target) a = Abs(d) total = ReduceMean<keepdims = 0>(a)"
HUBER = """d = Sub(prediction, target) c = Clip(d, low, high) h = Mul(c, half) r = Sub(d, h) m = Mul(c, r)
    total = ReduceMean<keepdims = 0>(m)"""
CROSS = """label = OneHot<axis = 1>(target, depth, ends) logs = LogSoftmax<axis = 1>(prediction)
    chosen = Mul(label, logs) sums = ReduceSum<keepdims = 0>(chosen, last) mean = ReduceMean<keepdims = 0>(sums)
    total = Neg(mean)"""
WEIGHED = """p = Sigmoid(prediction) d = Sub(p, target) s = Mul(d, d) w = Mul(s, weights)
    total = ReduceMean<keepdims = 0>(w)"""


def loss_of(body, target="float[batch, 3] target", prediction="float[batch, 3] prediction", opset=18, **constants):
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : {opset}]> own ({prediction}, {target}) => (float total) {{ {body} }}'
    )
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    return OnnxLoss(graph=proto.SerializeToString())


LIMITS = {"low": np.float32(-0.4), "high": np.float32(0.4), "half": np.float32(0.5)}
KNOWN = [
    (loss_of(SQUARES), MeanSquaredError(), VALUES),
    (loss_of(SQUARES, opset=21), MeanSquaredError(), VALUES),
    (loss_of(SQUARES, opset=17), MeanSquaredError(), VALUES),
    (loss_of(ABSOLUTE), MeanAbsoluteError(), VALUES),
    (loss_of(HUBER, **LIMITS), Huber(delta=0.4), VALUES),
    (
        loss_of(CROSS, "int64[batch] target", depth=np.int64(3), ends=np.float32([0, 1]), last=np.array([1])),
        CrossEntropy(),
        LABELS,
    ),
]
ids = ["mse", "mse, newer opset", "mse, older opset", "l1", "huber", "cross_entropy"]


def trained(loss, y, **options):
    graph = build_training_graph(MODEL, GraphSettings(loss=loss))
    data = Dataset.of(X, y)
    made = onnx_trainer(graph.model, graph.spec, data, [SGD(learning_rate=0.1)], provider="cpu", **options)
    vector = graph.initial.copy()
    made.begin(vector)
    return graph, [made.step().loss for _ in range(9)], vector


@pytest.mark.parametrize(("own", "known", "y"), KNOWN, ids=ids)
def test_a_known_loss_written_anew_trains_and_evaluates_alike(own, known, y):
    graph, losses, vector = trained(own, y)
    _, expected, same = trained(known, y)
    assert losses == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(vector, same, rtol=1e-4, atol=1e-6)
    data = Dataset.of(X, y)
    found = OnnxEvaluator(MODEL, graph.spec, GraphSettings(loss=own), data)(vector)
    wanted = OnnxEvaluator(MODEL, graph.spec, GraphSettings(loss=known), data)(vector)
    assert (found.loss, found.accuracy, found.examples) == (pytest.approx(wanted.loss, rel=1e-5), None, 40)


def test_one_that_nobody_else_has():
    loss = loss_of(WEIGHED, weights=np.float32([1, 5, 0]))
    graph, losses, _ = trained(loss, VALUES, batch_size=40)
    assert losses[-1] < losses[0]
    assert all(check.passed for check in check_gradients(graph.model, graph.spec, graph.initial))
    parts, whole = trained(loss, VALUES, micro_batch_size=7)[2], trained(loss, VALUES)[2]
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)


def test_its_constants_are_not_trained_and_its_names_are_its_own():
    """A loss may call its tensors as the model does."""
    body = (
        "scores = Sub(prediction, target) x = Mul(scores, bias) s = Mul(x, x) total = ReduceMean<keepdims = 0>(s)"
    )
    model = nn.to_onnx(nn.Linear(6, 3), (6,)).SerializeToString()
    graph = build_training_graph(model, GraphSettings(loss=loss_of(body, bias=np.float32([1, 2, 3]))))
    assert {parameter.name for parameter in graph.spec.parameters} == {"0.weight", "0.bias"}


def test_a_device_is_told_of_other_data():
    with pytest.raises(DataError, match="targets of shape"):
        trained(loss_of(SQUARES), numbers((40, 2), 3))
    with pytest.raises(ConfigError, match="f1 does not apply to the loss onnx; remove it"):
        trained(loss_of(SQUARES), VALUES, metrics=["f1"])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (OnnxLoss(graph=b"no graph"), "loss: not a readable ONNX model"),
        (
            OnnxLoss(graph=MODEL),
            "the loss must have two inputs, prediction and target, and one output; found inputs: x; outputs: 1",
        ),
        (loss_of("total = Sub(prediction, target)"), r"the loss has shape \(None, 3\), but must be a scalar"),
        (loss_of("total = ReduceMean<keepdims = 0>(prediction)"), "does not depend on its input target"),
        (loss_of("total = ReduceMean<keepdims = 0>(target)"), "does not depend on its input prediction"),
        (
            loss_of(SQUARES, prediction="float[batch, 2] prediction"),
            r"expects a prediction of shape \(None, 2\), but the model's output 'scores' has shape \(None, 3\)",
        ),
        (loss_of(SQUARES, "double[batch, 3] target"), "."),
        (
            loss_of("d = Sub(prediction, target) s = Hardmax(d) total = ReduceMean<keepdims = 0>(s)"),
            "no gradient for Hardmax",
        ),
    ],
)
def test_what_is_no_loss_is_refused(loss, words):
    with pytest.raises(GraphError, match=words) as caught:
        build_training_graph(MODEL, GraphSettings(loss=loss))
    assert "\n" not in str(caught.value)


def test_a_loss_has_a_file_or_a_graph():
    for given in ({}, {"file": "loss.onnx", "graph": b""}):
        with pytest.raises(ConfigError, match="needs either file or graph; set one of the two"):
            OnnxLoss(**given)


def test_a_loss_is_read_from_its_file(tmp_path):
    (tmp_path / "model.onnx").write_bytes(MODEL)
    settings = OnnxModel(file=str(tmp_path / "model.onnx"), loss=OnnxLoss(file=str(tmp_path / "loss.onnx")))
    with pytest.raises(ConfigError, match=r"loss\.onnx: no such file"):
        load_graph(settings)
    (tmp_path / "loss.onnx").write_bytes(loss_of(SQUARES).graph)
    built = build_training_graph(MODEL, GraphSettings(loss=loss_of(SQUARES)))
    assert load_graph(settings).graph == with_source(built.model, "")
