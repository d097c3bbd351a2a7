"""Models that compute in float16 train and are exported in float32."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import forward, numbers, run, session

PARAMETERS = {"w": numbers((4, 5), 1), "b": numbers((5,), 2), "v": numbers((5, 3), 3)}
ROUNDED = {name: value.astype(np.float16) for name, value in PARAMETERS.items()}
TEXT = "a = MatMul(x, w)\nc = Add(a, b)\nh = Tanh(c)\ny = MatMul(h, v)"
SETTINGS = GraphSettings(loss="mse")


def in_halves(*, inputs, batch="batch", text=TEXT):
    """Return a model that computes in float16, with inputs and outputs in float32 if `inputs` is false."""
    proto = onnx.load_model_from_string(forward(text, ROUNDED, (4,), batch=batch))
    del proto.graph.value_info[:]
    if inputs:
        proto.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
        proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    else:
        proto.graph.node[0].input[0] = "x16"
        proto.graph.node[-1].output[0] = "y16"
        proto.graph.node.append(helper.make_node("Cast", ["y16"], ["y"], to=TensorProto.FLOAT))
        # At the end, although it is needed first: onnxruntime's tool writes such files.
        proto.graph.node.append(helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16))
    return proto.SerializeToString()


@pytest.mark.parametrize("batch", ["batch", 1])
@pytest.mark.parametrize("inputs", [True, False])
def test_a_model_that_computes_in_float16(inputs, batch):
    data = in_halves(inputs=inputs, batch=batch)
    graph = build_training_graph(data, SETTINGS)
    assert graph.notes[-1] == "the file computes in float16, but trains in float32"
    wide = {name: value.astype(np.float32) for name, value in ROUNDED.items()}
    expected = build_training_graph(forward(TEXT, wide, (4,)), SETTINGS)
    feeds = {"x": numbers((6, 4), 5), "target": numbers((6, 3), 6)}
    found = run(graph, feeds)
    for name, value in run(expected, feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    trained = {name: value + 1 for name, value in wide.items()}
    exported = export_model(data, trained)
    x = feeds["x"][:1] if batch == 1 else feeds["x"]
    (y,) = session(exported).run(None, {"x": x})
    np.testing.assert_allclose(y, np.tanh(x @ trained["w"] + trained["b"]) @ trained["v"], rtol=1e-4, atol=1e-5)


def test_constants_and_types_in_attributes():
    """A shape makes ones in float16, and a branch contains a constant in float16."""
    text = (
        "s = Shape(x)\no = ConstantOfShape<value=float[1] {1}>(s)\nz = Add(x, o)\na = MatMul(z, w)\n"
        "c = Add(a, b)\nh = Tanh(c)\nf = Cast<to=1>(h)\ng = Cast<to=10>(f)\ny = MatMul(g, v)"
    )
    proto = onnx.load_model_from_string(in_halves(inputs=True, text=text))
    proto.graph.node[1].attribute[0].t.CopyFrom(numpy_helper.from_array(np.ones(1, np.float16)))
    two = numpy_helper.from_array(np.float16(2))
    body = helper.make_graph(
        [helper.make_node("Constant", [], ["two"], value=two), helper.make_node("Mul", ["y", "two"], ["twice"])],
        "b", [], [helper.make_tensor_value_info("twice", TensorProto.FLOAT16, ["n", 3])],
    )  # fmt: skip
    proto.graph.node.append(helper.make_node("If", ["yes"], ["out"], then_branch=body, else_branch=body))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    proto.graph.output[0].name = "out"
    graph = build_training_graph(proto.SerializeToString(), SETTINGS)
    x = numbers((6, 4), 5)
    wide = {name: value.astype(np.float32) for name, value in ROUNDED.items()}
    y = 2 * np.tanh((x + 1) @ wide["w"] + wide["b"]) @ wide["v"]
    np.testing.assert_allclose(run(graph, {"x": x, "target": y})["loss"], 0, atol=1e-8)


def test_a_model_that_only_stores_weights_in_float16_stays_as_it_is():
    text = "u = Cast<to=1>(w)\na = MatMul(x, u)\ny = Identity(a)"
    graph = build_training_graph(forward(text, {"w": ROUNDED["w"]}, (4,)), SETTINGS)
    assert graph.notes == ()
    assert [parameter.name for parameter in graph.spec.parameters] == ["w"]


@pytest.mark.parametrize("settings", [{"lora": 2}, {"lora": 2, "base": "int8"}, {"base": "int8", "train": ("v",)}])
def test_adapters_and_quantized_weights_of_a_model_in_float16(settings):
    parameters = {"w": numbers((64, 96), 1), "v": numbers((96, 3), 3), "b": numbers((96,), 2)}
    stored = {name: value.astype(np.float16) for name, value in parameters.items()}
    proto = onnx.load_model_from_string(forward(TEXT, stored, (64,)))
    for entry in (*proto.graph.input, *proto.graph.output):
        entry.type.tensor_type.elem_type = TensorProto.FLOAT16
    graph = build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse", **settings))
    x = numbers((6, 64), 5)
    exported = export_model(graph.forward, graph.spec.views(graph.initial))
    (y,) = open_session(exported).run(None, {"x": x})  # by default, onnxruntime would round activations, too
    np.testing.assert_allclose(run(graph, {"x": x, "target": y})["loss"], 0, atol=1e-6)


def test_a_model_that_casts_its_weights_to_float16():
    """torch writes such a file for a model under autocast. It is exported as it was."""
    text = "n = Cast<to=10>(x)\nu = Cast<to=10>(w)\na = MatMul(n, u)\ny = Cast<to=1>(a)"
    data = forward(text, {"w": PARAMETERS["w"]}, (4,))
    graph = build_training_graph(data, SETTINGS)
    x = numbers((6, 4), 5)
    assert run(graph, {"x": x, "target": x @ PARAMETERS["w"]})["loss"] < 1e-10
    exported = onnx.load_model_from_string(export_model(data, {"w": PARAMETERS["w"] + 1}))
    assert [node.op_type for node in exported.graph.node] == ["Cast", "Cast", "MatMul", "Cast"]
