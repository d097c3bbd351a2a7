"""Removes random masks that drop paths or channels, because an exported model must not drop anything.

In stochastic depth (Huang et al. 2016, arXiv:1603.09382), a mask keeps the path of each example with
a fixed probability, and what is kept is divided by that probability. Exporters write the mask as a
comparison of random numbers with the probability.
"""

import msgspec
import onnx
from onnx import helper

from edgeasync.autodiff.reading import array_of, is_uniform

_CLOSE = 1e-5
"""Maximum difference between numbers that count as equal."""

_SAME = frozenset({"Cast", "CastLike", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose result has the values of their first input."""

_NOT_VALUES = frozenset({"RandomNormalLike", "RandomUniformLike", "Shape", "Size"})
"""Operators whose result does not depend on the values of their input, only on its shape."""

_BELOW = {"Less": True, "LessOrEqual": True, "Greater": False, "GreaterOrEqual": False}
"""Comparisons, and whether they hold if the first operand is below the second."""


class _Mask(msgspec.Struct, frozen=True):
    """A random tensor whose values are `scale` with probability `kept`, and 0 otherwise."""

    kept: float
    scale: float = 1.0


def without_masks(graph: onnx.GraphProto | onnx.FunctionProto) -> list[onnx.NodeProto]:
    """Return the nodes of a graph, with products of data and masks replaced by the data.

    A mask is removed only if the mean of the product is the data, because that is what inference
    computes, and if the product has the data's shape. All other random numbers remain.
    """
    return _Search(graph).nodes


class _Search:
    """Goes through the nodes of a graph once, and recognizes random numbers, masks and constants."""

    def __init__(self, graph: onnx.GraphProto | onnx.FunctionProto) -> None:
        self._tensors = {tensor.name: tensor for tensor in getattr(graph, "initializer", ())}
        self._dims = {
            entry.name: entry.type.tensor_type.shape.dim
            for entry in (*graph.value_info, *graph.input, *graph.output)
            if not isinstance(entry, str) and entry.type.tensor_type.HasField("shape")
        }
        self._live = {entry if isinstance(entry, str) else entry.name for entry in graph.input} - {*self._tensors}
        """Tensors that depend on the values of the graph's inputs, so that they contain the batch."""
        self._makers = dict[str, onnx.NodeProto]()
        self._shifts = dict[str, float]()
        """Random numbers between 0 and 1, and the number that was added to them."""
        self._masks = dict[str, _Mask]()
        self.nodes = [self._replaced(node) for node in graph.node]

    def _replaced(self, node: onnx.NodeProto) -> onnx.NodeProto:
        self._makers |= dict.fromkeys(node.output, node)
        if node.op_type not in _NOT_VALUES and not self._live.isdisjoint(node.input):
            self._live.update(node.output)
        first, second = [*node.input, "", ""][:2]
        for data, mask in ((first, second), (second, first)):
            if node.op_type != "Mul" or mask not in self._masks or not self._spans(data, node.output[0]):
                continue
            if kept := self._kept(data, self._masks[mask]):
                return helper.make_node("Identity", [kept], list(node.output), node.name)
        if (found := self._mask(node.op_type, first, second)) is not None:
            self._masks[node.output[0]] = found
        elif (shift := self._shift(node, first, second)) is not None:
            self._shifts[node.output[0]] = shift
        return node

    def _shift(self, node: onnx.NodeProto, first: str, second: str) -> float | None:
        """Return what was added to a random number between 0 and 1, if a node computes one."""
        if node.op_type == "RandomUniformLike":
            bounds = {entry.name: entry.f for entry in node.attribute}
            return 0.0 if bounds.get("low", 0.0) == 0.0 and bounds.get("high", 1.0) == 1.0 else None
        if node.op_type == "Add":
            for random, other in ((first, second), (second, first)):
                number = self._number(other)
                if random in self._shifts and number is not None:
                    return self._shifts[random] + number
        return None

    def _mask(self, op: str, first: str, second: str) -> _Mask | None:
        """Return the mask that an operator computes, if it does."""
        if op in _SAME:
            return self._masks.get(first)
        if op == "Bernoulli":
            odds = self._number(first)
            return None if odds is None else _Mask(odds)
        if op == "Floor" and 0 < (shift := self._shifts.get(first, 0.0)) < 1:
            return _Mask(shift)
        for one, other, turned in ((first, second, False), (second, first, True)):
            number = self._number(other)
            if op in _BELOW and number is not None and self._shifts.get(one) == 0.0:
                return _Mask(number if _BELOW[op] != turned else 1 - number)
            if one in self._masks and number and (op == "Mul" or (op == "Div" and not turned)):
                mask = self._masks[one]
                return _Mask(mask.kept, mask.scale * number if op == "Mul" else mask.scale / number)
        return None

    def _spans(self, data: str, product: str) -> bool:
        """Return whether a tensor is data, and a product with it has the same shape.

        Axes of unknown size belong to the batch, so they count as equal.
        """
        if data not in self._live:
            return False
        own, whole = self._dims.get(data, ()), self._dims.get(product, ())
        if not own or not whole:
            return True
        return len(own) == len(whole) and all(
            mine.dim_value != 1 or other.dim_value == 1 for mine, other in zip(own, whole, strict=True)
        )

    def _kept(self, data: str, mask: _Mask) -> str:
        """Return the mean of a product of data and a mask, or "" if it is not a tensor of the graph."""
        if abs(mask.kept * mask.scale - 1) < _CLOSE:
            return data
        maker = self._makers.get(data)
        if maker is None or mask.scale != 1 or maker.op_type not in ("Div", "Mul"):
            return ""
        number = self._number(maker.input[1])
        scale = 0.0 if not number else 1 / number if maker.op_type == "Div" else number
        return maker.input[0] if abs(mask.kept * scale - 1) < _CLOSE else ""

    def _number(self, name: str) -> float | None:
        """Return the value of a constant whose values are all equal."""
        maker = self._makers.get(name)
        if maker is None:
            tensor = self._tensors.get(name)
        elif maker.op_type in _SAME:
            return self._number(maker.input[0])
        elif maker.op_type in ("Constant", "ConstantOfShape"):
            held = {entry.name: entry for entry in maker.attribute}
            if "value_float" in held:
                return float(held["value_float"].f)
            tensor = held["value"].t if "value" in held else None
        else:
            return None
        if tensor is None:
            return None
        value = array_of(tensor, f"tensor {name!r}")
        return float(value.flat[0]) if value.size and value.dtype.kind in "fiu" and is_uniform(value) else None
