"""The check of a published model on small modules: right gradients, wrong ones, and files without a module."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch")

from benchmarks import published_models_check as check
from benchmarks import published_models_sides as sides
from benchmarks.published_models import judge
from edgeasync.autodiff.settings import GraphSettings

nn = torch.nn

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporter warns of itself


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(5)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).eval()
    example = {"input": torch.randn(2, 1, 8, 8)}
    return module, check.export("own", module, example)[0], example


def outcome(module, model, made, settings, example):
    told = check.compare(check.Oracle(module, model, made, settings, example), made, example, 1)
    facts = {"outcome": "built", "flags": [], "parameters": 1, "nodes": 1, "build s": 1.0}
    return judge(facts | told)["outcome"], told["oracle"]


def test_a_small_module_trains_by_its_module_and_by_its_file(exported):
    module, model, example = exported
    made, settings, flags = check.build(model)
    assert flags == []
    assert outcome(module, model, made, settings, example) == ("trains", "module")
    assert outcome(model, model, made, settings, example) == ("trains", "file")


def test_rare_large_errors_do_not_count_but_frequent_ones_do():
    assert check._ratio({"ours": [1e-5, 1e-5, 1e-5, 0.1], "torch": [1e-5, 2e-5, 1e-5, 1e-5]}) == 1.0
    assert check._ratio({"ours": [0.1, 1e-5, 0.1, 0.1], "torch": [1e-5] * 4}) > 1000
    assert check._ratio({"ours": [1e-6], "torch": [0.0]}) == 2.0  # the limit


class OnTheEdge(nn.Module):
    """ReLUs of rounding errors, whose sides in float32 and float64 are a matter of chance."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(16, 3)
        for one, other in zip(self.first.parameters(), self.second.parameters(), strict=True):
            one.data = other.data + 1e-6 * torch.randn_like(other)

    def forward(self, input):  # noqa: A002 - the name of the file's input
        first = self.first(input)
        return self.head(torch.relu(torch.cat([first + 1000 - 1000 - self.second(input), first], 1)))


def test_on_the_same_sides_only_rounding_is_left():
    torch.manual_seed(5)
    module, example = OnTheEdge().eval(), {"input": torch.randn(2, 6)}
    model, _ = check.export("own", module, example)
    made, settings, _ = check.build(model)
    oracle = check.Oracle(module, model, made, settings, example)
    session = check.onnxruntime.InferenceSession(made.model, providers=check.PROVIDERS)
    drawn = [check.feeds_of(session, made, example, seed) for seed in range(4)]
    names = {name: name for name in oracle(*drawn[0], torch.float64)}
    for feeds, target in drawn:
        exact, rounded = [oracle(feeds, target, kind) for kind in (torch.float64, torch.float32)]
        assert check.errors_of(rounded, exact)[0] > 0.01
    told = check.compare_on_same_sides(oracle, made, drawn, names)
    assert told["error"] < 1e-4
    assert told["torch error"] < 1e-4
    assert told["distance"] < 1e-3


SIDED = {
    "Abs": {}, "Clip": {}, "HardSigmoid": {}, "HardSwish": {}, "LeakyRelu": {}, "Max": {}, "Min": {}, "Relu": {},
    "ReduceMax": {"keepdims": 0}, "MaxPool": {"kernel_shape": [2, 2], "strides": [2, 2]}, "GlobalMaxPool": {},
    "ArgMax": {}, "Greater": {},
}  # fmt: skip


@pytest.mark.parametrize("op", SIDED)
def test_an_operator_follows_the_sides_of_other_values(op):
    torch.manual_seed(5)
    inputs = [
        torch.randn(2, 3, 4, 4, dtype=torch.float64) for _ in range(2 if op in ("Max", "Min", "Greater") else 1)
    ]
    if op == "Clip":
        inputs += [torch.tensor(-0.5, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)]
    node = helper.make_node(op, [f"x{number}" for number in range(len(inputs))], ["y"])
    others = {f"x{number}": value + 2 * torch.randn_like(value) for number, value in enumerate(inputs)}

    def slopes(apply, values):
        leaves = [value.clone().requires_grad_() for value in values]
        made = apply(node, SIDED[op], leaves)
        if not made.requires_grad:
            return [made]
        weights = torch.linspace(1, 2, made.numel(), dtype=torch.float64).reshape(made.shape)
        return torch.autograd.grad((made * weights).sum(), leaves, allow_unused=True)[:1]

    plain, at_others = slopes(sides.compute, inputs), slopes(sides.compute, [*others.values()])
    torch.testing.assert_close(slopes(sides.Follower({}), inputs), plain)
    followed = slopes(sides.Follower(others), inputs)
    if op == "HardSwish":  # The slope depends on the value, too.
        (value,), (other,) = inputs, others.values()
        inside, weights = other.abs() < 3, torch.linspace(1, 2, 96, dtype=torch.float64).reshape(2, 3, 4, 4)
        at_others = [weights * torch.where(inside, value / 3 + 0.5, (other > 0).double())]
    torch.testing.assert_close(followed, type(followed)(at_others))
    assert not torch.equal(plain[0], followed[0])


def test_a_wrong_gradient_is_found(exported):
    module, model, example = exported
    made, settings, _ = check.build(model)
    proto = onnx.load_model_from_string(made.model)
    (bias,) = [node for node in proto.graph.node if "5.bias.grad" in node.output]
    bias.output[0] = "half"
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "a half"))
    proto.graph.node.append(helper.make_node("Mul", ["half", "a half"], ["5.bias.grad"]))
    wrong = type(made)(proto.SerializeToString(), made.spec, made.initial)
    assert outcome(module, model, wrong, settings, example) == ("WRONG", "module")


def test_the_flag_that_a_message_names_is_set():
    module = nn.Sequential(nn.Linear(6, 1)).eval()
    example = {"input": torch.randn(2, 6)}
    model, _ = check.export("own", module, example)
    made, settings, flags = check.build(model)
    assert settings == GraphSettings(loss="bce_with_logits")
    assert flags == ["--loss bce_with_logits"]
    assert outcome(module, model, made, settings, example) == ("trains", "module")


def test_a_softmax_at_the_end_is_skipped_by_both_sides():
    module = nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)).eval()
    example = {"input": torch.randn(2, 6)}
    model, _ = check.export("own", module, example)
    made, settings, flags = check.build(model)
    assert flags == []
    assert outcome(module, model, made, settings, example) == ("trains", "file")


class Recurrent(nn.Module):
    """A bidirectional LSTM, and a classifier of its last output."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, input):  # noqa: A002 - the name of the file's input
        return self.head(self.layer(input)[0][:, -1])


def test_operators_that_torch_runs_agree_with_onnxruntime():
    nodes = [
        helper.make_node("Range", ["start", "stop", "step"], ["rows"]),
        helper.make_node("GatherND", ["x", "places"], ["picked"]),
        helper.make_node("ScatterND", ["x", "places", "picked"], ["same"]),
        helper.make_node("Gather", ["same", "rows"], ["some"]),
        helper.make_node("Einsum", ["some", "x"], ["product"], equation="ij,kj->ik"),
        helper.make_node("Gelu", ["product"], ["bent"], approximate="tanh"),
        helper.make_node("Gelu", ["bent"], ["y"]),
    ]
    constants = {
        "start": np.int64(0),
        "stop": np.int64(4),
        "step": np.int64(2),
        "places": np.array([[1, 2], [3, 0]]),
    }
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", 1, [4, 3])], [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = np.random.Generator(np.random.PCG64(1)).standard_normal((4, 3)).astype(np.float32)
    (expected,) = check.onnxruntime.InferenceSession(model.SerializeToString(), providers=check.PROVIDERS).run(
        None, {"x": x}
    )
    found = check.in_torch.run(model, {"x": torch.from_numpy(x)}, set(), "y")
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_an_lstm_trains_by_its_file():
    torch.manual_seed(5)
    module = Recurrent().eval()
    example = {"input": torch.randn(2, 5, 3)}
    model = check._by_older_exporter(module, example)
    made, settings, _ = check.build(model)
    assert outcome(model, model, made, settings, example) == ("trains", "file")
    proto = check.in_torch.parse(model)
    values = {
        "input": example["input"],
        **{name: torch.from_numpy(v) for name, v in made.spec.views(made.initial).items()},
    }
    scores = check.in_torch.run(proto, values, set(), proto.graph.output[0].name)
    torch.testing.assert_close(scores, module(example["input"]))
