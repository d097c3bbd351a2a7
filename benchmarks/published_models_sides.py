"""Computes gradients in float64 on the sides of kinks that a computation in float32 has chosen.

In float32, a few ReLUs and max-pools of a deep model may choose another side than in float64. A
single one among millions changes gradients up to a thousand times as much as rounding does, for
torch as well as for us. On the same sides, only rounding is left, and a wrong gradient.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor

from benchmarks.published_models_onnx import OPERATORS, Values, compute

LINEAR = frozenset({
    "Abs", "Clip", "GlobalMaxPool", "HardSigmoid", "LeakyRelu", "Max", "MaxPool", "Min", "ReduceMax", "Relu",
})  # fmt: skip
"""Operators that are linear on each side of their kinks."""

DISCRETE = frozenset({"ArgMax", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
"""Operators whose results do not change on each side."""

SIDED = LINEAR | DISCRETE | {"HardSwish"}


def deciding(model: onnx.ModelProto, known: Container[str]) -> dict[str, str]:
    """Return the tensors that decide on sides, and for each the `known` tensor with the same values."""
    real, found = dict[str, str](), dict[str, str]()
    for node in model.graph.node:
        if node.op_type == "Identity":
            real[node.output[0]] = real.get(node.input[0], node.input[0])
        elif node.op_type in SIDED:
            found |= {name: name if name in known else real.get(name, name) for name in node.input}
    return {name: same for name, same in found.items() if same in known}


class Recorder:
    """Computes operators, and keeps the values that decide on the sides."""

    def __init__(self) -> None:
        self.seen: Values = {}

    def __call__(
        self, node: onnx.NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Tensor | None]
    ) -> Any:
        """Compute an operator."""
        if node.op_type in SIDED:
            pairs = zip(node.input, inputs, strict=True)
            self.seen |= {name: value.detach() for name, value in pairs if value is not None}
        return compute(node, attributes, inputs)


class Follower:
    """Computes operators on the sides that other values have chosen.

    A linear operator is replaced by its linear part at these values.
    """

    def __init__(self, seen: Values) -> None:
        self._seen = seen
        self.distance = 0.0
        """The largest relative distance from the values of a tensor that decides."""

    def __call__(
        self, node: onnx.NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Tensor | None]
    ) -> Any:
        """Compute an operator."""
        given = [value for value in inputs if value is not None]
        if node.op_type not in SIDED or not given[0].is_floating_point():
            return compute(node, attributes, inputs)
        deciding = [self._deciding(name, value) for name, value in zip(node.input, inputs, strict=True)]
        if node.op_type in DISCRETE:
            return compute(node, attributes, deciding)
        at = [value for value in deciding if value is not None]
        steps = [value - decides for value, decides in zip(given, at, strict=True)]
        kind = "HardSigmoid" if node.op_type == "HardSwish" else node.op_type
        known = {"alpha": 1 / 6} if node.op_type == "HardSwish" else attributes

        def apply(*values: Tensor) -> Tensor:
            left = iter(values)
            made: Tensor = OPERATORS[kind](known, *[None if each is None else next(left) for each in inputs])
            return made

        value, change = torch.func.jvp(apply, tuple(at), tuple(steps))
        return given[0] * (value + change) if node.op_type == "HardSwish" else value + change

    def _deciding(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None or name not in self._seen or not value.is_floating_point():
            return value
        decides, exact = self._seen[name].to(value.dtype), value.detach()
        size = float(exact.norm())
        self.distance = max(self.distance, float((decides - exact).norm()) / size if size else 0.0)
        return decides
