"""Training by a graph: against plain numpy, in place, and with data, graphs and providers that do not fit."""

import logging
import math
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError, DataError, GraphError, ModelMismatchError
from edgeasync.losses import CrossEntropy
from edgeasync.metrics import TopK
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD, Adam
from edgeasync.training.onnx_trainer import GraphGradient, open_session
from tests.support.models.gradients import forward, numbers
from tests.support.models.small_models import of_one_size
from tests.support.models.trainers import onnx_trainer

MLP = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
NORMED = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
TOKENS = nn.Sequential(nn.Embedding(20, 4), nn.MeanOverTime(), nn.Linear(4, 3))
LABELS = np.arange(50) % 3


def built(layers, shape, **settings):
    return build_training_graph(nn.to_onnx(layers, shape).SerializeToString(), GraphSettings(**settings))


def trainer(graph, x, y, *optimizer, **options):
    options.setdefault("provider", "cpu")
    return onnx_trainer(
        graph.model, graph.spec, Dataset.of(x, y), optimizer or [SGD(learning_rate=0.1)], **options
    )


def take(graph, x, y, *optimizer, steps=1, **options):
    """Train a copy of the first values; return the results and the values."""
    vector = graph.initial.copy()
    made = trainer(graph, x, y, *optimizer, **options)
    made.begin(vector)
    return [made.step() for _ in range(steps)], vector


# -- against plain numpy ---------------------------------------------------------------------------------------


def cross_entropy(values, x, y):
    """Return loss and gradients of the MLP, in float64."""
    hidden = np.tanh(x @ values["0.weight"].T + values["0.bias"])
    scores = hidden @ values["2.weight"].T + values["2.bias"]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    loss = -np.log(shares[np.arange(len(y)), y]).mean()
    shares[np.arange(len(y)), y] -= 1
    back = shares / len(y)
    inner = back @ values["2.weight"] * (1 - hidden**2)
    return loss, {
        "0.weight": inner.T @ x, "0.bias": inner.sum(0), "2.weight": back.T @ hidden, "2.bias": back.sum(0),
    }  # fmt: skip


def descend(value, gradient, state, count):
    state["v"] = 0.9 * state.get("v", 0) + gradient
    return value - 0.1 * state["v"]


def adam(value, gradient, state, count):
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["s"] = 0.999 * state.get("s", 0) + 0.001 * gradient**2
    mean, square = state["m"] / (1 - 0.9**count), state["s"] / (1 - 0.999**count)
    return value - 0.01 * mean / (np.sqrt(square) + 1e-8)


@pytest.mark.parametrize(
    ("optimizer", "update"),
    [(SGD(learning_rate=0.1, momentum=0.9), descend), (Adam(learning_rate=0.01), adam)],
    ids=["sgd", "adam"],
)
def test_fifty_steps_follow_plain_numpy(optimizer, update):
    graph = built(MLP, (8,))
    x = numbers((50, 8), 1)
    results, vector = take(graph, x, LABELS, optimizer, steps=50, batch_size=16, seed=3)
    values = {name: view.astype(np.float64) for name, view in graph.spec.views(graph.initial).items()}
    states = {name: {} for name in values}
    drawn = batches(Dataset.of(x, LABELS), 16, 3)
    for count, result in enumerate(results, 1):
        chosen_x, chosen_y = next(drawn)
        loss, gradients = cross_entropy(values, chosen_x.astype(np.float64), chosen_y)
        assert result.examples == len(chosen_y)
        np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
        values = {name: update(value, gradients[name], states[name], count) for name, value in values.items()}
    assert results[-1].loss < results[0].loss
    for name, view in graph.spec.views(vector).items():
        np.testing.assert_allclose(view, values[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("layers", [MLP, nn.Sequential(MLP, nn.Dropout(0.5))], ids=["plain", "dropout"])
def test_a_trainer_goes_on_from_its_state(layers):
    graph = built(layers, (8,))
    x = numbers((50, 8), 1)
    options = {"batch_size": 16, "keep_optimizer_state": True}
    first, again = (trainer(graph, x, LABELS, Adam(learning_rate=0.01), seed=seed, **options) for seed in (3, 4))
    vector = graph.initial.copy()
    first.begin(vector)
    for _ in range(5):
        first.step()
    again.restore({name: array.copy() for name, array in first.state().items()})
    restored = vector.copy()
    first.begin(vector)
    again.begin(restored)
    assert [first.step() for _ in range(5)] == [again.step() for _ in range(5)]
    assert np.array_equal(vector, restored)


# -- in place --------------------------------------------------------------------------------------------------


def test_gradients_are_written_where_they_are_read_and_nothing_is_copied():
    graph = built(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)), (64,))
    gradient = GraphGradient(graph.model, graph.spec, provider="cpu")
    vector, out = graph.initial.copy(), np.zeros_like(graph.initial)
    x, y = numbers((4, 64)), np.arange(4)
    gradient(vector, x, y, out)
    places = {value.ctypes.data for value in graph.spec.views(out).values()}
    assert places <= {value.data_ptr() for value in gradient._binding.get_outputs()}
    tracemalloc.start()
    losses = []
    for _ in range(3):
        losses.append(gradient(vector, x, y, out))
        vector -= np.float32(0.1) * out  # read where they are: nobody is told
        del losses[:-2]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    gradient(vector, x, y, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert losses[-1] < losses[0]
    assert peak - before < graph.spec.nbytes / 10


def test_statistics_move_in_place_and_new_vectors_take_their_turn():
    graph = built(NORMED, (1, 8, 8))
    x = 2 + numbers((50, 1, 8, 8))
    made = trainer(graph, x, LABELS, batch_size=50)
    vectors = [graph.initial.copy() for _ in range(3)]
    for vector in vectors:
        made.begin(vector)
        made.step()
        np.testing.assert_allclose(vector, vectors[0], rtol=2e-4, atol=1e-5)  # all data, in another order
        assert not np.array_equal(vector, graph.initial)
    views, first = graph.spec.views(vectors[0]), graph.spec.views(graph.initial)
    windows = np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), (1, 2)).reshape(-1, 9)
    convolved = windows @ first["0.weight"].reshape(4, 9).T + first["0.bias"]
    np.testing.assert_allclose(views["1.running_mean"], 0.1 * convolved.mean(0), rtol=1e-4, atol=1e-5)
    before = vectors[0].copy()
    made.step()
    np.testing.assert_array_equal(vectors[0], before)
    with pytest.raises(ModelMismatchError, match="flat float32"):
        made.begin(np.zeros(3, np.float32))


# -- metrics ---------------------------------------------------------------------------------------------------


def test_metrics_are_of_all_steps_since_the_last_call_and_of_short_batches_too():
    graph = built(MLP, (8,), loss=CrossEntropy(ignored_label=2))
    x = numbers((50, 8))
    made = trainer(graph, x, LABELS, metrics=["accuracy", "top_k", TopK(k=1)], batch_size=16)
    vector = graph.initial.copy()
    views = graph.spec.views(vector)
    made.begin(vector)
    drawn, right, count = batches(Dataset.of(x, LABELS), 16, 0), 0, 0
    for _ in range(6):  # the fourth has two examples
        batch, labels = next(drawn)
        hidden = np.tanh(batch @ views["0.weight"].T + views["0.bias"])
        said = (hidden @ views["2.weight"].T + views["2.bias"]).argmax(1)
        right, count = right + ((said == labels) & (labels != 2)).sum(), count + (labels != 2).sum()
        made.step()
    assert made.metrics() == {"accuracy": right / count, "top_5": 1.0, "top_1": right / count}
    assert made.metrics() == {}


def test_metrics_in_parts_are_those_of_the_batch():
    graph = built(MLP, (8,))
    x = numbers((50, 8))
    found = []
    for options in ({}, {"micro_batch_size": 7}):
        made = trainer(graph, x, LABELS, metrics=["accuracy", "f1"], batch_size=32, **options)
        made.begin(graph.initial.copy())
        made.step()
        found.append(made.metrics())
    assert found[0] == pytest.approx(found[1])


def test_metrics_that_the_loss_does_not_bear():
    graph = built(nn.Linear(8, 1), (8,), loss="mse")
    with pytest.raises(ConfigError, match="accuracy does not apply to the loss mse; choose from mae"):
        trainer(graph, numbers((50, 8)), numbers((50, 1)), metrics=["accuracy"])
    made = trainer(graph, numbers((50, 8)), numbers(50), metrics=["mae"])
    made.begin(graph.initial.copy())
    made.step()
    assert made.metrics()["mae"] > 0.0


def test_scores_in_chunks_leave_the_loss_and_no_metrics():
    parameters = {"p": numbers((2,), 1), "w": numbers((2, 20480), 2)}
    text = "h = Mul(x, p)\ns = MatMul(h, w)\ny = Transpose<perm=[0, 2, 1]>(s)"
    graph = build_training_graph(forward(text, parameters, (64, 2)), GraphSettings(freeze=("w",)))
    x = numbers((2, 64, 2), 3)
    y = np.arange(2 * 64).reshape(2, 64)
    scores = (x * parameters["p"]).astype(np.float64) @ parameters["w"]
    losses = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, y[..., None], -1)[..., 0]
    made = trainer(graph, x, y)
    found = made.evaluate(graph.initial, Dataset.of(x, y))
    assert (found.accuracy, found.examples) == (None, 2)
    np.testing.assert_allclose(found.loss, losses.mean(), rtol=1e-6)
    with pytest.raises(ConfigError, match="metrics need all scores"):
        trainer(graph, x, y, metrics=("accuracy",))


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"batch_size": 28, "micro_batch_size": 7}])
def test_an_evaluation_computes_no_more_examples_at_once_than_a_step(options, monkeypatch):
    graph, sizes = built(MLP, (8,)), []
    computed = GraphGradient.evaluate_batch

    def recorded(self, parameters, batch, meter):
        sizes.append(len(batch))
        return computed(self, parameters, batch, meter)

    monkeypatch.setattr(GraphGradient, "evaluate_batch", recorded)
    x = numbers((50, 8))
    made = trainer(graph, x, LABELS, **options)
    made.evaluate(graph.initial, Dataset.of(x, LABELS))
    assert sizes == [7] * 7 + [1]


def test_labels_that_are_ignored_need_be_no_class():
    graph = built(MLP, (8,), loss=CrossEntropy(ignored_label=255))
    labels = np.where(np.arange(50) % 2, LABELS, 255)
    results, _ = take(graph, numbers((50, 8)), labels, steps=3)
    assert all(math.isfinite(result.loss) for result in results)
    (result,), vector = take(graph, numbers((50, 8)), np.full(50, 255))
    assert result.loss is None
    np.testing.assert_array_equal(vector, graph.initial)
    with pytest.raises(DataError, match="label 3 is out of range: the hub's model has 3 classes"):
        trainer(graph, numbers((50, 8)), np.where(labels == 255, 255, labels + 1))


# -- data ------------------------------------------------------------------------------------------------------


def test_flat_examples_become_what_the_graph_takes():
    graph = built(NORMED, (1, 8, 8))
    x = numbers((50, 64))
    flat, first = take(graph, x, LABELS, steps=3)
    square, second = take(graph, x.reshape(-1, 1, 8, 8), LABELS, steps=3)
    assert flat == square
    np.testing.assert_array_equal(first, second)


def test_values_as_targets_and_examples_as_their_own():
    x = numbers((50, 8))
    graph = built(nn.Sequential(nn.Linear(8, 8)), (8,), loss="mse")
    results, _ = take(graph, x, 2 * x, steps=200)
    assert results[-1].loss < 0.1 * results[0].loss
    own = built(nn.Sequential(nn.Linear(8, 8)), (8,), loss="mse", target="input")
    results, _ = take(own, x, LABELS, steps=200)
    assert results[-1].loss < 0.1 * results[0].loss
    single = built(nn.Sequential(nn.Linear(8, 1)), (8,), loss="mse")
    assert math.isfinite(take(single, x, x[:, 0])[0][0].loss)


def test_a_fixed_batch_takes_full_batches_only():
    model = of_one_size(16, numbers((8, 3)))
    graph = build_training_graph(model, GraphSettings())
    results, _ = take(graph, numbers((50, 8)), LABELS, steps=7, batch_size=32)
    assert [result.examples for result in results] == [16] * 7
    with pytest.raises(DataError, match="15 examples do not fill a batch of 16"):
        trainer(graph, numbers((15, 8)), LABELS[:15])


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (numbers((50, 9)), LABELS, r"examples of shape \(9,\).* expects \(8,\)"),
        (numbers((50, 8)), np.arange(50) % 4, "label 3 is out of range: the hub's model has 3 classes"),
        (numbers((50, 8)), numbers(50), "class numbers"),
        (numbers((50, 8)), numbers((50, 3)), "class numbers"),
    ],
)
def test_data_that_does_not_fit(x, y, words):
    with pytest.raises(DataError, match=words):
        trainer(built(MLP, (8,)), x, y)


def test_axes_in_another_order_do_not_fit():
    graph = built(nn.Sequential(nn.Conv2d(3, 3, 3), nn.GlobalAvgPool()), (3, 8, 8))
    with pytest.raises(DataError, match=r"\(8, 8, 3\).* expects \(3, 8, 8\); transpose or reshape them"):
        trainer(graph, numbers((50, 8, 8, 3)), LABELS)
    trainer(graph, numbers((50, 192)), LABELS)
    places = built(nn.Conv1d(2, 3, 1), (2, 5), loss="mse")
    with pytest.raises(
        DataError, match=r"targets of shape \(5, 3\).* expects \(3, 5\); transpose or reshape them"
    ):
        trainer(places, numbers((50, 2, 5)), numbers((50, 5, 3)))


@pytest.mark.parametrize("no", [-1.0, 2.0])
def test_answers_that_are_neither_yes_nor_no(no):
    graph = built(nn.Linear(8, 1), (8,), loss="bce_with_logits")
    with pytest.raises(
        DataError,
        match=r"bce_with_logits expects targets from 0 \(no\) to 1 \(yes\); convert the targets to that range",
    ):
        trainer(graph, numbers((50, 8)), np.where(LABELS, 1.0, no))
    trainer(graph, numbers((50, 8)), np.where(LABELS, 0.9, 0.1))
    own = built(nn.Linear(8, 8), (8,), loss="bce_with_logits", target="input")
    with pytest.raises(DataError, match="bce_with_logits expects targets from 0"):
        trainer(own, numbers((50, 8)), LABELS)
    trainer(own, np.eye(8), LABELS[:8])


def test_tokens_that_do_not_fit():
    graph = built(TOKENS, (5,))
    with pytest.raises(DataError, match="examples are not whole numbers"):
        trainer(graph, numbers((50, 5)), LABELS)
    for token in (20, -21):
        with pytest.raises(DataError, match=rf"out of range for the hub's model \(.*idx={token}.*number tokens"):
            take(graph, np.full((50, 5), token), LABELS)


# -- graphs ----------------------------------------------------------------------------------------------------


def edited(change, graph=None):
    graph = graph or built(MLP, (8,))
    proto = onnx.load_model_from_string(graph.model)
    change(proto.graph)
    return proto.SerializeToString(), graph.spec


def without_target(graph):
    graph.input[1].name = "aim"
    for node in graph.node:
        node.input[:] = ["aim" if name == "target" else name for name in node.input]


def free_features(graph):
    graph.input[0].type.tensor_type.shape.dim[1].dim_param = "features"


def no_dimension(graph):
    del graph.input[0].type.tensor_type.shape.dim[:]


def text_input(graph):
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (without_target, GraphError, "no 'target', so it is not a training graph"),
        (lambda graph: graph.output.pop(1), GraphError, "no 'loss_weight', so it is not a training graph"),
        (lambda graph: graph.output.pop(2), GraphError, "no 'scores', so it is not a training graph"),
        (free_features, GraphError, r"'x' is .*whose only dynamic axis is the batch"),
        (no_dimension, GraphError, "."),
        (text_input, GraphError, "."),
        (lambda graph: graph.output.pop(), ModelMismatchError, "'2.bias.grad' is missing"),
        (lambda graph: graph.node.pop(), GraphError, "cannot load the graph"),
    ],
)
def test_a_graph_that_breaks_the_contract(change, error, words):
    model, spec = edited(change)
    with pytest.raises(error, match=words):
        GraphGradient(model, spec, provider="cpu")


def test_a_graph_of_another_model_and_a_forward_model():
    graph = built(MLP, (8,))
    for parameters, words in (
        ((("0.weight", (16, 9)),), r"'0.weight' is tensor\(float\) \[16, 8\].*\[16, 9\]"),
        ((("none", (16, 8)),), "'none' is missing"),
        ((("0.weight", (16, 8)),), r"the graph's inputs x, 0.bias, .* have no common batch size"),
    ):
        spec = ParameterSpec(tuple([Parameter(*parameter) for parameter in parameters]))
        with pytest.raises((ModelMismatchError, GraphError), match=words):
            GraphGradient(graph.model, spec, provider="cpu")
    model = nn.to_onnx(MLP, (8,)).SerializeToString()
    with pytest.raises(GraphError, match="no 'target'"):
        GraphGradient(model, graph.spec, provider="cpu")
    with pytest.raises(GraphError, match="cannot load"):
        GraphGradient(b"nothing of the kind", graph.spec, provider="cpu")


def test_a_graph_that_fails_in_a_step():
    graph = built(MLP, (8,))
    gradient = GraphGradient(graph.model, graph.spec, provider="cpu")
    with pytest.raises(GraphError, match=r"the hub's model fails on this device: node .*Mul"):
        gradient(graph.initial, numbers((4, 8)), np.arange(3), np.zeros_like(graph.initial))


@pytest.mark.parametrize(
    ("targets", "settings", "told"),
    [
        (np.zeros(50, np.int64), {}, True),
        (np.full(50, 2), {}, True),
        (LABELS, {}, False),
        (np.zeros((50, 3), np.float32), {"loss": "bce_with_logits"}, True),
        (np.tile([0, 1, 1], (50, 1)), {"loss": "bce_with_logits"}, False),
    ],
)
def test_a_device_with_one_class_is_told_so(caplog, targets, settings, told):
    trainer(built(MLP, (8,), **settings), numbers((50, 8)), targets)
    assert ("check y, unless other devices" in caplog.text) == told


def test_an_autoencoder_s_placeholders_for_labels_are_no_class(caplog):
    layers = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    trainer(built(layers, (8,), loss="mse", target="input"), numbers((50, 8)), np.zeros(50, np.int64))
    assert not caplog.text


# -- providers and threads -------------------------------------------------------------------------------------


def test_auto_takes_what_is_there_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with caplog.at_level(logging.INFO, "edgeasync"):
        open_session(built(MLP, (8,)).model, 1, "auto")
    assert caplog.messages == ["provider: CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("provider", "available", "chosen"),
    [
        ("cuda", ["CPU"], ["CPU"]),
        ("tensorrt", ["CPU"], ["CPU"]),
        ("tensorrt", ["CUDA", "CPU"], ["CUDA", "CPU"]),
    ],
)
def test_a_provider_that_is_not_there_is_replaced_with_a_warning(monkeypatch, caplog, provider, available, chosen):
    asked = stand_in(monkeypatch, available, starting=available)
    open_session(b"", 1, provider)
    assert asked == [f"{name}ExecutionProvider" for name in chosen]
    assert "this onnxruntime has no provider" in caplog.text


@pytest.mark.parametrize("provider", ["cuda", "auto"])
def test_a_provider_that_does_not_start_is_replaced_with_a_warning(monkeypatch, caplog, provider):
    asked = stand_in(monkeypatch, ["CUDA", "CPU"], starting=["CPU"])
    open_session(b"", 1, provider)
    assert asked == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert "failed to start" in caplog.text


def stand_in(monkeypatch, available, starting):
    """Put a session in place that starts some of the available providers; return what it is asked for."""
    asked = []

    class Session:
        def __init__(self, graph, options, providers, disabled_optimizers):
            asked.extend(providers)

        def get_providers(self):
            return [f"{name}ExecutionProvider" for name in starting]

    names = [f"{name}ExecutionProvider" for name in available]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    return asked


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel does not tell threads")
def test_threads_are_as_many_as_were_asked_for():
    model = built(MLP, (8,)).model

    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    sessions = [open_session(model, 1, "cpu")]
    assert threads() == before
    sessions.append(open_session(model, 4, "cpu"))
    assert threads() == before + 3
    del sessions
