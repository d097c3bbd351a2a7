"""Tied tensors: onnxruntime neither folds nor merges what is computed from them."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync.autodiff.graph import Graph, model_of, tensor, value_info
from edgeasync.autodiff.ties import tie

WEIGHT = np.arange(-32, 32, dtype=np.int8).reshape(8, 8)
X = np.ones((4, 8), np.float32)


def twice(rows, tied):
    """Multiply by a quantized matrix twice, and take rows of it, each from a copy of its own."""
    graph = Graph()
    graph.constants["w"] = WEIGHT
    scale, x = graph.constant(np.full(8, 0.5, np.float32)), "x"
    for _ in range(2):
        x = graph.op("MatMul", x, graph.op("DequantizeLinear", "w", tied(graph, scale, x), axis=0))
    part = graph.op("Slice", "w", tied(graph, graph.ints(2), x), graph.ints(6), graph.ints(0))
    part = graph.op("Cast", part, to=1)
    outputs = [onnx.helper.make_tensor_value_info(name, 1, None) for name in (x, part)]
    constants = [tensor(name, value) for name, value in graph.constants.items()]
    model = model_of(graph.nodes, [value_info("x", np.float32, (rows, 8))], outputs, constants, opset=18)
    return model.SerializeToString()


def optimized(model, path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    return session, Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("rows", [None, 4])
def test_onnxruntime_keeps_each_copy(rows, tmp_path):
    session, kept = optimized(twice(rows, tie), tmp_path / "tied.onnx")
    assert (kept["DequantizeLinear"], kept["Slice"]) == (2, 1)
    plain, folded = optimized(twice(rows, lambda graph, value, to: value), tmp_path / "plain.onnx")
    assert (folded["DequantizeLinear"], folded["Slice"]) == (1, 0)
    for found, expected in zip(session.run(None, {"x": X}), plain.run(None, {"x": X}), strict=True):
        np.testing.assert_array_equal(found, expected)
