"""Cross-entropy in chunks of classes: the same loss and gradients without a tensor of all scores."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from edgeasync.autodiff import chunks
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.losses import CrossEntropy
from tests.support.models.gradients import forward, numbers, run

CLASSES, TOKENS, WIDTH = 11, 3, 4
WEIGHTS = tuple([place / 4 for place in range(CLASSES)])
LOSSES = [
    CrossEntropy(),
    CrossEntropy(ignored_label=99),
    CrossEntropy(label_smoothing=0.2),
    CrossEntropy(class_weights=WEIGHTS, ignored_label=2),
    CrossEntropy(class_weights=WEIGHTS, ignored_label=2, label_smoothing=0.2),
]
TIED = """
h = Gather(w, x)
t = Transpose<perm=[1, 0]>(w)
s = MatMul(h, t)
y = Transpose<perm=[0, 2, 1]>(s)
"""
ADAPTER = """m = MatMul(h, w)
z = MatMul(h, a)
c = Mul(z, z)
t = Transpose<perm=[1, 0]>(d)
o = MatMul(c, t)
q = Add(m, o)
s = Add(q, b)
y = Transpose<perm=[0, 2, 1]>(s)"""
HEADS = {
    "product": ("s = MatMul(h, w)\ny = Transpose<perm=[0, 2, 1]>(s)", (WIDTH, CLASSES)),
    "bias": ("m = MatMul(h, w)\ns = Add(b, m)\ny = Transpose<perm=[0, 2, 1]>(s)", (WIDTH, CLASSES)),
    "transposed": (
        "t = Transpose<perm=[1, 0]>(w)\ns = MatMul(h, t)\ny = Transpose<perm=[0, 2, 1]>(s)",
        (CLASSES, WIDTH),
    ),
    "adapter": (ADAPTER, (WIDTH, CLASSES)),
    "flat": (
        "f = Reshape(h, rows)\ng = Gemm<transB=1>(f, w, b)\ns = Reshape(g, n)\ny = Transpose<perm=[0, 2, 1]>(s)",
        (CLASSES, WIDTH),
    ),
}  # fmt: skip


@pytest.fixture
def in_chunks(monkeypatch):
    def build(model, settings):
        whole = build_training_graph(model, settings)
        with monkeypatch.context() as patched:
            for name, value in (("SCORES_BYTES_MIN", 0), ("CHUNK_BYTES", 16 * TOKENS), ("CLASSES_MIN", 2)):
                patched.setattr(chunks, name, value)
            return whole, build_training_graph(model, settings)

    return build


def assert_same(whole, parts, feeds):
    expected, found = run(whole, feeds), run(parts, feeds)
    assert expected.keys() - found.keys() == {"y"}
    metadata = {entry.key: entry.value for entry in onnx.load_model_from_string(parts.model).metadata_props}
    assert metadata["edgeasync.chunks"] == "3"
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=2e-7, err_msg=name)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("train", [("*",), ("p",), ("w", "b"), ("p", "a", "d")], ids=str)
def test_the_loss_and_gradients_are_the_same(head, train, in_chunks):
    text, shape = HEADS[head]
    parameters = {"p": numbers((WIDTH,), 1), "w": numbers(shape, 2), "b": numbers((CLASSES,), 3)}
    parameters |= {"a": numbers((WIDTH, 2), 6), "d": numbers((CLASSES, 2), 7)}
    parameters |= {"rows": np.array([-1, WIDTH]), "n": np.array([-1, TOKENS, CLASSES])}
    model = forward(f"h = Mul(x, p)\n{text}", parameters, (TOKENS, WIDTH))
    target = np.random.default_rng(4).integers(0, CLASSES, (5, TOKENS))
    for loss in LOSSES if head == "product" else LOSSES[-1:]:
        labels = np.where(target == 2, loss.ignored_label or 2, target)
        whole, parts = in_chunks(model, GraphSettings(loss=loss, train=train))
        assert_same(whole, parts, {"x": numbers((5, TOKENS, WIDTH), 5), "target": labels})


@pytest.mark.parametrize("train", [("*",), ("w",), ("q",)], ids=str)
def test_a_weight_that_is_also_the_embedding_is_stored_once(train, in_chunks):
    text = TIED.replace("s = MatMul(h, t)", "z = Mul(h, q)\ns = MatMul(z, t)")
    parameters = {"w": numbers((CLASSES, WIDTH), 1), "q": numbers((WIDTH,), 2)}
    model = forward(text, parameters, (TOKENS,), kind=TensorProto.INT64)
    whole, parts = in_chunks(model, GraphSettings(train=train))
    tokens = np.random.default_rng(3).integers(0, CLASSES, (5, TOKENS))
    assert_same(whole, parts, {"x": tokens, "target": tokens[:, ::-1].copy()})
    for graph in (whole, parts):
        stored = [[*entry.dims] for entry in onnx.load_model_from_string(graph.model).graph.initializer]
        assert stored.count([CLASSES, WIDTH]) == (0 if "w" in graph.spec.names else 1)
        assert [WIDTH, CLASSES] not in stored


def test_masked_classes_and_large_scores(in_chunks):
    """A chunk may consist of impossible classes, and the powers of all scores may overflow."""
    bias = np.where(np.arange(CLASSES) < CLASSES // 2, -np.inf, 200.0).astype(np.float32)
    text, shape = HEADS["bias"]
    parameters = {"p": numbers((WIDTH,), 1), "w": numbers(shape, 2), "b": bias}
    model = forward(f"h = Mul(x, p)\n{text}", parameters, (TOKENS, WIDTH))
    target = np.random.default_rng(4).integers(CLASSES // 2, CLASSES, (5, TOKENS))
    whole, parts = in_chunks(model, GraphSettings(train=("p",)))
    x = numbers((5, TOKENS, WIDTH), 5)
    found, scores = run(parts, {"x": x, "target": target}), run(whole, {"x": x, "target": target})["y"]
    allowed = scores[:, CLASSES // 2 :].astype(np.float64)
    logarithms = np.log(np.exp(allowed - allowed.max(1, keepdims=True)).sum(1)) + allowed.max(1)
    own = np.take_along_axis(scores, target[:, None], 1)[:, 0]
    np.testing.assert_allclose(found["loss"], (logarithms - own).mean(), rtol=1e-5)
    assert np.isfinite(found["p.grad"]).all()


@pytest.mark.parametrize(
    ("text", "classes", "count"),
    [
        ("s = MatMul(h, w)", 20480, "3"),
        ("s = MatMul(h, w)", 4096, None),  # 1 MiB of scores
        ("m = MatMul(h, w)\ns = Mul(m, m)", 20480, None),
        ("m = MatMul(h, w)\nr = ReduceMean<keepdims=1>(m)\ns = Sub(m, r)", 20480, None),
    ],
)
def test_only_large_scores_of_a_linear_layer_are_computed_in_chunks(text, classes, count):
    parameters = {"p": numbers((2,), 1), "w": numbers((2, classes), 2)}
    model = forward(f"h = Mul(x, p)\n{text}\ny = Transpose<perm=[0, 2, 1]>(s)", parameters, (64, 2))
    graph = build_training_graph(model, GraphSettings())
    proto = onnx.load_model_from_string(graph.model)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata.get("edgeasync.chunks") == count
    assert ("y" in {entry.name for entry in proto.graph.output}) is (count is None)
    assert any("chunks" in note for note in graph.notes) is (count is not None)
