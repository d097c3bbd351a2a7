"""Self-attention."""

import math
from dataclasses import dataclass

import numpy as np

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer, glorot


@dataclass(frozen=True, slots=True)
class SelfAttention(Layer):
    """Multi-head self-attention: (batch, time, width) to the same shape, float32.

    Vaswani et al. 2017, arXiv:1706.03762. `width` must be divisible by `heads`. Parameters are
    named and laid out as in torch's MultiheadAttention: `in_proj_weight` (3 width, width) and
    `out_proj.weight` (width, width), with Glorot initialization; `in_proj_bias` (3 width,) and
    `out_proj.bias` (width,), zeros. In `in_proj_weight` and `in_proj_bias`, the rows for queries
    come first, then those for keys, then those for values.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Residual(nn.SelfAttention(32, 4)), (20, 32))
    """

    width: int
    heads: int

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        if self.width % self.heads:
            raise self.bad_argument("heads", self.heads, f"a divisor of width {self.width}")

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add softmax(q k^T / sqrt(width / heads)) v between two Gemms."""
        if len(x.dims) != 2 or x.dims[1] != self.width:
            raise self.mismatch(path, x, f"[batch, time, {self.width}]")
        width, bound = int(self.width), glorot(self.width, self.width)
        in_proj = [
            graph.uniform(f"{path}.in_proj_weight", (3 * width, width), bound),
            graph.filled(f"{path}.in_proj_bias", (3 * width,), 0.0),
        ]
        out_proj = [
            graph.uniform(f"{path}.out_proj.weight", (width, width), bound),
            graph.filled(f"{path}.out_proj.bias", (width,), 0.0),
        ]
        rows = graph.reshape(f"{path}/rows", x.name, (-1, width))
        projected = graph.node("Gemm", f"{path}/in_proj", [rows, *in_proj], transB=1)
        query, key, value = graph.split(f"{path}/split", projected, ("query", "key", "value"), axis=1)
        # Scale the queries, because there are fewer of them than scores (time x time).
        scale = graph.constant(f"{path}/scale", np.float32(1.0 / math.sqrt(width // self.heads)))
        scaled = graph.node("Mul", f"{path}/scaled", [query, scale])
        queries = self._heads(graph, f"{path}/queries", scaled, x, (0, 2, 1, 3))
        keys = self._heads(graph, f"{path}/keys", key, x, (0, 2, 3, 1))
        values = self._heads(graph, f"{path}/values", value, x, (0, 2, 1, 3))
        products = graph.node("MatMul", f"{path}/products", [queries, keys])
        weights = graph.node("Softmax", f"{path}/weights", [products], axis=-1)
        mixed = graph.node("MatMul", f"{path}/mixed", [weights, values])
        merged = graph.node("Transpose", f"{path}/merged", [mixed], perm=(0, 2, 1, 3))
        merged_rows = graph.reshape(f"{path}/merged_rows", merged, (-1, width))
        result = graph.node("Gemm", f"{path}/out_proj", [merged_rows, *out_proj], transB=1)
        return Value(graph.reshape(path, result, (-1, *x.dims)), x.dims)

    def _heads(self, graph: LayerGraph, name: str, rows: str, x: Value, order: tuple[int, ...]) -> str:
        time, width = x.dims
        apart = graph.reshape(f"{name}/apart", rows, (-1, time, int(self.heads), width // self.heads))
        return graph.node("Transpose", name, [apart], perm=order)
