"""Makes a training graph deterministic by disabling dropout and replacing random values."""

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.graph import refill

GOLDEN = (math.sqrt(5) - 1) / 2
"""The golden ratio minus 1.

The fractional parts of its multiples are evenly distributed between 0 and 1 (Weyl 1916).
"""

WIDTH = math.sqrt(12)
"""Width of a uniform distribution with standard deviation 1."""


def without_chance(model: bytes) -> bytes:
    """Set all dropout ratios to 0, and replace random tensors by values computed from their shape.

    The values within a tensor differ from each other, because a mask of equal values would either
    keep or drop everything.
    """
    proto = onnx.load_model_from_string(model)
    ratios = {name for node in proto.graph.node if node.op_type == "Dropout" for name in node.input[1:2]}
    for entry in proto.graph.initializer:
        if entry.name in ratios:
            entry.CopyFrom(numpy_helper.from_array(np.zeros((), np.float32), entry.name))
    nodes = [part for node in proto.graph.node for part in (_spread(node) if node.op_type in _DRAWING else [node])]
    refill(proto.graph.node, nodes)
    return bytes(proto.SerializeToString())


_DRAWING = frozenset({"RandomNormalLike", "RandomUniformLike"})


def _spread(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes that compute deterministic values in place of a random node."""
    given = {entry.name: entry.f for entry in node.attribute}
    if node.op_type == "RandomNormalLike":
        width = given.get("scale", 1.0) * WIDTH
        least = given.get("mean", 0.0) - width / 2
    else:
        least = given.get("low", 0.0)
        width = given.get("high", 1.0) - least
    prefix, made = f"{node.output[0]}::", list[onnx.NodeProto]()

    def constant(name: str, value: np.typing.ArrayLike) -> str:
        held = numpy_helper.from_array(np.asarray(value), prefix + name)
        made.append(helper.make_node("Constant", [], [prefix + name], value=held))
        return prefix + name

    def op(operator: str, name: str, *inputs: str, **attributes: Any) -> str:
        made.append(helper.make_node(operator, list(inputs), [prefix + name], **attributes))
        return prefix + name

    one = constant("one", np.int64(1))
    shape = op("Shape", "shape", node.input[0])
    end = op("Add", "end", op("Size", "size", node.input[0]), one)
    places = op("Cast", "places", op("Range", "range", one, end, one), to=TensorProto.DOUBLE)
    turns = op("Mul", "turns", places, constant("golden", np.float64(GOLDEN)))
    share = op("Sub", "share", turns, op("Floor", "whole", turns))
    wide = op("Mul", "wide", share, constant("width", np.float64(width)))
    moved = op("Add", "moved", wide, constant("least", np.float64(least)))
    shaped = op("Reshape", "shaped", moved, shape)
    made.append(helper.make_node("Cast", [shaped], [node.output[0]], to=TensorProto.FLOAT))
    return made
