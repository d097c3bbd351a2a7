"""Normalization layers with learned scale and shift."""

from dataclasses import dataclass
from typing import ClassVar

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer


@dataclass(frozen=True, slots=True)
class _BatchNorm(Layer):
    """Normalization of each channel over the batch and the spatial axes."""

    num_features: int
    eps: float = 1e-5
    momentum: float = 0.1

    ranks: ClassVar[tuple[int, ...]]
    shapes: ClassVar[str]

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        self.check_number("eps", self.eps, 1e-30, 1.0, "above 0 and below 1")
        self.check_number("momentum", self.momentum, 0.0, 1.0, "of 0 or more and below 1")

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
            # torch's momentum is the weight of the new value, ONNX's that of the old one.
            momentum=1.0 - self.momentum,
            training_mode=0,
        )
        return Value(node, x.dims)


@dataclass(frozen=True, slots=True)
class BatchNorm1d(_BatchNorm):
    """Batch normalization (Ioffe & Szegedy 2015, arXiv:1502.03167).

    Input and output are float32 (batch, num_features) or (batch, num_features, length). `momentum`
    is the weight of the newest batch in the running statistics, as in torch.

    Parameters of shape (num_features,): `weight`, initially 1, and `bias`, initially 0. Statistics
    of that shape: `running_mean`, initially 0, and `running_var`, initially 1.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()), (64,))
    """

    ranks: ClassVar[tuple[int, ...]] = (1, 2)
    shapes: ClassVar[str] = "[batch, {0}] or [batch, {0}, length]"


@dataclass(frozen=True, slots=True)
class BatchNorm2d(_BatchNorm):
    """Batch normalization of float32 (batch, num_features, height, width).

    Arguments, parameters and statistics are those of BatchNorm1d.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8)), (1, 28, 28))
    """

    ranks: ClassVar[tuple[int, ...]] = (3,)
    shapes: ClassVar[str] = "[batch, {0}, height, width]"


@dataclass(frozen=True, slots=True)
class LayerNorm(Layer):
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450).

    Normalizes each example, float32, over its last axes. `normalized_shape` is their shape.

    Parameters of shape `normalized_shape`: `weight`, initially 1, and `bias`, initially 0.

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
    """Instance normalization (Ulyanov et al. 2016, arXiv:1607.08022).

    Normalizes each channel of each example of float32 (batch, num_features, height, width). It
    always learns scale and shift, as torch's layer does with affine=True.

    Parameters of shape (num_features,): `weight`, initially 1, and `bias`, initially 0.

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
