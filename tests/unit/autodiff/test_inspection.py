"""What `inspect_graph` adds up, against numbers worked out by hand."""

import json

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.inspection import example_feeds, inspect_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.parameters import Parameter, ParameterSpec
from tests.support.models.gradients import forward, numbers


def by_hand(text, x, constants=(), body=None, **parameters):
    """Inspect 4 examples with a graph of nodes written as text; `body` makes the node for the line SCAN."""
    nodes = [body(line) if line == "SCAN" else parser.parse_node(line) for line in text.strip().splitlines()]
    shapes = {"x": ("batch", *x)} | parameters
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in dict(constants).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    spec = ParameterSpec(tuple([Parameter(name, tuple(shape)) for name, shape in parameters.items()]))
    return inspect_graph(model.SerializeToString(), spec, 4)


def test_a_multilayer_perceptron():
    found = by_hand("h = MatMul(x, w)\nr = Relu(h)\nloss = ReduceMean <keepdims = 0> (r)", (3,), w=(3, 5))
    assert found.floating_point_operations == 2 * 4 * 3 * 5 + 20 + 20
    # x and w, and at once h and r, or r and the loss
    assert found.memory_bytes == 4 * (12 + 15) + 4 * (20 + 20)
    assert (found.parameters, found.statistics, found.frozen, found.nodes) == (15, 0, 0, 3)
    assert found.operators == {"MatMul": 1, "Relu": 1, "ReduceMean": 1}
    assert found.inputs == {"x": ["batch", 3], "w": [3, 5]}


@pytest.mark.parametrize(
    ("text", "operations"),
    [
        ("loss = Conv(x, w)", 2 * (4 * 2 * 4 * 4) * (3 * 3 * 3)),
        ("loss = ConvTranspose(x, v)", 2 * (4 * 3 * 6 * 6) * (2 * 3 * 3)),
        ("loss = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)", 4 * 3 * 3 * 3 * 4),
        ("loss = GlobalAveragePool(x)", 4 * 3 * 36),
        ("loss = Sum(x, x, x)", 2 * 4 * 3 * 36),
        ("loss = Transpose <perm = [1, 0, 2, 3]> (x)", 0),
        ("f = Flatten(x)\nloss = Gemm <transA = 1> (f, f)", 2 * 108 * 108 * 4),
    ],
)
def test_operators(text, operations):
    found = by_hand(text, (3, 6, 6), w=(2, 3, 3, 3), v=(3, 2, 3, 3))
    assert found.floating_point_operations == operations


def scan(line):
    body = helper.make_graph(
        [parser.parse_node("t = Add(s, a)"), parser.parse_node("u = Mul(t, w)"), parser.parse_node("o = Abs(u)")],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "sa"],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "to"],
    )
    return helper.make_node(
        "Scan", ["start", "x"], ["last", "loss"], body=body, num_scan_inputs=1, scan_input_axes=[1]
    )


def test_the_body_of_a_scan_counts_for_each_time():
    found = by_hand("SCAN", (7, 3), {"start": np.zeros((4, 3), np.float32)}, scan, w=(3,))
    assert found.floating_point_operations == 7 * 3 * 12
    # x, w and the start; the last state and all results; t, u and then o of one time
    assert found.memory_bytes == 4 * (84 + 3 + 12) + 4 * (12 + 84) + 4 * (12 + 12 + 12)


def test_a_graph_of_one_batch_size_and_with_frozen_layers():
    parameters = {"w": numbers((3, 4)), "b": numbers((4,)), "v": numbers((4, 2)), "first": np.array([0])}
    text = "m = ReduceMax(x, first)\nd = Sub(x, m)\nh = MatMul(d, w)\nr = Add(h, b)\ny = MatMul(r, v)"
    model = forward(text, parameters, (3,), batch=6)
    graph = build_training_graph(model, GraphSettings(train=("v",)))
    found = inspect_graph(graph.model, graph.spec, 32)
    assert (found.batch_size, found.parameters, found.frozen) == (6, 8, 16)
    assert found == inspect_graph(graph.model, graph.spec, 6)
    assert json.loads(msgspec.json.encode(found))["file_bytes"] == len(graph.model)


def test_whole_numbers_are_such_as_the_graph_can_look_up():
    layers = nn.Sequential(nn.Embedding(50, 4), nn.MeanOverTime(), nn.Linear(4, 7))
    graph = build_training_graph(nn.to_onnx(layers, (9,)).SerializeToString(), GraphSettings())
    feeds = example_feeds(onnx.load_model_from_string(graph.model), graph.spec, 200)
    assert feeds["x"].dtype == feeds["target"].dtype == np.int64
    assert set(feeds["x"].ravel()) == set(range(50))
    assert set(feeds["target"]) == set(range(7))
    assert inspect_graph(graph.model, graph.spec, 4).floating_point_operations > 0


def test_a_graph_that_does_not_run():
    with pytest.raises(GraphError, match="does not run"):
        by_hand("loss = MatMul(x, w)", (3,), w=(4, 5))
