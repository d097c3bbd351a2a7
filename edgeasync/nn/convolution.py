"""Convolutions, pooling and upsampling.

All layers map float32 (batch, channels, length) or (batch, channels, height, width).
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer, he, times

Size = int | tuple[int, ...]
"""One integer for all spatial axes, or a tuple with one for each."""

AXES = {1: ("length",), 2: ("height", "width")}


class _Spatial(Layer):
    """A layer that slides a window over the `axes` spatial axes after the channels."""

    __slots__ = ()
    axes: ClassVar[int]

    def check_shape(self, path: str, x: Value, channels: int | str) -> None:
        """Raise `ConfigError` unless `x` has one channel axis and `axes` spatial axes.

        If `channels` is an integer, `x` must have that many channels.
        """
        if len(x.dims) != self.axes + 1 or (isinstance(channels, int) and x.dims[0] != channels):
            raise self.mismatch(path, x, f"[batch, {channels}, {', '.join(AXES[self.axes])}]")

    def slide(self, path: str, x: Value, window: tuple[int, ...], attributes: dict[str, Any]) -> tuple[int, ...]:
        """Return the number of window positions along each spatial axis.

        `window` is the dilated size of the window. Raises `ConfigError` if it does not fit.
        """
        strides, pads = attributes["strides"], attributes["pads"][: self.axes]
        least = [size - 2 * pad for size, pad in zip(window, pads, strict=True)]
        if any(dim < size for dim, size in zip(x.dims[1:], least, strict=True)):
            raise self.mismatch(path, x, f"{' and '.join(AXES[self.axes])} of at least {times(least)}")
        return tuple([(d - s) // t + 1 for d, s, t in zip(x.dims[1:], least, strides, strict=True)])


@dataclass(frozen=True, slots=True)
class _Convolution(_Spatial):
    """The arguments that all convolutions share."""

    in_channels: int
    out_channels: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    _: KW_ONLY  # torch's Conv2d and ConvTranspose2d order these differently
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
        """Return the arguments as ONNX attributes; raises `ConfigError` for invalid ones."""
        return {
            "kernel_shape": self.sizes("kernel_size", self.kernel_size, self.axes, 1),
            "strides": self.sizes("stride", self.stride, self.axes, 1),
            "pads": self.sizes("padding", self.padding, self.axes, 0) * 2,
            "dilations": self.sizes("dilation", self.dilation, self.axes, 1),
            "group": int(self.groups),
        }

    def parameters(self, graph: LayerGraph, path: str, shape: tuple[int, ...], inputs: float) -> list[str]:
        """Add the weight and the bias; return their names.

        The weight uses He initialization. `inputs` is the number of inputs of one output value.
        """
        names = [graph.uniform(f"{path}.weight", shape, he(inputs))]
        if self.bias:
            names.append(graph.filled(f"{path}.bias", (self.out_channels,), 0.0))
        return names


@dataclass(frozen=True, slots=True)
class _Forward(_Convolution):
    """A convolution, but not a transposed one."""

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
    """A convolution along one axis.

    Maps float32 (batch, in_channels, length) to (batch, out_channels, positions).

    Parameters: `weight` (out_channels, in_channels / groups, kernel) with He initialization, and
    `bias` (out_channels,), initially zero.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU()), (3, 100))
    """

    axes: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Conv2d(_Forward):
    """A convolution along two axes.

    Maps float32 (batch, in_channels, height, width) to (batch, out_channels, rows, columns).
    `kernel_size`, `stride`, `padding` and `dilation` are an integer, or a tuple with one for each
    axis. With `groups` equal to `in_channels` the convolution is depthwise.

    Parameters: `weight` (out_channels, in_channels / groups, kernel...) with He initialization, and
    `bias` (out_channels,), initially zero.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()), (1, 28, 28))
    """

    axes: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class ConvTranspose2d(_Convolution):
    """A transposed convolution along two axes, which enlarges images.

    Maps float32 (batch, in_channels, height, width) to (batch, out_channels, rows, columns). A side
    of length n becomes (n - 1) stride - 2 padding + dilation (kernel - 1) + 1.

    Parameters: `weight` (in_channels, out_channels / groups, kernel...) with He initialization for
    the mean number of inputs of an output value, and `bias` (out_channels,), initially zero.

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
            raise self.mismatch(path, x, f"a larger image, because this output would be {times(dims)}")
        shape = (self.in_channels, self.out_channels // self.groups, *kernel)
        # Along each axis, only every stride-th position of the kernel contributes to an output value.
        meeting = shape[0] // self.groups * math.prod(kernel) / math.prod(strides)
        parameters = self.parameters(graph, path, shape, max(meeting, 1.0))
        node = graph.node("ConvTranspose", path, [x.name, *parameters], **attributes)
        return Value(node, (self.out_channels, *dims))


@dataclass(frozen=True, slots=True)
class _Pool(_Spatial):
    """The arguments that all window pooling shares; `stride` defaults to `kernel_size`."""

    kernel_size: Size
    stride: Size | None = None
    padding: Size = 0

    def __post_init__(self) -> None:
        window = self.window()
        if any(2 * pad > size for pad, size in zip(window["pads"], window["kernel_shape"] * 2, strict=True)):
            raise self.bad_argument("padding", self.padding, "at most half of kernel_size")

    def window(self) -> dict[str, Any]:
        """Return the arguments as ONNX attributes; raises `ConfigError` for invalid ones."""
        kernel = self.sizes("kernel_size", self.kernel_size, self.axes, 1)
        return {
            "kernel_shape": kernel,
            "strides": kernel if self.stride is None else self.sizes("stride", self.stride, self.axes, 1),
            "pads": self.sizes("padding", self.padding, self.axes, 0) * 2,
        }

    def pool(self, graph: LayerGraph, path: str, x: Value, operator: str, **more: int) -> Value:
        """Add a pooling node; raises `ConfigError` if the input does not fit."""
        self.check_shape(path, x, "channels")
        attributes = self.window()
        places = self.slide(path, x, attributes["kernel_shape"], attributes)
        return Value(graph.node(operator, path, [x.name], **attributes, **more), (x.dims[0], *places))


@dataclass(frozen=True, slots=True)
class MaxPool1d(_Pool):
    """Max pooling along one axis.

    Maps float32 (batch, channels, length) to (batch, channels, positions). `stride` defaults to
    `kernel_size`. Values at the end that do not fill a window are dropped.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.MaxPool1d(2), (3, 100))
    """

    axes: ClassVar[int] = 1

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a MaxPool."""
        return self.pool(graph, path, x, "MaxPool")


@dataclass(frozen=True, slots=True)
class MaxPool2d(_Pool):
    """Max pooling along two axes.

    Maps float32 (batch, channels, height, width) to (batch, channels, rows, columns). `stride`
    defaults to `kernel_size`. Values at the ends that do not fill a window are dropped.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2)), (1, 28, 28))
    """

    axes: ClassVar[int] = 2

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a MaxPool."""
        return self.pool(graph, path, x, "MaxPool")


@dataclass(frozen=True, slots=True)
class AvgPool2d(_Pool):
    """Average pooling along two axes. The mean includes the padding's zeros.

    Maps float32 (batch, channels, height, width) to (batch, channels, rows, columns). `stride`
    defaults to `kernel_size`. Values at the ends that do not fill a window are dropped.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.AvgPool2d(2)), (1, 28, 28))
    """

    axes: ClassVar[int] = 2

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add an AveragePool."""
        return self.pool(graph, path, x, "AveragePool", count_include_pad=1)


@dataclass(frozen=True, slots=True)
class GlobalAvgPool(Layer):
    """The mean of each channel.

    Maps float32 (batch, channels, length) or (batch, channels, height, width) to (batch, channels).

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Conv2d(1, 8, 3), nn.GlobalAvgPool(), nn.Linear(8, 10)), (1, 28, 28))
    """

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a GlobalAveragePool, and a Flatten that removes its axes of length 1."""
        if len(x.dims) not in (2, 3):
            raise self.mismatch(path, x, "[batch, channels, length] or [batch, channels, height, width]")
        mean = graph.node("GlobalAveragePool", f"{path}/mean", [x.name])
        return Value(graph.node("Flatten", path, [mean], axis=1), x.dims[:1])


@dataclass(frozen=True, slots=True)
class Upsample(Layer):
    """Repeat every value `scale_factor` times along each spatial axis.

    The input is float32 (batch, channels, length) or (batch, channels, height, width).

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.Upsample(2), nn.Conv2d(8, 4, 3, padding=1)), (8, 14, 14))
    """

    scale_factor: int

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add a Resize with nearest-neighbour interpolation."""
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
