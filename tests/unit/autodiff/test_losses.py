"""Every loss against a formula in numpy, and its gradient against finite differences."""

import numpy as np
import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.losses import BinaryCrossEntropy, CrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError
from tests.support.models.gradients import THREADS, Reference, assert_slopes, forward, numbers, run


def check_loss(loss, shape, formula, target_of, weigh=np.size, *, scale=1.0, batches=("batch", 5)):
    """Train y = x * p at once: the loss alone decides the gradient."""
    parameters = {"p": scale * numbers((1, *shape), 1)}
    for batch in batches:
        model = forward("y = Mul(x, p)", parameters, shape, batch=batch)
        graph = build_training_graph(model, GraphSettings(loss=loss))
        for rows in (1, 5) if batch == "batch" else (5,):
            x = numbers((rows, *shape), 2)
            target = target_of((rows, *shape))
            for threads in THREADS:
                found = run(graph, {"x": x, "target": target}, threads)
                y = (x * parameters["p"]).astype(np.float64)
                np.testing.assert_allclose(found["loss"], formula(y, target), rtol=2e-5)
                np.testing.assert_allclose(found["loss_weight"], weigh(target), rtol=1e-6)
                np.testing.assert_allclose(found["y"], y, rtol=1e-6)
                assert set(found) == {"loss", "loss_weight", "y", "p.grad"}
                assert all(value.dtype == np.float32 for value in found.values())
                assert_slopes({"p": found["p.grad"]}, Reference(model), x,
                              lambda y, target=target: formula(y, target))  # fmt: skip


def real(shape):
    return numbers(shape, 3)


def mean_error(y, target):
    return np.abs(y - target).mean()


def huber(y, target, delta):
    d = np.abs(y - target)
    return np.where(d <= delta, d * d / 2, delta * (d - delta / 2)).mean()


@pytest.mark.parametrize("shape", [(3,), (2, 4), (1,)], ids=str)
def test_losses_of_real_values(shape):
    for mse in ("mse", MeanSquaredError()):
        check_loss(mse, shape, lambda y, t: ((y - t) ** 2).mean(), real)
    for l1 in ("l1", MeanAbsoluteError()):
        check_loss(l1, shape, mean_error, real)
    for setting, delta in (("huber", 1.0), (Huber(delta=0.3), 0.3), (Huber(delta=50.0), 50.0)):
        check_loss(setting, shape, lambda y, t, delta=delta: huber(y, t, delta), real)


def binary(y, target):
    return (np.logaddexp(0, y) - y * target).mean()


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_binary_cross_entropy(scale):

    def target(shape):
        return (numbers(shape, 3) > 0).astype(np.float32)

    for setting in ("bce_with_logits", BinaryCrossEntropy()):
        check_loss(setting, (3,), binary, target, scale=scale)
    check_loss("bce_with_logits", (2, 3), binary, lambda shape: np.clip(numbers(shape, 3), 0, 1))


def cross_entropy(y, target, weights=None, smoothing=0.0):
    """As torch defines it, weights and smoothing together included."""
    classes = y.shape[1]
    weights = np.ones(classes) if weights is None else np.asarray(weights)
    logs = np.moveaxis(
        y - np.log(np.exp(y - y.max(1, keepdims=True)).sum(1, keepdims=True)) - y.max(1, keepdims=True), 1, -1
    )
    chosen = np.take_along_axis(logs, target[..., None], -1)[..., 0]
    whole = weights[target].sum()
    right = -(weights[target] * chosen).sum() / whole
    return (1 - smoothing) * right - smoothing / classes * (logs * weights).sum() / whole


def labels(shape):
    generator = np.random.Generator(np.random.PCG64(3))
    return generator.integers(0, shape[1], (shape[0], *shape[2:]))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3), (1,)], ids=str)
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 0.25, 1.0)], ids=["", "weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(shape, weights, smoothing):
    if weights is not None and shape == (1,):
        weights = weights[:1]
    setting = CrossEntropy(class_weights=weights, label_smoothing=smoothing)
    if shape == (1,):
        return  # one class is always right: the loss is 0 and says nothing
    weigh = np.size if weights is None else lambda t: np.asarray(weights)[t].sum()
    check_loss(setting, shape, lambda y, t: cross_entropy(y, t, weights, smoothing), labels, weigh)


@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 0.25, 1.0)], ids=["", "weights"])
@pytest.mark.parametrize("ignored", [2, 255])
def test_a_label_that_is_ignored_counts_for_nothing(shape, weights, ignored):
    own = np.ones(4) if weights is None else np.asarray(weights)

    def some(shape):
        drawn = labels(shape)
        drawn.flat[0] = 1  # one at least counts
        drawn.flat[1:2] = ignored
        return drawn

    def formula(y, target):
        logs = np.moveaxis(y - np.logaddexp.reduce(y, axis=1, keepdims=True), 1, -1)
        counts = target != ignored
        label = np.where(counts, target, 0)
        smooth = 0.1 / 4 + 0.9 * (np.arange(4) == label[..., None])
        return -(smooth * own * logs * counts[..., None]).sum() / weigh(target)

    def weigh(target):
        return own[target[target != ignored]].sum()

    setting = CrossEntropy(class_weights=weights, label_smoothing=0.1, ignored_label=ignored)
    check_loss(setting, shape, formula, some, weigh)


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (CrossEntropy(ignored_label=9), 9),
        (CrossEntropy(ignored_label=9, label_smoothing=0.1), 9),
        (CrossEntropy(class_weights=(1.0, 0.0, 1.0, 3.0)), 1),
        (CrossEntropy(class_weights=(1.0, 0.0, 1.0, 3.0), label_smoothing=0.1), 1),
    ],
)
def test_a_batch_in_which_nothing_counts_moves_nothing(loss, label):
    model = forward("y = Mul(x, p)", {"p": numbers((1, 4))}, (4,))
    graph = build_training_graph(model, GraphSettings(loss=loss))
    found = run(graph, {"x": numbers((3, 4), 2), "target": np.full(3, label)})
    assert (found["loss"], found["loss_weight"]) == (0.0, 0.0)
    assert not found["p.grad"].any()


def test_cross_entropy_by_its_name_and_of_large_scores():
    check_loss("cross_entropy", (4,), cross_entropy, labels)
    check_loss("cross_entropy", (4,), cross_entropy, labels, scale=30.0)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits", "mse", "l1", "huber"])
def test_no_loss_overflows(loss):
    model = forward("y = Mul(x, p)", {"p": np.float32([[1e4, -1e4, 1e4]])}, (3,))
    graph = build_training_graph(model, GraphSettings(loss=loss))
    target = np.array([1]) if loss == "cross_entropy" else np.float32([[0, 1, 1]])
    found = run(graph, {"x": np.ones((1, 3), np.float32), "target": target})
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize(
    ("text", "shape", "setting", "why"),
    [
        (
            "y = ReduceSum<keepdims=0>(h, one)",
            (3,),
            "cross_entropy",
            "has one score .* or loss='bce_with_logits' for",
        ),
        ("y = Transpose(h)", (3,), "cross_entropy", "needs scores of shape"),
        (
            "y = Identity(h)",
            (3,),
            CrossEntropy(class_weights=(1.0, 2.0)),
            "class_weights has length 2, but the output has 3 classes",
        ),
    ],
)
def test_what_a_loss_cannot_read_is_refused(text, shape, setting, why):
    constants = {"one": np.array([1]), "unity": np.float32(1)}
    model = forward(f"h = Mul(x, p)\n{text}", {"p": numbers((1, *shape))} | constants, shape)
    with pytest.raises(GraphError, match=why):
        build_training_graph(model, GraphSettings(loss=setting))
