"""The table of expansions, which replace an operator by several that have gradient rules.

The function bodies in onnx are not used. Selu's gradient would overflow, the variance of
MeanVarianceNormalization would cancel, PRelu's gradient at 0 would differ from torch's, and
Attention's meaning depends on the version of onnx. onnx has no bodies for onnxruntime's operators.
"""

from collections.abc import Callable, Sequence

from edgeasync.autodiff.graph import Node
from edgeasync.autodiff.reading import ONNXRUNTIME
from edgeasync.autodiff.rules.registry import Step, TrainingGraphBuilder
from edgeasync.errors import GraphError, argument


class ReplacedStep(Step):
    """A node that is replaced by the nodes which its expansion adds to `graph`.

    `before` returns the trained parameters that the node depends on, if others are trained as well.
    """

    def __init__(
        self, graph: TrainingGraphBuilder, node: Node, opset: int, before: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(graph, node)
        self.opset = opset
        self._before = before

    def rank(self, position: int) -> int:
        """Return the number of dimensions of an input."""
        return len(self.shape(position))

    def fixed(self, position: int, axis: int) -> int:
        """Return the size of an axis. Raises `GraphError` if it depends on the batch size."""
        size = self.shape(position)[axis]
        if size is None:
            raise self.refused(
                f"axis {axis} of its input {position} depends on the batch size; export the model with a "
                "fixed size"
            )
        return size

    def refuse_inputs(self, names: dict[int, str]) -> None:
        """Raise `GraphError` if the node has one of these inputs. `names` describes them."""
        for position, name in names.items():
            if self.input(position):
                raise self.refused(f"it has {name} as input {position}; export the model without")

    def refused(self, why: str) -> GraphError:
        """Return the error that reports why this node cannot be replaced, and what to do."""
        before = self._before()
        rest = f", or freeze the parameters before it: {argument('freeze', *before)}" if before else ""
        return GraphError(f"{self.node.where} cannot be written with operators that have a gradient: {why}{rest}")


Expansion = Callable[[ReplacedStep], Sequence[str | None]]
"""Adds equivalent nodes and returns the names of their results, one per output of the operator.

Outputs that are not computed are `None`, and may be omitted at the end. A parameter must not be
read by two of the new nodes, because the build would suspect that an exporter has merged two equal
parameters.
"""

EXPANSIONS: dict[tuple[str, str], Expansion] = {}
"""Expansions by the operator's domain and name."""


def expands(*operators: str, domain: str = "") -> Callable[[Expansion], Expansion]:
    """Register a function as the expansion of operators."""

    def register(expansion: Expansion) -> Expansion:
        for operator in operators:
            EXPANSIONS[domain, operator] = expansion
        return expansion

    return register


def expands_fused(*operators: str) -> Callable[[Expansion], Expansion]:
    """Register a function as the expansion of operators of onnxruntime's own domain."""
    return expands(*operators, domain=ONNXRUNTIME)
