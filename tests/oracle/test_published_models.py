"""The check of a published model on small modules: right gradients, wrong ones, and files without a module."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch")

from benchmarks import published_models_check as check
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
    rare = {"ours": [1e-5, 1e-5, 1e-5, 0.1], "torch": [1e-5, 2e-5, 1e-5, 1e-5]}
    assert check._ratio(rare, check.MEDIAN) == 1.0
    assert check._ratio({"ours": [0.1, 1e-5, 0.1, 0.1], "torch": [1e-5] * 4}, check.QUARTILE) > 1000
    assert check._ratio({"ours": [1e-6], "torch": [0.0]}, check.MEDIAN) == 2.0  # the limit


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
