"""Gradients of interpolation, and of padding by copies.

Both are linear maps along single axes. The matrices are not derived from formulas, but measured, by
applying onnxruntime's operator to an identity matrix.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from edgeasync.autodiff.graph import FLOAT, Array, Graph, Node, model_of, tensor
from edgeasync.autodiff.probing import open_session
from edgeasync.autodiff.rules.registry import Gradients, Step, rule

MATRIX_MAX = 1 << 22
"""Maximum number of values in an interpolation matrix, which is part of the training graph."""

_OPSET = 19
"""The opset in which operators are measured. The newer ones do not change their results."""


@rule("Resize")
def _resize(step: Step) -> Gradients:
    """Multiply the gradient by the transposed interpolation matrix of each axis.

    If each value is repeated equally often, sum the gradients of its copies instead.
    """
    graph, scales = step.graph, _scales(step)
    mode = step.attribute("coordinate_transformation_mode", "half_pixel")
    if mode == "tf_crop_and_resize":
        raise step.refused("it crops (tf_crop_and_resize); crop with Slice before resizing")
    if (policy := step.attribute("keep_aspect_ratio_policy", "stretch")) != "stretch":
        raise step.refused(f"keep_aspect_ratio_policy is {policy}; set the sizes of all axes")
    axes = list[int]()
    for axis, (size, out) in enumerate(zip(step.shape(0), step.output_shape, strict=True)):
        if size is None or out is None:
            if size is not out or scales.get(axis, 1.0) != 1.0:
                raise step.refused("it resizes the batch axis")
        elif size != out or scales.get(axis, 1.0) != 1.0:
            axes.append(axis)
    matrices = {axis: _interpolation(step, axis, scales.get(axis)) for axis in axes}
    if all(_repeats(matrix) for matrix in matrices.values()):
        return [_sum_copies(step, axes)]
    gradient, shape = step.gradient, list(step.output_shape)
    for axis, matrix in matrices.items():
        gradient = multiply(graph, gradient, shape, axis, matrix.T)
        shape[axis] = step.shape(0)[axis]
    return [gradient]


def _scales(step: Step) -> dict[int, float]:
    """Return the scale of each axis, or an empty dictionary if the node specifies sizes instead."""
    given = step.constant(2)
    if given is None or not given.size:
        return {}
    rank = len(step.shape(0))
    axes = step.attribute("axes", range(rank))
    return {axis % rank: float(scale) for axis, scale in zip(axes, given, strict=True)}


def _interpolation(step: Step, axis: int, scale: float | None) -> Array:
    """Return the matrix that interpolates one axis, of shape (output size, input size)."""
    size, out = step.shape(0)[axis], step.output_shape[axis]
    assert size is not None
    assert out is not None
    if size * out > MATRIX_MAX:
        raise step.refused(f"resizing {size} values to {out} needs too large a matrix; resize in several steps")
    unread = ("axes", "keep_aspect_ratio_policy")
    attributes = {name: value for name, value in step.node.attributes.items() if name not in unread}
    sizes = np.array([1, size, out, 1]) if scale is None else None
    scales = None if scale is None else np.array([1, 1, scale, 1], FLOAT)
    # The identity matrix is an image of one column per channel.
    found = measured("Resize", [np.eye(size, dtype=FLOAT)[None, :, :, None], None, scales, sizes], attributes)
    return found[0, :, :, 0].T


def _repeats(matrix: Array) -> bool:
    """Return whether an interpolation repeats each value equally often, in order."""
    out, size = matrix.shape
    return out % size == 0 and bool((matrix == np.eye(size).repeat(out // size, 0)).all())


def _sum_copies(step: Step, axes: Sequence[int]) -> str:
    graph, parts, copies = step.graph, list[int](), list[int]()
    for axis, size in enumerate(step.shape(0)):
        parts.append(-1 if size is None else size)
        if axis in axes:
            copies.append(len(parts))
            parts.append((step.output_shape[axis] or 0) // (size or 1))
    if not axes:
        return step.gradient
    apart = graph.op("Reshape", step.gradient, graph.ints(*parts))
    return graph.op("ReduceSum", apart, graph.ints(*copies), keepdims=0)


def sum_padding(step: Step, pads: Sequence[tuple[int, int, int]], mode: str) -> str:
    """Return the gradient of a Pad node that fills the padding with copies of its input's values.

    `pads` lists the padded axes, with the padding before and after. The gradients in the padding
    are added to those of the values that were copied there.
    """
    graph, gradient, shape = step.graph, step.gradient, list(step.output_shape)
    for axis, low, high in pads:
        size = step.shape(0)[axis]
        if size is None:
            raise step.refused("it pads the batch axis")
        origin = measured("Pad", [np.arange(size, dtype=FLOAT), np.array([low, high])], {"mode": mode})
        copied = np.concatenate([origin[:low], origin[low + size :]])
        widths = [width for width in (low, size, high) if width]
        parts = [*graph.add("Split", gradient, graph.ints(*widths), outputs=len(widths), axis=axis)]
        middle = parts.pop(1 if low else 0)
        border = graph.op("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
        shape[axis] = low + high
        back = multiply(graph, border, shape, axis, np.equal.outer(np.arange(size), copied).astype(FLOAT))
        gradient = graph.op("Add", middle, back)
        shape[axis] = size
    return gradient


def multiply(graph: Graph, value: str, shape: Sequence[int | None], axis: int, matrix: Array) -> str:
    """Multiply a tensor of `shape` along one axis by a constant matrix, from the left."""
    if axis == len(shape) - 1:
        return graph.op("MatMul", value, graph.constant(matrix.T))
    if axis == len(shape) - 2:
        return graph.op("MatMul", graph.constant(matrix), value)
    before, after = shape[:axis], shape[axis + 1 :]
    joined = [_product(before), matrix.shape[1], _product(after)]
    rows = graph.op("MatMul", graph.constant(matrix), graph.op("Reshape", value, graph.ints(*joined)))
    apart = [*before, matrix.shape[0], *after]
    return graph.op("Reshape", rows, graph.ints(*[-1 if dim is None else dim for dim in apart]))


def _product(shape: Sequence[int | None]) -> int:
    """Return the number of values, or -1 if it depends on the batch size."""
    return -1 if None in shape else math.prod(dim or 0 for dim in shape)


def measured(op: str, inputs: Sequence[Array | None], attributes: Mapping[str, Any]) -> Array:
    """Run a single operator on constants in onnxruntime, and return its output."""
    names = [f"input_{place}" if value is not None else "" for place, value in enumerate(inputs)]
    constants = [tensor(name, value) for name, value in zip(names, inputs, strict=True) if value is not None]
    node = Node(op, names, ["y"], dict(attributes))
    model = model_of([node], [], [onnx.ValueInfoProto(name="y")], constants, opset=_OPSET)
    (found,) = open_session(model.SerializeToString()).run(None, {})
    return np.asarray(found)
