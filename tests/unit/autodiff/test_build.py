"""The training graph's contract, what is chosen to be trained, and what is refused, with what to do about it."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.contract import is_training_graph
from edgeasync.autodiff.forward import widen_inputs
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.losses import CrossEntropy
from edgeasync.training.graph_check import check_graph
from tests.support.gradients import Reference, assert_slopes, check, forward, numbers, run, session, squares

MSE = GraphSettings(loss="mse")
DENSE = "h = Gemm(x, w1, b1)\na = Relu(h)\ny = Gemm(a, w2, b2)"


def dense(**more):
    return {
        "w1": numbers((4, 5), 1),
        "b1": numbers((5,), 2),
        "w2": numbers((5, 3), 3),
        "b2": numbers((3,), 4),
    } | more


def model(text=DENSE, parameters=None, x=(4,), **options):
    return forward(text, dense() if parameters is None else parameters, x, **options)


def edited(data, edit):
    proto = onnx.load_model_from_string(data)
    edit(proto)
    return proto.SerializeToString()


def names(graph):
    return [entry.name for entry in graph.spec.parameters]


# -- the contract ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["batch", "", 4])
def test_the_inputs_outputs_and_metadata_of_a_training_graph(batch):
    graph = build_training_graph(model(batch=batch), GraphSettings())
    opened = session(graph.model)
    rows = 4 if batch == 4 else "batch"
    assert [(entry.name, entry.type, entry.shape) for entry in opened.get_inputs()] == [
        ("x", "tensor(float)", [rows, 4]),
        ("target", "tensor(int64)", [rows]),
        ("w1", "tensor(float)", [4, 5]),
        ("b1", "tensor(float)", [5]),
        ("w2", "tensor(float)", [5, 3]),
        ("b2", "tensor(float)", [3]),
    ]
    assert [(entry.name, entry.type, entry.shape) for entry in opened.get_outputs()] == [
        ("loss", "tensor(float)", []),
        ("loss_weight", "tensor(float)", []),
        ("y", "tensor(float)", [rows, 3]),
        ("w1.grad", "tensor(float)", [4, 5]),
        ("b1.grad", "tensor(float)", [5]),
        ("w2.grad", "tensor(float)", [5, 3]),
        ("b2.grad", "tensor(float)", [3]),
    ]
    assert opened.get_modelmeta().custom_metadata_map == {
        "edgeasync.contract": "2",
        "edgeasync.output": "y",
        "edgeasync.target": "label",
        "edgeasync.loss": '{"kind":"cross_entropy","class_weights":null,"label_smoothing":0.0,'
        '"ignored_label":null}',
        "edgeasync.classes": "3",
    }
    assert [(entry.name, entry.shape) for entry in graph.spec.parameters] == [
        ("w1", (4, 5)), ("b1", (5,)), ("w2", (5, 3)), ("b2", (3,)),
    ]  # fmt: skip
    for name, value in graph.spec.views(graph.initial).items():
        np.testing.assert_array_equal(value, dense()[name])


def test_a_training_graph_is_known_for_one_and_is_not_differentiated_again():
    graph = build_training_graph(model(), GraphSettings())
    assert is_training_graph(graph.model)
    assert not is_training_graph(model())
    assert not is_training_graph(b"no model at all")
    with pytest.raises(GraphError, match="a training graph already; give the forward model"):
        build_training_graph(graph.model, GraphSettings())


@pytest.mark.parametrize("batch", ["batch", 3])
def test_the_same_model_gives_the_same_bytes(batch):
    first, second = (build_training_graph(model(batch=batch), GraphSettings()) for _ in range(2))
    assert first.model == second.model
    assert first.spec.fingerprint == second.spec.fingerprint
    assert first.initial.tobytes() == second.initial.tobytes()


def test_only_standard_operators_come_out():
    proto = onnx.load_model_from_string(build_training_graph(model(), GraphSettings()).model)
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 18)]


def test_a_weighted_loss_is_in_the_metadata():
    setting = GraphSettings(loss=CrossEntropy(class_weights=(1.0, 2.0, 0.5), ignored_label=255))
    found = session(build_training_graph(model(), setting).model).get_modelmeta().custom_metadata_map
    assert json.loads(found["edgeasync.loss"])["class_weights"] == [1.0, 2.0, 0.5]
    assert found["edgeasync.ignored_label"] == "255"


# -- what is trained -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["w1", "b1", "w2", "b2"]),
        ({"train": ("w2", "b2")}, ["w2", "b2"]),
        ({"freeze": ("w1", "b1")}, ["w2", "b2"]),
        ({"train": ("*2",)}, ["w2", "b2"]),
        ({"train": ("w*", "b*"), "freeze": ("b?",)}, ["w1", "w2"]),
        ({"train": ("w[1]",)}, ["w1"]),
        ({"output": "h"}, ["w1", "b1"]),
        ({"output": "a", "train": ("*",)}, ["w1", "b1"]),
    ],
)
def test_patterns_choose_what_is_trained_and_the_rest_is_constant(settings, expected):
    data = model()
    graph = build_training_graph(data, GraphSettings(loss="mse", **settings))
    assert names(graph) == expected
    constants = {entry.name for entry in onnx.load_model_from_string(graph.model).graph.initializer}
    assert not constants.intersection(expected)
    if "output" not in settings:
        assert set(dense()) - set(expected) <= constants
        x, target = numbers((4, 4), 7), numbers((4, 3), 8)
        found = run(graph, {"x": x, "target": target})
        assert_slopes({name: found[f"{name}.grad"] for name in expected}, Reference(data), x,
                      lambda y: squares(y, target))  # fmt: skip


def test_what_is_frozen_is_not_differentiated():
    head = build_training_graph(model(), GraphSettings(train=("*2",)))
    assert all("::Relu" not in node.name and "gradient/a" not in node.name
               for node in onnx.load_model_from_string(head.model).graph.node)  # fmt: skip


@pytest.mark.parametrize("settings", [{"train": ("v*",)}, {"freeze": ("v*",)}, {"train": ("*", "v*")}])
def test_a_pattern_that_matches_nothing_is_a_mistake(settings):
    with pytest.raises(GraphError, match=r"no parameter matches 'v\*'; there are w1, b1, w2, b2"):
        build_training_graph(model(), GraphSettings(**settings))


def test_a_model_in_half_precision_is_refused_by_its_type():
    half = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float16[batch, 3] x) => (float16[batch, 3] y) <float16[3] w = {1, 2, 3}> { y = Mul(x, w) }"""
    )
    with pytest.raises(GraphError, match="no float32 parameter, only float16; export it in float32"):
        build_training_graph(half.SerializeToString(), GraphSettings(loss="mse"))


def test_nothing_left_to_train_and_nothing_that_reaches_the_output():
    with pytest.raises(GraphError, match="no trained parameter reaches output 'y': none chosen"):
        build_training_graph(model(), GraphSettings(freeze=("*",)))
    with pytest.raises(GraphError, match="no trained parameter reaches output 'h'"):
        build_training_graph(model(), GraphSettings(output="h", loss="mse", train=("*2",)))


def test_scalars_whole_numbers_and_infinite_masks_are_no_parameters():
    more = {"t": np.float32(2), "i": np.array([1, 0]), "m": np.float32([[0, -np.inf, 0]])}
    text = "a = Gather<axis=1>(x, i)\nb = Mul(a, t)\nc = Gemm(b, w)\ny = Add(c, m)"
    graph = build_training_graph(model(text, {"w": numbers((2, 3), 1)} | more), MSE)
    assert names(graph) == ["w"]


# -- how tensors may be joined ---------------------------------------------------------------------------------


JOINED = {
    "one gradient for two parameters": "a = Add(h, w)\ny = Add(a, v)",
    "a parameter used twice": "a = Mul(h, w)\nb = Tanh(a)\ny = Mul(b, w)",
    "a parameter multiplied by itself": "a = Mul(w, w)\ny = Mul(h, a)",
    "a parameter added to itself": "a = Add(w, w)\ny = Mul(h, a)",
    "a parameter added at the end": "a = Tanh(h)\nb = Mul(a, w)\ny = Add(b, v)",
    "a parameter subtracted at the end": "a = Mul(w, h)\ny = Sub(a, v)",
    "many readers": "a = Tanh(h)\nb = Mul(a, a)\nc = Mul(b, a)\nd = Sum(a, b, c, a)\ne = Mul(d, w)\ny = Add(e, v)",
    "two ways that meet": "a = Tanh(h)\nb = Sigmoid(h)\nc = Mul(a, b)\ny = Add(c, h)",
    "through identities": "a = Identity(h)\nb = Identity(a)\nc = Mul(b, w)\ny = Identity(c)",
    "a weight by another name": "u = Identity(w)\na = Mul(h, w)\nb = Tanh(a)\ny = Mul(b, u)",
    "a way that ends": "a = Greater(h, w)\nb = Cast<to=1>(a)\nc = Mul(b, v)\ny = Add(c, h)",
}


@pytest.mark.parametrize("text", JOINED.values(), ids=JOINED)
def test_gradients_that_meet_or_part(text):
    parameters = {"w": numbers((3,), 5), "v": numbers((3,), 6)}
    check(
        text, (3,), {name: value for name, value in parameters.items() if f"{name}" in text.replace("Where", "")}
    )


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


def test_an_autoencoder_is_its_own_target():
    text = "h = Gemm(x, w1, b1)\na = Relu(h)\ny = Gemm(a, w2, b2)"
    parameters = dense(w2=numbers((5, 4), 3), b2=numbers((4,), 4))
    graph = build_training_graph(model(text, parameters), GraphSettings(loss="mse", target="input"))
    assert session(graph.model).get_modelmeta().custom_metadata_map["edgeasync.target"] == "input"
    assert [entry.shape for entry in session(graph.model).get_inputs()[:2]] == [["batch", 4]] * 2
    with pytest.raises(GraphError, match=r"needs one input of the output's shape \(None, 3\); the inputs have"):
        build_training_graph(model(), GraphSettings(loss="mse", target="input"))


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


# -- what is refused -------------------------------------------------------------------------------------------


def refused(data, why, **settings):
    with pytest.raises(GraphError, match=why) as caught:
        build_training_graph(data, GraphSettings(**{"loss": "mse"} | settings))
    assert "\n" not in str(caught.value)


def test_an_operator_without_a_rule_is_named_and_what_to_do():
    text = DENSE.replace("a = Relu(h)", "a = Sinh(h)")
    refused(model(text), r"the Sinh that makes 'a': there is no gradient for Sinh; write the model with other "
                         r"operators, or freeze what comes before it: freeze=\['w1', 'b1'\]$")  # fmt: skip
    assert names(build_training_graph(model(text), GraphSettings(freeze=("w1", "b1")))) == ["w2", "b2"]
    refused(model(text), "everything that is trained comes before it: write the model with other operators$",
            train=("*1",))  # fmt: skip
    named = edited(model(text), lambda proto: setattr(proto.graph.node[1], "name", "bend"))
    refused(named, r"node 'bend' \(Sinh\): there is no gradient for Sinh")
    assert names(build_training_graph(named, GraphSettings(train=("*2",)))) == ["w2", "b2"]


def test_operators_without_a_rule_are_named_all_at_once():
    text = "h = Gemm(x, w1, b1)\na = Sinh(h)\nb = Mul(a, w2)\nc = Cosh(b)\nd = Sinh(c)\ny = Mul(d, b2)"
    data = model(text, {"w1": numbers((4, 5), 1), "b1": numbers((5,), 2), "w2": numbers((5,), 3),
                        "b2": numbers((5,), 4)})  # fmt: skip
    refused(data, "the Sinh that makes 'a', the Cosh that makes 'c', the Sinh that makes 'd': there is no "
                  r"gradient for Sinh, Cosh; .* comes before them: freeze=\['w1', 'b1', 'w2'\]$")  # fmt: skip
    assert names(build_training_graph(data, GraphSettings(loss="mse", freeze=("w1", "b1", "w2")))) == ["b2"]


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


@pytest.mark.parametrize(
    ("name", "clash"),
    [("loss", "h"), ("target", "h"), ("loss_weight", "h"), ("w1.grad", "h"), ("target", "x"), ("loss", "b1")],
)
def test_names_that_the_contract_needs(name, clash):
    def rename(proto):
        for node in proto.graph.node:
            node.input[:] = [name if old == clash else old for old in node.input]
            node.output[:] = [name if old == clash else old for old in node.output]
        for entry in (*proto.graph.input, *proto.graph.initializer, *proto.graph.value_info):
            entry.name = name if entry.name == clash else entry.name

    why = f"the model has a tensor '{name}', a name that the training graph needs; rename it"
    refused(edited(model(), rename), why, loss="cross_entropy")


def test_outputs_that_are_unclear_or_missing():
    def second(proto):
        proto.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", 5]))

    refused(edited(model(), second), r"the model has 2 outputs \(y, h\); name the one to train: output='y'")
    refused(model(), "the model has no tensor 'z'; its outputs are y", output="z")
    build_training_graph(edited(model(), second), GraphSettings(output="h", loss="mse"))


def frozen(*names):
    return edited(model(), lambda proto: proto.metadata_props.add(key="edgeasync.frozen", value=json.dumps(names)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["w2", "b2"]),
        ({"freeze": ("b2",)}, ["w2"]),
        ({"train": ("*",)}, ["w1", "b1", "w2", "b2"]),
        ({"train": ("*1",)}, ["w1", "b1"]),
        ({"train": ("*",), "freeze": ("w?",)}, ["b1", "b2"]),
    ],
)
def test_what_the_file_says_is_frozen_stays_so_unless_train_is_given(settings, expected):
    graph = build_training_graph(frozen("w1", "b1", "gone"), GraphSettings(loss="mse", **settings))
    assert names(graph) == expected
    told = () if "train" in settings else ("frozen in torch, and so here unless train names them: w1, b1",)
    assert graph.warnings == told


def test_a_file_in_which_all_is_frozen():
    refused(
        frozen("w1", "b1", "w2", "b2"), r"torch had w1, b1, w2, b2 frozen: give train=\['w1', 'b1', 'w2', 'b2'\]"
    )
    broken = edited(model(), lambda proto: proto.metadata_props.add(key="edgeasync.frozen", value="w1"))
    refused(broken, "the model's metadata 'edgeasync.frozen' is not a list of names")


def test_outputs_that_nothing_trains():
    refused(model("y = Identity(x)", {}, batch=2), "no parameter|nothing can be trained")
    refused(model("y = Identity(w)", {"w": numbers((2, 3))}), "depends on no input")
    refused(
        model("y = Cast<to=1>(x)", {"w": numbers((2, 3))}, kind=TensorProto.INT64), "no trained parameter reaches"
    )
    refused(
        model("a = Shape(x)\ny = Cast<to=1>(a)", {"w": numbers((2,))}, batch=2), "is a constant; nothing can be"
    )


def test_a_free_size_besides_the_batch():
    refused(
        model(x=("length", 4)),
        r"input 'x' has a free size 'length' at axis 1; only the batch, axis 0, may be free",
    )


def test_parameters_that_an_exporter_merged():
    ones = {"w": np.ones(4, np.float32), "v": numbers((4,), 3)}
    text = "a = Mul(x, w)\nb = Mul(a, v)\ny = Mul(b, w)"
    why = (
        "parameter 'w' is read by the Mul that makes 'a' and the Mul that makes 'y', and all its values are equal"
    )
    refused(
        model(text, ones),
        f"{why}: the exporter may have merged parameters; .*, or give freeze=\\['w'\\], or train=\\['\\*'\\] if ",
    )
    refused(
        model(text, {"w": np.zeros(1, np.float32), "v": numbers((4,), 3)}),
        "the exporter may have merged parameters",
    )
    graph = build_training_graph(model(text, ones), GraphSettings(loss="mse", freeze=("w",)))
    assert names(graph) == ["v"]
    assert names(build_training_graph(model(text, ones | {"w": numbers((4,), 5)}), MSE)) == ["w", "v"]


def test_parameters_that_an_exporter_stored_once_but_named_apart():
    """Uniform ones become parameters of their own, as the older exporter of torch means them."""
    text = "u = Identity(w)\na = Mul(x, w)\nb = Tanh(a)\nc = Mul(b, v)\ny = Mul(c, u)"
    graph = build_training_graph(model(text, {"w": np.ones(4, np.float32), "v": numbers((4,), 3)}), MSE)
    assert names(graph) == ["w", "v", "u"]


NORM = "h = Mul(x, p)\na = BatchNormalization(h, {})\nb = Tanh(a)\ny = BatchNormalization(b, {})"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s1, b1, m, v", "s2, b2, m, v"),
        ("s1, b1, b1, v", "s2, b2, m, v2"),
        ("s1, b1, m, s1", "s2, b2, m2, v"),
        ("s1, b1, m, v", "s2, b2, m2, m"),
        ("s1, b1, m, m", "s2, b2, m2, v"),
    ],
)
def test_running_statistics_that_an_exporter_merged(first, second):
    parameters = {name: numbers((4,), seed, positive=True) for seed, name in enumerate(
        ["p", "s1", "b1", "s2", "b2", "m", "m2", "v", "v2"])}  # fmt: skip
    text = NORM.format(first, second)
    used = {
        name: value
        for name, value in parameters.items()
        if name in text.replace(",", " ").replace(")", " ").split()
    }
    refused(
        model(text, used), "reads the running statistic '[a-z0-9]+', which something else reads in another way"
    )


def test_statistics_by_another_name_move_too():
    parameters = {name: numbers((4,), seed, positive=True) for seed, name in enumerate(["p", "s", "b", "m", "v"])}
    text = "n = Identity(m)\nh = Mul(x, p)\ny = BatchNormalization(h, s, b, n, v)"
    graph = build_training_graph(model(text, parameters), MSE)
    assert names(graph) == ["p", "s", "b", "m", "v"]
    assert [entry.role for entry in graph.spec.parameters][3:] == ["statistic", "statistic"]


def folded(parameter, output):
    """Return a convolution as torch's exporters leave it after they folded a batch norm into it."""
    text = f"h = Mul(x, p)\n{output} = Conv(h, k)\na = Relu({output})\ny = Mul(a, w)"
    parameters = {"p": numbers((1, 2, 5), 1), "k": numbers((3, 2, 3), 2), "w": numbers((3, 1), 3)}

    def edit(proto):
        proto.producer_name = "pytorch"
        proto.graph.node[1].input[1] = parameter
        proto.graph.initializer[1].name = parameter

    return edited(model(text, parameters, (2, 5)), edit)


@pytest.mark.parametrize(("parameter", "output"), [("onnx::Conv_36", "c"), ("c1.weight", "getitem_3")])
def test_a_batch_norm_that_an_exporter_folded(parameter, output):
    refused(
        folded(parameter, output), f"the Conv that makes '{output}' holds a batch norm that the exporter folded"
    )
    head = build_training_graph(folded(parameter, output), GraphSettings(loss="mse", train=("w",)))
    assert names(head) == ["w"]
    assert "c.weight" in names(build_training_graph(folded("c.weight", "conv2d"), MSE))


@pytest.mark.parametrize("name", ["val_70", "onnx::Mul_37"])
def test_what_an_exporter_computed(name):
    """It may be a constant of the formula, as the root of an attention's width is; a matrix is none."""

    def edit(proto):
        proto.producer_name = "pytorch"
        proto.graph.node[1].input[1] = proto.graph.initializer[1].name = name

    parameters = {"p": numbers((1, 3)), "k": np.float32([0.7])}
    refused(edited(model("h = Mul(x, p)\ny = Mul(h, k)", parameters, (3,)), edit),
            f"reads '{name}', which the exporter computed, of a parameter or of constants")  # fmt: skip
    scaled = edited(model("h = Mul(x, p)\ny = Mul(h, k)", parameters, (3,)), edit)
    assert names(build_training_graph(scaled, GraphSettings(loss="mse", freeze=(name,)))) == ["p"]
    assert names(build_training_graph(scaled, GraphSettings(loss="mse", train=("p", name)))) == ["p", name]
    parameters["k"] = numbers((3, 2), 4)
    matrix = edited(model("h = Mul(x, p)\ny = MatMul(h, k)", parameters, (3,)), edit)
    assert names(build_training_graph(matrix, MSE)) == ["p", name]


def noted(data, **notes):
    """Return a model with the notes that torch's newer exporter makes of tensors."""

    def edit(proto):
        proto.producer_name = "pytorch"
        for name, (key, value) in notes.items():
            info = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            info.metadata_props.add(key=f"pkg.{key}", value=value)
            proto.graph.value_info.append(info)

    return edited(data, edit)


KIND, FOLDED_FROM = "torch.export.graph_signature.InputSpec.kind", "onnxscript.optimizer.folded_from"


def test_buffers_and_constants_that_the_exporter_knows_are_not_trained():
    parameters = {"p": numbers((1, 3)), "k": numbers((3,), 3), "c": numbers((3,), 4)}
    data = model("h = Mul(x, p)\na = Add(h, k)\ny = Mul(a, c)", parameters, (3,))
    assert names(build_training_graph(data, MSE)) == ["p", "k", "c"]
    known = noted(data, p=(KIND, "PARAMETER"), k=(KIND, "BUFFER"), c=(KIND, "CONSTANT_TENSOR"))
    assert names(build_training_graph(known, MSE)) == ["p"]


def test_what_an_exporter_computed_of_several_parameters():
    data = model("h = Mul(x, p)\ny = MatMul(h, mul)", {"p": numbers((1, 3)), "mul": numbers((3, 2), 4)}, (3,))
    assert names(build_training_graph(noted(data, mul=(FOLDED_FROM, "['l.weight']")), MSE)) == ["p", "mul"]
    refused(noted(data, mul=(FOLDED_FROM, "['l.g', 'l.v']")), "reads 'mul', which the exporter computed")


def test_tied_weights_of_which_an_exporter_made_two():
    table = numbers((5, 3), 4)
    text = "h = Gather(w, x)\na = Tanh(h)\ny = MatMul(a, val_0)"
    data = noted(model(text, {"w": table, "val_0": table.T.copy()}, (2,), kind=TensorProto.INT64))
    refused(data, "the MatMul that makes 'y' reads 'val_0', which the exporter computed")
    assert names(build_training_graph(data, GraphSettings(loss="mse", freeze=("w",)))) == ["val_0"]


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


def test_a_body_that_reads_what_is_trained():
    def value(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    body = helper.make_graph(
        [helper.make_node("MatMul", ["s", "w"], ["n"]), helper.make_node("Add", ["n", "i"], ["o"])],
        "body",
        [value("s"), value("i")],
        [value("o")],
    )
    data = edited(
        forward("t = Transpose<perm=[1, 0, 2]>(x)\ns = ReduceMean(t, a)\ny = Scan<num_scan_inputs=1>(s, t)",
                {"w": numbers((3, 3), 1), "a": np.int64([0])}, (5, 3)),
        lambda proto: proto.graph.node[2].attribute.append(helper.make_attribute("body", body)),
    )  # fmt: skip
    with pytest.raises(GraphError, match=r"its body reads 'w', which is trained"):
        build_training_graph(data, MSE)


def test_a_scalar_and_an_exponent_are_trained_if_they_are_named_in_full():
    parameters = {"w": numbers((3,), 1), "s": np.float32(2.0), "e": np.float32([3.0])}
    data = forward("h = Mul(x, w)\nr = Relu(h)\nq = Pow(r, e)\ny = Mul(q, s)", parameters, (3,))
    assert names(build_training_graph(data, MSE)) == ["w"]
    graph = build_training_graph(data, GraphSettings(loss="mse", train=("*", "s", "e")))
    assert names(graph) == ["w", "s", "e"]
    found = run(graph, {"x": numbers((8, 3), 2), "target": numbers((8, 3), 3)})
    assert all(np.isfinite(value).all() for value in found.values())  # a rectified base is 0 here and there


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


def test_an_operator_without_a_rule_has_its_replacement_named():
    for op, formula in {"Celu": r"F\.elu\(h\)", "Selu": r"1\.05\d+ \* F\.elu"}.items():
        refused(model(DENSE.replace("Relu", op)), rf"other operators, such as {formula}.* for {op}, or freeze")


def test_what_would_be_refused_next_is_said_at_once():
    text = "a = Sinh(w0)\nb = Mul(x, a)\nh = MatMul(b, w1)\nc = Sinh(h)\nd = Add(c, b1)\ny = Softmax(d)"
    parameters = {"w0": numbers((4,), 1), "w1": numbers((4, 3), 2), "b1": numbers((3,), 3)}
    told = r"comes from Softmax, .* give output='d'; with that: .* freeze=\['w0', 'w1'\]$"
    refused(model(text, parameters), told, loss="cross_entropy")


@pytest.mark.parametrize(
    ("frozen", "moves"), [(["s", "b"], True), (["s", "b", "mean", "var"], False), (["mean", "var"], True)]
)
def test_a_batch_norm_uses_its_stored_statistics_only_if_all_four_arrays_are_frozen(frozen, moves):
    text = "n = BatchNormalization(x, s, b, mean, var)\ny = Gemm(n, w)"
    parameters = {"s": numbers((4,), 1), "b": numbers((4,), 2), "mean": numbers((4,), 3),
                  "var": numbers((4,), 4, positive=True), "w": numbers((4, 3), 5)}  # fmt: skip
    graph = build_training_graph(model(text, parameters), GraphSettings(loss="mse", freeze=tuple(frozen)))
    roles = {entry.name for entry in graph.spec.parameters if entry.role == "statistic"}
    assert roles == ({"mean", "var"} if moves else set())
