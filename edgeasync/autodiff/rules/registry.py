"""The table of gradient rules, and the classes that rules use."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from edgeasync.autodiff.graph import Graph, Node, Shape
from edgeasync.errors import GraphError

Gradients = Sequence[str | None]
"""Gradients of a node's inputs, in order. The entry of an input without a gradient is `None`. Such
entries may be omitted at the end.
"""


class Step:
    """A node of the forward model, as an argument to its gradient rule.

    Rules add nodes to `graph`.
    """

    def __init__(self, graph: "TrainingGraphBuilder", node: Node) -> None:
        self.graph = graph
        self.node = node
        self.gradients: list[str | None] = []
        """The gradient of each output. Set when the reverse pass reaches the node."""
        self.saved: dict[str, str] = {}
        """Tensors that the forward part of a rule stores for the reverse part."""
        self.end = 0
        """Index in the graph after the last node of the operator."""
        self.may_be_infinite = False
        """Whether the gradients may be infinite. Set when the reverse pass reaches the node."""

    @property
    def gradient(self) -> str:
        """The gradient of the first output."""
        gradient = self.gradients[0]
        assert gradient is not None
        return gradient

    def input(self, position: int) -> str:
        """Return an input's name, or "" if it is omitted."""
        return self.node.inputs[position] if position < len(self.node.inputs) else ""

    def output(self, position: int = 0) -> str:
        """Return an output's name. Adds the output if it is optional and missing."""
        outputs = self.node.outputs
        while len(outputs) <= position:
            outputs.append("")
        if not outputs[position]:
            outputs[position] = self.graph.new_name(f"{self.node.op}_{position}")
        return outputs[position]

    def shape(self, position: int) -> Shape:
        """Return an input's shape."""
        return self.graph.shape(self.input(position))

    @property
    def output_shape(self) -> Shape:
        """The first output's shape."""
        return self.graph.shape(self.node.outputs[0])

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute of the node."""
        return self.node.attributes.get(name, default)

    def axis(self, default: int = -1) -> int:
        """Return the attribute `axis`, counted from the front."""
        return int(self.attribute("axis", default)) % len(self.shape(0))

    def constant(self, position: int, default: Any = None) -> Any:
        """Return a constant input as an array. Raises `GraphError` if it is not constant."""
        name = self.input(position)
        if not name:
            return default
        if name not in self.graph.constants:
            raise self.refused(f"its input {name!r} is not a constant")
        return self.graph.constants[name]

    def active(self, position: int) -> bool:
        """Return whether an input depends on a trained parameter."""
        return self.input(position) in self.graph.active

    def refused(self, why: str) -> GraphError:
        """Return the error that reports why this node cannot be differentiated."""
        return GraphError(f"{self.node.where} has no gradient: {why}")

    def where(self, condition: str, gradient: str) -> str:
        """Return a gradient where a condition holds, and 0 elsewhere, even if the gradient is infinite."""
        return self.graph.op("Where", condition, gradient, self.graph.scalar(0.0))

    def unbroadcast(self, gradient: str, position: int) -> str:
        """Sum a gradient over the axes along which an input was broadcast."""
        return self.graph.reduce_to(gradient, self.output_shape, self.shape(position))


class StatisticsUpdate(msgspec.Struct, frozen=True):
    """The batch's statistics of a batch norm, by which its running statistics are updated."""

    names: tuple[str, str]
    """Names of the running mean and variance."""
    rank: int
    mean: str
    """The batch's mean, with size 1 on all axes of `rank` other than the channels."""
    total: str
    """The sum of squared distances from the mean, per channel."""
    count: str
    """The number of values per channel, as a vector of one value."""
    momentum: float


class TrainingGraphBuilder(Graph):
    """The training graph under construction, with the information that gradient rules need."""

    def __init__(self) -> None:
        super().__init__()
        self.active: set[str] = set()
        """Tensors that depend on a trained parameter."""
        self.statistics: dict[str, str] = {}
        """For each updated running statistic, the tensor that contains its next value."""
        self.updates: list[StatisticsUpdate] = []
        self.live_statistics: frozenset[str] = frozenset()
        """Running statistics to update. A batch norm uses its other running statistics unchanged.
        """


GradientRule = Callable[[Step], Gradients]
ForwardRule = Callable[[Step], None]


class Rule(msgspec.Struct, frozen=True):
    """The gradient rule of an operator.

    If set, `forward` adds the nodes of the forward pass. Otherwise, the operator's node is copied.
    """

    gradient: GradientRule
    forward: ForwardRule | None = None


RULES: dict[str, Rule] = {}
"""Gradient rules by operator. Importing `edgeasync.autodiff.rules` registers them."""


def rule(*operators: str, forward: ForwardRule | None = None) -> Callable[[GradientRule], GradientRule]:
    """Register a function as the gradient rule of operators."""

    def register(gradient: GradientRule) -> GradientRule:
        for operator in operators:
            RULES[operator] = Rule(gradient, forward)
        return gradient

    return register


INSTEAD: dict[str, str] = {}
"""Equivalent torch code, for error messages about operators without a gradient rule."""

STOPPING = frozenset(
    {
        "And", "ArgMax", "ArgMin", "Ceil", "ConstantOfShape", "Equal", "EyeLike", "Floor", "Greater",
        "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "NonZero", "Not", "OneHot", "Or",
        "RandomNormalLike", "RandomUniformLike", "Range", "Round", "Shape", "Sign", "Size", "Xor",
    }
)  # fmt: skip
"""Operators whose derivative is undefined, or zero almost everywhere. As in other libraries, no
gradient passes through them to earlier parameters. Identity is included, because preparation
removes all Identity nodes except those that stop the gradient.
"""
