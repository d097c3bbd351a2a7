"""Evaluation on held-out data: by hand, against the training graph's own loss, in evaluation mode, in batches."""

import math
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, DataError, GraphError, ModelMismatchError
from edgeasync.graphs.evaluation import OnnxEvaluator, evaluation_graph, make_evaluator
from edgeasync.graphs.graph_model import HubGraph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    find_loss,
)
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.training.evaluation import ROWS_MAX, EvaluationResult
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.onnx_trainer import GraphGradient
from tests.support.models.gradients import forward, numbers
from tests.support.models.small_models import of_one_size

N = ROWS_MAX + 44
LABELS = np.arange(N) % 3
MLP = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
NORMED = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
)
TOKENS = nn.Sequential(nn.Embedding(20, 4), nn.MeanOverTime(), nn.Linear(4, 3))


def prepared(model, **settings):
    """Return a serialized forward model, its training graph, and a vector that is not the first."""
    graph = build_training_graph(model, GraphSettings(**settings))
    return graph, graph.initial + 0.1 * np.abs(numbers(graph.spec.length, 5))


def evaluator(model, graph, x, y, **settings):
    return OnnxEvaluator(model, graph.spec, GraphSettings(**settings), Dataset.of(x, y))


def of(layers, shape):
    return nn.to_onnx(layers, shape).SerializeToString()


def inferred(model, graph, vector, x):
    """Return what an exported model says."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    exported = export_model(model, graph.spec.views(vector))
    session = onnxruntime.InferenceSession(exported, options, ["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def judged(scores, labels):
    """Return loss and accuracy, in float64 and the plainest way."""
    scores = scores.astype(np.float64)
    loss = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(labels)), labels]
    return loss.mean(), (scores.argmax(1) == labels).mean()


# -- against the training graph --------------------------------------------------------------------------------

WEIGHTS = (0.5, 2.0, 0.0)
CLASSES = [
    "cross_entropy",
    CrossEntropy(class_weights=WEIGHTS),
    CrossEntropy(label_smoothing=0.2),
    CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.2),
    CrossEntropy(ignored_label=2),
    CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.2, ignored_label=1),
]
VALUES = [
    "mse", MeanSquaredError(), "l1", MeanAbsoluteError(), "huber", Huber(delta=0.3), "bce_with_logits",
    BinaryCrossEntropy(),
]  # fmt: skip


def trained_on(graph, vector, x, y):
    """Return the training graph's loss of all data as one batch."""
    gradient = GraphGradient(graph.model, graph.spec, provider="cpu")
    return gradient(vector, x, y, np.zeros_like(vector))


@pytest.mark.parametrize("loss", CLASSES + VALUES, ids=str)
@pytest.mark.parametrize("rows", [1, N])
def test_every_loss_is_the_training_graphs(loss, rows):
    x = numbers((N, 8))[:rows]
    if loss in CLASSES:
        y = LABELS[:rows]
    else:
        y = numbers((N, 3), 2)[:rows]
        if find_loss(loss) == BinaryCrossEntropy():
            y = (y > 0).astype(np.float32)
    model = of(MLP, (8,))
    graph, vector = prepared(model, loss=loss)
    found = evaluator(model, graph, x, y, loss=loss)(vector)
    assert found.loss == pytest.approx(trained_on(graph, vector, x, y), abs=1e-5)
    assert found.examples == rows
    if loss in CLASSES:
        counts = y != getattr(loss, "ignored_label", None)
        scores = inferred(model, graph, vector, x)[counts]
        assert found.accuracy == pytest.approx(judged(scores, y[counts])[1])
    else:
        assert found.accuracy is None


@pytest.mark.parametrize("loss", CLASSES, ids=str)
def test_scores_of_several_places(loss):
    model = forward("y = MatMul(w, x)", {"w": numbers((3, 4), 1)}, (4, 5))
    graph, vector = prepared(model, loss=loss)
    x, y = numbers((N, 4, 5)), np.arange(5 * N).reshape(N, 5) % 3
    found = evaluator(model, graph, x, y, loss=loss)(vector)
    assert found.loss == pytest.approx(trained_on(graph, vector, x, y), abs=1e-5)
    scores = vector.reshape(3, 4) @ x
    counts = y != getattr(loss, "ignored_label", None)
    assert found.accuracy == pytest.approx((scores.argmax(1) == y)[counts].mean(), abs=1e-3)


ARCHITECTURES = {
    "gru": (nn.Sequential(nn.GRU(4, 5), nn.Linear(5, 3)), (6, 4)),
    "lstm": (nn.Sequential(nn.LSTM(4, 5), nn.Linear(5, 3)), (6, 4)),
    "transformer": (
        nn.Sequential(
            nn.PositionEmbedding(6, 4), nn.Residual(nn.LayerNorm(4), nn.SelfAttention(4, 2)), nn.GELU(),
            nn.MeanOverTime(), nn.Linear(4, 3),
        ),
        (6, 4),
    ),
    "convolutional": (
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2), nn.ReLU(),
            nn.Upsample(2), nn.GlobalAvgPool(), nn.Linear(2, 3),
        ),
        (1, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "shape"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_architecture_takes_its_parameters_as_inputs(layers, shape):
    """Some operators run otherwise, or not at all, if what was a constant is fed."""
    model = of(layers, shape)
    graph, vector = prepared(model)
    x = numbers((N, *shape))
    made = evaluator(model, graph, x, LABELS)
    assert len(made._fed) == len(graph.spec.parameters)
    assert made(vector).loss == pytest.approx(trained_on(graph, vector, x, LABELS), abs=1e-5)
    scores = inferred(model, graph, vector, x)
    assert made(vector).accuracy == pytest.approx(judged(scores, LABELS)[1], abs=0.01)


@pytest.mark.parametrize("y", [numbers(N, 3), LABELS, LABELS[:, None]], ids=["values", "integers", "column"])
def test_targets_come_as_a_device_takes_them(y):
    model = of(nn.Sequential(nn.Linear(8, 1)), (8,))
    graph, vector = prepared(model, loss="mse")
    x = numbers((N, 8))
    found = evaluator(model, graph, x, y, loss="mse")(vector)
    assert found.loss == pytest.approx(trained_on(graph, vector, x, y.astype(np.float32)), abs=1e-5)


def test_an_autoencoder_is_its_own_target():
    model = of(nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8)), (8,))
    graph, vector = prepared(model, loss="mse", target="input")
    x = numbers((N, 8))
    found = evaluator(model, graph, x.reshape(N, 2, 4), LABELS, loss="mse", target="input")(vector)
    assert found.loss == pytest.approx(trained_on(graph, vector, x, LABELS), abs=1e-5)
    assert found.accuracy is None


def test_an_autoencoder_of_tokens():
    model = forward(
        "h = Gather(table, x)\ny = Transpose <perm=[0, 2, 1]> (h)",
        {"table": numbers((6, 6), 1)}, (5,), kind=TensorProto.INT64,
    )  # fmt: skip
    graph, vector = prepared(model, target="input")
    x = np.arange(5 * N).reshape(N, 5) % 6
    found = evaluator(model, graph, x, LABELS, target="input")(vector)
    assert found.loss == pytest.approx(trained_on(graph, vector, x, x), abs=1e-5)
    assert found.accuracy == pytest.approx((vector.reshape(6, 6)[x].argmax(2) == x).mean())


# -- in evaluation mode ----------------------------------------------------------------------------------------


def test_batch_norms_use_their_running_statistics_and_dropouts_are_off():
    model = of(NORMED, (1, 8, 8))
    graph, vector = prepared(model)
    x = 3 + 2 * numbers((N, 1, 8, 8))
    made = evaluator(model, graph, x, LABELS)
    found = made(vector)
    loss, accuracy = judged(inferred(model, graph, vector, x), LABELS)
    assert found.loss == pytest.approx(loss, abs=1e-5)
    assert found.accuracy == pytest.approx(accuracy)
    assert made(vector) == found
    # Not the batch's: then the stored ones would not matter.
    moved = vector.copy()
    moved[graph.spec.trained_length :] *= 2
    assert made(moved).loss != pytest.approx(found.loss, rel=1e-3)


def test_what_is_frozen_stays_inside():
    model = of(MLP, (8,))
    graph, vector = prepared(model, train=("2.*",))
    x = numbers((N, 8))
    made = evaluator(model, graph, x, LABELS, train=("2.*",))
    assert {entry.name for entry in made._session.get_inputs()} == {"x", "2.weight", "2.bias"}
    assert made(vector).loss == pytest.approx(trained_on(graph, vector, x, LABELS), abs=1e-5)


def two_heads():
    text = "h = MatMul(x, w)\ny = Softmax(h)\nz = MatMul(other, h)"
    proto = onnx.load_model_from_string(forward(text, {"w": numbers((8, 3))}, (8,)))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("other", TensorProto.FLOAT, [4, "batch"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 3]))
    return proto.SerializeToString()


def test_the_output_that_the_loss_reads():
    """A tensor inside the model, which needs only one of its inputs."""
    model = two_heads()
    graph, vector = prepared(model, output="h")
    x = numbers((N, 8))
    found = evaluator(model, graph, x, LABELS, output="h")(vector)
    assert found.loss == pytest.approx(judged(x @ vector.reshape(8, 3), LABELS)[0], abs=1e-5)
    with pytest.raises(GraphError, match="the model has 2 outputs"):
        evaluation_graph(model, graph.spec, None)
    with pytest.raises(GraphError, match="whose only dynamic axis is the batch"):
        evaluator(model, graph, x, LABELS, output="z")


def test_tokens():
    model = of(TOKENS, (5,))
    graph, vector = prepared(model)
    tokens = np.random.default_rng(0).integers(0, 20, (N, 5))
    found = evaluator(model, graph, tokens, LABELS)(vector)
    assert found.loss == pytest.approx(trained_on(graph, vector, tokens, LABELS), abs=1e-5)
    for place in (0, N - 1):
        wrong = tokens.copy()
        wrong[place] = 20
        with pytest.raises(DataError, match=r"out of range for the hub's model \(.*idx=20.*number tokens"):
            evaluator(model, graph, wrong, LABELS)(vector)
    with pytest.raises(DataError, match="examples are not whole numbers"):
        evaluator(model, graph, numbers((N, 5)), LABELS)


@pytest.mark.parametrize("examples", [1, 10, 16, 50])
def test_a_fixed_batch_is_filled_up_and_every_example_counts_once(examples):
    model = of_one_size(16, numbers((8, 3), 1))
    graph, vector = prepared(model)
    x, y = numbers((50, 8))[:examples], LABELS[:examples]
    found = evaluator(model, graph, x, y)(vector)
    loss, accuracy = judged(x @ vector.reshape(8, 3), y)
    assert found == EvaluationResult(pytest.approx(loss, abs=1e-5), pytest.approx(accuracy), examples)


# -- one session, one thread, bounded batches ------------------------------------------------------------------


def test_one_session_of_one_thread_serves_every_evaluation(monkeypatch):
    made = []
    real = onnxruntime.InferenceSession
    model = of(MLP, (8,))
    graph, vector = prepared(model)
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda *given, **rest: made.append(given[1].intra_op_num_threads) or real(*given, **rest),
    )
    once = evaluator(model, graph, numbers((N, 8)), LABELS)
    found = {once(vector + np.float32(shift)).loss for shift in (0.0, 0.1, 0.2)}
    assert len(found) == 3
    assert made == [1]


def test_the_vector_is_read_where_it_is_in_batches():
    model = of(MLP, (8,))
    graph, vector = prepared(model)
    made = evaluator(model, graph, numbers((N, 8)), LABELS)
    fed = []

    class Session:
        def run(self, names, feeds):
            fed.append(feeds)
            return real.run(names, feeds)

    real, made._session = made._session, Session()
    before = vector.copy()
    made(vector)
    assert [len(feeds["x"]) for feeds in fed] == [ROWS_MAX, N - ROWS_MAX]
    assert all(np.shares_memory(feeds[p.name], vector) for feeds in fed for p in graph.spec.parameters)
    np.testing.assert_array_equal(vector, before)


def test_a_model_that_diverged_has_a_loss_that_is_no_number():
    graph, vector = prepared(of(MLP, (8,)))
    made = evaluator(of(MLP, (8,)), graph, numbers((9, 8)), LABELS[:9])
    vector[:] = np.nan
    assert math.isnan(made(vector).loss)


def test_fewer_of_large_examples_at_a_time():
    model = of(nn.Sequential(nn.Conv2d(1, 1, 8), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(225, 3)), (1, 128, 128))
    graph, vector = prepared(model)
    made = evaluator(model, graph, np.zeros((70, 128 * 128), np.float32), LABELS[:70])
    assert made._rows == 64
    assert made(vector).examples == 70


# -- what does not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (numbers((50, 9)), LABELS[:50], r"examples of shape \(9,\), but the hub's model expects \(8,\)"),
        (numbers((50, 8)), np.arange(50) % 4, "label 3 is out of range: the hub's model has 3 classes"),
        (numbers((50, 8)), numbers(50), "class numbers"),
        (numbers((50, 8)), np.zeros((50, 2), int), r"targets of shape \(2,\), but the hub's model expects \(\)"),
    ],
)
def test_data_that_does_not_fit(x, y, words):
    model = of(MLP, (8,))
    with pytest.raises(DataError, match=words):
        evaluator(model, prepared(model)[0], x, y)


def test_examples_that_all_weigh_nothing():
    loss = CrossEntropy(class_weights=(1.0, 0.0, 0.0))
    model = of(MLP, (8,))
    graph, vector = prepared(model, loss=loss)
    with pytest.raises(DataError, match="the weight 0 in class_weights"):
        evaluator(model, graph, numbers((9, 8)), np.arange(9) % 2 + 1, loss=loss)
    assert math.isfinite(evaluator(model, graph, numbers((9, 8)), np.arange(9) % 2, loss=loss)(vector).loss)


def test_examples_that_are_all_ignored():
    graph, _ = prepared(of(MLP, (8,)))
    with pytest.raises(DataError, match="all labels are the ignored label 7"):
        evaluator(of(MLP, (8,)), graph, numbers((9, 8)), np.full(9, 7), loss=CrossEntropy(ignored_label=7))


def test_an_output_that_mixes_examples():
    model = forward("h = MatMul(x, w)\ny = Reshape(h, s)", {"w": numbers((8, 6)), "s": np.array([-1, 3])}, (8,))
    spec = ParameterSpec((Parameter("w", (8, 6)),))
    with pytest.raises(GraphError, match=r"shape \(2, 3\) for 1 examples"):
        OnnxEvaluator(model, spec, GraphSettings(), Dataset.of(numbers((9, 8)), LABELS[:9]))


def test_a_size_that_is_free_besides_the_batch():
    proto = onnx.load_model_from_string(forward("y = MatMul(x, w)", {"w": numbers((8, 3))}, (2, 8)))
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "time"
    spec = ParameterSpec((Parameter("w", (8, 3)),))
    with pytest.raises(GraphError, match="whose only dynamic axis is the batch"):
        OnnxEvaluator(proto.SerializeToString(), spec, GraphSettings(), Dataset.of(numbers((9, 16)), LABELS[:9]))


def test_another_model_than_the_spec_says():
    model = of(MLP, (8,))
    graph, vector = prepared(model)
    data = Dataset.of(numbers((9, 8)), LABELS[:9])
    for parameter, words in (
        (Parameter("other", (3,)), "not a parameter of the forward model"),
        (Parameter("2.bias", (4,)), r"of shape \(4,\), but float32"),
    ):
        with pytest.raises(ModelMismatchError, match=words):
            OnnxEvaluator(model, ParameterSpec((parameter,)), GraphSettings(), data)
    with pytest.raises(ModelMismatchError, match="flat float32"):
        OnnxEvaluator(model, graph.spec, GraphSettings(), data)(vector[1:])
    with pytest.raises(GraphError, match="this is a training graph"):
        OnnxEvaluator(graph.model, graph.spec, GraphSettings(), data)


# -- for a hub -------------------------------------------------------------------------------------------------


def test_a_hubs_model_gets_its_evaluator():
    data = Dataset.of(numbers((9, 8)), LABELS[:9])
    numpy = SoftmaxModel(inputs=8, classes=3)
    assert make_evaluator(numpy, None, data)(numpy.initial(0)).loss == pytest.approx(math.log(3))
    model = of(MLP, (8,))
    graph, vector = prepared(model)
    settings = OnnxModel(file="model.onnx")
    loaded = HubGraph(graph.model, graph.spec, graph.initial, model)
    same = evaluator(model, graph, data.x, data.y)
    assert make_evaluator(settings, loaded, data)(vector) == same(vector)
    with pytest.raises(
        ConfigError, match=r"model\.onnx: a training graph cannot be evaluated.*use the forward model"
    ):
        make_evaluator(settings, HubGraph(graph.model, graph.spec, graph.initial, None), data)


def test_nothing_heavy_is_imported_before_it_is_needed():
    program = "import sys, edgeasync.graphs.evaluation; print(*{'onnx', 'onnxruntime'}.intersection(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == ""


@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.BOOL, TensorProto.DOUBLE])
def test_inputs_that_are_neither_float32_nor_int64(kind):
    model = forward("h = Cast<to=1>(x)\ny = Gemm(h, w)", {"w": numbers((4, 3), 1)}, (4,), kind=kind)
    graph, vector = prepared(model)
    x = (np.arange(N * 4) % 7 % 2).reshape(N, 4)
    found = evaluator(model, graph, x, LABELS)(vector)
    assert (found.loss, found.accuracy) == pytest.approx(
        judged(x @ graph.spec.views(vector)["w"], LABELS), rel=1e-5
    )


def test_axes_in_another_order():
    model = of(nn.Conv1d(2, 3, 1), (2, 5))
    graph, _ = prepared(model, loss="mse")
    with pytest.raises(
        DataError,
        match=r"examples of shape \(5, 2\), but the hub's model expects \(2, 5\); transpose or reshape them",
    ):
        evaluator(model, graph, numbers((9, 5, 2)), numbers((9, 3, 5)), loss="mse")
    with pytest.raises(
        DataError,
        match=r"targets of shape \(5, 3\), but the hub's model expects \(3, 5\); transpose or reshape them",
    ):
        evaluator(model, graph, numbers((9, 2, 5)), numbers((9, 5, 3)), loss="mse")
