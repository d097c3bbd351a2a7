"""What exporters lose of a module: the file has it all the same, or `to_onnx` refuses with a way that works."""

import ast
import random
import re
import threading

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import edgeasync.torch
from edgeasync import Stop, train
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.chance import without_chance
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import ConfigError, EdgeAsyncError, GraphError
from edgeasync.sdk.torch_draws import SameDraws
from tests.support.models.followed import arguments
from tests.support.models.gradients import session
from tests.support.models.torch_exports import EXPORTS, export

nn, functional = torch.nn, torch.nn.functional
prune = pytest.importorskip("torch.nn.utils.prune")
MSE = GraphSettings(loss="mse")
IDS = torch.randint(1, 5, (3, 4), generator=torch.Generator().manual_seed(0))
"""Token 0, the padding, is not among them."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Module(nn.Module):
    """Parts by name, and a forward that is given."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.body = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.body(self, x)


def of_floats(forward, **parts):
    return Module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2), **parts)


def graph_of(proto):
    return build_training_graph(proto.SerializeToString(), MSE)


def gradients(proto, feeds):
    """Return the gradients that a training graph has by its parameters' names, and its running statistics."""
    graph = graph_of(proto)
    opened = session(without_chance(graph.model))
    names = [entry.name for entry in opened.get_outputs()]
    read = {entry.name for entry in opened.get_inputs()}
    feeds = {name: value for name, value in (feeds | graph.spec.views(graph.initial)).items() if name in read}
    return dict(zip(names, opened.run(names, feeds), strict=True))


def assert_as_torch(module, proto, x):
    """Hold every gradient and statistic against torch's, without dropout and with the same random numbers."""
    module = module.train()
    for part in module.modules():
        if "Dropout" in type(part).__name__:
            part.p = 0.0
    with SameDraws():
        found = module(x)
        target = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        functional.mse_loss(found, target).backward()
    ours = gradients(proto, {"x": x.numpy(), "target": target.numpy()})
    for name, tensor in module.named_parameters():
        if tensor.requires_grad:
            np.testing.assert_allclose(
                ours[f"{name}.grad"], tensor.grad.to_dense(), rtol=2e-4, atol=1e-6, err_msg=name
            )
    moved = {name: value for name, value in ours.items() if name.endswith(".new")}
    for name, value in moved.items():
        np.testing.assert_allclose(value, module.get_buffer(name.removesuffix(".new")), rtol=1e-5, err_msg=name)
    return moved


def sampled(m, x):
    mean, spread = m.a(x).chunk(2, 1)
    return torch.cat([mean, mean], 1) * 0.1 + m.a(x) * torch.randn_like(x) + spread.exp().mean()


NOISE = {
    "normal numbers": lambda m, x: m.b(m.a(x) + torch.randn_like(x) * 0.1),
    "uniform numbers for a row": lambda m, x: m.b(m.a(x) * torch.rand(4)),
    "a mask of coins": lambda m, x: m.b(m.a(x) * torch.bernoulli(torch.full_like(x, 0.3))),
    "a mask of odds": lambda m, x: m.b(m.a(x) * torch.bernoulli(m.a(x).sigmoid())),
    "a path left out": lambda m, x: m.b(x + m.a(x) * x.new_empty(x.shape[0], 1).bernoulli_(0.5)),
    "a soft choice": lambda m, x: m.b(functional.gumbel_softmax(m.a(x))),
    "noise beside a stop": lambda m, x: m.b(m.a(x) + torch.randn_like(x)) + m.b(m.a(x).detach()),
    "reparametrized": lambda m, x: m.b(sampled(m, x)),
}


@pytest.mark.parametrize("forward", NOISE.values(), ids=NOISE)
def test_a_module_with_noise_is_compared_by_the_same_draws(forward):
    module, x = of_floats(forward), torch.randn(6, 4)
    proto = edgeasync.torch.to_onnx(module, x)
    assert_as_torch(module, proto, x)
    graph = graph_of(proto)
    assert all(
        check.passed and check.compared for check in check_gradients(graph.model, graph.spec, graph.initial)
    )


def hooked(m, x):
    hidden = m.a(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: -gradient)
    return m.b(hidden + torch.randn_like(hidden) * 0.1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


WRONG = {
    "a sample that torch passes no gradient through": lambda m, x: m.b(torch.normal(m.a(x), 0.5)),
    "a hook": hooked,
    "a function with another gradient": lambda m, x: m.b(Reversed.apply(m.a(x)) + torch.randn_like(x) * 0.1),
    "a stop in place": lambda m, x: m.b(m.a(x) + torch.rand_like(x)) + m.b(m.a(x) * 2).detach_(),
}


@pytest.mark.parametrize("forward", WRONG.values(), ids=WRONG)
def test_noise_hides_no_wrong_gradient(forward):
    with pytest.raises(
        GraphError, match=r"the gradient of '[ab].weight' in the exported model differs from torch's"
    ):
        edgeasync.torch.to_onnx(of_floats(forward), torch.randn(3, 4))


def test_numbers_that_nothing_repeats_are_no_comparison():
    drawn = of_floats(lambda m, x: m.b(m.a(x) * random.random()))
    with pytest.raises(
        GraphError, match=r"Module returns different gradients at each call.*; train the module itself"
    ):
        edgeasync.torch.to_onnx(drawn, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves
def test_a_file_of_torch_s_own_exporter_tells_which_of_its_masks_stay():
    """A mask that only multiplies is removed from an exported model, an affine one is not."""
    x = torch.randn(3, 4)
    module = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(4, 2))
    data = export(module, x, **EXPORTS["new"])
    assert build_training_graph(data, MSE).warnings == ()
    same = run_forward(onnx.load_model_from_string(export_model(data, {})), x)
    np.testing.assert_allclose(same, module.eval()(x).detach(), rtol=1e-5, atol=1e-6)
    module = nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(4, 2))
    (told,) = build_training_graph(export(module, x, **EXPORTS["new"]), MSE).warnings
    assert re.fullmatch(
        r"node '.*' \(RandomUniformLike\) draws random numbers in evaluations too, .*edgeasync.torch.to_onnx",
        told,
    )
    assert graph_of(edgeasync.torch.to_onnx(module, x)).warnings == ()


DROPOUTS = {
    "Dropout": ((6, 4), (6, 4)),
    "Dropout1d": ((6, 4, 3), (6, 4, 1)),
    "Dropout1d of two axes": ((6, 4), (6, 1)),
    "Dropout2d": ((6, 4, 3, 2), (6, 4, 1, 1)),
    "Dropout3d": ((6, 4, 3, 2, 2), (6, 4, 1, 1, 1)),
    "AlphaDropout": ((6, 4), (6, 4)),
    "FeatureAlphaDropout": ((6, 4, 3), (6, 4, 1)),
}


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_dropout_of_any_kind_draws_in_training_alone(kind, exporter):
    shape, drawn = DROPOUTS[kind]
    made = getattr(nn, kind.split()[0])(0.5)
    module, x = (
        Module(lambda m, x: m.b(m.drop(x * m.a)), a=nn.Parameter(torch.ones(1)), drop=made, b=nn.Flatten()),
        torch.randn(shape),
    )
    proto = edgeasync.torch.to_onnx(module, x, exporter=exporter)
    graph = graph_of(proto)
    opened, y = session(graph.model), module(x).detach().numpy()
    feeds = {"x": x.numpy(), "target": y} | graph.spec.views(graph.initial)
    assert len({float(opened.run(["loss"], feeds)[0]) for _ in range(8)}) > 1, "as a device runs it"
    same = run_forward(onnx.load_model_from_string(export_model(proto.SerializeToString(), {})), x)
    np.testing.assert_array_equal(same, module.eval()(x).detach(), "without training nothing is dropped")
    # Torch's own values, kept and dropped, are the only ones, and whole channels have the same of the two.
    kept = module.train().drop(torch.ones(4000, 1, *shape[2:])).unique()
    assert len(kept) == 2
    of_ones = run_forward(proto, torch.ones(shape)).reshape(shape)
    assert np.isclose(of_ones[..., None], kept.numpy(), atol=1e-6).any(-1).all()
    first = of_ones[tuple(slice(1) if one == 1 else slice(None) for one in drawn)]
    np.testing.assert_array_equal(of_ones, np.broadcast_to(first, shape))


def run_forward(proto, x):
    """Run a file as it is, with the chance it has."""
    return open_session(proto.SerializeToString()).run(["y"], {"x": x.numpy()})[0]


def bag(**options):
    return lambda: Module(
        lambda m, ids: m.scores(m.table(ids)), table=nn.EmbeddingBag(5, 3, **options), scores=nn.Linear(3, 2)
    )


def table(**options):
    return lambda: Module(
        lambda m, ids: m.scores(m.table(ids).mean(1)), table=nn.Embedding(5, 3, **options), scores=nn.Linear(3, 2)
    )


def by_function(m, ids):
    return m.scores(functional.embedding(ids, m.scores.weight, padding_idx=-5).mean(1))


PADDED = {
    "a table": table(padding_idx=0),
    "from behind": table(padding_idx=-5),
    "of sparse gradients": table(padding_idx=0, sparse=True),
    "a function": lambda: Module(by_function, scores=nn.Linear(3, 5)),
    "a bag of means": bag(padding_idx=0),
    "a bag of sums": bag(padding_idx=0, mode="sum"),
}


@pytest.mark.parametrize("module", PADDED.values(), ids=PADDED)
def test_padding_is_not_trained_whatever_the_example_holds(module):
    module = module()
    if hasattr(module, "table"):
        with torch.no_grad():
            module.table.weight[0] = 1.0
    proto = edgeasync.torch.to_onnx(module, IDS)
    padded = torch.tensor([[0, 1, 2, 0], [3, 0, 0, 4], [0, 0, 0, 0], [1, 2, 3, 4]])
    assert_as_torch(module, proto, padded)


@pytest.mark.parametrize("module", [bag(), bag(mode="sum")])
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_a_bag_of_embeddings_is_its_table_and_a_mean(module, exporter):
    module = module()
    assert_as_torch(module, edgeasync.torch.to_onnx(module, IDS, exporter=exporter), IDS)


def scaled(m, x):
    return m.b(m.a(x)) * m.scale.exp() + m.shift


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_single_numbers_are_trained(exporter):
    module = of_floats(scaled, scale=nn.Parameter(torch.tensor(0.7)), shift=nn.Parameter(torch.tensor(0.0)))
    x = torch.randn(6, 4)
    proto = edgeasync.torch.to_onnx(module, x, exporter=exporter)
    assert_as_torch(module, proto, x)
    run = train(proto, (x.numpy(), np.arange(6) % 2), workers=1, until=Stop(updates=3))
    assert run.arrays["scale"].shape == ()
    assert run.arrays["scale"] != np.float32(0.7)


@pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves
def test_a_single_number_in_a_file_of_the_older_exporter_is_told():
    module = of_floats(scaled, scale=nn.Parameter(torch.tensor(0.7)), shift=nn.Parameter(torch.tensor(0.0)))
    content = export(module, torch.randn(3, 4), **EXPORTS["old, training"])
    (told,) = build_training_graph(content, MSE).warnings
    assert told.startswith("scalars are not trained, because they may be constants: scale, shift; ")
    followed = build_training_graph(content, GraphSettings(loss="mse", train=arguments(told)["train"]))
    assert {"scale", "shift", "a.weight"} <= {parameter.name for parameter in followed.spec.parameters}
    assert followed.warnings == ()
    graph = build_training_graph(export(module, torch.randn(3, 4), **EXPORTS["new"]), MSE)
    assert {"scale", "shift"} <= {parameter.name for parameter in graph.spec.parameters}


class Kept(nn.Module):
    """A backbone whose norms keep their statistics, as is usual where it is tuned."""

    def __init__(self, *, frozen, noise):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.running_mean.fill_(0.3)
        self.a.requires_grad_(not frozen)
        self.norm.requires_grad_(not frozen)
        self.noise = noise

    def train(self, *mode):
        super().train(*mode)
        self.norm.eval()
        return self

    def forward(self, x):
        hidden = self.norm(self.a(x))
        return self.b(hidden + torch.randn_like(hidden) * 0.1 if self.noise else hidden)


@pytest.mark.parametrize("whole", [True, False])
def test_parts_of_a_module_in_training_mode_keep_their_mode(whole):
    module, x = of_floats(lambda m, x: m.b(m.norm(m.a(x))), norm=nn.BatchNorm1d(4)), torch.randn(6, 4)
    (module if whole else module.norm).eval()
    graph = graph_of(edgeasync.torch.to_onnx(module, x, exporter="legacy"))
    assert ("norm.running_mean" in {parameter.name for parameter in graph.spec.parameters}) == whole
    data = x.numpy(), np.ones((6, 2), np.float32)
    run = train(edgeasync.torch.model(module, nn.MSELoss()), data, workers=1, until=Stop(updates=1))
    assert bool(run.arrays["norm.running_mean"].any()) == whole


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_statistics_of_a_norm_in_evaluation_mode_stay(frozen, noise, exporter):
    module, x = Kept(frozen=frozen, noise=noise), torch.randn(6, 4)
    proto = edgeasync.torch.to_onnx(module, x, exporter=exporter)
    assert assert_as_torch(module, proto, x) == {}
    everything = build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse", train=("*",)))
    assert {parameter.role for parameter in everything.spec.parameters} == {"trained"}
    named = GraphSettings(loss="mse", train=("b.*", "norm.running_mean", "norm.running_var"))
    moving = build_training_graph(proto.SerializeToString(), named)
    assert "norm.running_var" in {parameter.name for parameter in moving.spec.parameters}


class Averaged(nn.Module):
    """Takes away a mean of what has been seen."""

    def __init__(self, *, used=True):
        super().__init__()
        self.a = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.used = used

    def forward(self, x):
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.a(x - self.seen if self.used else x)


class Clamped(nn.Linear):
    """Keeps its weights small, in place."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


MOVING = {
    "a weight": (lambda: Clamped(4, 2), "weight"),
    "a mean of its own": (Averaged, "seen"),
    "a mean that is only kept": (lambda: Averaged(used=False), "seen"),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        "parametrizations.weight.0._u",
    ),
    "a mean over all batches": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=None)),
        "1.running_mean",
    ),
    "statistics of instances": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
        ),
        "1.running_mean",
    ),
}


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize(("module", "name"), MOVING.values(), ids=MOVING)
def test_what_moves_in_forward_moves_in_the_file_or_is_refused(module, name, exporter):
    said = refused(module(), torch.randn(6, 4), exporter=exporter)
    assert repr(name) in said or "torch cannot export" in said
    assert "random" not in said


def refused(module, x, **options):
    """Return a refusal of one line, and do what it says until the module trains."""
    first, given = "", dict(options)
    for _ in range(3):
        with pytest.raises(EdgeAsyncError) as caught:
            edgeasync.torch.to_onnx(module, x, **given)
        said = str(caught.value)
        assert "\n" not in said
        first = first or said
        found = {name: ast.literal_eval(value) for name, value in ARGUMENT.findall(said)}
        if not found:
            assert "train the module itself with edgeasync.torch.model" in said
            assert_trains_itself(module, x)
            return first
        given |= found
        edgeasync.torch.to_onnx(module, x, **given)
        return first
    raise AssertionError(first)


ARGUMENT = re.compile(r"\b(exporter|freeze|train)=('[^']*'|\[[^\]]*\])")


def assert_trains_itself(module, x):
    y = np.zeros(tuple(module(x).shape), np.float32)
    model = edgeasync.torch.model(module, functional.mse_loss)
    assert train(model, (x.numpy(), y), workers=1, until=Stop(updates=1)).updates >= 1


def branching(m, x):
    return m.b(m.a(x)) if x.abs().max() < 6 else -m.b(m.a(x))


def guarded(m, x):
    if torch.isnan(x).any() or not (x.abs() < 1e6).all():
        raise ValueError("no numbers")
    return m.b(m.a(x))


@pytest.mark.parametrize("forward", [branching, lambda m, x: m.b(m.a(x)) * (2 if torch.equal(x, x * 2) else 1)])
def test_a_way_that_values_choose_is_not_frozen(forward):
    said = refused(of_floats(forward), torch.randn(3, 4), exporter="legacy")
    assert re.search(
        r"branches on the values of a tensor \(test_what_exporters_lose.py:\d+\), .*; use torch.where, or", said
    )
    assert "torch cannot export Module" in refused(of_floats(branching), torch.randn(3, 4))


def test_a_guard_chooses_nothing():
    edgeasync.torch.to_onnx(of_floats(guarded), torch.randn(3, 4), exporter="legacy")


class Token(nn.Module):
    """Puts a learned token before each sequence; the number of sequences is read in one way or another."""

    def __init__(self, count):
        super().__init__()
        self.token, self.a, self.count = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 4), count

    def forward(self, x):
        return torch.cat([self.token.expand(self.count(x), -1), self.a(x)], 1)


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_a_batch_that_became_a_number_is_told(exporter):
    said = refused(Token(len), torch.randn(3, 4), exporter=exporter)
    assert "accepts only 3 examples, because len(x) became a Python number" in said
    assert "use x.shape[0]" in said
    edgeasync.torch.to_onnx(Token(lambda x: x.shape[0]), torch.randn(3, 4), exporter=exporter)


def still(tensor):
    tensor.grad.zero_()


STILL = {"register_hook": lambda gradient: gradient * 0, "register_post_accumulate_grad_hook": still}


@pytest.mark.parametrize("hook", STILL)
def test_a_hook_of_a_parameter_is_in_no_file_and_stays_in_a_module(hook):
    module = of_floats(lambda m, x: m.b(m.a(x)))
    getattr(module.a.weight, hook)(STILL[hook])
    said = refused(module, torch.randn(3, 4), exporter="legacy")
    assert said.startswith("the gradient of a.weight has a hook, which an exported model cannot express; ")
    data = np.ones((8, 4), np.float32), np.ones((8, 2), np.float32)
    with pytest.raises(ConfigError, match=r"a.weight has a hook, which cannot be sent .* engine='tasks'"):
        train(edgeasync.torch.model(module, nn.MSELoss()), data, workers=1, engine="processes")
    run = train(edgeasync.torch.model(module, nn.MSELoss()), data, workers=1, until=Stop(updates=1))
    moved = {name for name, array in run.arrays.items() if (array != module.state_dict()[name].numpy()).any()}
    assert moved == {"a.bias", "b.weight", "b.bias"}


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        return gradient.clamp(-1, 1)


def clipped_within(m, x):
    hidden = m.a(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return m.b(hidden)


def clipped_by_a_layer():
    module = of_floats(lambda m, x: m.b(m.a(x)))
    module.a.register_full_backward_pre_hook(lambda _, gradients: tuple([each.clamp(-1, 1) for each in gradients]))
    return module


CLIPPED = {
    "a hook of a tensor": lambda: of_floats(clipped_within),
    "a hook of a layer": clipped_by_a_layer,
    "a function": lambda: of_floats(lambda m, x: m.b(Clipped.apply(m.a(x)))),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("module", CLIPPED.values(), ids=CLIPPED)
def test_gradients_that_are_clipped_on_their_way_are_refused_though_they_are_small_here(module):
    said = refused(module(), torch.randn(3, 4), exporter="legacy")
    assert (
        "clips gradients in the backward pass, with a hook or a custom function, which an exported model" in said
    )
    assert "exporter=" not in said


def pruned():
    module = of_floats(lambda m, x: m.b(m.a(x)))
    prune.l1_unstructured(module.a, "weight", amount=0.5)
    return module


def weight_normed():
    module = of_floats(lambda m, x: m.b(m.a(x)))
    nn.utils.weight_norm(module.a)
    module(torch.randn(2, 4))
    return module


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("kind", [pruned, weight_normed])
def test_a_weight_that_each_forward_computes_anew_is_no_hindrance(kind, exporter):
    module, x = kind(), torch.randn(6, 4)
    assert_as_torch(module, edgeasync.torch.to_onnx(module, x, exporter=exporter), x)
    data = x.numpy(), np.ones((6, 2), np.float32)
    train(edgeasync.torch.model(kind(), nn.MSELoss()), data, workers=1, until=Stop(updates=1))


def shifted(m, x):
    return m.b(m.a(x.sub_(0.5)))


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_a_forward_may_change_its_input(exporter):
    module, x = of_floats(shifted), torch.randn(6, 4)
    before = x.clone()
    proto = edgeasync.torch.to_onnx(module, x, exporter=exporter)
    assert torch.equal(x, before)
    ours = gradients(proto, {"x": x.numpy(), "target": np.zeros((6, 2), np.float32)})
    functional.mse_loss(module(before), torch.zeros(6, 2)).backward()
    np.testing.assert_allclose(ours["a.weight.grad"], module.a.weight.grad, rtol=2e-4, atol=1e-6)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_what_is_kept_between_calls_is_no_random_number():
    said = refused(Counting(4, 2), torch.randn(3, 4), exporter="legacy")
    assert "or of state between calls" in said


class Packed(nn.Module):
    def __init__(self, *, packs):
        super().__init__()
        self.steps, self.b, self.packs = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2), packs

    def forward(self, x):
        length = (x.abs().sum(2) > 0).sum(1).clamp(min=1)
        if self.packs:
            packed = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
            return self.b(self.steps(packed)[1][-1])
        h, _ = self.steps(x)
        return self.b(h[torch.arange(h.shape[0]), length - 1])


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_packed_sequences_are_told_without_what_c_says_and_without_a_dump(exporter, capfd):
    x = torch.randn(4, 5, 3)
    x[1, 3:] = 0
    said = refused(Packed(packs=True), x, exporter=exporter)
    assert "::" not in said
    assert "remove pack_padded_sequence, and select the last step" in said
    assert capfd.readouterr().out == ""
    edgeasync.torch.to_onnx(Packed(packs=False), x, exporter=exporter)


def gated(m, x):
    return m.b(x * (m.a(x) > 0))


ONE_WAY = {
    "parameters that no gradient reaches": (
        lambda: of_floats(gated),
        "dynamo",
        r"no gradient reaches a.weight, a.bias of Module; .* freeze=[",
    ),
    "an operator without a gradient": (
        lambda: of_floats(lambda m, x: m.b(m.a(x) * torch.linalg.det(m.a(x).reshape(-1, 2, 2)).reshape(-1, 1))),
        "dynamo",
        "freeze=[",
    ),
    "what the older exporter cannot write": (
        lambda: of_floats(lambda m, x: m.b(torch.expm1(m.a(x)))),
        "legacy",
        "exporter='dynamo'",
    ),
    "padding by the older exporter": (
        PADDED["a table"],
        "legacy",
        "an embedding has a padding_idx, .* exporter='dynamo'",
    ),
    "random numbers by the older exporter": (
        lambda: of_floats(NOISE["uniform numbers for a row"]),
        "legacy",
        "exporter='dynamo'",
    ),
    "what neither can write": (
        lambda: of_floats(lambda m, x: torch.linalg.eigvals(m.a(x).reshape(-1, 2, 2)).real),
        "dynamo",
        "; train",
    ),
}


@pytest.mark.parametrize(("module", "exporter", "told"), ONE_WAY.values(), ids=ONE_WAY)
def test_a_refusal_names_only_what_works(module, exporter, told):
    module = module()
    said = refused(module, IDS if hasattr(module, "table") else torch.randn(3, 4), exporter=exporter)
    assert re.search(told.replace("[", r"\["), said), said


def test_train_and_freeze_have_the_meaning_of_the_hub(caplog):
    module, x = of_floats(lambda m, x: m.b(m.a(x))), torch.randn(3, 4)
    for chosen, trained in (
        ({"train": "b.*"}, {"b.weight", "b.bias"}),
        ({"freeze": ["a.*", "b.bias"]}, {"b.weight"}),
        ({"train": ["*.bias"], "freeze": "a.*"}, {"b.bias"}),
    ):
        proto = edgeasync.torch.to_onnx(module, x, exporter="legacy", **chosen)
        assert {parameter.name for parameter in graph_of(proto).spec.parameters} == trained
    assert all(tensor.requires_grad for tensor in module.parameters()), "the module stays as it is"
    with pytest.raises(
        ConfigError, match=r"no parameter matches 'c.\*'; the parameters are a.weight, a.bias, b.weight"
    ):
        edgeasync.torch.to_onnx(module, x, freeze="c.*")


REFUSED = {
    "bytes for floats": (
        lambda: nn.Linear(4, 2),
        np.zeros((3, 4), np.uint8),
        "Linear rejects example (mat1 and mat2",
    ),
    "one example": (
        lambda: nn.Linear(4, 2),
        np.zeros(4),
        "accepts example, but not a batch of twice its size (mat1 and mat2 shapes",
    ),
    "a batch of one size": (
        lambda: of_floats(lambda m, x: m.b(m.a(x).view(3, 4))),
        np.zeros((3, 4)),
        "but not a batch of twice its size",
    ),
    "a script": (
        lambda: torch.jit.script(nn.Linear(4, 2)),
        np.zeros((3, 4)),
        "it is scripted; pass the module before torch.jit",
    ),
    "a script inside": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 2))),
        np.zeros((3, 4)),
        "its part '0' is scripted",
    ),
    "doubles": (
        lambda: nn.Linear(4, 2).double(),
        np.zeros((3, 4)),
        "parameter 'weight' is float64, but training requires float32",
    ),
    "no numbers": (
        lambda: nn.utils.skip_init(nn.Linear, 4, 2).apply(lambda part: part.weight.data.fill_(torch.nan)),
        np.zeros((3, 4)),
        "parameter 'weight' contains values that are not finite",
    ),
    "no shape yet": (
        lambda: nn.LazyLinear(2),
        np.zeros((3, 4)),
        "'weight' has no shape yet; call the module on one batch",
    ),
    "what cannot be copied": (
        lambda: of_floats(lambda m, x: m.b(x), lock=threading.Lock()),
        np.zeros((3, 4)),
        "Module cannot be copied (cannot pickle '_thread.lock' object)",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("module", "example", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported_is_told_in_one_line(module, example, told):
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        edgeasync.torch.to_onnx(module(), example)
    assert "\n" not in str(caught.value)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(5, 3), nn.Embedding(6, 3)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(1, keepdim=True)


TAKEN = {
    "float64": (lambda: nn.Linear(4, 2), np.zeros((3, 4))),
    "one axis": (Factors, (torch.tensor([0, 4, 1]), torch.tensor([5, 0, 1]))),
    "a parameter among the results": (
        lambda: of_floats(lambda m, x: (m.b(m.a(x)), m.a.weight)),
        torch.zeros(3, 4),
    ),
}


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize(("module", "example"), TAKEN.values(), ids=TAKEN)
def test_what_can_be_exported_is(module, example, exporter):
    proto = edgeasync.torch.to_onnx(module(), example, exporter=exporter)
    graph = build_training_graph(
        proto.SerializeToString(), GraphSettings(loss="mse", output=proto.graph.output[0].name)
    )
    assert all(check.passed for check in check_gradients(graph.model, graph.spec, graph.initial))


class Changing(nn.Module):
    def __init__(self, *, training):
        super().__init__()
        self.a, self.training_alone = nn.Linear(4, 2), training

    def forward(self, x):
        found = self.a(x)
        return found + torch.randn_like(found) if self.training or not self.training_alone else found


def test_a_file_that_evaluates_otherwise_says_so():
    graphs = [
        graph_of(edgeasync.torch.to_onnx(Changing(training=alone), torch.randn(3, 4))) for alone in (True, False)
    ]
    assert "the model's predictions differ from the module's after eval()" in " ".join(graphs[0].warnings)
    assert graphs[1].warnings == (), "a module that always draws predicts as its file"
