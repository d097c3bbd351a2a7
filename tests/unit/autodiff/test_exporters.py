"""Files as other exporters write them, imitated: each trains, or is refused by a sentence that can be followed."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, arguments, native_reason
from tests.support.models.exported import (
    FILES,
    dynamo,
    jax2tf,
    keras,
    keras_gru,
    onnxruntime,
    paddle2onnx,
    tf2onnx,
    written,
)
from tests.support.models.followed import assert_trains, follow
from tests.support.models.gradients import forward, numbers, run
from tests.support.models.small_models import FOLDED_FROM, names, noted


@pytest.mark.parametrize(("make", "settings", "told"), FILES.values(), ids=FILES)
def test_files_of_other_exporters(make, settings, told):
    proto = make()
    graph, found, refusals = follow(proto.SerializeToString(), settings)
    assert {name: value for name, value in found.items() if settings.get(name) != value} == told, refusals
    assert_trains(graph, rate=0.05)


# -- what cannot be trained, and what to do instead ------------------------------------------------------------


CLASSIFIER = """<ir_version: 8, producer_name: "skl2onnx", opset_import: [{}"ai.onnx.ml" : 1]>
    g (float[n, 4] x) => (int64[n] label, {}) {{
        label, p = ai.onnx.ml.LinearClassifier <
            classlabels_ints = [0, 1, 2], coefficients = [{}], intercepts = [0.0, 0.0, 0.0], multi_class = 1,
            post_transform = "SOFTMAX"
        > (x)
        {}
    }}"""
PLAIN = ("float[n, 3] p", "")
ZIPPED = ("seq(map(int64, float)) z", "z = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1, 2]>(p)")


def classifier(opsets, result):
    """Return skl2onnx's LogisticRegression; onnxruntime's own sample imports no standard operators."""
    text = CLASSIFIER.format(opsets, result[0], ", ".join(["0.5"] * 12), result[1])
    proto = parser.parse_model(text)
    proto.graph.node[0].name = "LinearClassifier"
    return proto


SCALED = """<ir_version: 8, producer_name: "skl2onnx", opset_import: ["" : {}, "ai.onnx.ml" : 1]>
    g (double[n, 2] x) => (float[n, 3] y)
        <float[2, 3] w = {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0}}> {{
        s = ai.onnx.ml.Scaler<offset = [1.0, 2.0], scale = [0.5, 4.0]>(x)
        y = MatMul(s, w)
    }}"""


@pytest.mark.parametrize("opset", [9, 18])
def test_a_scaler_of_scikit_learn_becomes_arithmetic(opset):
    data = parser.parse_model(SCALED.format(opset)).SerializeToString()
    graph = build_training_graph(data, GraphSettings(loss="mse"))
    assert names(graph) == ["w"]
    x, target = np.float32([[3, 1], [1, 2]]), np.zeros((2, 3), np.float32)
    shifted = np.float32([[1, -4], [0, 0]])
    y = shifted @ np.float32([[1, 2, 3], [4, 5, 6]])
    found = run(graph, {"x": x, "target": target})
    np.testing.assert_allclose(found["loss"], (y**2).mean())
    np.testing.assert_allclose(found["w.grad"], 2 * shifted.T @ y / y.size)


@pytest.mark.parametrize(
    ("opsets", "result", "output"),
    [('"" : 18, ', PLAIN, None), ("", PLAIN, "p"), ('"" : 9, ', ZIPPED, None), ('"" : 9, ', ZIPPED, "p")],
)  # fmt: skip
def test_scikit_learn_s_own_operators(opsets, result, output):
    with pytest.raises(GraphError) as told:
        build_training_graph(classifier(opsets, result).SerializeToString(), GraphSettings(output=output))
    assert "\n" not in str(told.value)
    assert "(LinearClassifier): operators of the domain 'ai.onnx.ml'" in str(told.value)
    assert "or a network of edgeasync.nn" in str(told.value)
    assert_trains(build_training_graph(nn.to_onnx(nn.Linear(4, 3), (4,)).SerializeToString(), GraphSettings()))


def test_patterns_name_what_an_exporter_computed_or_merged():
    for make in (dynamo, onnxruntime):
        data = make().SerializeToString()
        with pytest.raises(GraphError, match=r"train=\['\*'\]"):
            build_training_graph(data, GraphSettings())
        assert_trains(build_training_graph(data, GraphSettings(train=("*",))))
    shared = written(
        "a = Mul(x, s)\nb = MatMul(a, w)\nc = Tanh(b)\ny = Mul(c, s)",
        {"s": np.ones(4, np.float32), "w": numbers((4, 4), 1)},
    )
    graph = build_training_graph(shared.SerializeToString(), GraphSettings(train=("*",)))
    assert [entry.name for entry in graph.spec.parameters] == ["s", "w"]


# -- weights in Constant nodes ---------------------------------------------------------------------------------


def trained(proto, **settings):
    graph = build_training_graph(proto.SerializeToString(), GraphSettings(**{"loss": "mse"} | settings))
    return [entry.name for entry in graph.spec.parameters]


def test_constants_are_weights_only_in_a_file_without_others():
    assert trained(paddle2onnx(), output="z") == ["conv_w", "conv_b", "fc_w", "fc_b"]
    text, values = (
        "a = MatMul(x, w)\nb = Mul(a, mask)\ny = Add(b, c)",
        {"w": numbers((4, 3), 1), "mask": np.float32([1, 0, 1]), "c": numbers((3,), 2)},
    )
    assert trained(written(text, values, constants={"mask"})) == ["w", "c"]
    assert trained(written(text, values, constants={"mask"}), train=("*",)) == ["w", "c"]
    assert trained(written(text, values, constants={"mask"}), train=("w", "mask")) == ["w", "mask"]
    assert trained(written(text, values, constants={"mask", "w", "c"}), freeze=("mask",)) == ["w", "c"]


def test_constants_of_some_layers_are_named_in_a_warning_that_can_be_followed():
    text = "a = MatMul(x, w)\nh = Tanh(a)\nb = MatMul(h, v)\ny = Mul(b, mask)"
    values = {"w": numbers((4, 5), 1), "v": numbers((5, 3), 2), "mask": np.float32([1, 0, 1])}
    mixed = written(text, values, constants={"v", "mask"})
    assert trained(mixed) == ["w"]
    (said,) = warnings(mixed)
    assert said == "weights in Constant nodes are not trained: v; to train them, set train=['*', 'v']"
    assert trained(mixed, **arguments(said)) == ["w", "v"]
    (said,) = warnings(mixed, train=("w",))
    assert arguments(said) == {"train": ("w", "v")}
    assert warnings(mixed, train=("*", "v")) == ()
    turned = written(
        f"t = Transpose(u)\n{text.replace('x, w', 'x, t')}",
        {"u": numbers((5, 4), 1), "v": values["v"], "mask": values["mask"]},
        constants={"v"},
    )
    assert trained(turned) == ["u", "mask"]
    formula = written(text, values, constants={"w", "v"})
    assert trained(formula) == ["mask", "w", "v"]  # a number of the formula in an initializer changes nothing
    assert warnings(formula) == ()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (numbers((4, 5), 1).astype(np.float64), "float64"),
        (np.full((4, 5), np.nan, np.float32), "not finite"),
    ],
)
def test_a_weight_that_nothing_can_train_is_named_in_a_warning(value, what):
    text = "k = Neg(w)\nh = Cast <to = 1> (w)\na = MatMul(x, h)\nb = MatMul(a, v)\ny = Add(b, mask)"
    rest = {"v": numbers((5, 3), 2), "mask": np.float32([0, -np.inf, 0])}
    (said,) = warnings(written(text, {"w": value} | rest), loss="mse")
    assert f"so these are not: w ({what}); to train them, export the model in float32" in said
    assert warnings(written(text, {"w": value} | rest), loss="mse", train=("v",)) == ()
    assert warnings(written(text, {"w": numbers((4, 5), 1)} | rest), loss="mse") == ()


def test_a_bias_of_one_number():
    text, values = (
        "a = MatMul(x, w)\nb = Add(a, c)\nh = Tanh(b)\nd = MatMul(h, v)\nz = Add(d, e)\ny = Mul(z, half)",
        {
            "w": numbers((4, 5), 1),
            "c": numbers((5,), 2),
            "v": numbers((5, 1), 3),
            "e": numbers((1,), 4),
            "half": np.float32(0.5),
        },
    )
    assert trained(written(text, values, constants=set(values))) == ["w", "c", "v", "e"]


def test_a_batch_norm_in_constants_moves_its_statistics():
    text = "a = MatMul(x, w)\nb = BatchNormalization(a, s, b0, mean, var)\ny = Relu(b)"
    values = {"w": numbers((4, 3), 1), "s": numbers((3,), 2), "b0": numbers((3,), 3), "mean": numbers((3,), 4),
              "var": numbers((3,), 5, positive=True)}  # fmt: skip
    proto = written(text, values, constants=set(values), graph="Model from PaddlePaddle.")
    graph = build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse"))
    roles = [(entry.name, entry.role) for entry in graph.spec.parameters]
    assert roles[3:] == [("mean", "statistic"), ("var", "statistic")]
    assert_trains(graph)
    export_model(proto.SerializeToString(), graph.spec.views(graph.initial))


def test_trained_constants_are_exported():
    data = paddle2onnx().SerializeToString()
    graph = build_training_graph(data, GraphSettings(output="z"))
    moved = {name: value + np.float32(1) for name, value in graph.spec.views(graph.initial).items()}
    exported = onnx.load_model_from_string(export_model(data, moved))
    for name, value in moved.items():
        (entry,) = [entry for entry in exported.graph.initializer if entry.name == name]
        np.testing.assert_array_equal(numpy_helper.to_array(entry), value)
    again = build_training_graph(exported.SerializeToString(), GraphSettings(output="z", train=tuple(moved)))
    np.testing.assert_array_equal(again.initial, graph.spec.flatten(moved))


# -- quantized weights -----------------------------------------------------------------------------------------


def test_quantized_weights_stay_small_in_the_training_graph():
    text = (
        "w = DequantizeLinear<axis=1>(q, s)\na = MatMul(x, w)\nd = MatMul(x, la)\ne = MatMul(d, lb)\ny = Add(a, e)"
    )
    parameters = {
        "q": np.arange(-2000, 2096).reshape(64, 64).astype(np.int8),
        "s": np.full(64, 0.01, np.float32),
        "la": numbers((64, 2), 1),
        "lb": numbers((2, 64), 2),
    }
    data = written(text, parameters, (64,)).SerializeToString()
    graph = build_training_graph(data, GraphSettings(loss="mse", train=("l?",)))
    assert len(graph.model) < len(data) + 4096
    assert_trains(graph, rate=0.001)


# -- what is said, but not refused ------------------------------------------------------------------------------


def warnings(proto, **settings):
    return build_training_graph(proto.SerializeToString(), GraphSettings(**settings)).warnings


def test_biases_and_batch_norms_that_tf2onnx_leaves_out():
    bias, norm = warnings(keras())
    assert "drops biases whose values are all 0, and these layers have no bias: w, v;" in bias
    assert "folded batch norms into conv2d/Conv2D_weights_fused_bn" in norm
    assert warnings(tf2onnx(), output="z", loss="bce_with_logits") == ()
    assert warnings(keras_gru()) == ()
    assert warnings(jax2tf(), output="z") == warnings(jax2tf(), output="z")
    assert ["no bias: v;" in said for said in warnings(jax2tf(), output="z")] == [True]


def test_adapters_are_not_taken_for_what_an_exporter_made():
    assert warnings(keras(), lora=1) == ()
    layers = {"w": numbers((4, 5), 1), "v": numbers((5, 3), 2)}
    proto = written("a = MatMul(x, w)\ny = MatMul(a, v)", layers, producer="pytorch")
    for number, (entry, node) in enumerate(zip(proto.graph.initializer, proto.graph.node, strict=True)):
        entry.name = node.input[1] = f"onnx::MatMul_{number}"
    assert warnings(proto, lora=1) == ()


def test_weights_of_shared_layers_that_onnxruntime_packed_once():
    """In ALBERT, all layers share their parameters."""
    weights, biases = [numbers((4, 4), place) for place in range(3)], [numbers((4,), place) for place in range(3)]
    text = (
        "q = Gemm(x, wq, bq)\nk = Unsqueeze(q, one)\nz = com.microsoft.Attention<num_heads=2>(k, w, b)\n"
        "y = Squeeze(z, one)"
    )
    parameters = {"wq": weights[1], "bq": biases[0], "w": np.hstack(weights), "b": np.hstack(biases),
                  "one": np.array([1])}  # fmt: skip
    proto = onnx.load_model_from_string(forward(text, parameters, (4,)))
    assert_trains(build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse")), rate=0.001)
    proto.producer_name = "onnxruntime.transformers"
    told = (
        r"onnxruntime's optimizer copied parameter 'wq' into 'w', .* optimized it, or set freeze=\['wq', 'w'\] or "
        r"train=\['\*'\]; after that: .* copied parameter 'bq' into 'b', .*"
    )
    with pytest.raises(GraphError, match=told):
        build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse"))
    for settings in ({"train": ("*",)}, {"freeze": ("w", "b")}, {"freeze": ("wq", "bq")}):
        build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse", **settings))
    tied = onnx.load_model_from_string(
        forward("h = MatMul(x, v)\ng = Tanh(h)\ny = MatMul(g, vt)", {"v": weights[0], "vt": weights[0].T}, (4,))
    )
    tied.producer_name = proto.producer_name
    with pytest.raises(GraphError, match="copied parameter 'v' into 'vt'"):
        build_training_graph(tied.SerializeToString(), GraphSettings(loss="mse"))


def test_convolutions_that_onnxruntime_may_have_fused_with_batch_norms():
    text = 'y = com.microsoft.FusedConv<activation="Relu">(x, w, b)'
    data = forward(text, {"w": numbers((2, 3, 3), 1), "b": numbers((2,), 2)}, (3, 5))
    proto = onnx.load_model_from_string(data)
    assert warnings(proto, loss="mse") == ()
    proto.producer_name = "onnxruntime.transformers"
    (said,) = warnings(proto, loss="mse")
    assert said.startswith("onnxruntime's optimizer folds batch norms into convolutions, such as w, which then")
    assert warnings(proto, loss="mse", freeze=("w",)) == ()


# -- one line, without the words of libraries in C++ -----------------------------------------------------------


RUNTIME = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : "
CHECKED = (
    "/onnxruntime_src/tensor/reshape_helper.h:45 a::Helper(const a::Shape&, bool) size != 0 && n == 0 was false. "
)
ASSERTED = "/project/onnx/convert.h:96: inRange: Assertion `version >= 1 && version <= 28` failed: "
FAILED, TYPES = "Status Message: concatbase.h:135 PrepareForComputeImpl ", '("","c": tensor(bool),) -> ("r",)'
LOADED = "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/m.onnx failed:"
NATIVE = [
    (
        f"{RUNTIME}Running Reshape. Name:'r' Status Message: {CHECKED}It cannot.",
        "Running Reshape. Name:'r' It cannot",
    ),
    (f"{ASSERTED}Warning: invalid version (must be 1 to 28)", "Warning: invalid version (must be 1 to 28)"),
    (f"{LOADED}Fatal error: own:Bend(-1) is not registered", "Fatal error: own:Bend(-1) is not registered"),
    ("No Op registered for Bend\n\n==> Context: Bad node spec for node. Name: b", "No Op registered for Bend"),
    (
        f"{RUNTIME}Non-zero status code returned while running Concat node. Name:'/c' {FAILED}Axis 0 has 2 and 3",
        "node '/c' (Concat) fails: Axis 0 has 2 and 3",
    ),
    (
        f"{RUNTIME}Exception during initialization: Exception running Conv node. Name:'' Not for Pad::SAME_UPPER.",
        "a node (Conv) fails: Not for SAME_UPPER",
    ),
    (
        f'{RUNTIME}This is an invalid model. In Node, ("l", Loop, "", -1) : {TYPES} , Error Nodes must be sorted',
        "node 'l' (Loop) is wrong: Nodes must be sorted",
    ),
    (
        "Node (m) Op (MatMul) [ShapeInferenceError] Incompatible dimensions",
        "node 'm' (MatMul) is wrong: Incompatible dimensions",
    ),
    ("input 'onnx::Conv_12' of x::op_1 is not there", "input 'onnx::Conv_12' of x::op_1 is not there"),
    ("two\nlines", "two lines"),
    ("", "ValueError"),
]


@pytest.mark.parametrize(("said", "reason"), NATIVE)
def test_the_reason_in_an_error_of_a_library(said, reason):
    assert native_reason(ValueError(said)) == reason


BROKEN = {
    "a node that does not run": """<ir_version: 8, opset_import: ["" : 18]> g (float[b, 4] x) => (float[b, 3] y)
        <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2] s = {-1, 3}> { h = MatMul(x, w) y = Reshape(h, s) }""",
    "shapes that do not fit": """<ir_version: 8, opset_import: ["" : 18]> g (float[b, 4] x) => (float[b, 3] y)
        <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }""",
    "an operator that nobody knows": """<ir_version: 8, opset_import: ["" : 18]> g (float[b, 2] x) =>
        (float[b, 2] y) <float[2] w = {1, 2}> { h = Mul(x, w) y = Bend(h) }""",
    "an old operator": """<ir_version: 3, opset_import: ["" : 1]> g (float[b, 2] x) => (float[b, 2] y)
        <float[2] w = {1, 2}> { h = Mul<broadcast=1>(x, w) y = Upsample<height_scale=1.0, width_scale=1.0>(h) }""",
    "an opset that never was": """<ir_version: 8, opset_import: ["" : 0]> g (float[b, 2] x) => (float[b, 2] y)
        <float[2] w = {1, 2}> { y = Mul(x, w) }""",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_no_assertion_of_a_library_reaches_a_person(text):
    with pytest.raises(GraphError) as told:
        build_training_graph(parser.parse_model(text).SerializeToString(), GraphSettings(loss="mse"))
    said = str(told.value)
    assert "\n" not in said
    assert not [native for native in (".cc:", ".h:", "Assertion", "[ONNXRuntimeError]", "==>") if native in said]


@pytest.mark.parametrize("frozen", [(), ("v",)])
def test_quantized_convolutions_are_refused_before_anything_is_frozen_for_them(frozen):
    text = (
        "q, scale, zero = DynamicQuantizeLinear(x)\ni = ConvInteger(q, body, zero, middle)\nf = Cast<to=1>(i)\n"
        "m = Flatten(f)\ny = Gemm(m, v)"
    )
    parameters = {"body": np.ones((2, 2, 3), np.uint8), "middle": np.uint8(1), "v": numbers((8, 3), 1)}
    proto = written(text, parameters, (2, 6), producer="onnx.quantize")
    told = r"operator ConvInteger is not supported on devices; use the original file, before onnxruntime optimized"
    with pytest.raises(GraphError, match=told):
        build_training_graph(proto.SerializeToString(), GraphSettings(freeze=frozen))


OFF = {
    "a batch of a fixed size": (
        "r = Reshape(x, three)\ny = MatMul(r, w)",
        r"write x.shape\[0\] where forward has len",
    ),
    "an index beyond the end": ("g = Gather <axis = 1> (x, seventh)\ny = MatMul(g, w)", "with other operators"),
    "float64": (
        "h = Cast <to = 11> (x)\nt = Tan(h)\nz = Cast <to = 1> (t)\ny = MatMul(z, w)",
        "export that part in float32",
    ),
}


@pytest.mark.parametrize(("text", "told"), OFF.values(), ids=OFF)
def test_the_batch_is_blamed_only_where_another_size_runs(text, told):
    values = {"w": numbers((4, 3), 1), "three": np.array([3, 4]), "seventh": np.array([0, 1, 2, 7])}
    proto = written(text, {name: value for name, value in values.items() if name in text}, producer="pytorch")
    with pytest.raises(GraphError, match=f"the forward model does not run: .*; .*{told}"):
        build_training_graph(proto.SerializeToString(), GraphSettings(loss="mse"))


def test_limits_of_a_clip_are_not_taken_for_parameters():
    """torch's newer exporter computes the limits of a ReLU6 beforehand."""
    data = forward("a = MatMul(x, w)\nb = Clip(a, low, high)\ny = Mul(b, scale)",
                   {"w": numbers((4, 3), 1), "low": np.float32(0), "high": np.float32(6), "scale": np.float32(2)},
                   (4,))  # fmt: skip
    origins = {name: (FOLDED_FROM, f"['{name}_value']") for name in ("low", "high", "scale")}
    graph = build_training_graph(noted(data, **origins), GraphSettings(loss="mse"))
    (said,) = [warning for warning in graph.warnings if "scalars computed by the exporter" in warning]
    assert "are not trained: scale of 'scale_value';" in said
