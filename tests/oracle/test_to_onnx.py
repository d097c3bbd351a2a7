"""`to_onnx`: which examples it takes, how it checks, and what of the module it keeps."""

import dataclasses
import logging

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import edgeasync.torch
from edgeasync import Stop, train
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import ConfigError, GraphError
from edgeasync.sdk.torch_calls import flat

nn = torch.nn
EXPORTERS = ["dynamo", "legacy"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def dims(proto):
    return {
        entry.name: [dim.dim_param or dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        for entry in proto.graph.input
    }


def names(entries):
    return [entry.name for entry in entries]


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(6, 3)

    def forward(self, x):
        return self.scores(x.float() / 255)


class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scores = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.scores(self.table(x).mean(1))


KINDS = {
    "uint8": (Cast, torch.arange(0, 240, 10, dtype=torch.uint8).reshape(4, 6)),
    "int16": (Cast, torch.ones(4, 6, dtype=torch.int16)),
    "bool": (Cast, torch.arange(24).reshape(4, 6) % 5 > 1),
    "float64": (Cast, torch.linspace(0, 1, 24, dtype=torch.float64).reshape(4, 6)),
    "float16": (Cast, torch.linspace(0, 1, 24).half().reshape(4, 6)),
    "int32 ids": (Ids, torch.arange(24, dtype=torch.int32).reshape(4, 6) % 20),
    "int64 ids": (Ids, torch.arange(24).reshape(4, 6) % 20),
    "ids of one kind": (Ids, torch.full((2, 6), 19)),
    "an array": (Cast, np.zeros((2, 6))),
    "lists": (Cast, [[0.0] * 6] * 2),
}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(("kind", "x"), KINDS.values(), ids=KINDS)
def test_an_example_of_any_kind_is_checked(kind, x, exporter):
    proto = edgeasync.torch.to_onnx(kind(), x, exporter=exporter)
    assert dims(proto) == {"x": ["batch", 6]}


def pages():
    """The model of the page From PyTorch, whose first batch norm of zeros has no gradient, and other kinks."""
    return {
        "batch norm and max pool": (
            nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
            ),
            torch.zeros(2, 64),
        ),
        "max pool of ties": (nn.Sequential(nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 2)), torch.zeros(2, 2, 4)),
        "relu at 0": (nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 4)),
        "norm of two": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.ones(2, 4)),
        "dropout": (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), torch.zeros(2, 4)),
    }  # fmt: skip


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", pages())
def test_an_example_on_a_kink_is_checked_elsewhere(kind, exporter):
    torch.manual_seed(0)
    module, x = pages()[kind]
    edgeasync.torch.to_onnx(module, x, exporter=exporter)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_running_statistics_are_the_module_s_and_no_warning_says_otherwise(exporter, check):
    module, x = pages()["norm of two"]
    module[1].running_mean.fill_(0.5)
    proto = edgeasync.torch.to_onnx(module, x, exporter=exporter, check=check)
    graph = build_training_graph(proto.SerializeToString(), GraphSettings())
    np.testing.assert_array_equal(graph.spec.views(graph.initial)["1.running_mean"], 0.5)
    assert graph.warnings == ()


class Hidden(nn.Module):
    """A last layer of zeros, as many begin, hides a stopped gradient before it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.last(self.first(x).detach_()) + self.first(x)[:, :2]


class Scarce(nn.Module):
    """One parameter's gradient is small beside another's, and stopped in part."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return 100 * self.large(x) + self.small(x) + self.small(x).tanh().detach_()


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 2)

    def forward(self, x):
        hidden = nn.functional.dropout(x, 0.5, self.training)
        return self.scores(hidden) + (2 * self.scores(hidden)).detach_()


@pytest.mark.parametrize("kind", [Hidden, Scarce, Random])
def test_what_hides_a_wrong_gradient_does_not_hide_it_here(kind):
    with pytest.raises(GraphError, match=r"the gradient of '[\w.]+' in the exported model differs from torch's"):
        edgeasync.torch.to_onnx(kind(), torch.zeros(2, 4))


class OnlyPositive(nn.Linear):
    def forward(self, x):
        if (x <= 0).any():
            raise ValueError("give positive numbers")
        return super().forward(x.log())


def test_examples_are_such_as_the_module_takes():
    edgeasync.torch.to_onnx(OnlyPositive(4, 2), torch.full((2, 4), 0.5), exporter="legacy")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 3)

    def forward(self, image, age, scale=1.0):
        return self.scores(image + age) * scale


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 3)

    def forward(self, *parts, **named):
        return self.scores(sum(parts) + sum(named.values()))


PAIR = torch.linspace(0, 1, 8).reshape(2, 4), torch.ones(2, 1)
SEVERAL = {
    "a tuple": (Two, PAIR, ["image", "age"]),
    "arrays": (Two, (np.zeros((2, 4), np.float32), np.zeros((2, 1), np.float32)), ["image", "age"]),
    "a dict": (Two, {"age": PAIR[1], "image": PAIR[0]}, ["age", "image"]),
    "any number": (Many, PAIR, ["parts0", "parts1"]),
    "any names": (Many, {"a": PAIR[0], "b": PAIR[1]}, ["a", "b"]),
    "one of a tuple": (Many, PAIR[:1], ["parts0"]),
}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(("kind", "example", "inputs"), SEVERAL.values(), ids=SEVERAL)
def test_several_inputs_have_the_names_of_forward(kind, example, inputs, exporter):
    proto = edgeasync.torch.to_onnx(kind(), example, exporter=exporter)
    assert dims(proto) == {name: ["batch", 1 if name in {"age", "parts1", "b"} else 4] for name in inputs}


@pytest.mark.parametrize(
    ("kind", "example", "told"),
    [
        (Two, PAIR[:1], "example does not fit Two.forward: missing a required argument: 'age'"),
        (Two, {"image": PAIR[0], "agee": PAIR[1]}, "example does not fit Two.forward: "),
        (Two, (*PAIR, *PAIR), "example does not fit Two.forward: too many positional arguments"),
        (
            Two,
            (PAIR[0], PAIR[1][:1]),
            r"'age' of example has shape \(1, 1\); pass a batch of at least two examples",
        ),
        (
            Two,
            (PAIR[0], torch.zeros(())),
            r"'age' of example has shape \(\); pass a batch of at least two examples",
        ),
        (Two, {"image": PAIR[0], "age": None}, "'age' of example is NoneType, not an array; pass arrays"),
        (Cast, "text", "'x' of example is str, not an array"),
    ],
)
def test_an_example_that_does_not_fit(kind, example, told):
    with pytest.raises(ConfigError, match=told):
        edgeasync.torch.to_onnx(kind(), example)


@dataclasses.dataclass
class Found:
    scores: torch.Tensor
    parts: list[torch.Tensor]
    loss: None = None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (PAIR[0], ["y"]),
        (PAIR, ["y0", "y1"]),
        ({"scores": PAIR[0], "more": {"box": PAIR[1], "count": 3}}, ["scores", "more.box"]),
        (Found(PAIR[0], [PAIR[1], PAIR[0]]), ["scores", "parts.0", "parts.1"]),
        ((PAIR[0], {"a": PAIR[1]}), ["y0", "y1.a"]),
    ],
)
def test_the_names_of_outputs(found, expected):
    assert list(flat(found)) == expected


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        return self.head(self.body(x) * self.scale)


HEAD = {"head.weight", "head.bias"}
STATISTICS = {"body.1.running_mean", "body.1.running_var"}
BODY = {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("chosen", "trained"),
    [
        ({}, HEAD | STATISTICS),
        ({"train": ["head.weight"]}, {"head.weight"}),
        ({"train": ["*"]}, HEAD | STATISTICS | BODY),
        ({"freeze": ["head.bias"]}, {"head.weight"} | STATISTICS),
    ],
    ids=["unsaid", "one", "all", "fewer"],
)
def test_what_is_frozen_in_torch_stays_so_unless_train_names_it(chosen, trained, exporter, caplog):
    x, y = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 2
    proto = edgeasync.torch.to_onnx(Frozen(), torch.zeros(2, 4), exporter=exporter)
    with caplog.at_level(logging.WARNING, "edgeasync"):
        run = train(proto, (x, y), workers=1, until=Stop(updates=1), **chosen)
    assert set(run.arrays) == trained
    assert ("not trained, because frozen in torch: body.0.weight" in caplog.text) == ("train" not in chosen)
    again = train(run.model, (x, y), workers=1, until=Stop(updates=1), **chosen)
    assert set(again.arrays) == trained, "what was trained keeps what is frozen"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scores = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.scores.weight = self.table.weight
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.norm(self.scores(self.table(x).mean(1))))


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_names_and_first_values_are_the_modules_own(exporter):
    proto = edgeasync.torch.to_onnx(Tied(), torch.randint(0, 6, (4, 3)), exporter=exporter)
    assert set(names(proto.graph.initializer)) >= {"table.weight", "norm.weight", "norm.bias"}
    onnx.checker.check_model(proto, full_check=True)
    spec = build_training_graph(proto.SerializeToString(), GraphSettings()).spec
    assert sorted(each.name for each in spec.parameters) == ["norm.bias", "norm.weight", "table.weight"]
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    module(torch.randn(8, 4))
    proto = edgeasync.torch.to_onnx(module, torch.randn(8, 4), exporter=exporter)
    held = {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            np.testing.assert_array_equal(held[name], tensor.numpy(), err_msg=name)
