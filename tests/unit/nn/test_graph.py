"""The ONNX model of a network: its structure, names and initial values."""

import math

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.errors import StorageError
from tests.support.models.layers import parameters, refuses_arguments

DIGITS = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Residual(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(8 * 4 * 4, 10),
)


def test_a_model_has_the_promised_form():
    proto = nn.to_onnx(DIGITS, input_shape=(1, 8, 8), seed=0)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 9
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 20)]
    assert [entry.name for entry in proto.graph.input] == ["x"]
    assert [entry.name for entry in proto.graph.output] == ["scores"]
    assert [node.name for node in proto.graph.node if node.op_type != "Constant"] == [
        "0", "1", "2", "3.body.0", "3.body.1", "3.body.2", "3", "4", "5", "6",
    ]  # fmt: skip
    assert {name: (values.dtype, values.shape) for name, values in parameters(proto).items()} == {
        name: (np.float32, shape)
        for name, shape in {
            "0.weight": (8, 1, 3, 3),
            "0.bias": (8,),
            "3.body.0.weight": (8, 8, 3, 3),
            "3.body.1.weight": (8,),
            "3.body.1.bias": (8,),
            "3.body.1.running_mean": (8,),
            "3.body.1.running_var": (8,),
            "6.weight": (10, 128),
            "6.bias": (10,),
        }.items()
    }


def test_node_names_are_unique_and_begin_with_the_path():
    model = nn.Sequential(nn.LSTM(3, 4, 2, return_sequences=True), nn.SelfAttention(4, 2), nn.Linear(4, 2))
    names = [node.name for node in nn.to_onnx(model, (5, 3)).graph.node]
    assert len(set(names)) == len(names)
    assert {name[0] for name in names} == {"0", "1", "2"}


def test_the_seed_alone_decides_the_parameters():
    first, again, other = (nn.to_onnx(DIGITS, (1, 8, 8), seed=seed).SerializeToString() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("layer", "dims", "name", "bound"),
    [
        (nn.Linear(100, 50), (100,), "0.weight", math.sqrt(6 / 150)),
        (nn.Conv2d(16, 16, 3, groups=2), (16, 3, 3), "0.weight", math.sqrt(6 / 72)),
        (nn.ConvTranspose2d(16, 32, 4, 2), (16, 3, 3), "0.weight", math.sqrt(6 / 64)),
        (nn.GRU(20, 25), (2, 20), "0.weight_hh", 0.2),
        (nn.LSTM(20, 25), (2, 20), "0.bias", 0.2),
        (nn.SelfAttention(32, 4), (2, 32), "0.in_proj_weight", math.sqrt(6 / 64)),
        (nn.Embedding(100, 30), (2,), "0.weight", math.sqrt(3)),
    ],
)
def test_first_values_fill_their_range(layer, dims, name, bound):
    values = parameters(nn.to_onnx(layer, dims, seed=0))[name]
    assert np.abs(values).max() <= bound * (1 + 1e-6)
    assert values.min() < -0.9 * bound
    assert values.max() > 0.9 * bound
    assert abs(values.mean()) < 0.15 * bound


def test_first_values_are_these():
    # Held fast, so that the same seed means the same model in every version and on every machine.
    weight = parameters(nn.to_onnx(nn.Linear(2, 1), (2,), seed=0))["0.weight"]
    draws = np.random.Generator(np.random.PCG64(0)).random(2, np.float32)
    assert weight.tolist() == [((2 * draws - 1) * np.float32(math.sqrt(2))).tolist()]


def test_a_model_is_saved(tmp_path):
    nn.save(DIGITS, tmp_path / "digits.onnx", input_shape=(1, 8, 8), seed=2)
    assert onnx.load(tmp_path / "digits.onnx") == nn.to_onnx(DIGITS, (1, 8, 8), seed=2)
    with pytest.raises(StorageError, match=r"digits\.onnx: cannot be written"):
        nn.save(DIGITS, str(tmp_path / "nowhere" / "digits.onnx"), (1, 8, 8))


test_a_wrong_argument_is_refused = refuses_arguments(
    (lambda: nn.to_onnx(nn.ReLU, (3,)), "pass a layer such as Sequential(...)"),
    (lambda: nn.to_onnx(nn.ReLU(), ()), "input_shape is (); pass the sizes of one example"),
    (lambda: nn.to_onnx(nn.ReLU(), (3, 0)), "input_shape is (3, 0); pass"),
    (lambda: nn.to_onnx(nn.ReLU(), (3,), seed=-1), "seed is -1; pass an integer of at least 0"),
)
