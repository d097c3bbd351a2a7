"""Tied tensors: onnxruntime neither folds nor merges what is computed from them."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync.autodiff.graph import Graph, model_of, tensor, value_info
from edgeasync.autodiff.ties import tie

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def model(rows, tied):
    """Compute the same exponential twice, and take rows of a constant."""
    graph = Graph()
    graph.constants["w"] = np.arange(64, dtype=np.int8).reshape(8, 8)
    first = graph.op("Exp", "x")
    second = graph.op("Exp", tied(graph, "x", first))
    rest = graph.op("Slice", "w", tied(graph, graph.ints(2), second), graph.ints(6), graph.ints(0))
    results = [graph.op("Mul", first, second), graph.op("Cast", rest, to=1)]
    outputs = [onnx.helper.make_tensor_value_info(name, 1, None) for name in results]
    constants = [tensor(name, value) for name, value in graph.constants.items()]
    made = model_of(graph.nodes, [value_info("x", np.float32, (rows, 8))], outputs, constants, opset=18)
    return made.SerializeToString()


def optimized(content, path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    kept = Counter(node.op_type for node in onnx.load(path).graph.node)
    return session.run(None, {"x": X}), (kept["Exp"], kept["Slice"])


@pytest.mark.parametrize("rows", [None, 4])
def test_onnxruntime_keeps_what_is_computed_from_tied_tensors(rows, tmp_path):
    found, kept = optimized(model(rows, tie), tmp_path / "tied.onnx")
    expected, simplified = optimized(model(rows, lambda graph, value, to: value), tmp_path / "plain.onnx")
    assert (kept, simplified) == ((2, 1), (1, 0))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
