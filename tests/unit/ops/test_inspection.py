"""What is said of files that train, and of files that do not."""

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.errors import GraphError
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.ops.inspection import inspect_file, usual_exchange
from edgeasync.parameters import Parameter, ParameterSpec
from tests.support.models.gradients import forward, numbers
from tests.support.models.graphs import forward_model


@pytest.fixture
def inspected(tmp_path):
    """Return a function that inspects a serialized model with settings."""

    def inspect(content, **settings):
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        return inspect_file(OnnxModel(file=str(path), **settings), batch_size=5)

    return inspect


def test_a_file_that_trains(inspected):
    found = inspected(forward_model(), train=("head.*",))
    training = found.training
    assert (found.problem, found.flags, found.warnings, found.notes) == (None, [], [], [])
    assert (training.output, training.loss, training.target.dtype) == ("scores", "cross_entropy", "int64")
    assert (training.parameters, training.statistics, training.frozen) == (16 * 3 + 3, 0, 8 * 16 + 16)
    assert [array.name for array in training.arrays] == ["head.weight", "head.bias"]
    assert (training.step.examples, training.step_problem) == (5, None)
    assert training.step.seconds > 0
    assert training.step.memory_bytes > 20e6, "a Python with numpy and onnxruntime"


def test_large_frozen_values_are_a_base(inspected):
    layers = nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3)
    found = inspected(nn.to_onnx(nn.Sequential(*layers), (8,)).SerializeToString(), train=("4.*",)).training
    assert 0 <= found.base_bytes - 4 * (600 * 600 + 8 * 600 + 2 * 600) < 1024
    assert found.graph_bytes < 10_000
    assert inspected(forward_model()).training.base_bytes == 0


def test_statistics(inspected):
    layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    found = inspected(nn.to_onnx(layers, (6,)).SerializeToString()).training
    assert (found.parameters, found.statistics) == (6 * 4 + 4 + 4 + 4 + 4 * 2 + 2, 8)


def test_a_fixed_batch(inspected):
    """The examples of this batch depend on each other, so its size cannot become dynamic."""
    parameters = {"w": numbers((3, 4)), "first": np.array([0])}
    content = forward("m = ReduceMax(x, first)\nd = Sub(x, m)\ny = MatMul(d, w)", parameters, (3,), batch=3)
    assert inspected(content).training.step.examples == 3


def test_the_flags_of_a_refusal_lead_to_a_file_that_trains(inspected):
    text = """<ir_version: 9, opset_import: ["" : 18]>
        g (float[batch, 3] x) => (float[batch, 3] y) <float[3] a = {1, 2, 3}, float[3] b = {1, 2, 3}>
        { h = Mul(x, a) m = Hardmax(h) y = Mul(m, b) }"""
    content = onnx.parser.parse_model(text).SerializeToString()
    found = inspected(content)
    assert found.training is None
    assert (found.contents.weights, found.contents.without_gradient) == (6, {"Hardmax": 1})
    assert found.flags == ["--freeze", "a"]
    assert "--freeze 'a'" in found.problem
    assert inspected(content, freeze=("a",)).training.parameters == 3


def test_a_step_that_fails_leaves_the_rest(inspected, monkeypatch):
    def fail(*_, **__):
        raise GraphError("not enough memory")

    monkeypatch.setattr("edgeasync.ops.inspection.measure_step", fail)
    found = inspected(forward_model()).training
    assert (found.step, found.step_problem, found.parameters) == (None, "not enough memory", 195)


@pytest.mark.parametrize("length", [100, 5000])
def test_the_payloads_are_those_of_a_hub(length):
    spec = ParameterSpec((Parameter("w", (length,)), Parameter("m", (7,), "statistic")))
    exchange = usual_exchange(spec)
    assert exchange.up.codec == ("identity" if length == 100 else "int8")
    assert (exchange.down.codec, exchange.whole.codec) == ("int8", "float16")
    assert exchange.whole.bytes == 2 * length + 4 * 7
    assert length + 28 < exchange.down.bytes < 1.1 * length + 28
