"""Computes norms and activations twice, so that their results need not stay in memory.

A step keeps every result of the forward pass that the backward pass reads. Norms and activations
take little time, so the backward pass can compute them again from tensors that are kept anyway
(Chen et al. 2016, arXiv:1604.06174).
"""

from collections.abc import Collection, Iterable

from edgeasync.autodiff.graph import Graph, Node, free_inputs

NORMS = frozenset({"BatchNormalization", "LayerNormalization"})

CHEAP = NORMS | {
    "Abs", "Add", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
    "Log", "Mul", "Neg", "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub", "Tanh",
}  # fmt: skip
"""Operators to compute again. Random operators are excluded, because they would draw new numbers."""


def recompute(graph: Graph, start: int, outputs: Collection[str]) -> None:
    """Compute results of the forward pass again where the backward pass reads them.

    The backward pass begins at the node with index `start`. The `outputs`, which the loss reads, are
    not computed again.
    """
    forward, backward = graph.nodes[:start], graph.nodes[start:]
    copier = _Copier(graph, forward, {name for node in backward for name in free_inputs(node)}, outputs)
    graph.nodes = forward
    for node in backward:
        node.inputs = [copier.copy(name) for name in node.inputs]
        graph.nodes.append(node)


class _Copier:
    """Adds a second computation of each tensor when it is needed first.

    Such a tensor depends on a single tensor that the backward pass reads, its root. If it depended
    on two, as at the end of a residual block, one of them could require all earlier blocks.
    """

    def __init__(
        self, graph: Graph, forward: Iterable[Node], read: Collection[str], outputs: Collection[str]
    ) -> None:
        self._graph = graph
        self._roots: dict[str, str] = {}
        self._makers: dict[str, Node] = {}
        self._copies: dict[str, str] = {}
        computed = set[str]()
        for node in forward:
            wide = node.inputs[:1] if node.op in NORMS | {"Clip"} else node.inputs
            roots = {self._roots.get(name, name if name in read else "") for name in wide if name in computed}
            computed.update(node.outputs)
            name = node.outputs[0]
            if (
                name not in outputs
                and node.op in CHEAP
                and not node.domain
                and len(roots) == 1
                and "" not in roots
            ):
                root = roots.pop()
                if len(wide) == 1 or wide.count(root) != 1 or self._rank(name) == self._rank(root) >= 0:
                    self._roots[name], self._makers[name] = root, node

    def _rank(self, name: str) -> int:
        return len(self._graph.shapes[name]) if name in self._graph.shapes else -1

    def copy(self, name: str) -> str:
        """Return a second computation of a tensor, or `name` if it is not computed again."""
        if name not in self._makers or name in self._copies:
            return self._copies.get(name, name)
        node, op, root = self._makers[name], self._graph.op, self._roots[name]
        inputs = [self.copy(each) for each in node.inputs]
        # onnxruntime merges equal nodes, so the copy must differ from the original.
        if inputs != node.inputs:
            again = op(node.op, *inputs, **node.attributes)
        elif node.op == "BatchNormalization":
            again = op(node.op, *inputs, **{**node.attributes, "momentum": 0.5})  # used in training mode only
        else:
            attributes, first = dict(node.attributes), self._graph.ints(0)
            if attributes.get("axis", -1) >= 0:
                attributes["axis"] += 1
            wide = op("Unsqueeze", root, first)
            again = op(
                "Squeeze", op(node.op, *[wide if each == root else each for each in inputs], **attributes), first
            )
        self._copies[name] = again
        return again
