"""Convolutions, pooling and upsampling along one or two spatial axes."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer, he, times

Size = int | tuple[int, ...]
"""One integer for all axes, or one per axis."""

AXES = {1: ("length",), 2: ("height", "width")}


class _Spatial(Layer):
    """A layer that slides a window along the `axes` axes after the channels."""

    __slots__ = ()
    axes: ClassVar[int]

    def check_shape(self, path: str, x: Value, channels: int | str) -> None:
        """Raise `ConfigError` unless `x` has `axes` spatial axes and the given number of channels."""
        if len(x.dims) != self.axes + 1 or (isinstance(channels, int) and x.dims[0] != channels):
            raise self.mismatch(path, x, f"[batch, {channels}, {', '.join(AXES[self.axes])}]")

    def slide(self, path: str, x: Value, window: tuple[int, ...], attributes: dict[str, Any]) -> tuple[int, ...]:
        """Return the number of window positions along each axis.

        The size of `window` includes dilation. Raises `ConfigError` if an axis with its padding is
        shorter than the window.
        """
        strides, pads = attributes["strides"], attributes["pads"][: self.axes]
        least = [size - 2 * pad for size, pad in zip(window, pads, strict=True)]
        if any(dim < size for dim, size in zip(x.dims[1:], least, strict=True)):
            raise self.mismatch(path, x, f"{' and '.join(AXES[self.axes])} of at least {times(least)}")
        return tuple([(d - s) // t + 1 for d, s, t in zip(x.dims[1:], least, strides, strict=True)])


@dataclass(frozen=True, slots=True)
class _Convolution(_Spatial):
    """Arguments of all convolutions."""

    in_channels: int
    out_channels: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    _: KW_ONLY  # torch orders these differently in Conv2d and ConvTranspose2d
    dilation: Size = 1
    groups: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        Layer.__post_init__(self)
        self.window()
        if self.in_channels % self.groups or self.out_channels % self.groups:
            wanted = f"a divisor of in_channels {self.in_channels} and out_channels {self.out_channels}"
            raise self.bad_argument("groups", self.groups, wanted)

    def window(self) -> dict[str, Any]:
        """Return the arguments as ONNX attributes. Raises `ConfigError`."""
        return {
            "kernel_shape": self.sizes("kernel_size", self.kernel_size, self.axes, 1),
            "strides": self.sizes("stride", self.stride, self.axes, 1),
            "pads": self.sizes("padding", self.padding, self.axes, 0) * 2,
            "dilations": self.sizes("dilation", self.dilation, self.axes, 1),
            "group": int(self.groups),
        }

    def parameters(self, graph: LayerGraph, path: str, shape: tuple[int, ...], inputs: float) -> list[str]:
        """Add the weight (He initialization for `inputs` inputs) and any bias. Return their names."""
        names = [graph.uniform(f"{path}.weight", shape, he(inputs))]
        if self.bias:
            names.append(graph.filled(f"{path}.bias", (self.out_channels,), 0.0))
        return names


@dataclass(frozen=True, slots=True)
class _Forward(_Convolution):
    """A convolution that is not transposed."""

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Conv."""
        self.check_shape(path, x, self.in_channels)
        attributes = self.window()
        kernel = attributes["kernel_shape"]
        reach = [d * (k - 1) + 1 for d, k in zip(attributes["dilations"], kernel, strict=True)]
        places = self.slide(path, x, tuple(reach), attributes)
        shape = (self.out_channels, self.in_channels // self.groups, *kernel)
        parameters = self.parameters(graph, path, shape, math.prod(shape[1:]))
        return Value(graph.node("Conv", path, [x.name, *parameters], **attributes), (self.out_channels, *places))


@dataclass(frozen=True, slots=True)
class Conv1d(_Forward):
    """Convolution: (batch, in_channels, length) to (batch, out_channels, positions), float32.

    Parameters: `weight` (out_channels, in_channels / groups, kernel), He initialization; `bias`,
    zeros.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU()), (3, 100))
    """

    axes: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Conv2d(_Forward):
    """Convolution: (batch, in_channels, height, width) to (batch, out_channels, rows, columns).

    `kernel_size`, `stride`, `padding` and `dilation` are one integer, or one integer per axis. If
    `groups` is the number of channels, this is a depthwise convolution. Parameters: `weight`
    (out_channels, in_channels / groups, kernel...), He initialization; `bias` (out_channels,),
    zeros.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()), (1, 28, 28))
    """

    axes: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class ConvTranspose2d(_Convolution):
    """A transposed convolution, which enlarges images; shapes as for Conv2d, float32.

    A side of n becomes (n - 1) stride - 2 padding + dilation (kernel - 1) + 1. Parameters: `weight`
    (in_channels, out_channels / groups, kernel...), He initialization, based on the mean number of
    input values that contribute to an output value; `bias` (out_channels,), zeros.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1), (8, 14, 14))
    """

    axes: ClassVar[int] = 2

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a ConvTranspose."""
        self.check_shape(path, x, self.in_channels)
        attributes = self.window()
        kernel, strides = attributes["kernel_shape"], attributes["strides"]
        dims = tuple(
            [
                (n - 1) * s - 2 * p + d * (k - 1) + 1
                for n, s, p, d, k in zip(
                    x.dims[1:], strides, attributes["pads"][:2], attributes["dilations"], kernel, strict=True
                )
            ]
        )
        if min(dims) < 1:
            raise self.mismatch(path, x, f"a larger image: its padding reduces this one to {times(dims)}")
        shape = (self.in_channels, self.out_channels // self.groups, *kernel)
        # Along each axis, an output value uses only every stride-th kernel position.
        meeting = shape[0] // self.groups * math.prod(kernel) / math.prod(strides)
        parameters = self.parameters(graph, path, shape, max(meeting, 1.0))
        node = graph.node("ConvTranspose", path, [x.name, *parameters], **attributes)
        return Value(node, (self.out_channels, *dims))


@dataclass(frozen=True, slots=True)
class _Pool(_Spatial):
    """Arguments of all pooling layers with a window. `stride` defaults to the window size."""

    kernel_size: Size
    stride: Size | None = None
    padding: Size = 0

    def __post_init__(self) -> None:
        window = self.window()
        if any(2 * pad > size for pad, size in zip(window["pads"], window["kernel_shape"] * 2, strict=True)):
            raise self.bad_argument("padding", self.padding, "at most half the kernel_size")

    def window(self) -> dict[str, Any]:
        """Return the arguments as ONNX attributes. Raises `ConfigError`."""
        kernel = self.sizes("kernel_size", self.kernel_size, self.axes, 1)
        return {
            "kernel_shape": kernel,
            "strides": kernel if self.stride is None else self.sizes("stride", self.stride, self.axes, 1),
            "pads": self.sizes("padding", self.padding, self.axes, 0) * 2,
        }

    def pool(self, graph: LayerGraph, path: str, x: Value, operator: str, **more: int) -> Value:
        """Add a pooling node. Raises `ConfigError`."""
        self.check_shape(path, x, "channels")
        attributes = self.window()
        places = self.slide(path, x, attributes["kernel_shape"], attributes)
        return Value(graph.node(operator, path, [x.name], **attributes, **more), (x.dims[0], *places))


@dataclass(frozen=True, slots=True)
class MaxPool1d(_Pool):
    """The largest value in each window: (batch, channels, length) to (batch, channels, positions).

    `stride` defaults to `kernel_size`. An incomplete window at the end is dropped.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.MaxPool1d(2), (3, 100))
    """

    axes: ClassVar[int] = 1

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a MaxPool."""
        return self.pool(graph, path, x, "MaxPool")


@dataclass(frozen=True, slots=True)
class MaxPool2d(_Pool):
    """The largest value in each window: (batch, channels, height, width), float32.

    `stride` defaults to `kernel_size`. Incomplete windows at the ends are dropped.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2)), (1, 28, 28))
    """

    axes: ClassVar[int] = 2

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a MaxPool."""
        return self.pool(graph, path, x, "MaxPool")


@dataclass(frozen=True, slots=True)
class AvgPool2d(_Pool):
    """The mean of each window including padding: (batch, channels, height, width), float32.

    `stride` defaults to `kernel_size`. Incomplete windows at the ends are dropped.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.AvgPool2d(2)), (1, 28, 28))
    """

    axes: ClassVar[int] = 2

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add an AveragePool."""
        return self.pool(graph, path, x, "AveragePool", count_include_pad=1)


@dataclass(frozen=True, slots=True)
class GlobalAvgPool(Layer):
    """The mean of each channel: (batch, channels, 1 or 2 spatial axes) to (batch, channels).

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.GlobalAvgPool(), nn.Linear(8, 10)), (1, 28, 28))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a GlobalAveragePool, and a Flatten that removes axes of size 1."""
        if len(x.dims) not in (2, 3):
            raise self.mismatch(path, x, "[batch, channels, length] or [batch, channels, height, width]")
        mean = graph.node("GlobalAveragePool", f"{path}/mean", [x.name])
        return Value(graph.node("Flatten", path, [mean], axis=1), x.dims[:1])


@dataclass(frozen=True, slots=True)
class Upsample(Layer):
    """Repeat every value `scale_factor` times along each of 1 or 2 spatial axes, float32.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Upsample(2), nn.Conv2d(8, 4, 3, padding=1)), (8, 14, 14))
    """

    scale_factor: int

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Resize with nearest neighbours."""
        if len(x.dims) not in (2, 3):
            raise self.mismatch(path, x, "[batch, channels, length] or [batch, channels, height, width]")
        dims = (x.dims[0], *[dim * int(self.scale_factor) for dim in x.dims[1:]])
        factors = [1.0, 1.0, *[self.scale_factor] * (len(dims) - 1)]
        scales = graph.constant(f"{path}/scales", np.array(factors, np.float32))
        node = graph.node(
            "Resize",
            path,
            [x.name, "", scales],
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )
        return Value(node, dims)
