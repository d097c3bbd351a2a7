"""Sums over the rows of a gradient: right for all shapes, and exact where all rows are equal."""

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync.autodiff.graph import Graph, model_of, tensor, value_info

ROWS_OF_THREE = [
    ((3, 1500), (None, 1500)),
    ((4, 90), (None, 90)),
    ((5, 197), (None, 197)),  # not divisible
    ((9, 300), (None, None)),
    ((6, 50, 7), (None, 50, 7)),
    ((1500,), (1500,)),
    ((64,), (None,)),
    ((3, 5), (None, 5)),
]


def total(value, shape, to):
    graph = Graph()
    result = graph.reduce_to("x", shape, to)
    constants = [tensor(name, array) for name, array in graph.constants.items()]
    outputs = [onnx.helper.make_tensor_value_info(result, 1, None)]
    model = model_of(graph.nodes, [value_info("x", np.float32, shape)], outputs, constants, opset=18)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": value})[0], [node.op for node in graph.nodes]


@pytest.mark.parametrize(("rows", "shape"), ROWS_OF_THREE)
@pytest.mark.parametrize("kept", [(3,), (2, 3), (1,)])
@pytest.mark.parametrize("ones", [False, True])
def test_a_sum_over_rows_has_the_shape_of_the_smaller_tensor(rows, shape, kept, ones):
    value = np.random.Generator(np.random.PCG64(1)).standard_normal((*rows, *kept)).astype(np.float32)
    to = (*[1] * (len(rows) * ones), *kept)
    found, _ = total(value, (*shape, *kept), to)
    np.testing.assert_allclose(found, value.sum(tuple(range(len(rows))), np.float64).reshape(to), 1e-5, 1e-4)


@pytest.mark.parametrize(("rows", "shape"), ROWS_OF_THREE)
def test_a_sum_of_many_equal_rows_loses_no_digit(rows, shape):
    row = np.linspace(0.1, 1, 32, dtype=np.float32)
    found, _ = total(np.broadcast_to(row, (*rows, 32)), (*shape, 32), (32,))
    np.testing.assert_allclose(found, row * np.float64(np.prod(rows)), 2e-6)


@pytest.mark.parametrize("shape", [(None,), (None, 5), (8, 16)])
def test_few_rows_need_one_node(shape):
    rows = [dim or 4 for dim in shape]
    _, operators = total(np.ones((*rows, 32), np.float32), (*shape, 32), (32,))
    assert operators == ["ReduceSum"]
