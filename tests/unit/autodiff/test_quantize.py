"""The setting `base` quantizes frozen weights, and nothing else."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from edgeasync.autodiff.adapters import adapted_layers
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.quantize import BLOCK, quantize_blocks, quantize_channels
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import forward, numbers, run, session

WIDTH, ROWS, TOKENS = 72, 64, 4
"""Neither is a multiple of the other's block. A block of int4 has 32 values."""

BODY = """
e = Gather(table, x)
h1 = Mul(e, p)
h2 = MatMul(h1, w2)
t3 = Transpose<perm=[1, 0]>(w3)
m3 = MatMul(h2, t3)
h3 = Tanh(m3)
f4 = Reshape(h3, flat)
h4 = Gemm<transB=1>(f4, w4, b4)
r5 = Reshape(h4, planes)
h5 = Conv(r5, w5)
h6 = Flatten(h5)
h7 = MatMul(h6, small)
h8 = MatMul(h7, w8)
h9 = Mul(h8, added)
t9 = Transpose<perm=[1, 0]>(table)
y = MatMul(h9, t9)
"""
PARAMETERS = {
    "table": numbers((ROWS, WIDTH), 1),
    "w2": 0.1 * numbers((WIDTH, WIDTH), 2),
    "w3": 0.1 * numbers((WIDTH, WIDTH), 3),
    "w4": 0.1 * numbers((WIDTH, WIDTH), 4),
    "w5": 0.1 * numbers((64, 8, 3, 3), 5),
    "small": 0.1 * numbers((64, 60), 6),
    "w8": 0.1 * numbers((60, WIDTH), 7),
    "added": numbers((WIDTH,), 8),
    "b4": numbers((WIDTH,), 9),
    "p": numbers((WIDTH,), 10),
    "flat": np.array([-1, WIDTH]),
    "planes": np.array([-1, 8, 3, 3]),
}
TRAINED = ("p", "b4")
QUANTIZED = ("table", "w2", "w3", "w4", "w5", "w8")
IN_BYTES = {"int8": QUANTIZED, "int4": ("table", "w5")}
"""Weights stored in int8: a table has no sums, and the convolution's inputs have no block."""

FEEDS = {"x": np.array([[1, 5, 0, 2], [7, 0, 63, 63]]), "target": numbers((2 * TOKENS, ROWS), 11)}


def model(**options):
    return forward(BODY, PARAMETERS, (TOKENS,), kind=TensorProto.INT64, **options)


def stored(content):
    return {entry.name: numpy_helper.to_array(entry) for entry in onnx.load_from_string(content).graph.initializer}


def dequantized(content):
    """Return the values that the quantized weights of a model stand for, and the model with them instead."""
    proto, plain = onnx.load_from_string(content), onnx.load_from_string(model())
    names = [node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"]
    proto.graph.output.extend([onnx.ValueInfoProto(name=name) for name in names])
    found = session(proto.SerializeToString()).run(names, {"x": FEEDS["x"]})
    values = dict(zip(names, found, strict=True))
    values["w3"] = values.pop("t3").T
    np.testing.assert_array_equal(values.pop("t9").T, values["table"])
    for entry in plain.graph.initializer:
        if entry.name in values:
            entry.CopyFrom(numpy_helper.from_array(values[entry.name], entry.name))
    return values, plain.SerializeToString()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_gradients_equal_those_of_the_dequantized_weights(base, recompute):
    settings = {"loss": "mse", "train": TRAINED, "recompute": recompute}
    built = build_training_graph(model(), GraphSettings(base=base, **settings))
    check_graph(built.model, bytes_max=1 << 20)
    values, plain = dequantized(built.forward)
    assert values.keys() == {*QUANTIZED}
    for name, value in values.items():
        size = np.abs(PARAMETERS[name]).max()
        assert 0.0 < np.abs(value - PARAMETERS[name]).max() <= size / (250 if name in IN_BYTES[base] else 8)
    found, expected = [
        run(graph, FEEDS) for graph in (built, build_training_graph(plain, GraphSettings(**settings)))
    ]
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-5 * np.abs(value).max(), name
    assert built.spec.views(built.initial)["b4"].dtype == np.float32


@pytest.mark.parametrize("base", ["int8", "int4"])
@pytest.mark.parametrize("opset", [11, 18, 21])
def test_the_file_and_the_graph_store_each_weight_once(base, opset):
    built = build_training_graph(model(opset=opset), GraphSettings(base=base, loss="mse", train=TRAINED))
    note = f"6 frozen weights are stored in {base}"
    assert note in built.notes
    for content in (built.model, built.forward):
        tensors = stored(content)
        for name in QUANTIZED:
            (value,) = [value for each, value in tensors.items() if each.startswith(f"{name}_quantized")]
            assert value.dtype.name == ("int8" if name in IN_BYTES[base] else base)
            assert value.shape in (PARAMETERS[name].shape, PARAMETERS[name].shape[::-1])
        assert {tensors[name].dtype.name for name in ("small", "added")} == {"float32"}
        assert not [name for name, value in tensors.items() if value.dtype == np.float32 and value.size >= 4096]
    assert set(TRAINED) <= stored(built.forward).keys()


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_an_exported_model_has_the_quantized_base(base):
    built = build_training_graph(model(), GraphSettings(base=base, loss="mse", train=TRAINED))
    moved = {name: numbers(PARAMETERS[name].shape, 20) for name in TRAINED}
    exported = export_model(built.forward, moved)
    assert len(exported) == len(built.forward)
    _, plain = dequantized(exported)
    found, expected = [
        session(each).run(None, {"x": FEEDS["x"]})[0] for each in (exported, export_model(plain, moved))
    ]
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()  # onnxruntime may round activations


def test_a_base_of_another_type_is_noted_and_kept():
    built = build_training_graph(model(), GraphSettings(base="int8", loss="mse", lora="2:w*"))
    again = build_training_graph(built.forward, GraphSettings(base="int4", loss="mse", lora="2:w*"))
    assert again.model == built.model
    assert "uses the frozen weights as they were quantized before" in again.notes


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_layers_with_adapters_keep_their_names(base):
    built = build_training_graph(model(), GraphSettings(base=base, loss="mse", lora="2:w*"))
    names = {parameter.name for parameter in built.spec.parameters}
    layers = ("w2", "w3", "w4", "w5", "w8")
    assert names == {f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    moved = {name: 0.1 * numbers(value.shape, 21) for name, value in built.spec.views(built.initial).items()}
    exported = onnx.load_from_string(export_model(built.forward, moved))
    assert {layer.name for layer in adapted_layers(exported)} == {*layers}


def test_values_are_rounded_to_the_nearest_step():
    weight = numbers((50, 70), 1)
    weight[3], weight[:, 5] = 0.0, 0.0
    for axis in (0, 1):
        values, scale = quantize_channels(weight, axis)
        wide = np.expand_dims(scale, 1 - axis)
        assert np.abs(values * wide - weight).max() <= wide.max() / 2 * 1.001
        values, scale = quantize_blocks(weight, axis)
        wide = np.repeat(scale, BLOCK, axis=axis).take(range(weight.shape[axis]), axis)
        steps = weight / wide
        expected = np.rint(steps).clip(-8, 7)
        np.testing.assert_array_equal(values.astype(np.float32), expected)
        assert steps.min() >= -8.001
        assert (
            np.abs(np.minimum.reduceat(steps, np.arange(0, weight.shape[axis], BLOCK), axis=axis) + 8).min() < 1e-5
        )


def test_a_base_without_frozen_weights_is_refused():
    told = "base 'int8' quantizes frozen weights of at least 4096 values, but there are none; train fewer"
    with pytest.raises(GraphError, match=told):
        build_training_graph(model(), GraphSettings(base="int8", loss="mse"))


def test_weights_that_other_nodes_read_stay_as_they_are():
    text = "h = Mul(x, p)\na = MatMul(h, w)\nb = MatMul(a, v)\nc = ReduceSum(v, one)\ny = Add(b, c)"
    parameters = {"p": numbers((64,)), "w": numbers((64, 64), 1), "v": numbers((64, 64), 2), "one": np.array([0])}
    settings = GraphSettings(base="int8", loss="mse", train=("p",))
    tensors = stored(build_training_graph(forward(text, parameters, (64,)), settings).forward)
    assert {"w_quantized", "v"} <= tensors.keys()
    assert not {"w", "v_quantized"} & tensors.keys()
