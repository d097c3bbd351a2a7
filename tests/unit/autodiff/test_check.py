"""The check passes for sound graphs of every kind, and fails for every gradient that was tampered with."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.inspection import example_feeds
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.losses import CrossEntropy
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import forward, numbers
from tests.support.size import repetitions

NORMED = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Residual(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    nn.GlobalAvgPool(), nn.Flatten(), nn.Linear(8, 4),
)  # fmt: skip
LENET = (
    nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10),
    ),
    (1, 12, 12),
)  # fmt: skip
MLP = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
MODELS = {
    "lenet": (*LENET, {}),
    "batch norm": (NORMED, (1, 8, 8), {}),
    "lstm": (nn.Sequential(nn.LSTM(4, 8), nn.Linear(8, 3)), (6, 4), {}),
    "gru": (nn.Sequential(nn.GRU(4, 8, bidirectional=True), nn.Linear(16, 3)), (6, 4), {}),
    "tokens": (nn.Sequential(nn.Embedding(20, 6), nn.MeanOverTime(), nn.Linear(6, 3)), (5,), {}),
    "dropout": (nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)), (8,), {"loss": "huber"}),
    "autoencoder": (nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8)), (8,), {"loss": "mse", "target": "input"}),
    "head": (MLP, (8,), {"train": ("2.*",)}),
    "smoothed": (
        MLP,
        (8,),
        {"loss": {"kind": "cross_entropy", "label_smoothing": 0.1, "class_weights": (1.0, 2.0, 0.5)}},
    ),
    **{loss: (MLP, (8,), {"loss": loss}) for loss in ("mse", "l1", "huber", "bce_with_logits")},
}


def built(model, shape, **settings):
    return build_training_graph(nn.to_onnx(model, shape).SerializeToString(), settings_of(settings))


def settings_of(settings):
    from edgeasync.config import convert  # noqa: PLC0415

    return convert(settings, GraphSettings, where="test")


def check(graph, **options):
    return check_gradients(graph.model, graph.spec, graph.initial, **options)


@pytest.mark.parametrize(("model", "shape", "settings"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("seed", range(repetitions("points at which gradients are checked")))
def test_a_sound_graph_passes(model, shape, settings, seed):
    graph = built(model, shape, **settings)
    checks = check(graph, seed=seed)
    trained = [parameter.name for parameter in graph.spec.parameters if parameter.role == "trained"]
    assert [found.name for found in checks] == trained
    assert all(found.passed and found.error <= 0.06 for found in checks), checks
    assert any(found.slope for found in checks)


def test_values_where_the_loss_has_a_bend_or_is_not_defined():
    """A ReLU of exactly 0 everywhere, and a logarithm of positive numbers."""
    zeros = forward("h = MatMul(x, w)\ny = Relu(h)", {"w": np.zeros((3, 2), np.float32)}, (3,))
    assert check(build_training_graph(zeros, GraphSettings(loss="mse")))[0].passed
    log = forward("h = Mul(x, w)\ny = Log(h)", {"w": np.full((3,), 1e-4, np.float32)}, (3,))
    assert check(build_training_graph(log, GraphSettings(loss="mse")))[0].passed


def test_a_loss_that_is_never_finite():
    model = forward("h = Mul(x, w)\ny = Div(h, z)", {"w": numbers(3), "z": np.zeros(3, np.float32)}, (3,))
    with pytest.raises(GraphError, match="not finite"):
        check(build_training_graph(model, GraphSettings(loss="mse", train=("w",))))


# Gradients stop at s: of a model of torch's, whose newer exporter writes a `detach` as this Identity.
STOPPED = "h = MatMul(x, w)\ns = Identity(h)\na = Tanh(s)\nb = Mul(a, v)\nc = Mul(h, v)\ny = Add(b, c)"
DETACH = ("pkg.torch.onnx.class_hierarchy", "['Net', 'aten.detach.default']")


def stopped(text=STOPPED, **parameters):
    parameters = parameters or {"w": numbers((3, 2)), "v": numbers((2,), 1)}
    proto = onnx.load_model_from_string(forward(text, parameters, (3,)))
    (node,) = [node for node in proto.graph.node if list(node.output) == ["s"]]
    node.metadata_props.add(key=DETACH[0], value=DETACH[1])
    return proto.SerializeToString()


def test_what_a_gradient_stops_at_keeps_its_value():
    honest = build_training_graph(stopped(), GraphSettings(loss="mse"))
    assert [(found.name, found.passed) for found in check(honest)] == [("w", True), ("v", True)]
    passing = build_training_graph(
        forward(STOPPED, {"w": numbers((3, 2)), "v": numbers((2,), 1)}, (3,)), GraphSettings(loss="mse")
    )
    assert not np.allclose(gradients(honest)["w"], gradients(passing)["w"])
    np.testing.assert_allclose(gradients(honest)["v"], gradients(passing)["v"])
    wrong = tampered(honest, "w", ("Mul", "right", "factor", "wrong"), factor=np.float32(0.9))
    assert failing(honest, wrong) == ["w"]


@pytest.mark.parametrize("value", [np.ones((2,)), numbers((2,), 1)], ids=["uniform", "different"])
def test_a_weight_that_is_shared_with_a_stop_is_one_parameter(value):
    text = "s = Identity(v)\nh = MatMul(x, w)\na = Mul(h, s)\nb = Tanh(a)\ny = Mul(b, v)"
    graph = build_training_graph(
        stopped(text, w=numbers((3, 2)), v=value.astype(np.float32)), GraphSettings(loss="mse")
    )
    assert [parameter.name for parameter in graph.spec.parameters] == ["w", "v"]
    assert all(found.passed for found in check(graph))


# -- tampering -------------------------------------------------------------------------------------------------


def tampered(graph, name, *nodes, **constants):
    """Return the graph's bytes with nodes between the gradient, now `right`, and the output for it, `wrong`."""
    proto = onnx.load_model_from_string(graph.model)
    for node in proto.graph.node:
        for position, output in enumerate(node.output):
            if output == f"{name}.grad":
                node.output[position] = "right"
        for position, read in enumerate(node.input):
            if read == f"{name}.grad":
                node.input[position] = "right"
    for op, *inputs, output in nodes:
        proto.graph.node.append(helper.make_node(op, inputs, [output.replace("wrong", f"{name}.grad")]))
    proto.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in constants.items())
    return proto.SerializeToString()


def failing(graph, model):
    return [found.name for found in check_gradients(model, graph.spec, graph.initial) if not found.passed]


SCALED = [
    (kind, factor) for kind in ("batch norm", "lstm", "tokens", "dropout", "l1") for factor in (0.9, -1.0, 0.0)
]


@pytest.mark.parametrize(("kind", "factor"), [*SCALED, ("lenet", 1.1)])
def test_a_scaled_gradient_fails(kind, factor):
    model, shape, settings = MODELS[kind]
    graph = built(model, shape, **settings)
    for name in (graph.spec.parameters[0].name, graph.spec.parameters[2].name):
        wrong = tampered(graph, name, ("Mul", "right", "factor", "wrong"), factor=np.float32(factor))
        assert failing(graph, wrong) == [name]


@pytest.mark.parametrize("name", ["0.weight", "7.weight", "11.bias"])
def test_one_wrong_value_among_many_fails(name):
    """One of the larger ones has the wrong sign."""
    graph = built(*LENET)
    shape = next(parameter.shape for parameter in graph.spec.parameters if parameter.name == name)
    gradient = gradients(graph)[name].ravel()
    usual = np.sqrt(np.mean(gradient**2))
    factors = np.ones(gradient.size, np.float32)
    factors[np.argmin(np.abs(np.abs(gradient) - 3 * usual))] = -1.0
    wrong = tampered(graph, name, ("Mul", "right", "factors", "wrong"), factors=factors.reshape(shape))
    assert failing(graph, wrong) == [name]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_fails(value):
    graph = built(MLP, (8,))
    added = np.zeros(3, np.float32)
    added[1] = value
    assert failing(graph, tampered(graph, "2.bias", ("Add", "right", "added", "wrong"), added=added)) == ["2.bias"]


def gradients(graph):

    feeds = example_feeds(onnx.load_model_from_string(graph.model), graph.spec, 8)
    feeds |= graph.spec.views(graph.initial)
    names = [f"{parameter.name}.grad" for parameter in graph.spec.parameters]
    values = open_session(graph.model).run(names, feeds)
    return {name.removesuffix(".grad"): value for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize(
    "text",
    [
        "r = RandomNormalLike(h)\nn = Mul(r, s)\na = Add(h, n)\ny = Tanh(a)",
        "r = RandomUniformLike<low=1.0>(h)\ny = Mul(h, r)",
    ],
)
def test_random_numbers_are_the_same_meanwhile(text):
    """Random numbers drawn for a tensor's shape do not depend on its values, so no gradient passes."""
    parameters = {"p": numbers((1, 3), 1)} | ({"s": numbers((3,), 2)} if "s)" in text else {})
    model = forward(f"h = Mul(x, p)\n{text}", parameters, (3,))
    graph = build_training_graph(model, GraphSettings(loss="mse"))
    check_graph(graph.model, bytes_max=1 << 20)
    checks = check_gradients(graph.model, graph.spec, graph.initial)
    assert [check.name for check in checks] == list(parameters)
    assert all(check.passed and check.slope for check in checks)


def test_a_loss_that_nothing_moves_is_no_error():
    """No class counts, so loss, gradients and differences are exactly 0."""
    graph = built(MLP, (8,), loss=CrossEntropy(class_weights=(0.0, 0.0, 0.0)))
    checks = check_gradients(graph.model, graph.spec, graph.initial)
    assert {(check.passed, check.slope, check.difference) for check in checks} == {(True, 0.0, 0.0)}
    assert not any(check.compared for check in checks)


def test_a_gradient_is_looked_for_where_it_is_not_0():
    """At the first examples the bias shuts every unit."""
    graph = build_training_graph(
        forward("m = MatMul(x, p)\nh = Add(m, b)\nr = Relu(h)\ny = ReduceMax<keepdims=1>(r, a)", SHUT, (3,)),
        GraphSettings(loss="mse"),
    )
    checks = check_gradients(graph.model, graph.spec, graph.initial, batch_size=2)
    assert all(check.passed and check.compared for check in checks)


SHUT = {"p": numbers((3, 4), 1), "b": np.full(4, -3.5, np.float32), "a": np.array([1])}
