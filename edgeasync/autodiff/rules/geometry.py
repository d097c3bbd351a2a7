"""The geometry of sliding windows in convolutions and pooling."""

from collections.abc import Sequence
from typing import Self

import msgspec

from edgeasync.autodiff.graph import Graph, Shape
from edgeasync.autodiff.rules.registry import Step


class Geometry(msgspec.Struct, frozen=True):
    """The parameters of a sliding window, with input and output sizes, per spatial dimension."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    wide: tuple[int, ...]
    """Spatial sizes of the larger side, such as the input of a convolution."""
    narrow: tuple[int, ...]
    """Spatial sizes of the smaller side, such as the output of a convolution."""

    @classmethod
    def of(
        cls, step: Step, kernel: tuple[int, ...], wide: tuple[int | None, ...], narrow: tuple[int | None, ...]
    ) -> Self:
        """Read the strides, dilations and padding of a node.

        Raises `GraphError` if a spatial size is dynamic.
        """
        if None in wide or None in narrow:
            raise step.refused("its spatial sizes depend on the batch size")
        sizes = tuple([dim or 0 for dim in wide])
        outs = tuple([dim or 0 for dim in narrow])
        count = len(kernel)
        strides = tuple(step.attribute("strides", [1] * count))
        dilations = tuple(step.attribute("dilations", [1] * count))
        pads = list(step.attribute("pads", [0] * 2 * count))
        auto = step.attribute("auto_pad", "NOTSET")
        if auto.startswith("SAME"):
            for axis in range(count):
                reach = dilations[axis] * (kernel[axis] - 1) + 1
                total = max(0, (outs[axis] - 1) * strides[axis] + reach - sizes[axis])
                less = total // 2
                first = less if auto == "SAME_UPPER" else total - less
                pads[axis], pads[count + axis] = first, total - first
        return cls(kernel, strides, dilations, tuple(pads[:count]), tuple(pads[count:]), sizes, outs)

    @property
    def pads(self) -> list[int]:
        """Padding in the order that ONNX uses."""
        return [*self.before, *self.after]

    @property
    def rest(self) -> list[int]:
        """Number of values at the end of the wide side that no window covers.

        A negative number means that windows extend beyond the end.
        """
        return [
            wide - ((narrow - 1) * stride - before - after + dilation * (kernel - 1) + 1)
            for wide, narrow, stride, before, after, dilation, kernel in zip(
                self.wide,
                self.narrow,
                self.strides,
                self.before,
                self.after,
                self.dilations,
                self.kernel,
                strict=True,
            )
        ]

    @property
    def dense(self) -> bool:
        """Whether every stride is 1."""
        return all(stride == 1 for stride in self.strides)


class Convolution(msgspec.Struct, frozen=True):
    """A convolution in a graph: kernel shape, geometry and number of groups."""

    graph: Graph
    shape: tuple[int, ...]
    geometry: Geometry
    group: int

    @classmethod
    def of(cls, step: Step, wide: Shape, narrow: Shape) -> Self:
        """Read a node whose second input is the kernel.

        Raises `GraphError` if a spatial size is dynamic.
        """
        shape = step.graph.static_shape(step.input(1), step.node.where)
        geometry = Geometry.of(step, shape[2:], wide[2:], narrow[2:])
        return cls(step.graph, shape, geometry, step.attribute("group", 1))


def as_two(sizes: Sequence[int], missing: int = 1) -> tuple[int, int]:
    """Extend one-dimensional sizes to two dimensions."""
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])
