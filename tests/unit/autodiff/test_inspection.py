"""What is read from a model file, and the operations of a graph, against numbers worked out by hand."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.contents import TensorInfo
from edgeasync.autodiff.inspection import count_operations, describe, example_feeds, frozen_values
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.parameters import Parameter, ParameterSpec
from tests.support.models.gradients import forward, numbers


def by_hand(text, x, constants=(), body=None, **parameters):
    """Count the operations on 4 examples; `body` makes the node for the line SCAN."""
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
    return count_operations(model, example_feeds(model, spec, 4))


def test_a_multilayer_perceptron():
    operations = by_hand("h = MatMul(x, w)\nr = Relu(h)\nloss = ReduceMean <keepdims = 0> (r)", (3,), w=(3, 5))
    assert operations == 2 * 4 * 3 * 5 + 20 + 20


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
    assert by_hand(text, (3, 6, 6), w=(2, 3, 3, 3), v=(3, 2, 3, 3)) == operations


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
    assert by_hand("SCAN", (7, 3), {"start": np.zeros((4, 3), np.float32)}, scan, w=(3,)) == 7 * 3 * 12


def test_a_model_and_its_training_graph_have_the_same_inputs_and_outputs():
    parameters = {"w": numbers((3, 4)), "b": numbers((4,)), "v": numbers((4, 2))}
    model = forward("h = MatMul(x, w)\nr = Add(h, b)\ny = MatMul(r, v)", parameters, (3,), batch=6)
    found = describe(model, trains=False)
    assert found.inputs == [TensorInfo("x", "float32", [6, 3])]
    assert found.outputs == [TensorInfo("y", "float32", [6, 2])]
    assert (found.weights, found.operators, found.without_gradient) == (24, {"MatMul": 2, "Add": 1}, {})
    graph = build_training_graph(model, GraphSettings(train=("v",)))
    built = describe(graph.model, trains=True)
    assert [entry.name for entry in built.inputs] == ["x", "target"]
    assert [entry.name for entry in built.outputs] == ["loss", "loss_weight", "y"]
    assert frozen_values(onnx.load_model_from_string(graph.model)) == 16


def test_quantized_values_count_without_their_scales():
    parameters = {"w": numbers((64, 64)), "v": numbers((64, 2))}
    model = forward("h = MatMul(x, w)\ny = MatMul(h, v)", parameters, (64,))
    for base in ("int8", "int4"):
        graph = build_training_graph(model, GraphSettings(loss="mse", train=("v",), base=base))
        assert frozen_values(onnx.load_model_from_string(graph.model)) == 64 * 64


def test_operators_without_a_gradient_are_counted():
    """What is resolved at build time needs no rule; an operator of another domain never has one."""
    text = """<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        g (float[batch, 3] x, string[batch] s) => (float[batch, 3] y) <float[3] w = {1, 2, 3}>
        { k = Constant <value_float = 2.0> () m = Mul(x, w) d = Det(m) e = Det(x)
          o = own.Relu(m) c = CastLike(k, x) y = Mul(o, c) }"""
    found = describe(parser.parse_model(text).SerializeToString(), trains=False)
    assert found.without_gradient == {"Det": 2, "Relu": 1}
    assert found.inputs[1] == TensorInfo("s", "string", ["batch"])


def test_shapes_that_the_file_does_not_state_are_inferred():
    model = onnx.load_model_from_string(forward("y = MatMul(x, w)", {"w": numbers((3, 4))}, (3,)))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert describe(model.SerializeToString(), trains=True).outputs[0].shape[1:] == [4]


def test_whole_numbers_are_such_as_the_graph_can_look_up():
    layers = nn.Sequential(nn.Embedding(50, 4), nn.MeanOverTime(), nn.Linear(4, 7))
    graph = build_training_graph(nn.to_onnx(layers, (9,)).SerializeToString(), GraphSettings())
    feeds = example_feeds(onnx.load_model_from_string(graph.model), graph.spec, 200)
    assert feeds["x"].dtype == feeds["target"].dtype == np.int64
    assert set(feeds["x"].ravel()) == set(range(50))
    assert set(feeds["target"]) == set(range(7))
    proto = onnx.load_model_from_string(graph.model)
    assert count_operations(proto, example_feeds(proto, graph.spec, 4)) > 0


def test_a_graph_that_does_not_run():
    with pytest.raises(GraphError, match="does not run"):
        by_hand("loss = MatMul(x, w)", (3,), w=(4, 5))
