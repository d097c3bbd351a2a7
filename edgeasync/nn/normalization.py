"""Layers that normalize values, then apply a learned scale and shift."""

from dataclasses import dataclass
from typing import ClassVar

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer


@dataclass(frozen=True, slots=True)
class _BatchNorm(Layer):
    """Normalizes each channel over batch and spatial axes."""

    num_features: int
    eps: float = 1e-5
    momentum: float = 0.1

    ranks: ClassVar[tuple[int, ...]]
    shapes: ClassVar[str]

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        self.check_number("eps", self.eps, 1e-30, 1.0, "above 0 and below 1")
        self.check_number("momentum", self.momentum, 0.0, 1.0, "of at least 0 and below 1")

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a BatchNormalization in inference mode, which uses the running statistics."""
        if len(x.dims) not in self.ranks or x.dims[0] != self.num_features:
            raise self.mismatch(path, x, self.shapes.format(self.num_features))
        shape = (self.num_features,)
        parameters = [
            graph.filled(f"{path}.weight", shape, 1.0),
            graph.filled(f"{path}.bias", shape, 0.0),
            graph.filled(f"{path}.running_mean", shape, 0.0),
            graph.filled(f"{path}.running_var", shape, 1.0),
        ]
        node = graph.node(
            "BatchNormalization",
            path,
            [x.name, *parameters],
            epsilon=float(self.eps),
            # torch's momentum is the weight of the new value, ONNX's that of the old.
            momentum=1.0 - self.momentum,
            training_mode=0,
        )
        return Value(node, x.dims)


@dataclass(frozen=True, slots=True)
class BatchNorm1d(_BatchNorm):
    """Batch normalization of (batch, num_features) or (batch, num_features, length), float32.

    Ioffe & Szegedy 2015, arXiv:1502.03167. `momentum` is the weight of each new batch in the
    running statistics, as in torch. Parameters (num_features,): `weight`, ones; `bias`, zeros.
    Statistics: `running_mean`, zeros; `running_var`, ones.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()), (64,))
    """

    ranks: ClassVar[tuple[int, ...]] = (1, 2)
    shapes: ClassVar[str] = "[batch, {0}] or [batch, {0}, length]"


@dataclass(frozen=True, slots=True)
class BatchNorm2d(_BatchNorm):
    """Batch normalization of (batch, num_features, height, width), float32. See BatchNorm1d.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8)), (1, 28, 28))
    """

    ranks: ClassVar[tuple[int, ...]] = (3,)
    shapes: ClassVar[str] = "[batch, {0}, height, width]"


@dataclass(frozen=True, slots=True)
class LayerNorm(Layer):
    """Normalization of each example over its last axes, which have the sizes `normalized_shape`.

    Ba et al. 2016, arXiv:1607.06450. Parameters (normalized_shape): `weight`, ones; `bias`, zeros.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32)), (64,))
    """

    normalized_shape: int | tuple[int, ...]
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self._shape():
            raise self.bad_argument("normalized_shape", self.normalized_shape, "at least one size")
        self.check_number("eps", self.eps, 1e-30, 1.0, "above 0 and below 1")

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a LayerNormalization."""
        shape = self._shape()
        if x.dims[-len(shape) :] != shape:
            raise self.mismatch(path, x, f"[batch, ..., {', '.join(map(str, shape))}]")
        weight = graph.filled(f"{path}.weight", shape, 1.0)
        bias = graph.filled(f"{path}.bias", shape, 0.0)
        inputs = [x.name, weight, bias]
        node = graph.node("LayerNormalization", path, inputs, axis=-len(shape), epsilon=float(self.eps))
        return Value(node, x.dims)

    def _shape(self) -> tuple[int, ...]:
        count = len(self.normalized_shape) if isinstance(self.normalized_shape, tuple) else 1
        return self.sizes("normalized_shape", self.normalized_shape, count, 1)


@dataclass(frozen=True, slots=True)
class InstanceNorm2d(Layer):
    """Normalization of each channel of each example: (batch, num_features, height, width), float32.

    Ulyanov et al. 2016, arXiv:1607.08022. It has a learned scale and shift, like torch's layer with
    affine=True. Parameters (num_features,): `weight`, ones; `bias`, zeros.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8)), (1, 28, 28))
    """

    num_features: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        self.check_number("eps", self.eps, 1e-30, 1.0, "above 0 and below 1")

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add an InstanceNormalization."""
        if len(x.dims) != 3 or x.dims[0] != self.num_features:
            raise self.mismatch(path, x, f"[batch, {self.num_features}, height, width]")
        weight = graph.filled(f"{path}.weight", (self.num_features,), 1.0)
        bias = graph.filled(f"{path}.bias", (self.num_features,), 0.0)
        node = graph.node("InstanceNormalization", path, [x.name, weight, bias], epsilon=float(self.eps))
        return Value(node, x.dims)
