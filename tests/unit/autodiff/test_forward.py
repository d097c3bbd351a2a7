"""Reading forward models: which are accepted, and which constants are folded."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.forward import widen_inputs
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import Reference, assert_slopes, check, forward, numbers, run, session, squares
from tests.support.models.small_models import DENSE, MSE, edited, model, names, refused


def test_the_input_through_an_identity():
    check("y = Mul(h, w)", (3,), {"w": numbers((3,), 5)}, before="i = Identity(x)\nh = Mul(i, p)")


@pytest.mark.parametrize("before", ["h = Cast<to=1>(x)\na = Mul(h, p)", "a = Gather(p, x)"])
def test_whole_numbers_as_input(before):
    p = numbers((7, 3) if "Gather" in before else (3,), 1)
    data = model(f"{before}\ny = Tanh(a)", {"p": p}, (3,), kind=TensorProto.INT64)
    graph = build_training_graph(data, MSE)
    x = np.random.Generator(np.random.PCG64(1)).integers(0, 7, (4, 3))
    oracle = Reference(data)
    target = numbers(oracle(x).shape, 8)
    found = run(graph, {"x": x, "target": target}, 2)
    assert_slopes({"p": found["p.grad"]}, oracle, x, lambda y: squares(y, target))


def test_two_inputs():
    def given(proto):
        proto.graph.initializer.pop()
        proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3]))

    data = model("a = Mul(x, p)\ny = Add(a, z)", {"p": numbers((3,), 1), "z": np.float32(0)}, (3,))
    graph = build_training_graph(edited(data, given), MSE)
    x, z, target = (numbers((4, 3), seed) for seed in (2, 3, 4))
    found = run(graph, {"x": x, "z": z, "target": target})
    expected = (2 * (x * numbers((3,), 1) + z - target) * x).sum(0) / 12
    np.testing.assert_allclose(found["p.grad"], expected, rtol=1e-4)


def test_constants_of_shapes_are_folded_for_every_batch():
    """As exporters write `x.view(x.size(0), -1)`."""
    check("s = Shape(h)\nn = Gather(s, zero)\nu = Unsqueeze(n, first)\nt = Concat<axis=0>(u, minus)\n"
          "a = Reshape(h, t)\ny = Gemm(a, w)", (2, 3), {"zero": np.int64(0), "first": np.array([0]),
          "minus": np.array([-1]), "w": numbers((6, 2), 3)})  # fmt: skip


def test_a_batch_size_as_a_number():
    check("s = Shape(h)\nn = Gather(s, zero)\nf = Cast<to=1>(n)\na = Div(h, f)\ny = Mul(a, w)", (3,),
          {"zero": np.int64(0), "w": numbers((3,), 3)})  # fmt: skip


def test_a_cast_like_a_tensor_of_the_batch():
    check("z = Constant<value=float {2.0}>()\nc = CastLike(z, h)\na = Mul(h, c)\ny = CastLike(a, h)", (3,))


def test_a_foreign_operator():
    def foreign(proto):
        proto.graph.node[1].domain = "com.microsoft"
        proto.graph.node[1].op_type = "Gelu"
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    why = (
        "there is no gradient for Gelu of the domain 'com.microsoft'; use the file from before onnxruntime "
        r"optimized or quantized it, or freeze what comes before it: freeze=\['w1', 'b1'\]$"
    )
    refused(edited(model(), foreign), why)
    before, after = {"output": "h", "loss": "mse"}, {"freeze": ("?1",)}
    for settings, trained in ((before, ["w1", "b1"]), (after, ["w2", "b2"])):
        graph = build_training_graph(edited(model(), foreign), GraphSettings(**settings))
        assert names(graph) == trained
        check_graph(graph.model, bytes_max=1 << 20)


def test_an_initializer_in_another_file():
    def outside(proto):
        entry = proto.graph.initializer[0]
        entry.data_location = TensorProto.EXTERNAL
        entry.external_data.add(key="location", value="weights.bin")
        entry.ClearField("raw_data")

    refused(edited(model(), outside), "tensor 'w1' lies in an external file; save the model as one file")


@pytest.mark.parametrize("data", [b"", b"no model", b"\x08\x07"])
def test_what_is_no_model(data):
    refused(data, "not a readable ONNX model")


def test_outputs_that_are_unclear_or_missing():
    def second(proto):
        proto.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", 5]))

    refused(edited(model(), second), r"the model has 2 outputs \(y, h\); name the one to train: output='y'")
    refused(model(), "the model has no tensor 'z'; its outputs are y", output="z")
    build_training_graph(edited(model(), second), GraphSettings(output="h", loss="mse"))


def test_a_free_size_besides_the_batch():
    refused(
        model(x=("length", 4)),
        r"input 'x' has a free size 'length' at axis 1; only the batch, axis 0, may be free",
    )


@pytest.mark.parametrize("kind", [11, 10])
def test_other_floats_than_float32(kind):
    text = f"h = Mul(x, p)\na = Cast<to={kind}>(h)\nb = Tanh(a)\ny = Cast<to=1>(b)"
    refused(model(text, {"p": numbers((4,))}), "computes in float(64|16); only float32 can be trained")
    refused(model(f"h = Mul(x, p)\ny = Cast<to={kind}>(h)", {"p": numbers((4,))}), "not float32")


def test_an_opset_that_is_too_new():
    def newer(proto):
        proto.opset_import[0].version = 24

    refused(edited(model(), newer), "the model is of opset 24; export it with opset 18")


@pytest.mark.parametrize("opset", [9, 11, 13, 15, 17, 18, 19, 20, 21, 22, 23])
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


# -- what depends on the batch size, on sequences, or on what a body reads ---------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "k = Constant<value_ints=[4]>()\ns = Shape<start=0, end=1>(x)\nd = Div(s, k)",  # 0 at sizes 2 and 3
        "k = Constant<value_ints=[2]>()\ns = Shape<start=0, end=1>(x)\nd = Min(s, k)",  # 2 at both
    ],
)
def test_what_is_alike_at_two_batch_sizes_only_is_no_constant(text):
    data = forward(f"{text}\nf = Cast<to=1>(d)\nh = Mul(x, w)\ny = Add(h, f)", {"w": numbers((3,), 1)}, (3,))
    graph = build_training_graph(data, MSE)
    for rows in (1, 8):
        x, target = numbers((rows, 3), 2), numbers((rows, 3), 3)
        (y,) = session(data).run(None, {"x": x})
        np.testing.assert_allclose(run(graph, {"x": x, "target": target})["loss"], squares(y, target), rtol=1e-5)


@pytest.mark.parametrize("sizes", ["value_ints=[2, 4]", "value_int=4"])
def test_parts_of_a_sequence_are_parts_of_a_tensor(sizes):
    sequence = f"c = Constant<{sizes}>()\nq = SplitToSequence<axis=1>(h, c)"
    places = "i0 = Constant<value_int=0>()\ni1 = Constant<value_int=1>()"
    parts = "a = SequenceAt(q, i0)\nb = SequenceAt(q, i1)\ny = Concat<axis=1>(b, a)"
    data = forward(f"h = Mul(x, p)\n{sequence}\n{places}\n{parts}", {"p": numbers((6,), 1)}, (6,))
    x, target = numbers((4, 6), 2), numbers((4, 6), 3)
    y = session(data).run(None, {"x": x})[0]
    found = run(build_training_graph(data, MSE), {"x": x, "target": target})
    np.testing.assert_allclose(found["loss"], squares(y, target), rtol=1e-5)
    cut = 2 if "ints" in sizes else 4
    slope = 2 * (y - target) / y.size
    slope = np.concatenate([slope[:, 6 - cut :], slope[:, : 6 - cut]], axis=1)
    np.testing.assert_allclose(found["p.grad"], (slope * x).sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("place", ["value_int=2", "value_int=-3", "value_ints=[0, 1]"])
def test_a_part_that_its_sequence_does_not_have(place):
    sequence = "c = Constant<value_ints=[2, 4]>()\nq = SplitToSequence<axis=1>(h, c)"
    text = f"h = Mul(x, p)\n{sequence}\ni = Constant<{place}>()\ny = SequenceAt(q, i)"
    data = forward(text, {"p": numbers((6,), 1)}, (6,))
    with pytest.raises(GraphError, match="takes a part that its sequence of 2 does not have"):
        build_training_graph(data, MSE)


def test_a_sequence_of_parts_without_a_length():
    text = "h = Mul(x, p)\nc = Constant<value_int=0>()\nq = SplitToSequence<axis=1>(h, c)"
    data = forward(f"{text}\ni = Constant<value_int=0>()\ny = SequenceAt(q, i)", {"p": numbers((6,), 1)}, (6,))
    with pytest.raises(GraphError, match="does not run"):
        build_training_graph(data, MSE)


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


def test_a_branch_reads_an_input_that_is_cast():
    def branch(name, text):
        nodes = [onnx.parser.parse_node(text)]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.INT32, None)])

    def with_branch(proto):
        taken = branch("a", "a = Add(x, x)"), branch("b", "b = Identity(x)")
        node = helper.make_node("If", ["which"], ["c"], then_branch=taken[0], else_branch=taken[1])
        proto.graph.node.insert(0, node)
        proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "which"))

    data = model("h = Cast<to=1>(c)\ny = Mul(h, p)", {"p": numbers((1, 4), 1)}, kind=TensorProto.INT32)
    data = edited(data, with_branch)
    proto, x = onnx.load_model_from_string(data), np.array([[1, 2, 3, 4]])
    widen_inputs(proto)
    (found,) = session(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(found, 2 * x * numbers((1, 4), 1))
    refused(data, r"the If that makes 'c': devices do not run If; write the model with other operators")


def test_inputs_that_no_data_can_be_are_refused():
    data = model("h = Cast<to=1>(x)\ny = Mul(h, p)", {"p": numbers((1, 4))}, kind=TensorProto.UINT64)
    refused(data, "input 'x' is uint64; a device's data is float32 or int64: export the model with such inputs")


def test_a_file_that_does_not_say_the_shape_of_its_output():
    def unshaped(proto):
        proto.graph.output[0].type.tensor_type.ClearField("shape")

    assert build_training_graph(edited(model(), unshaped), MSE).spec.trained_length


def test_a_batch_that_is_fixed_inside_the_file_is_told():
    text = "r = Expand(t, two)\nh = Concat<axis=1>(x, r)\ny = Gemm(h, w)"
    parameters = {"t": numbers((1, 2)), "two": np.array([2, 2]), "w": numbers((6, 3))}
    for producer, advice in {
        "pytorch": r"write x\.shape\[0\] where forward has len\(x\)",
        "": "any batch size",
    }.items():

        def by(proto, producer=producer):
            proto.producer_name = producer

        refused(edited(model(text, parameters), by), rf"node .*Concat\) fails: .*2.*3; .*{advice}|{advice}")
