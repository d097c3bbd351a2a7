"""The training graph's contract, what is chosen to be trained, and what is refused, with what to do about it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.rules import INSTEAD
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.graphs.graph_model import build_graph
from edgeasync.graphs.onnx_model import OnnxModel
from tests.support.models.gradients import forward, numbers, run, session
from tests.support.models.small_models import DENSE, FOLDED_FROM, MSE, dense, edited, model, names, noted, refused


@pytest.mark.parametrize("batch", ["batch", 3])
def test_the_same_model_gives_the_same_bytes(batch):
    first, second = (build_training_graph(model(batch=batch), GraphSettings()) for _ in range(2))
    assert first.model == second.model
    assert first.spec.fingerprint == second.spec.fingerprint
    assert first.initial.tobytes() == second.initial.tobytes()


def test_a_model_in_double_precision_is_refused_by_its_type():
    double = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]>
        g (double[batch, 3] x) => (double[batch, 3] y) <double[3] w = {1, 2, 3}> { y = Mul(x, w) }"""
    )
    with pytest.raises(GraphError, match="no float32 parameter, only float64; export it in float32"):
        build_training_graph(double.SerializeToString(), GraphSettings(loss="mse"))


def test_an_autoencoder_is_its_own_target():
    text = "h = Gemm(x, w1, b1)\na = Relu(h)\ny = Gemm(a, w2, b2)"
    parameters = dense(w2=numbers((5, 4), 3), b2=numbers((4,), 4))
    graph = build_training_graph(model(text, parameters), GraphSettings(loss="mse", target="input"))
    assert session(graph.model).get_modelmeta().custom_metadata_map["edgeasync.target"] == "input"
    assert [entry.shape for entry in session(graph.model).get_inputs()[:2]] == [["batch", 4]] * 2
    with pytest.raises(GraphError, match=r"needs one input with the output's shape \(None, 3\); the inputs have"):
        build_training_graph(model(), GraphSettings(loss="mse", target="input"))


def test_an_operator_without_a_rule_is_named_and_what_to_do():
    text = DENSE.replace("a = Relu(h)", "a = Hardmax(h)")
    refused(model(text), r"the Hardmax that computes 'a': no gradient for Hardmax; write the model with other "
                         r"operators, or freeze the parameters before it: freeze=\['w1', 'b1'\]$")  # fmt: skip
    assert names(build_training_graph(model(text), GraphSettings(freeze=("w1", "b1")))) == ["w2", "b2"]
    refused(model(text), "all trained parameters come before it, so write the model with other operators$",
            train=("*1",))  # fmt: skip
    named = edited(model(text), lambda proto: setattr(proto.graph.node[1], "name", "bend"))
    refused(named, r"node 'bend' \(Hardmax\): no gradient for Hardmax")
    assert names(build_training_graph(named, GraphSettings(train=("*2",)))) == ["w2", "b2"]


def test_operators_without_a_rule_are_named_all_at_once():
    text = "h = Gemm(x, w1, b1)\na = Hardmax(h)\nb = Mul(a, w2)\nc = Compress<axis=1>(b, k)\nd = Hardmax(c)"
    text += "\ny = Mul(d, b2)"
    data = model(text, {"w1": numbers((4, 5), 1), "b1": numbers((5,), 2), "w2": numbers((5,), 3),
                        "b2": numbers((5,), 4), "k": np.ones(5, bool)})  # fmt: skip
    refused(data, "the Hardmax that computes 'a', the Compress that computes 'c', the Hardmax that computes 'd': "
                  r"no gradient for Hardmax, Compress; .* before them: freeze=\['w1', 'b1', 'w2'\]$")  # fmt: skip
    assert names(build_training_graph(data, GraphSettings(loss="mse", freeze=("w1", "b1", "w2")))) == ["b2"]


def test_outputs_that_nothing_trains():
    refused(model("y = Identity(x)", {}, batch=2), "no parameter|nothing can be trained")
    refused(model("y = Identity(w)", {"w": numbers((2, 3))}), "does not depend on any input")
    refused(
        model("y = Cast<to=1>(x)", {"w": numbers((2, 3))}, kind=TensorProto.INT64), "no trained parameter affects"
    )
    refused(
        model("a = Shape(x)\ny = Cast<to=1>(a)", {"w": numbers((2,))}, batch=2),
        "is a constant, so there is nothing",
    )


def test_parameters_that_an_exporter_merged():
    ones = {"w": np.ones(4, np.float32), "v": numbers((4,), 3)}
    text = "a = Mul(x, w)\nb = Mul(a, v)\ny = Mul(b, w)"
    why = "parameter 'w' is used by the Mul that computes 'a' and the Mul that computes 'y', and all its values"
    refused(
        model(text, ones),
        f"{why} are equal, so the exporter may have merged two parameters into it; "
        ".*, or set freeze=\\['w'\\], or train=\\['\\*'\\]",
    )
    refused(
        model(text, {"w": np.zeros(1, np.float32), "v": numbers((4,), 3)}),
        "the exporter may have merged two parameters into it",
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
    refused(model(text, used), "shares the running statistic '[a-z0-9]+' with another node")


def test_statistics_by_another_name_move_too():
    parameters = {name: numbers((4,), seed, positive=True) for seed, name in enumerate(["p", "s", "b", "m", "v"])}
    text = "n = Identity(m)\nh = Mul(x, p)\ny = BatchNormalization(h, s, b, n, v)"
    graph = build_training_graph(model(text, parameters), MSE)
    assert names(graph) == ["p", "s", "b", "m", "v"]
    assert [entry.role for entry in graph.spec.parameters][3:] == ["statistic", "statistic"]


def folded(parameter, output):
    """Return a convolution as torch's exporters leave it after they folded a batch norm into it."""
    text = f"h = Mul(x, p)\n{output} = Conv(h, k, c)\na = Relu({output})\ny = Mul(a, w)"
    parameters = {"p": numbers((1, 2, 5), 1), "k": numbers((3, 2, 3), 2), "c": numbers(3), "w": numbers((3, 1), 3)}
    bias = "onnx::Conv_37" if parameter.startswith("onnx::") else "c1.bias"

    def edit(proto):
        proto.producer_name = "pytorch"
        proto.graph.node[1].input[1:] = [parameter, bias]
        proto.graph.initializer[1].name, proto.graph.initializer[2].name = parameter, bias

    return edited(model(text, parameters, (2, 5)), edit)


@pytest.mark.parametrize(("parameter", "output"), [("onnx::Conv_36", "c"), ("c1.weight", "getitem_3")])
def test_a_batch_norm_that_an_exporter_folded(parameter, output):
    refused(
        folded(parameter, output),
        f"the exporter folded a batch norm into the Conv that computes '{output}', which changes training",
    )
    head = build_training_graph(folded(parameter, output), GraphSettings(loss="mse", train=("w",)))
    assert names(head) == ["w"]
    assert parameter in names(
        build_training_graph(folded(parameter, output), GraphSettings(loss="mse", train=("*",)))
    )
    assert "c.weight" in names(build_training_graph(folded("c.weight", "conv2d"), MSE))


@pytest.mark.parametrize("name", ["val_70", "onnx::Mul_37"])
def test_what_an_exporter_computed(name):
    """It may be a constant of the formula, as the root of an attention's width is; a matrix is none."""

    def edit(proto):
        proto.producer_name = "pytorch"
        proto.graph.node[1].input[1] = proto.graph.initializer[1].name = name

    parameters = {"p": numbers((1, 3)), "k": np.float32([0.7])}
    refused(edited(model("h = Mul(x, p)\ny = Mul(h, k)", parameters, (3,)), edit),
            f"uses '{name}', which the exporter computed from a parameter or constants")  # fmt: skip
    scaled = edited(model("h = Mul(x, p)\ny = Mul(h, k)", parameters, (3,)), edit)
    assert names(build_training_graph(scaled, GraphSettings(loss="mse", freeze=(name,)))) == ["p"]
    assert names(build_training_graph(scaled, GraphSettings(loss="mse", train=("p", name)))) == ["p", name]
    parameters["k"] = numbers((3, 2), 4)
    matrix = edited(model("h = Mul(x, p)\ny = MatMul(h, k)", parameters, (3,)), edit)
    assert names(build_training_graph(matrix, MSE)) == ["p", name]


def test_a_file_that_names_no_parameter():
    """Keras with torch writes such files: all weights are computed, and biases are added."""
    text = "h = Conv(x, k)\na = Add(h, b)\nm = Mul(a, s)\nf = Flatten(m)\ny = MatMul(f, w)"
    parameters = {
        "k": numbers((3, 2, 3), 1),
        "b": numbers((3, 1), 2),
        "s": numbers((3, 1), 3),
        "w": numbers((9, 2), 4),
    }
    numbered = {"k": "onnx::Conv_1", "b": "onnx::Add_2", "s": "onnx::Mul_3", "w": "onnx::MatMul_4"}

    def keras(proto, names=numbered):
        proto.producer_name = "pytorch"
        for entry in proto.graph.initializer:
            entry.name = names[entry.name]
        for node in proto.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    data = model(text, parameters, (2, 5))
    graph = build_training_graph(edited(data, keras), MSE)
    assert names(graph) == [*numbered.values()]
    (warning,) = graph.warnings
    assert "so onnx::Mul_3 are trained although they may be constants" in warning
    assert warning.endswith("set freeze=['onnx::Mul_3']")
    refused(edited(data, lambda proto: keras(proto, numbered | {"w": "last.weight"})), "'onnx::Conv_1', which the")
    parameters["s"] = parameters["b"][::-1].copy()
    refused(edited(model(text, parameters, (2, 5)), keras), "uses 'onnx::Add_2', which the exporter computed")


def test_what_an_exporter_computed_of_several_parameters():
    data = model("h = Mul(x, p)\ny = MatMul(h, mul)", {"p": numbers((1, 3)), "mul": numbers((3, 2), 4)}, (3,))
    assert names(build_training_graph(noted(data, mul=(FOLDED_FROM, "['l.weight']")), MSE)) == ["p", "mul"]
    refused(noted(data, mul=(FOLDED_FROM, "['l.g', 'l.v']")), "uses 'mul', which the exporter computed")


def test_tied_weights_of_which_an_exporter_made_two():
    table = numbers((5, 3), 4)
    text = "h = Gather(w, x)\na = Tanh(h)\ny = MatMul(a, val_0)"
    data = noted(model(text, {"w": table, "val_0": table.T.copy()}, (2,), kind=TensorProto.INT64))
    refused(data, "the MatMul that computes 'y' uses 'val_0', which the exporter computed")
    assert names(build_training_graph(data, GraphSettings(loss="mse", freeze=("w",)))) == ["val_0"]


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
    with pytest.raises(GraphError, match=r"its body uses the trained tensor 'w'"):
        build_training_graph(data, MSE)


def test_an_operator_without_a_rule_has_its_replacement_named(monkeypatch):
    monkeypatch.setitem(INSTEAD, "Hardmax", "h.softmax(1)")
    told = r"other operators, such as h\.softmax\(1\) for Hardmax, or freeze"
    refused(model(DENSE.replace("Relu", "Hardmax")), told)


def test_what_would_be_refused_next_is_said_at_once():
    text = "a = Hardmax(w0)\nb = Mul(x, a)\nh = MatMul(b, w1)\nc = Hardmax(h)\nd = Add(c, b1)\n"
    text += "e = Softmax(d)\ny = Neg(e)"
    parameters = {"w0": numbers((4,), 1), "w1": numbers((4, 3), 2), "b1": numbers((3,), 3)}
    told = r"comes from Softmax, .* set output='d'; after that: .* freeze=\['w0', 'w1'\]$"
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


ROWS = {
    "a mean over the batch": ("m = ReduceMean(a, zero)\ny = MatMul(m, v)", "batch"),
    "classes first": ("b = MatMul(a, v)\ny = Transpose<perm=[1, 0]>(b)", "batch"),
    "times instead of examples": ("m = ReduceMean(a, zero)\ny = MatMul(m, v)", 16),
}


@pytest.mark.parametrize(("text", "batch"), ROWS.values(), ids=ROWS)
def test_an_output_without_an_axis_for_the_examples_is_refused(text, batch):
    """Devices have one target per example, so no device could train it."""
    parameters = {"w": numbers((4, 5), 1), "v": numbers((5, 3), 2), "zero": np.array([0])}
    data = forward(f"a = MatMul(x, w)\n{text}", parameters, (4,), batch=batch)
    with pytest.raises(GraphError, match="m: output 'y' has no axis for the examples of a batch"):
        build_graph(data, OnnxModel(file="m", loss="mse"), "m")


@pytest.mark.parametrize("size", [1, 5])
def test_inputs_of_different_batch_sizes_are_refused(size):
    def edit(proto):
        proto.graph.input.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, [size, 5]))

    data = edited(forward("a = MatMul(x, w)\nb = Mul(a, m)\ny = Neg(b)", {"w": numbers((4, 5))}, (4,)), edit)
    refused(data, rf"but their sizes differ \(x: dynamic, m: {size}\)")


@pytest.mark.parametrize(("name", "shape"), [("w" * 257, (1, 5)), ("w", (1, 1, 1, 1, 1, 1, 1, 4, 5))])
def test_a_parameter_that_the_protocol_cannot_name_is_refused(name, shape):
    data = edited(forward("y = Mul(x, w)", {"w": numbers(shape)}, shape[1:]), lambda proto: _rename(proto, name))
    refused(data, f"has {len(name)} characters in its name and {len(shape)} axes, but the limits are 256 and 8")


def _rename(proto, name):
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = name


def test_nan_in_a_constant_is_told():
    data = forward(
        "a = MatMul(x, w)\ny = Add(a, b)", {"w": numbers((4, 3)), "b": np.float32([1, np.nan, 2])}, (4,)
    )
    (said,) = build_training_graph(data, MSE).warnings
    assert said == "constants contain NaN, so that all results may be NaN: b; correct the file"


def test_names_that_another_build_has_given_are_not_given_again():
    text = "h = MatMul(x, w)\nk = Relu(h)\ny = MatMul(k, v)"
    parameters = {"w": numbers((4, 1), 1), "v": numbers((1, 3), 2)}
    feeds = {"x": numbers((6, 4), 3), "target": np.arange(6) % 3}
    data = forward(text, parameters, (4,))
    plain = build_training_graph(data, GraphSettings())
    named = build_training_graph(edited(data, lambda proto: _rename(proto, "::constant_1")), GraphSettings())
    expected, found = run(plain, feeds), run(named, feeds)
    assert found["loss"] == expected["loss"]
    np.testing.assert_array_equal(found["::constant_1.grad"], expected["w.grad"])
