"""Where torch stops a gradient the exported model does, or it is refused: never another gradient in silence."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import edgeasync.torch
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import session
from tests.support.size import repetitions

nn = torch.nn
WIDTH = 4
MSE = GraphSettings(loss="mse")


class RandomModule(nn.Module):
    """A random graph over a few weights, each of which may be used in several places, with stops anywhere."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 2) for _ in range(3)]
        )
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator))
        # A LayerNorm's first weights are all alike, as those are that exporters merge.
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        draw = np.random.default_rng(self.seed)
        values = [x]
        for _ in range(draw.integers(4, 9)):
            values.append(self._stopped(self._next(values, draw), draw))
        first, second, third = self.weights  # each is trained somewhere
        return (
            sum(values[-3:]) + (nn.functional.linear(x, first, self.bias).tanh() @ second + self.norm(x)) @ third
        )

    def _next(self, values, draw):
        one, other = (values[place] for place in draw.integers(0, len(values), 2))
        weight = self.weights[draw.integers(len(self.weights))]
        match draw.integers(7):
            case 0:
                return nn.functional.linear(one, weight, self.bias)
            case 1:
                return nn.functional.linear(one, weight.detach(), self.bias)
            case 2:
                return torch.tanh(one) * other
            case 3:
                return one + torch.sigmoid(other.detach())
            case 4:
                with torch.no_grad():
                    target = nn.functional.linear(other, weight).tanh()
                return one - target
            case 5:
                return self.norm(one) + nn.functional.layer_norm(other, (WIDTH,), self.norm.weight.detach())
            case _:
                return nn.functional.softplus(one @ weight)

    @staticmethod
    def _stopped(value, draw):
        match draw.integers(8):
            case 0:
                return value.detach()
            case 1:
                with torch.no_grad():
                    return value * 2
            case 2:
                return value + (value.round() - value).detach()  # straight through
            case 3:
                return value.data
            case _:
                return value


def gradients(proto, x, target):
    """Return the gradients of an exported module at its first values."""
    graph = build_training_graph(proto.SerializeToString(), MSE)
    opened = session(graph.model)
    feeds = {"x": x.numpy(), "target": target.numpy()} | dict(graph.spec.views(graph.initial.copy()))
    names = [f"{parameter.name}.grad" for parameter in graph.spec.parameters]
    return dict(zip(names, opened.run(names, feeds), strict=True)), graph


def torchs(module, x, target):
    module = copy.deepcopy(module).to(x.dtype)
    nn.functional.mse_loss(module(x), target).backward()
    return {
        f"{name}.grad": torch.zeros_like(tensor).numpy() if tensor.grad is None else tensor.grad.numpy()
        for name, tensor in module.named_parameters()
    }


def assert_as_torch(module, proto, x, seed=0):
    """Hold the exported module against torch in float64, within a few times the spread of torch's own float32."""
    target = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(seed))
    ours, graph = gradients(proto, x, target)
    exact, single = torchs(module, x.double(), target.double()), torchs(module, x, target)
    largest = max(np.abs(gradient).max() for gradient in exact.values())
    for name, gradient in exact.items():
        spread = np.abs(single[name] - gradient).max()
        apart = np.abs(ours.get(name, np.zeros_like(gradient)) - gradient).max()
        assert apart <= 4 * spread + 1e-5 * largest, (name, apart, spread, largest)
    return graph


def exported(module, x, exporter):
    """Return an exported module, or what is said instead."""
    try:
        return edgeasync.torch.to_onnx(module, x, exporter=exporter), ""
    except GraphError as error:
        return None, str(error)


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("seed", range(repetitions("random modules with stops")))
def test_a_random_graph_is_as_in_torch_or_refused(seed, exporter):
    module = RandomModule(seed)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    proto, refusal = exported(module, x, exporter)
    if exporter == "legacy" and refusal:
        assert "use exporter='dynamo'" in refusal
        return
    assert not refusal
    graph = assert_as_torch(module, proto, x, seed)
    assert all(found.passed for found in check_gradients(graph.model, graph.spec, graph.initial))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Detached(Base):
    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden.detach()) + hidden


class WithoutGrad(Base):
    def forward(self, x):
        hidden = self.a(x)
        with torch.no_grad():
            high, _ = hidden.max(1, keepdim=True)
            target = self.a(x).relu() - high
        return self.b(hidden) + target


class Decorated(Base):
    @torch.no_grad()
    def target(self, x):
        return self.a(x).relu()

    def forward(self, x):
        return self.b(self.a(x)) + self.target(x)


class Nested(Base):
    def forward(self, x):
        hidden = self.a(x)
        with torch.no_grad():
            still = hidden * 3
            with torch.enable_grad():
                moving = hidden * 4
        return self.b(hidden) + still + moving


class OfTheWeight(Base):
    def forward(self, x):
        return nn.functional.linear(self.b(self.a(x)), self.b.weight.detach(), self.b.bias)


class WithDropout(Base):
    def forward(self, x):
        hidden = nn.functional.dropout(self.a(x), 0.5, self.training)
        with torch.no_grad():
            target = nn.functional.dropout(hidden, 0.5, self.training).tanh()
        return self.b(hidden) - target


class InPlace(Base):
    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden) + (hidden * 2).detach_()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnFunction(Base):
    def forward(self, x):
        return self.b(Straight.apply(self.a(x))) + self.a(x)


class Noisy(Base):
    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden + torch.rand(WIDTH)) + hidden.detach()


KEPT = [Detached, WithoutGrad, Decorated, Nested, OfTheWeight, WithDropout, Noisy]
OLDER = (
    "the legacy exporter does not write where torch stops gradients: use exporter='dynamo', or train the module"
)


@pytest.mark.parametrize("kind", KEPT)
def test_a_stop_is_kept_by_the_newer_exporter_and_the_older_one_is_refused(kind):
    torch.manual_seed(0)
    module, x = kind(), torch.randn(8, WIDTH)
    with pytest.raises(GraphError, match="use exporter='dynamo', or" if kind is Noisy else OLDER):
        edgeasync.torch.to_onnx(module, torch.zeros(2, WIDTH), exporter="legacy")
    proto = edgeasync.torch.to_onnx(module, torch.zeros(2, WIDTH))
    if kind not in (WithDropout, Noisy):
        assert_as_torch(module, proto, x)


LOST_BY_BOTH = "the legacy exporter does not write where torch stops gradients: train the module itself"
LOST = {
    InPlace: r"exporters ignore detach_\(\): write h = h.detach\(\) instead of h.detach_\(\), or train the module",
    OwnFunction: r"and its largest value is \S+; train the module itself with edgeasync.torch.model",
}


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize(("kind", "told"), LOST.items())
def test_a_stop_that_is_lost_is_refused_with_what_works(kind, told, exporter):
    module = kind()
    given = LOST_BY_BOTH if exporter == "legacy" else told
    with pytest.raises(GraphError, match=given) as caught:
        edgeasync.torch.to_onnx(module, torch.randn(2, WIDTH), exporter=exporter)
    assert "\n" not in str(caught.value)
    data = np.random.default_rng(0).normal(size=(2, 32, WIDTH)).astype(np.float32)
    run = edgeasync.train(
        edgeasync.torch.model(module), (data[0], data[1]), workers=1, until=edgeasync.Stop(updates=1)
    )
    assert run.updates >= 1
