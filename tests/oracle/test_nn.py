"""What layers of `edgeasync.nn` compute, against the same layers of torch."""

import itertools

import numpy as np
import pytest

from edgeasync import nn
from tests.support.models.layers import numbers, parameters, randomized, run

torch = pytest.importorskip("torch")


def test_torch_agrees_about_images():
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 4, 3, 2, 1, groups=2),
        nn.AvgPool2d(2, 1, 1),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 5),
    )
    same = torch.nn.Sequential(
        torch.nn.Conv2d(2, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.Hardswish(),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.ConvTranspose2d(8, 4, 3, 2, 1, groups=2),
        torch.nn.AvgPool2d(2, 1, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 6 * 6, 5),
    ).eval()
    proto = randomized(model, (2, 10, 10))
    state = {name: torch.tensor(values) for name, values in parameters(proto).items()}
    state["1.num_batches_tracked"] = torch.tensor(0)
    same.load_state_dict(state)
    x = numbers((3, 2, 10, 10))
    with torch.no_grad():
        expected = same(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(proto, x), expected, rtol=1e-4, atol=1e-4)


def test_torch_agrees_about_attention():
    proto = randomized(nn.SelfAttention(8, 2), (5, 8))
    same = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    same.load_state_dict({name[2:]: torch.tensor(values) for name, values in parameters(proto).items()})
    x = numbers((3, 5, 8))
    with torch.no_grad():
        tensor = torch.from_numpy(x)
        expected = same(tensor, tensor, tensor, need_weights=False)[0].numpy()
    np.testing.assert_allclose(run(proto, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "order"), [("LSTM", (0, 2, 3, 1)), ("GRU", (1, 0, 2))])
def test_torch_agrees_about_recurrence(kind, order):
    layer = getattr(nn, kind)(3, 4, 2, bidirectional=True, return_sequences=True)
    proto = randomized(layer, (5, 3))
    same = getattr(torch.nn, kind)(3, 4, 2, bidirectional=True, batch_first=True)

    def reordered(values):
        # torch has its gates in the order i f g o, or r z n; `order` says where ONNX has each.
        gates = np.split(values, len(order))
        return torch.tensor(np.concatenate([gates[place] for place in order]))

    state, p = {}, parameters(proto)
    for level, (direction, suffix) in itertools.product((0, 1), enumerate(("", "_reverse"))):
        ending = f"_l{level}{suffix}"
        for name in ("weight_ih", "weight_hh"):
            state[name + ending] = reordered(p[f"0.{level}.{name}"][direction])
        for name, values in zip(("bias_ih", "bias_hh"), np.split(p[f"0.{level}.bias"][direction], 2), strict=True):
            state[name + ending] = reordered(values)
    same.load_state_dict(state)
    x = numbers((3, 5, 3))
    with torch.no_grad():
        expected = same(torch.from_numpy(x))[0].numpy()
    np.testing.assert_allclose(run(proto, x), expected, rtol=1e-4, atol=1e-5)
