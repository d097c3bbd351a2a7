"""Files of models: opsets, functions, inputs of other types, outputs, and those that are refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.producers import UNCONVERTED
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import assert_same_values, check, numbers, run, session
from tests.support.models.small_models import DENSE, MSE, edited, model, names, refused


def test_a_foreign_operator():
    def foreign(proto):
        proto.graph.node[1].domain = "com.microsoft"
        proto.graph.node[1].op_type = "DynamicQuantizeMatMul"
        proto.graph.node[1].input.extend(["q", "s"])
        proto.graph.initializer.append(numpy_helper.from_array(np.eye(5, dtype=np.int8), "q"))
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(1), "s"))
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    why = (
        "no gradient for DynamicQuantizeMatMul of the domain 'com.microsoft'; use the original file, before "
        r"onnxruntime optimized or quantized it, or freeze the parameters before it: freeze=\['w1', 'b1'\]$"
    )
    refused(edited(model(), foreign), why)
    before, after = {"output": "h", "loss": "mse"}, {"freeze": ("?1",)}
    for settings, trained in ((before, ["w1", "b1"]), (after, ["w2", "b2"])):
        graph = build_training_graph(edited(model(), foreign), GraphSettings(**settings))
        assert names(graph) == trained
        check_graph(graph.model, bytes_max=1 << 20)


def test_an_operator_that_a_converter_left():
    """tf2onnx exits with 0 although it leaves operators in the file that it cannot convert."""

    def left(proto, op="Betainc", domain="", producer="tf2onnx", opset=18):
        proto.graph.node[1].op_type, proto.graph.node[1].domain = op, domain
        proto.graph.node[1].name = f"StatefulPartitionedCall/{op}"
        proto.producer_name, proto.opset_import[0].version = producer, opset
        if domain:
            proto.opset_import.append(helper.make_opsetid(domain, 1))

    def said(*arguments):
        with pytest.raises(GraphError) as told:
            build_training_graph(edited(model(), lambda proto: left(proto, *arguments)), MSE)
        return str(told.value)

    node = "node 'StatefulPartitionedCall/Betainc' (Betainc): "
    assert said().startswith(f"{node}not an operator of ONNX; {UNCONVERTED}")
    assert f"; {UNCONVERTED}" in said("Betainc", "ai.onnx.converters.tensorflow", "")
    assert "onnxruntime-extensions" in said("Betainc", "ai.onnx.contrib")
    assert "of ONNX; use the original file, before" in said("Placeholder", "", "pytorch")
    assert "(Gelu): the model says opset 18, which does not have it; export it with opset 20" in said("Gelu")


def test_an_operator_that_a_converter_left_in_a_branch():
    proto = onnx.load_model_from_string(model())
    body = helper.make_graph([helper.make_node("TensorListReserve", [], ["r"])], "b", [], [typed("r")])
    proto.graph.node.append(helper.make_node("If", ["c"], ["unread"], then_branch=body, else_branch=body))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    refused(proto.SerializeToString(), r"the TensorListReserve that computes 'r': not an operator of ONNX")


def typed(name):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [])


def test_an_initializer_in_another_file():
    def outside(proto):
        entry = proto.graph.initializer[0]
        entry.data_location = TensorProto.EXTERNAL
        entry.external_data.add(key="location", value="weights.bin")
        entry.ClearField("raw_data")

    refused(edited(model(), outside), "tensor 'w1' is stored in an external file; save the model as one file")


@pytest.mark.parametrize("data", [b"", b"no model", b"\x08\x07"])
def test_what_is_no_model(data):
    refused(data, "not a readable ONNX model")


def test_a_pointer_of_git_lfs():
    refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "with git lfs pull")


def test_an_output_that_is_missing():
    refused(model(), "the model has no tensor 'z'; its outputs are y", output="z")
    build_training_graph(model(), GraphSettings(output="h", loss="mse"))


HALF = "t = Transpose(w)\nv = Cast<to=1>(t)\na = MatMul(x, v)\ns = Cast<to=1>(b)\ny = Add(a, s)"


@pytest.mark.parametrize("kind", [np.float16, np.float64])
@pytest.mark.parametrize("held", ["initializers", "constants"])
def test_weights_that_are_cast_to_float32_are_parameters_by_their_own_names(kind, held):
    weights = {"w": numbers((3, 4), 1).astype(kind), "b": np.zeros(3, kind)}
    data = model(HALF, weights)

    def as_constants(proto):
        nodes = [helper.make_node("Constant", [], [entry.name], value=entry) for entry in proto.graph.initializer]
        nodes += proto.graph.node
        del proto.graph.node[:], proto.graph.initializer[:]
        proto.graph.node.extend(nodes)

    data = edited(data, as_constants) if held == "constants" else data
    graph = build_training_graph(data, MSE)
    assert names(graph) == ["w", "b"]
    assert not graph.warnings
    plain = model("t = Transpose(w)\na = MatMul(x, t)\ny = Add(a, b)",
                  {name: value.astype(np.float32) for name, value in weights.items()})  # fmt: skip
    feeds = {"x": numbers((5, 4), 2), "target": numbers((5, 3), 3)}
    found, expected = run(graph, feeds), run(build_training_graph(plain, MSE), feeds)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    trained = {"w": numbers((3, 4), 5), "b": numbers(3, 6)}
    (y,) = session(export_model(data, trained)).run(None, {"x": feeds["x"]})
    np.testing.assert_allclose(y, feeds["x"] @ trained["w"].T + trained["b"], rtol=1e-5, atol=1e-6)
    (part,) = session(export_model(data, {"w": trained["w"]})).run(None, {"x": feeds["x"]})
    np.testing.assert_allclose(part, feeds["x"] @ trained["w"].T, rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_read_in_its_own_precision_too_is_not_trained():
    text = "v = Cast<to=1>(w)\na = MatMul(x, v)\nr = ReduceMax<keepdims=0>(w)\ns = Cast<to=1>(r)\n"
    text += "b = Mul(a, s)\ny = Mul(b, p)"
    graph = build_training_graph(
        model(text, {"w": numbers((4, 3), 1).astype(np.float64), "p": numbers(3, 2)}), MSE
    )
    assert names(graph) == ["p"]
    assert any("w (float64)" in said for said in graph.warnings)


def test_an_opset_that_is_too_new():
    def newer(proto):
        proto.opset_import[0].version = 25

    refused(
        edited(model(), newer), "the model has opset 25, but the newest supported is 24; export it with opset 18"
    )


@pytest.mark.parametrize("opset", [9, 11, 13, 15, 17, 18, 19, 20, 21, 22, 23, 24])
def test_every_opset_that_is_read(opset):
    """Converted where it is old: the parameters keep their names, and the gradients are the same."""
    check("a = Conv<pads=[1, 1]>(h, k)\nb = Relu(a)\nc = MaxPool<kernel_shape=[2], strides=[2]>(b)\n"
          "d = Flatten(c)\ny = Gemm(d, w, b2)", (2, 6), {"k": numbers((3, 2, 3), 2), "w": numbers((9, 2), 3),
          "b2": numbers((2,), 4)}, opset=opset)  # fmt: skip


def test_the_inputs_of_parameters_in_an_old_file():
    """Before IR 4 every initializer was an input too."""

    def listed(proto):
        for entry in proto.graph.initializer:
            proto.graph.input.append(helper.make_tensor_value_info(entry.name, 1, list(entry.dims)))

    assert names(build_training_graph(edited(model(), listed), GraphSettings())) == ["w1", "b1", "w2", "b2"]


def test_functions_of_the_model_are_inlined():
    def functioned(proto):
        body = helper.make_function("own", "Bend", ["i"], ["o"], [helper.make_node("Tanh", ["i"], ["o"])],
                                    [helper.make_opsetid("", 18)])  # fmt: skip
        proto.functions.append(body)
        proto.opset_import.append(helper.make_opsetid("own", 1))
        proto.graph.node[1].domain, proto.graph.node[1].op_type = "own", "Bend"

    data = model()
    found = [
        run(build_training_graph(made, MSE), {"x": numbers((3, 4), 7), "target": numbers((3, 3), 8)})
        for made in (edited(data, functioned), model(DENSE.replace("Relu", "Tanh")))
    ]
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_initial_values_are_not_views_of_the_file():
    graph = build_training_graph(model(), MSE)
    graph.initial[:] = 0
    entry = onnx.load_model_from_string(model()).graph.initializer[0]
    assert numpy_helper.to_array(entry).any()


NARROW = {
    "int32": (TensorProto.INT32, np.int64),
    "int16": (TensorProto.INT16, np.int64),
    "int8": (TensorProto.INT8, np.int64),
    "uint16": (TensorProto.UINT16, np.int64),
    "uint8": (TensorProto.UINT8, np.int64),
    "bool": (TensorProto.BOOL, np.int64),
    "float64": (TensorProto.DOUBLE, np.float32),
    "float16": (TensorProto.FLOAT16, np.float32),
}


@pytest.mark.parametrize(("kind", "fed"), NARROW.values(), ids=NARROW)
def test_inputs_that_are_neither_float32_nor_int64_are_cast_in_the_graph(kind, fed):
    text = "h = Cast<to=1>(x)\ny = Mul(h, p)"
    parameters = {"p": numbers((1, 4), 1)}
    x = np.array([[0, 1, 1, 0], [1, 1, 0, 0]])
    feeds = {"target": numbers((2, 4), 2)}
    found = run(build_training_graph(model(text, parameters, kind=kind), MSE), feeds | {"x": x.astype(fed)})
    expected = run(build_training_graph(model(text, parameters), MSE), feeds | {"x": x.astype(np.float32)})
    for name in ("loss", "p.grad"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_file_that_does_not_say_the_shape_of_its_output():
    def unshaped(proto):
        proto.graph.output[0].type.tensor_type.ClearField("shape")

    assert build_training_graph(edited(model(), unshaped), MSE).spec.trained_length


@pytest.mark.parametrize("opset", [11, 16, 20])
@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_norms_that_onnx_does_not_have(op, opset):
    """onnxruntime's optimizer writes them to files of any opset, and onnxruntime runs them."""
    parameters = {"g": numbers((4,), 1), "p": numbers((1, 4), 3)}
    data = model(f"h = Mul(x, p)\ny = {op}<axis=-1, epsilon=0.001>(h, g)", parameters, opset=opset)
    data = edited(data, lambda proto: proto.opset_import.append(helper.make_opsetid("com.microsoft", 1)))
    graph = assert_same_values(data, numbers((3, 4), 4))
    values = graph.spec.views(graph.initial + np.float32(1))
    moved = onnx.load_model_from_string(export_model(data, values))
    assert [node.domain for node in moved.graph.node] == ["", ""]


def with_functions(*functions, call="Last"):
    def edit(proto):
        proto.graph.node.insert(0, helper.make_node(call, ["x"], ["before"], domain=functions[-1].domain))
        proto.graph.node[1].input[0] = "before"
        proto.functions.extend(functions)
        if functions[-1].domain:
            proto.opset_import.append(helper.make_opsetid("own", 1))

    return edited(model(), edit)


def function(name, *calls, domain="own"):
    """Return a function that calls operators one after the other: names of `own`, or Tanh."""
    nodes = [
        helper.make_node(each, [f"v{place}"], [f"v{place + 1}"], domain="" if each == "Tanh" else "own")
        for place, each in enumerate(calls)
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_function(domain, name, ["v0"], [f"v{len(calls)}"], nodes, opsets)


def test_functions_that_call_each_other_again_and_again():
    """They would become 2**40 nodes."""
    doubled = [function(f"F{place}", f"F{place - 1}", f"F{place - 1}") for place in range(1, 40)]
    functions = (function("F0", "Tanh"), *doubled, function("Last", "F39", "F39"))
    refused(with_functions(*functions), "the model has 1099511627779 nodes if calls of its own functions are")
    build_training_graph(with_functions(function("Last", "Tanh", "Tanh")), MSE)


def test_a_function_with_the_name_of_an_operator():
    """onnxruntime uses the operator, onnx uses the function."""
    refused(with_functions(function("Sigmoid", "Tanh", domain=""), call="Sigmoid"), "defines the operator Sigmoid")


def test_a_constant_without_a_value():
    def edit(proto):
        proto.graph.node.insert(0, helper.make_node("Constant", [], ["nothing"]))
        proto.graph.node[1].input[0] = "nothing"

    refused(edited(model(), edit), "has no value, which is not supported in a training graph")
