"""Files of the structure that others publish build with at most a loss, and train."""

import numpy as np
import onnx
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset
from edgeasync.graphs.evaluation import make_evaluator
from edgeasync.graphs.graph_model import HubGraph
from edgeasync.graphs.onnx_model import OnnxModel
from tests.support.models.followed import assert_trains, examples
from tests.support.models.gradients import assert_same_values, forward, numbers, run, session
from tests.support.models.small_models import edited, refused

NORM = ("m{0} = ReduceMean<axes=[-1]>(i{0})\nd{0} = Sub(i{0}, m{0})\nk{0} = Constant<value = float {{2.0}}>()\n"
        "q{0} = Pow(d{0}, k{0})\nv{0} = ReduceMean<axes=[-1]>(q{0})\ne{0} = Constant<value = float {{1e-5}}>()\n"
        "a{0} = Add(v{0}, e{0})\nr{0} = Sqrt(a{0})\nn{0} = Div(d{0}, r{0})\ns{0} = Mul(n{0}, g{0})\n"
        "t{0} = Add(s{0}, b{0})\no{0} = Relu(t{0})\n")  # fmt: skip
"""A layer normalization and a Relu as old exporters of torch write them."""


def dense(name, inputs, outputs, seed=1):
    return {f"w{name}": 0.3 * numbers((outputs, inputs), seed), f"c{name}": numbers(outputs, seed + 1)}


def net(last, outputs=1, *, name="y", times=16):
    """Return a network for features of 16 windows, in a file with a batch size of 1."""
    parameters = dense("1", times * 6, 8) | {"g1": np.ones(8, np.float32), "b1": np.zeros(8, np.float32)}
    parameters |= dense("2", 8, outputs, 3)
    text = f"f = Flatten(x)\ni1 = Gemm<transB=1>(f, w1, c1)\n{NORM.format(1)}z = Gemm<transB=1>(o1, w2, c2)\n"
    data = forward(text + last, parameters, (times, 6), batch=1, opset=13, ir=7)
    return edited(data, lambda proto: _rename(proto, name))


def _rename(proto, name):
    proto.producer_name = "pytorch"
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = name


def recurrent():
    """Return a bidirectional LSTM whose first state is made from the shape of the batch, as by tf2onnx."""
    text = """t = Transpose<perm=[1, 0, 2]>(x)
        s = Shape(x)
        f = Cast<to=6>(s)
        n = Slice(f, zero, one, zero)
        d = Concat<axis=0>(n, five)
        e = Cast<to=7>(d)
        i = Expand(nought, e)
        u = Unsqueeze(i, zero)
        h0 = Concat<axis=0>(u, u)
        q, h, c = LSTM<direction="bidirectional", hidden_size=5>(t, w, r, b, , h0, h0)
        j = Slice(h, one, two, zero)
        k = Squeeze(j, zero)
        z = MatMul(k, v)
        o = Add(z, c0)
        y = Sigmoid(o)"""
    parameters = {
        "w": 0.3 * numbers((2, 20, 6), 1), "r": 0.3 * numbers((2, 20, 5), 2), "b": numbers((2, 40), 3),
        "v": numbers((5, 1), 4), "c0": numbers((1,), 5), "nought": np.zeros(1, np.float32), "zero": np.array([0]),
        "one": np.array([1]), "two": np.array([2]), "five": np.array([5], np.int32),
    }  # fmt: skip
    return edited(
        forward(text, parameters, (16, 6), opset=13, ir=7),
        lambda proto: setattr(proto, "producer_name", "tf2onnx"),
    )


LABELS = '{"1": "one minute", "2": "an hour"}'
FILES = {
    "one answer": (net("y = Sigmoid(z)"), {"loss": "bce_with_logits"}, "z"),
    "classes, named by JSON": (net("a = Relu(z)\ny = Softmax<axis=1>(a)", 7, name=LABELS), {}, "a"),
    "recurrent": (recurrent(), {"loss": "bce_with_logits"}, "o"),
}


@pytest.mark.parametrize(("data", "settings", "scores"), FILES.values(), ids=FILES)
def test_a_published_file_trains_with_at_most_a_loss(data, settings, scores):
    graph = build_training_graph(data, GraphSettings(**settings))
    assert_trains(graph)
    metadata = session(graph.model).get_modelmeta().custom_metadata_map
    assert metadata["edgeasync.output"] == scores
    assert any(f"trains the scores before it, '{scores}'" in said for said in graph.notes)
    trained = graph.spec.views(graph.initial + np.float32(0.1))
    exported = onnx.load_model_from_string(export_model(data, trained))
    original = onnx.load_model_from_string(data)
    assert exported.graph.output == original.graph.output
    x = numbers((1, 16, 6), 5)
    (y,) = session(exported.SerializeToString()).run(None, {"x": x})
    feeds = examples(graph) | {"x": np.repeat(x, 16, axis=0)} | trained
    names = [scores]
    (z,) = session(graph.model).run(names, feeds)
    expected = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True) if "loss" not in settings else 1 / (1 + np.exp(-z))
    np.testing.assert_allclose(y, expected[:1], rtol=1e-4)


RESIZED = {
    "enlarged": (10, 'y = Resize<mode="linear">(h, s)', [1, 1, 2, 1.5]),
    "shrunk": (10, 'y = Resize<mode="linear">(h, s)', [1, 1, 0.75, 0.4375]),
    "enlarged, nearest": (10, 'y = Resize<mode="nearest">(h, s)', [1, 1, 2.25, 1.4375]),
    "shrunk, nearest": (10, 'y = Resize<mode="nearest">(h, s)', [1, 1, 0.75, 0.4375]),
    "by the older operator": (9, 'y = Upsample<mode="linear">(h, s)', [1, 1, 2, 1.5]),
    "by the oldest operator": (7, 'y = Upsample<mode="linear", scales=[1.0, 1.0, 2.0, 3.0]>(h)', None),
}


@pytest.mark.parametrize(("opset", "text", "scales"), RESIZED.values(), ids=RESIZED)
def test_images_are_resized_as_by_the_opset_of_the_file(opset, text, scales):
    """Before opset 11, the first pixels of both images lie on each other."""
    parameters = {"w": numbers((1, 2, 10, 11), 1)} | ({} if scales is None else {"s": np.float32(scales)})
    data = forward(f"h = Mul(x, w)\n{text}", parameters, (2, 10, 11), opset=opset, ir=7)
    assert_same_values(data, numbers((3, 2, 10, 11), 2))


def test_what_the_conversion_of_an_opset_changes_is_refused():
    """Before opset 13, Hardmax treated all axes from its own on as one."""
    text = "m = Hardmax<axis=1>(x)\nh = Flatten(m)\ny = MatMul(h, w)"
    data = forward(text, {"w": numbers((20, 3), 1)}, (4, 5), opset=12, ir=7)
    refused(data, r"Hardmax .*: onnx cannot convert it from opset 12, because it then computes other values; ")


def test_the_default_loss_of_one_answer_is_refused_with_one_flag():
    refused(net("y = Sigmoid(z)"), "it comes from Sigmoid: set loss='bce_with_logits', with the labels 0 and 1$",
            loss="cross_entropy")  # fmt: skip


@pytest.mark.parametrize(("data", "settings"), [file[:2] for file in FILES.values()], ids=FILES)
def test_an_evaluation_uses_the_tensor_that_is_trained_and_any_batch(data, settings):
    graph = build_training_graph(data, GraphSettings(**settings))
    loaded, feeds = HubGraph(graph.model, graph.spec, graph.initial, data), examples(graph)
    model = OnnxModel(file="published.onnx", **settings)
    evaluator = make_evaluator(model, loaded, Dataset.of(feeds["x"], feeds["target"]))
    assert evaluator(graph.initial).loss == pytest.approx(run(graph, feeds)["loss"], rel=1e-4)
