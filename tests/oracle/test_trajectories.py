"""Two hundred steps of SGD and of Adam from the same start: the losses stay those of torch."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support.models.torch_exports import EXPORTS, LOSSES, Stepper, export
from tests.support.models.torch_models import MODELS, make

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 200


def batches(name):
    _, batch, classes = MODELS[name]
    torch.manual_seed(5)
    return [(batch(), torch.randint(0, classes, (len(batch()),))) for _ in range(8)]


def by_torch(model, data, rule, dtype):
    model = copy.deepcopy(model).to(dtype).train()
    make_rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[rule]
    optimizer = make_rule(model.parameters(), lr=0.05 if rule == "sgd" else 3e-3)
    losses = []
    for step in range(STEPS):
        x, target = data[step % len(data)]
        optimizer.zero_grad()
        loss = LOSSES["cross_entropy"](model(x.to(dtype) if x.is_floating_point() else x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return np.array(losses)


def by_graph(model, data, rule):
    stepper = Stepper(export(model, data[0][0], **EXPORTS["old, training"]), "cross_entropy", threads=2)
    values = stepper.values
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    losses = []
    for step in range(STEPS):
        found = stepper(*data[step % len(data)])
        losses.append(float(found["loss"]))
        for name, value in values.items():
            gradient = found[f"{name}.grad"]
            if rule == "sgd":
                np.subtract(value, np.float32(0.05) * gradient, out=value)
                continue
            first[name] += np.float32(0.1) * (gradient - first[name])
            second[name] += np.float32(0.001) * (gradient * gradient - second[name])
            root = np.sqrt(second[name] / np.float32(1 - 0.999 ** (step + 1))) + np.float32(1e-8)
            np.subtract(value, np.float32(3e-3 / (1 - 0.9 ** (step + 1))) * first[name] / root, out=value)
    return np.array(losses)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "own transformer"])
def test_losses_follow_torch(name, rule):
    model, *_ = make(name)
    data = batches(name)
    exact, single = (by_torch(model, data, rule, dtype) for dtype in (torch.float64, torch.float32))
    found = by_graph(model, data, rule)
    assert exact[-8:].mean() < 0.8 * exact[:8].mean()
    assert np.abs(found - exact).max() <= max(1e-4, 2 * np.abs(single - exact).max())
