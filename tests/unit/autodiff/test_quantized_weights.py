"""Quantized weights keep their types in a training graph, and each use dequantizes them late."""

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from edgeasync.autodiff import chunks
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.graph import free_inputs, read_nodes
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import forward, numbers, run

WIDTH = 40
"""Width of the weights. It is not a multiple of the block size, so the last block is shorter."""

BLOCK = 16
BODY = """
e = Gather(table, x)
h1 = Mul(e, p)
m2 = MatMul(h1, w2)
h2 = Tanh(m2)
t3 = Transpose<perm=[1, 0]>(w3)
m3 = MatMul(h2, t3)
h3 = Relu(m3)
f4 = Reshape(h3, flat)
t4 = Transpose<perm=[1, 0]>(w4)
h4 = Gemm(f4, t4, b4)
r5 = Reshape(h4, planes)
h5 = Conv<pads=[1, 1]>(r5, w5)
f6 = Flatten(h5)
h6 = Gemm<transB=1>(f6, w6)
y = MatMul(h6, w7)
"""
WEIGHTS = {
    "table": (9, WIDTH), "w2": (WIDTH, WIDTH), "w3": (WIDTH, WIDTH), "w4": (WIDTH, WIDTH),
    "w5": (3, 5, 3), "w6": (8, 24), "w7": (8, 2),
}  # fmt: skip
OTHERS = {
    "p": numbers((WIDTH,), 1),
    "b4": numbers((WIDTH,), 2),
    "flat": np.array([-1, WIDTH]),
    "planes": np.array([-1, 5, 8]),
}
TOKENS = 2


def quantized(weight, kind):
    """Return the inputs and attributes of a DequantizeLinear, and what it computes."""
    if kind == "tensor":
        scale = np.float32(np.abs(weight).max() / 127)
        values = np.rint(weight / scale).astype(np.int8)
        return [values, scale], "", values * scale
    if kind in ("channel", "uint8", "float16"):
        scale = np.abs(weight).max(axis=tuple(range(1, weight.ndim))) / np.float32(127)
        if kind == "float16":
            scale = scale.astype(np.float16)
        wide = scale.astype(np.float32).reshape(-1, *[1] * (weight.ndim - 1))
        values = np.rint(weight / wide).clip(-128, 127)
        found = (values * wide).astype(scale.dtype).astype(np.float32)
        if kind == "uint8":
            return [(values + 128).astype(np.uint8), scale, np.full(scale.shape, 128, np.uint8)], "axis=0", found
        return [values.astype(np.int8), scale], "axis=0", found
    axis, offset = weight.ndim - 1, 8 if kind == "uint4" else 0
    starts = np.arange(0, weight.shape[axis], BLOCK)
    scale = np.maximum.reduceat(np.abs(weight), starts, axis=axis) / np.float32(7)
    wide = np.repeat(scale, BLOCK, axis=axis)[..., : weight.shape[axis]]
    values = np.rint(weight / wide).clip(-8, 7)
    dtype = {"int8": np.int8, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}[kind.removesuffix(", blocks")]
    inputs = [(values + offset).astype(np.int8).astype(dtype), scale]
    inputs += [np.full(scale.shape, offset, np.int8).astype(dtype)] if offset else []
    return inputs, f"axis={axis}, block_size={BLOCK}", (values * wide).astype(np.float32)


def models(kind, batch):
    """Return a model with quantized weights, and the same model with what they stand for."""
    lines, stored, plain = [], dict(OTHERS), dict(OTHERS)
    for seed, (name, shape) in enumerate(WEIGHTS.items()):
        inputs, attributes, plain[name] = quantized(numbers(shape, 10 + seed), kind)
        names = [f"{name}_{part}" for part in "qsz"][: len(inputs)]
        stored |= dict(zip(names, inputs, strict=True))
        made = f"{name}_16" if kind == "float16" else name
        lines.append(f"{made} = DequantizeLinear<{attributes}>({', '.join(names)})".replace("<>", ""))
        lines += [f"{name} = Cast<to=1>({made})"] if kind == "float16" else []
    options = {"x": (TOKENS,), "batch": batch, "opset": 21, "kind": TensorProto.INT64}
    return [
        forward(text, values, **options) for text, values in (("\n".join(lines) + BODY, stored), (BODY, plain))
    ]


KINDS = ("tensor", "channel", "uint8", "float16", "int8, blocks", "int4", "uint4")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("batch", ["batch", 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_dequantized_weights(kind, batch, recompute):
    settings = GraphSettings(loss="mse", train=("p", "b4"), recompute=recompute)
    ours, plain = [build_training_graph(model, settings) for model in models(kind, batch)]
    check_graph(ours.model, bytes_max=1 << 20)
    feeds = {"x": np.array([[1, 5], [7, 0], [8, 8]]), "target": numbers((6, 2), 3)}
    found, expected = run(ours, feeds), run(plain, feeds)
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-5 * np.abs(value).max(), name


def optimized(graph, folder):
    """Return the nodes that onnxruntime runs on a device, and the constants."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(graph.model, options, ["CPUExecutionProvider"])
    proto = onnx.load(folder / "optimized.onnx").graph
    return read_nodes(proto.node), {entry.name: numpy_helper.to_array(entry) for entry in proto.initializer}


@pytest.mark.parametrize("batch", ["batch", 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_use_dequantizes_the_weight_once_after_what_it_reads(kind, batch, tmp_path):
    graph = build_training_graph(models(kind, batch)[0], GraphSettings(loss="mse", train=("p",)))
    nodes, constants = optimized(graph, tmp_path)
    stored = {name.partition("_q")[0]: value for name, value in constants.items() if "_q" in name}
    assert stored.keys() == WEIGHTS.keys()
    assert {value.dtype.name for value in stored.values()} == {quantized(numbers((2, 2)), kind)[0][0].dtype.name}
    large = [value for value in constants.values() if value.dtype == np.float32 and value.size > WIDTH]
    assert all(value.size <= WIDTH**2 / BLOCK * 1.5 for value in large)  # scales of blocks
    makers = {name: node for node in nodes for name in node.outputs}
    readers = Counter(name for node in nodes for name in free_inputs(node))
    dequantized = [node for node in nodes if node.op == "DequantizeLinear"]
    for node in dequantized:
        assert readers[node.outputs[0]] == 1
        assert node.inputs[0] not in constants or makers[node.inputs[1]].op == "Mul"
        in_rows = node.attributes.get("axis") == 1 and constants.get(node.inputs[0], np.zeros(1)).ndim == 2
        assert kind == "tensor" or not in_rows or node.inputs[0] == "table_q"  # that is slow
    used = Counter(node.inputs[0].partition("_q")[0] for node in dequantized)
    assert [used[name] for name in ("w2", "w3", "w4", "w5", "w6", "w7")] == [2] * 6
    assert not [node for node in nodes if node.op == "Transpose" and makers.get(node.inputs[0]) in dequantized]


@pytest.mark.parametrize("kind", ["tensor", "channel", "uint8"])
def test_only_the_rows_that_a_gather_reads_are_dequantized(kind, tmp_path):
    graph = build_training_graph(models(kind, "batch")[0], GraphSettings(loss="mse", train=("p",)))
    nodes, _ = optimized(graph, tmp_path)
    assert [node.op for node in nodes if "table_q" in node.inputs] == ["Gather"]


HEAD = """
e = Gather(table, x)
h = Mul(e, p)
t = Transpose<perm=[1, 0]>(table)
s = MatMul(h, t)
y = Transpose<perm=[0, 2, 1]>(s)
"""


@pytest.mark.parametrize("kind", ["tensor", "channel", "uint8", "int8, blocks", "int4", "uint4"])
def test_the_loss_in_chunks_dequantizes_a_part_of_the_weight_at_a_time(kind, monkeypatch, tmp_path):
    inputs, attributes, plain = quantized(numbers((9, WIDTH), 1), kind)
    stored = {f"table_{part}": value for part, value in zip("qsz", inputs, strict=False)}
    line = f"table = DequantizeLinear<{attributes}>({', '.join(stored)})".replace("<>", "")
    options = {"x": (TOKENS,), "opset": 21, "kind": TensorProto.INT64}
    for name, value in (("SCORES_BYTES_MIN", 0), ("CHUNK_BYTES", 16 * TOKENS), ("CLASSES_MIN", 2)):
        monkeypatch.setattr(chunks, name, value)
    ours, expected = [
        build_training_graph(forward(text, {"p": OTHERS["p"]} | values, **options), GraphSettings(train=("p",)))
        for text, values in ((line + HEAD, stored), (HEAD, {"table": plain}))
    ]
    feeds = {"x": np.array([[1, 5], [7, 0], [8, 8]]), "target": np.array([[0, 1], [3, 8], [5, 5]])}
    for name, value in run(expected, feeds).items():
        np.testing.assert_allclose(run(ours, feeds)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    nodes, _ = optimized(ours, tmp_path)
    parts = [node for node in nodes if node.op == "Gemm"]
    dequantized = {node.outputs[0]: node.inputs[0] for node in nodes if node.op == "DequantizeLinear"}
    found = Counter(dequantized[node.inputs[1]] for node in parts if node.inputs[1] in dequantized)
    assert len(found) >= 3
    assert all(name.startswith("table_q::") == (kind in ("int4", "uint4")) for name in found)


def test_biases_of_32_bits_are_stored_in_float32():
    text = "w = DequantizeLinear(q, s)\nb = DequantizeLinear(i, s)\nh = Mul(x, p)\ny = Gemm(h, w, b)"
    parameters = {
        "q": np.ones((3, 2), np.int8),
        "i": np.array([400, -9], np.int32),
        "s": np.float32(0.5),
        "p": numbers((3,)),
    }
    graph = build_training_graph(forward(text, parameters, (3,)), GraphSettings(loss="mse", train=("p",)))
    stored = {
        entry.name: numpy_helper.to_array(entry) for entry in onnx.load_from_string(graph.model).graph.initializer
    }
    assert stored["q"].dtype == np.int8
    np.testing.assert_array_equal(stored["b"], np.float32([200, -4.5]))
