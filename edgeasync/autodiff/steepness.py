"""Tells where gradients may be infinite although the loss is finite, as at the square root of 0.

A Relu before a square root stops such a gradient. Its rule usually multiplies by 0, which is faster
than a selection, but would turn an infinite gradient into NaN.
"""

from collections.abc import Mapping

from edgeasync.autodiff.graph import Graph, Node

STEEP = {"Acos": 0, "Acosh": 0, "Asin": 0, "Atanh": 0, "Div": 1, "Log": 0, "Pow": 0, "Reciprocal": 0, "Sqrt": 0}
"""Operators whose derivative may be infinite, and the position of the input that decides this."""

_AT_ZERO = frozenset({"Div", "Log", "Pow", "Reciprocal", "Sqrt"})


def is_steep(graph: Graph, node: Node, makers: Mapping[str, Node]) -> bool:
    """Return whether the derivative of a node may be infinite.

    It is finite if the input is a constant, or the sum of a tensor and a positive constant, which
    prevents a division by 0. `makers` contains the node that computes each tensor.
    """
    if node.domain or node.op not in STEEP:
        return False
    if node.op == "Pow" and (power := graph.constants.get(node.inputs[1])) is not None and (power >= 1).all():
        return False
    name = node.inputs[STEEP[node.op]]
    if (value := graph.constants.get(name)) is not None:
        return not value.all()
    while (maker := makers.get(name)) is not None and maker.op in ("Pow", "Sqrt"):
        name = maker.inputs[0]
    if maker is None or node.op not in _AT_ZERO or maker.op not in ("Add", "Clip", "Max"):
        return True
    return not any((graph.constants[each] > 0).all() for each in maker.inputs[:2] if each in graph.constants)
