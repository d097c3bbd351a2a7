"""Every loss of a training graph beside torch's own, with every parameter; value and gradient."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
)
from tests.support.models.gradients import forward, numbers, run

WEIGHTS = (0.5, 2.0, 0.0, 1.0)


def cross_entropy(loss):
    weight = None if loss.class_weights is None else torch.tensor(loss.class_weights, dtype=torch.float64)
    ignored = -100 if loss.ignored_label is None else loss.ignored_label
    return torch.nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=loss.label_smoothing)


CASES = [
    *[
        (loss, cross_entropy(loss))
        for weights in (None, WEIGHTS)
        for smoothing in (0.0, 0.2)
        for ignored in (None, 1, 255)
        for loss in [CrossEntropy(class_weights=weights, label_smoothing=smoothing, ignored_label=ignored)]
    ],
    (MeanSquaredError(), torch.nn.MSELoss()),
    (MeanAbsoluteError(), torch.nn.L1Loss()),
    (Huber(delta=0.4), torch.nn.HuberLoss(delta=0.4)),
    (BinaryCrossEntropy(), torch.nn.BCEWithLogitsLoss()),
]


@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
@pytest.mark.parametrize(("loss", "own"), CASES, ids=[str(loss) for loss, _ in CASES])
def test_a_loss_is_that_of_torch(loss, own, shape):
    graph = build_training_graph(
        forward("y = Mul(x, p)", {"p": numbers((1, *shape), 1)}, shape), GraphSettings(loss=loss)
    )
    x, generator = numbers((6, *shape), 2), np.random.default_rng(3)
    if isinstance(loss, CrossEntropy):
        target = generator.integers(0, 4, (6, *shape[1:]))
        if loss.ignored_label is not None:
            target[::2] = loss.ignored_label
        target[1] = 3
    else:
        target = generator.random((6, *shape)).astype(np.float32)
    found = run(graph, {"x": x, "target": target})
    p = torch.tensor(graph.initial.reshape(1, *shape), dtype=torch.float64, requires_grad=True)
    wanted = torch.from_numpy(target)
    value = own(torch.from_numpy(x).double() * p, wanted if wanted.dtype == torch.int64 else wanted.double())
    value.backward()
    np.testing.assert_allclose(found["loss"], value.item(), rtol=1e-5)
    np.testing.assert_allclose(found["p.grad"], p.grad.numpy(), rtol=1e-4, atol=1e-6)
