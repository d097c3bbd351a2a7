"""Dense layers, embeddings, activations, dropout, and layers that reshape or reorder values."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeasync.nn.graph import ElementType, LayerGraph, Value
from edgeasync.nn.layer import Layer, glorot


@dataclass(frozen=True, slots=True)
class Linear(Layer):
    """x W^T + b along the last axis: (batch, ..., in_features) to (batch, ..., out_features).

    The input may have any number of axes, as in torch. Parameters: `weight` (out_features,
    in_features), with Glorot initialization; `bias` (out_features,), zeros.

    >>> from edgeasync import nn
    >>> nn.Linear(64, 10)
    Linear(in_features=64, out_features=10, bias=True)
    >>> model = nn.to_onnx(nn.Linear(64, 10), (64,))
    """

    in_features: int
    out_features: int
    bias: bool = True

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Gemm. With more than two axes, all but the last are flattened into rows."""
        if not x.dims or x.dims[-1] != self.in_features:
            raise self.mismatch(path, x, f"[batch, ..., {self.in_features}]")
        bound = glorot(self.in_features, self.out_features)
        parameters = [graph.uniform(f"{path}.weight", (self.out_features, self.in_features), bound)]
        if self.bias:
            parameters.append(graph.filled(f"{path}.bias", (self.out_features,), 0.0))
        dims = (*x.dims[:-1], self.out_features)
        if len(dims) == 1:
            return Value(graph.node("Gemm", path, [x.name, *parameters], transB=1), dims)
        # Gemm reads the weight as stored; MatMul would have to transpose it at every step.
        rows = graph.reshape(f"{path}/rows", x.name, (-1, self.in_features))
        product = graph.node("Gemm", f"{path}/product", [rows, *parameters], transB=1)
        return Value(graph.reshape(path, product, (-1, *dims)), dims)


@dataclass(frozen=True, slots=True)
class Embedding(Layer):
    """Replace integers by learned vectors: int64 (batch, ...) to float32 (batch, ..., width).

    An input of `count` or more causes an error when the model runs. Parameter: `weight` (count,
    width), uniform with variance one.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Embedding(1000, 16), nn.MeanOverTime(), nn.Linear(16, 2)), (20,))
    """

    count: int
    width: int

    @property
    def input_type(self) -> ElementType:
        """int64, because inputs are indices of vectors."""
        return "int64"

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Gather."""
        weight = graph.uniform(f"{path}.weight", (self.count, self.width), math.sqrt(3.0))
        return Value(graph.node("Gather", path, [weight, x.name], axis=0), (*x.dims, self.width))


@dataclass(frozen=True, slots=True)
class PositionEmbedding(Layer):
    """Add a learned vector to each of `length` positions: (batch, length, width), float32.

    Attention needs this layer, because attention ignores order. Parameter: `weight` (length,
    width), uniform with variance one.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Embedding(1000, 16), nn.PositionEmbedding(20, 16)), (20,))
    """

    length: int
    width: int

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add an Add node that broadcasts the vectors to every example."""
        if x.dims != (self.length, self.width):
            raise self.mismatch(path, x, f"[batch, {self.length}, {self.width}]")
        weight = graph.uniform(f"{path}.weight", (self.length, self.width), math.sqrt(3.0))
        return Value(graph.node("Add", path, [x.name, weight]), x.dims)


@dataclass(frozen=True, slots=True)
class ReLU(Layer):
    """max(x, 0), element by element, float32.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), (64,))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Relu."""
        return Value(graph.node("Relu", path, [x.name]), x.dims)


@dataclass(frozen=True, slots=True)
class LeakyReLU(Layer):
    """`x` if it is positive, otherwise `negative_slope` times `x`, float32 (Maas et al. 2013).

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.1)), (64,))
    """

    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        self.check_number("negative_slope", self.negative_slope, 0.0, math.inf, "of at least 0")

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a LeakyRelu."""
        return Value(graph.node("LeakyRelu", path, [x.name], alpha=float(self.negative_slope)), x.dims)


@dataclass(frozen=True, slots=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-x)), element by element, float32.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 1), nn.Sigmoid()), (64,))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Sigmoid."""
        return Value(graph.node("Sigmoid", path, [x.name]), x.dims)


@dataclass(frozen=True, slots=True)
class Tanh(Layer):
    """The hyperbolic tangent, element by element, float32.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.Tanh()), (64,))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Tanh."""
        return Value(graph.node("Tanh", path, [x.name]), x.dims)


@dataclass(frozen=True, slots=True)
class GELU(Layer):
    """`x` times the cumulative normal distribution at `x` (Hendrycks & Gimpel, arXiv:1606.08415).

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.GELU()), (64,))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Gelu in its exact form."""
        return Value(graph.node("Gelu", path, [x.name]), x.dims)


@dataclass(frozen=True, slots=True)
class Hardswish(Layer):
    """x min(max(x + 3, 0), 6) / 6, float32 (Howard et al. 2019, arXiv:1905.02244).

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.Hardswish()), (64,))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a HardSwish."""
        return Value(graph.node("HardSwish", path, [x.name]), x.dims)


@dataclass(frozen=True, slots=True)
class _AlongAxis(Layer):
    """An operator along an axis other than the batch axis."""

    dim: int = -1

    operator: ClassVar[str]

    def __post_init__(self) -> None:
        self.check_integer("dim", self.dim, None)

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add the operator."""
        rank = len(x.dims) + 1
        axis = self.dim + rank if self.dim < 0 else self.dim
        if not 1 <= axis < rank:
            raise self.mismatch(path, x, f"an input in which dim {self.dim} is an axis other than the batch")
        return Value(graph.node(self.operator, path, [x.name], axis=axis), x.dims)


@dataclass(frozen=True, slots=True)
class Softmax(_AlongAxis):
    """exp(x) divided by its sum along the axis `dim`, float32. `dim` cannot be 0, the batch axis.

    Do not use it at the end of a model with cross-entropy loss, which needs raw scores.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 10), nn.Softmax()), (64,))
    """

    operator: ClassVar[str] = "Softmax"


@dataclass(frozen=True, slots=True)
class LogSoftmax(_AlongAxis):
    """The logarithm of softmax along the axis `dim`, float32. `dim` cannot be 0, the batch axis.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 10), nn.LogSoftmax()), (64,))
    """

    operator: ClassVar[str] = "LogSoftmax"


@dataclass(frozen=True, slots=True)
class Dropout(Layer):
    """In training, zero each value with probability `p` and divide the others by 1 - p.

    Float32, element by element (Srivastava et al. 2014). The layer is inactive in the forward
    model, and active in the training graph that is built from it.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.1)), (64,))
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        self.check_number("p", self.p, 0.0, 1.0, "of at least 0 and below 1")

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Dropout with the ratio as an input."""
        ratio = graph.constant(f"{path}/ratio", np.float32(self.p))
        return Value(graph.node("Dropout", path, [x.name, ratio]), x.dims)


@dataclass(frozen=True, slots=True)
class Flatten(Layer):
    """Join all axes after the batch axis: (batch, ...) to (batch, features), any type.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (8, 8))
    """

    @property
    def input_type(self) -> None:
        """Any element type."""

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Flatten."""
        return Value(graph.node("Flatten", path, [x.name], axis=1), (math.prod(x.dims),), x.type)


@dataclass(frozen=True, slots=True, init=False)
class Reshape(Layer):
    """Change the shape of every example to `shape`: (batch, ...) to (batch, shape...), any type.

    One size may be -1. It is then computed from the other sizes.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Reshape(1, 8, 8), nn.Conv2d(1, 4, 3)), (64,))
    """

    shape: tuple[int, ...]

    def __init__(self, *shape: int) -> None:
        object.__setattr__(self, "shape", shape)
        for size in shape:
            if size != -1:
                self.check_integer("shape", size)
        if not shape or shape.count(-1) > 1:
            raise self.bad_argument("shape", shape, "at least one size, and at most one -1")

    @property
    def input_type(self) -> None:
        """Any element type."""

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Reshape that keeps the batch axis."""
        total, known = math.prod(x.dims), math.prod([size for size in self.shape if size != -1])
        dims = tuple([total // known if size == -1 else int(size) for size in self.shape])
        if math.prod(dims) != total:
            multiple = "a multiple of " if -1 in self.shape else ""
            raise self.mismatch(path, x, f"{multiple}{known} values per example, not {total}")
        return Value(graph.reshape(path, x.name, (0, *dims)), dims, x.type)


@dataclass(frozen=True, slots=True, init=False)
class Permute(Layer):
    """Reorder the axes, any type: axis i of the result is axis `dims[i]` of the input.

    The batch axis is 0 and stays first. `Permute(0, 2, 1)` swaps the two axes after it.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Permute(0, 2, 1), nn.Linear(20, 5)), (20, 3))
    """

    dims: tuple[int, ...]

    def __init__(self, *dims: int) -> None:
        object.__setattr__(self, "dims", dims)
        for axis in dims:
            self.check_integer("dims", axis, 0)
        if sorted(dims) != list(range(len(dims))) or dims[:1] != (0,):
            raise self.bad_argument("dims", dims, "every axis once, starting with 0, the batch")

    @property
    def input_type(self) -> None:
        """Any element type."""

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Transpose."""
        if len(self.dims) != len(x.dims) + 1:
            raise self.mismatch(path, x, f"{len(self.dims)} axes, including the batch")
        dims = tuple([x.dims[axis - 1] for axis in self.dims[1:]])
        return Value(graph.node("Transpose", path, [x.name], perm=self.dims), dims, x.type)


@dataclass(frozen=True, slots=True)
class MeanOverTime(Layer):
    """The mean over axis 1: (batch, time, ...) to (batch, ...), float32.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.MeanOverTime(), nn.Linear(3, 2)), (20, 3))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a ReduceMean."""
        if len(x.dims) < 2:
            raise self.mismatch(path, x, "[batch, time, ...]")
        axes = graph.constant(f"{path}/axes", np.array([1], np.int64))
        return Value(graph.node("ReduceMean", path, [x.name, axes], keepdims=0), x.dims[1:])
