"""Tests of writing and reading models without copying their large constants."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from edgeasync.autodiff.graph import Array, Node, model_of, value_info
from edgeasync.autodiff.reading import OPSET_MIN
from edgeasync.autodiff.serialization import LARGE_BYTES_MIN, detach, serialize
from edgeasync.training.graph_check import check_graph

SIDE = int((LARGE_BYTES_MIN / 4) ** 0.5)
LARGE: Array = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
CONSTANTS: dict[str, Array] = {
    "large": LARGE,
    "transposed": LARGE.T,
    "vector": np.zeros(SIDE * SIDE, np.float32),
    "bytes": np.full((SIDE, 4 * SIDE), 7, np.int8),
    "number": np.array(3, np.int64),
    "flags": np.array([[True], [False]]),
    "empty": np.zeros((0, 2), np.float32),
    "int4": np.array([[1, -8], [7, 0]], ml_dtypes.int4),
    "text": np.array(["a", "b"], object),
}


def _serialized() -> bytes:
    x, y = [value_info(name, np.float32, (None, SIDE)) for name in ("x", "y")]
    return serialize(model_of([Node("Identity", ["x"], ["y"])], [x], [y], [], opset=OPSET_MIN), CONSTANTS)


def test_a_serialized_model_contains_all_constants() -> None:
    model = onnx.load_model_from_string(_serialized())
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]
    found = {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}
    assert found.keys() == CONSTANTS.keys()
    for name, value in CONSTANTS.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(found[name], value, name)


def test_the_device_accepts_the_order_of_the_fields() -> None:
    graph = onnx.load_model_from_string(_serialized())
    del graph.graph.initializer[-1]  # devices accept no text
    check_graph(serialize(graph, {"more": LARGE}), bytes_max=1 << 24)


def test_values_of_large_matrices_are_views() -> None:
    model = _serialized()
    light, values = detach(model)
    assert values.keys() == {"large", "transposed", "bytes"}
    for name, value in values.items():
        np.testing.assert_array_equal(value, CONSTANTS[name])
        assert np.shares_memory(value, np.frombuffer(model, np.uint8))
    entries = {entry.name: entry for entry in light.graph.initializer}
    assert entries.keys() == CONSTANTS.keys()
    for name, entry in entries.items():
        assert tuple(entry.dims) == CONSTANTS[name].shape
        assert (name in values) == (not entry.raw_data and name not in ("empty", "text"))
    assert entries["int4"].data_type == TensorProto.INT4


@pytest.mark.parametrize("end", [-1, -LARGE_BYTES_MIN, 40])
def test_a_truncated_model_is_an_error(end: int) -> None:
    with pytest.raises(Exception, match=r".+"):
        detach(_serialized()[:end])
