"""Operators that are replaced by others train as in torch, also where they bend."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from tests.support.models.gradients import forward, numbers
from tests.support.models.torch_exports import EXPORTS, Stepper, distance, export, torch_step

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves

nn, F = torch.nn, torch.nn.functional
BENDS = np.float32([[-2, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 2]])

POINTWISE = {
    "Celu<alpha=0.5>": lambda x: F.celu(x, 0.5),
    "Selu": F.selu,
    "Mish": F.mish,
    "Softsign": F.softsign,
    "ThresholdedRelu<alpha=0.25>": lambda x: F.threshold(x, 0.25, 0.0),
    "Shrink<lambd=0.5, bias=0.5>": lambda x: F.softshrink(x, 0.5),
    "Shrink<lambd=0.25>": lambda x: F.hardshrink(x, 0.25),
    "com.microsoft.Gelu": F.gelu,
    "com.microsoft.FastGelu": lambda x: F.gelu(x, approximate="tanh"),
}


def stepped(text, parameters, x, y, function, **options):
    """Compare the gradients of a model in text with those of a function of x and all parameters in torch."""
    stepper = Stepper(forward(text, parameters, x.shape[1:], **options), "mse", train=("*",))
    target = torch.from_numpy(numbers(y, 9))
    found = stepper(torch.from_numpy(x), target)
    exact = {name: torch.from_numpy(value).double().requires_grad_() for name, value in stepper.values.items()}
    F.mse_loss(function(torch.from_numpy(x).double(), exact), target.double()).backward()
    for name, value in exact.items():
        assert distance(found[f"{name}.grad"], value.grad.numpy(), 0.0) < 1e-5, name


@pytest.mark.parametrize("op", POINTWISE)
def test_activations_where_they_bend(op):
    name, _, attributes = op.partition("<")
    text = f"h = Mul(x, p)\na = {name}{'<' + attributes if attributes else ''}(h)\ny = Mul(a, w)"
    parameters = {"p": np.ones(BENDS.shape, np.float32), "w": numbers(BENDS.shape[1:], 1)}
    stepped(text, parameters, BENDS, BENDS.shape, lambda x, given: POINTWISE[op](x * given["p"]) * given["w"])


def test_a_prelu_where_it_bends():
    x = np.concatenate([BENDS, -BENDS])[:, None]
    parameters = {"p": np.ones(x.shape[1:], np.float32), "slope": np.float32([0.25])}
    stepped("h = Mul(x, p)\ny = PRelu(h, slope)", parameters, x, x.shape,
            lambda x, given: F.prelu(x * given["p"], given["slope"]))  # fmt: skip


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.slope = nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.PReLU(6)
        self.middle, self.last = nn.Linear(6 * 16, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = F.softsign(F.mish(self.slope(self.norm(self.conv(x)))))
        return self.last(F.celu(F.selu(self.middle(h.flatten(1))), 0.5))


class Attentive(nn.Module):
    """Grouped attention with a causal mask, which has an operator from opset 23 on."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.norm, self.last = nn.RMSNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        length = x.shape[1]
        query, key, value = (layer(x).unflatten(2, (-1, 2)).transpose(1, 2)
                             for layer in (self.query, self.key, self.value))  # fmt: skip
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.last(self.norm(mixed.transpose(1, 2).reshape(-1, length, 8)[:, -1]))


MODELS = {"activations": (Activated, (5, 2, 6, 6)), "attention": (Attentive, (5, 4, 8))}


@pytest.mark.parametrize(("name", "way", "opset"), [
    ("activations", "old, training", 18), ("activations", "new", 18), ("activations", "new", 23),
    ("attention", "new", 18), ("attention", "new", 23),
])  # fmt: skip
def test_exports_of_torch(name, way, opset):
    torch.manual_seed(0)
    made, shape = MODELS[name]
    model = made()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    x, target = torch.randn(shape), torch.randint(0, 3, shape[:1])
    given = EXPORTS[way] | ({"opset_version": opset} if EXPORTS[way]["dynamo"] else {})
    stepper = Stepper(export(model, x, **given), "cross_entropy")
    found = stepper(x, target)
    _, exact, _ = torch_step(model, x, target, "cross_entropy")
    assert {f"{key}.grad" for key in exact} <= found.keys()
    for key, value in exact.items():
        assert distance(found[f"{key}.grad"], value, 1e-2) < 2e-5, key
