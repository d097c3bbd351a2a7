"""Ties tensors to others, so that onnxruntime computes from them late and keeps copies apart."""

from onnx import helper

from edgeasync.autodiff.graph import FLOAT, Graph


def tie(graph: Graph, value: str, to: str) -> str:
    """Return a copy of `value`, with the same values, that is computed only after `to`.

    onnxruntime computes results of constants when it loads a graph, merges equal nodes, and may run
    a node long before its result is read. It does none of this to a node that reads a tied tensor.

    `value` is float32, int32 or int64. It may be a constant, such as the scale of a
    DequantizeLinear. `to` must not be empty. Its size may be fixed.
    """
    kind = int(helper.np_dtype_to_tensor_dtype(graph.dtypes.get(value, FLOAT)))
    one = graph.op("Sign", graph.op("Cast", graph.op("Size", to), to=kind))
    tied = graph.op("Mul", value, one)
    if value in graph.shapes:
        graph.shapes[tied], graph.dtypes[tied] = graph.shapes[value], graph.dtypes.get(value, FLOAT)
    return tied
