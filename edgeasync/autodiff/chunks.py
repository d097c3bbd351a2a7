"""Computes cross-entropy in chunks of classes, so that no tensor contains all scores.

The scores of a language model need more memory than all its layers. The last layer, which computes
them, is therefore replaced. A first pass over the classes finds the normalization of the softmax
and the scores of the labels. A second pass computes the scores again, and from them the gradients.
Each pass uses a part of the layer's weight at a time.
"""

import math
from typing import NamedTuple

import numpy as np

from edgeasync.autodiff.forward import PROBES, ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Graph, Node, free_inputs
from edgeasync.autodiff.losses import TARGET, LossParts
from edgeasync.autodiff.quantized_weights import add_part, is_quantized
from edgeasync.autodiff.rules import TrainingGraphBuilder
from edgeasync.autodiff.ties import tie
from edgeasync.losses import CrossEntropy

SCORES_BYTES_MIN = 4 << 20
"""Size of an example's scores from which they are computed in chunks. If the batch size is fixed, it
is that of all examples.
"""

CHUNK_BYTES = 2 << 20
"""Size of an example's scores in a chunk."""

CLASSES_MIN = 256
"""Smallest number of classes in a chunk. Matrix products with fewer columns are slow."""


class Product(NamedTuple):
    """A product of activations with a weight, which may be quantized."""

    x: str
    weight: str
    axis: int
    """The axis of the weight that belongs to the classes."""


class Head(NamedTuple):
    """The last layer of a classifier, with the classes on axis 1 of its scores.

    The scores are a sum of products and a bias. A layer has a single product, and its LoRA adapter
    adds another one.
    """

    nodes: list[Node]
    """The nodes that compute the layer."""
    products: list[Product]
    bias: str
    """The bias per class, or "" if the layer has none."""
    classes: int
    chunks: int


def find_head(prepared: ForwardGraph) -> Head | None:
    """Return the last layer of a model, if its scores are so large that chunks save memory."""
    classes = prepared.output_sample[1]
    examples = PROBES[0] if prepared.shapes[prepared.inputs[0]][0] is None else 1
    bytes_per_example = 4 * math.prod(prepared.output_sample) // examples
    chunks = min(-(-bytes_per_example // CHUNK_BYTES), classes // CLASSES_MIN)
    if bytes_per_example < SCORES_BYTES_MIN or chunks < 2:
        return None
    return _Search(prepared, classes).head(chunks)


class _Search:
    """Walks from the scores back to the matrix products that compute them."""

    def __init__(self, prepared: ForwardGraph, classes: int) -> None:
        self._prepared, self._classes = prepared, classes
        self._makers = {name: node for node in prepared.nodes for name in node.outputs}
        self._reads = [name for node in prepared.nodes for name in free_inputs(node)]
        self._nodes, self._products, self._biases = list[Node](), list[Product](), list[str]()

    def head(self, chunks: int) -> Head | None:
        shapes, name = self._prepared.shapes, self._prepared.output
        node = self._take(name, "Transpose")
        if node is not None:
            rank = len(shapes[name])
            if node.attributes.get("perm") != [0, rank - 1, *range(1, rank - 1)]:
                return None
            name = node.inputs[0]
        elif len(shapes[name]) != 2:
            return None
        if not self._find_products(name) or self._biases[1:]:
            return None
        return Head(self._nodes, self._products, "".join(self._biases), self._classes, chunks)

    def _find_products(self, name: str) -> bool:
        """Collect the products and biases whose sum is a tensor. Return whether that is possible."""
        name, shapes = self._unshaped(name), self._prepared.shapes
        node = self._take(name, "Add", "MatMul", "Gemm")
        if node is None:
            return False
        if node.op == "Add":
            self._biases += [each for each in node.inputs if self._is_bias(each)]
            rest = [each for each in node.inputs if not self._is_bias(each)]
            return all(shapes[each] == shapes[name] and self._find_products(each) for each in rest)
        if not self._is_plain(node):
            return False
        self._biases += node.inputs[2:]
        weight, axis = self._weight(node.inputs[1], 0 if node.attributes.get("transB") else 1)
        self._products.append(Product(node.inputs[0], weight, axis))
        maker, constants = self._makers.get(weight), self._prepared.constants
        known = weight in constants or weight in self._prepared.parameters
        return known or (maker is not None and is_quantized(maker, constants))

    def _take(self, name: str, *operators: str) -> Node | None:
        """Return the node that computes a tensor, if nothing but the last layer reads the tensor."""
        node = self._makers.get(name)
        if node is None or node.op not in operators or node.domain or self._reads.count(name) > 1:
            return None
        self._nodes.append(node)
        return node

    def _unshaped(self, name: str) -> str:
        """Skip a Reshape that keeps the classes on the last axis."""
        node, shapes = self._makers.get(name), self._prepared.shapes
        if node is None or node.op != "Reshape" or shapes[node.inputs[0]][-1:] != (self._classes,):
            return name
        return node.inputs[0] if self._take(name, "Reshape") else name

    def _is_bias(self, name: str) -> bool:
        prepared = self._prepared
        known = name in prepared.constants or name in prepared.parameters
        return known and prepared.shapes[name] == (self._classes,) and prepared.dtypes[name] == FLOAT

    def _is_plain(self, node: Node) -> bool:
        shapes, plain = self._prepared.shapes, {"transA": 0, "alpha": 1.0, "beta": 1.0}
        if any(node.attributes.get(name, value) != value for name, value in plain.items()):
            return False
        if node.inputs[2:] and not self._is_bias(node.inputs[2]):
            return False
        return len(shapes[node.inputs[0]]) > 1 and len(shapes[node.inputs[1]]) == 2

    def _weight(self, name: str, axis: int) -> tuple[str, int]:
        """Return the weight and its axis of classes, before a transposition if there is one."""
        node = self._makers.get(name)
        if node is not None and node.op == "Transpose" and self._take(name, "Transpose"):
            return node.inputs[0], 1 - axis
        return name, axis


class _Weights(NamedTuple):
    """Weights of the loss, as scalars or with one row per label.

    The loss of a row is the sum over the classes of `weight * -log probability`. The weight is
    `spread * classes[class]`, plus `own` for the label's class.
    """

    own: str
    spread: str
    """The part that label smoothing spreads over all classes, or "" without smoothing."""
    total: str
    """The sum of the weights of all classes."""
    classes: np.ndarray[tuple[int], np.dtype[np.float32]]
    weight: str
    """The weight of the batch."""
    divisor: str


def add_loss_in_chunks(graph: TrainingGraphBuilder, loss: CrossEntropy, head: Head) -> LossParts:
    """Append the loss of the scores of `head`, and its gradients at the head's inputs."""
    graph.enter("loss")
    return _Chunks(graph, loss, head).parts()


def _weights(graph: Graph, loss: CrossEntropy, classes: int, labels: str) -> tuple[str, _Weights]:
    """Return the labels, with 0 instead of the ignored label, and the weights of the loss."""
    op, smoothing = graph.op, loss.label_smoothing
    per_class = np.array(loss.class_weights or np.ones(classes), np.float32)
    factors = list[str]()
    if loss.ignored_label is not None:
        ignored = op("Equal", labels, graph.constant(np.int64(loss.ignored_label)))
        labels = op("Where", ignored, graph.constant(np.int64(0)), labels)  # the label may not be a class number
        factors.append(op("Cast", op("Not", ignored), to=1))
    spread = op("Mul", graph.scalar(smoothing / classes), *(factors or [graph.scalar(1.0)])) if smoothing else ""
    if loss.class_weights is not None:
        factors.append(op("Gather", graph.constant(per_class), labels))
    if not factors:
        weight = divisor = op("Cast", op("Size", labels), to=1)
        own = graph.scalar(1.0 - smoothing)
    else:
        own = op("Mul", *factors) if factors[1:] else factors[0]
        weight = op("ReduceSum", own, keepdims=0)
        # A batch without counted examples must have gradient 0, also with smoothed labels.
        divisor = op("Where", op("Greater", weight, graph.scalar(0.0)), weight, graph.scalar(np.inf))
        own = op("Mul", own, graph.scalar(1.0 - smoothing))
    total = own
    if spread:
        total = op("Add", own, op("Mul", spread, graph.scalar(float(per_class.sum()))))
    return labels, _Weights(own, spread, total, per_class, weight, divisor)


class _Chunks:
    """Appends the two passes over the classes."""

    def __init__(self, graph: TrainingGraphBuilder, loss: CrossEntropy, head: Head) -> None:
        self._graph, self._head = graph, head
        self._rows = [
            graph.op("Reshape", x, graph.ints(-1, graph.static_shape(weight, "the last layer")[1 - axis]))
            for x, weight, axis in head.products
        ]
        labels = graph.op("Reshape", TARGET, graph.ints(-1, 1))
        self._labels, self._weights = _weights(graph, loss, head.classes, labels)
        size = -(-head.classes // head.chunks)
        self._spans = [(start, min(start + size, head.classes)) for start in range(0, head.classes, size)]

    def parts(self) -> LossParts:
        op, weights = self._graph.op, self._weights
        highest, logarithm, total = self._normalize()
        negative = op("Neg", op("Div", weights.own, weights.divisor))
        scale = op("Div", weights.total, weights.divisor)
        done, found = logarithm, _Gradients(self._graph, self._head, self._rows)
        for span in self._spans:
            columns, scores = self._scores(span, done)
            logarithms = op("Sub", op("Sub", scores, highest), logarithm)
            gradient = op("Mul", op("Exp", logarithms), scale)
            if weights.spread:
                classes = self._graph.constant(weights.classes[slice(*span)].reshape(1, -1))
                gradient = op("Sub", gradient, op("Mul", op("Div", weights.spread, weights.divisor), classes))
            inside, local = self._local(span)
            change = op("Where", inside, negative, self._graph.scalar(0.0))
            gradient = op("ScatterElements", gradient, local, change, axis=1, reduction="add")
            done = found.add(gradient, columns)
        return LossParts(op("Div", total, weights.divisor), weights.weight, found.by_tensor())

    def _normalize(self) -> tuple[str, str, str]:
        """Return each row's highest score, the logarithm of its sum of powers, and the total loss.

        The powers are those of the differences to the highest score.
        """
        op, graph, weights = self._graph.op, self._graph, self._weights
        done, highs, sums, own, spread = self._rows[0], list[str](), list[str](), "", ""
        axis, lowest = graph.ints(1), graph.scalar(float(np.finfo(np.float32).min))
        for span in self._spans:
            _, scores = self._scores(span, done)
            high = op("Max", op("ReduceMax", scores, axis, keepdims=1), lowest)
            sums.append(op("ReduceSum", op("Exp", op("Sub", scores, high)), axis, keepdims=1))
            highs.append(high)
            inside, local = self._local(span)
            found = op("Where", inside, op("GatherElements", scores, local, axis=1), graph.scalar(0.0))
            done = own = op("Add", own, found) if own else found
            if weights.spread:
                product = op("MatMul", scores, graph.constant(weights.classes[slice(*span)].reshape(-1, 1)))
                spread = op("Add", spread, product) if spread else product
        high = op("Concat", *highs, axis=1)
        highest = op("ReduceMax", high, axis, keepdims=1)
        powers = op("Mul", op("Concat", *sums, axis=1), op("Exp", op("Sub", high, highest)))
        logarithm = op("Log", op("ReduceSum", powers, axis, keepdims=1))
        loss = op("Mul", weights.own, op("Add", logarithm, op("Sub", highest, own)))
        if weights.spread:
            both = op("Mul", op("Add", logarithm, highest), graph.scalar(float(weights.classes.sum())))
            loss = op("Add", loss, op("Mul", weights.spread, op("Sub", both, spread)))
        return highest, logarithm, op("ReduceSum", loss, keepdims=0)

    def _scores(self, span: tuple[int, int], done: str) -> tuple[list[str], str]:
        """Return the parts of the weights that belong to some classes, and the scores of these classes.

        They are computed after the tensor `done`.
        """
        graph, bias = self._graph, self._head.bias
        start = tie(graph, graph.ints(span[0]), done)
        columns = [add_part(graph, weight, axis, span, start) for _, weight, axis in self._head.products]
        added = [graph.op("Slice", bias, start, graph.ints(span[1]), graph.ints(0))] if bias else []
        for rows, part, product in zip(self._rows, columns, self._head.products, strict=True):
            added = [graph.op("Gemm", rows, part, *added, transB=1 - product.axis)]
        return columns, added[0]

    def _local(self, span: tuple[int, int]) -> tuple[str, str]:
        """Return a mask of the labels within a span of classes, and each label's index in the span.

        The indices of other labels are clipped to the span.
        """
        op, (start, stop) = self._graph.op, span
        place = op("Sub", self._labels, self._graph.constant(np.int64(start)))
        first, last = self._graph.constant(np.int64(0)), self._graph.constant(np.int64(stop - start - 1))
        local = op("Clip", place, first, last)
        return op("Equal", local, place), local


class _Gradients:
    """Sums up the gradients of the loss at the inputs of the last layer, chunk by chunk."""

    def __init__(self, graph: TrainingGraphBuilder, head: Head, rows: list[str]) -> None:
        self._graph, self._head, self._rows = graph, head, rows
        self._at_x: dict[int, str] = {}
        self._at_weights: list[list[str]] = [[] for _ in rows]
        self._at_bias = list[str]()

    def add(self, gradient: str, columns: list[str]) -> str:
        """Add the gradient at a chunk of scores, and return a tensor that is computed after it."""
        op, active, done = self._graph.op, self._graph.active, gradient
        if self._head.bias in active:
            self._at_bias.append(op("ReduceSum", gradient, self._graph.ints(0), keepdims=0))
        for place, (x, weight, axis) in enumerate(self._head.products):
            if weight in active:
                pair = (self._rows[place], gradient) if axis else (gradient, self._rows[place])
                done = op("Gemm", *pair, transA=1)
                self._at_weights[place].append(done)
            if x in active:
                before = [self._at_x[place]] if place in self._at_x else []
                done = self._at_x[place] = op("Gemm", gradient, columns[place], *before, transB=axis)
        return done

    def by_tensor(self) -> dict[str, str]:
        """Return the whole gradients by the tensors that they belong to."""
        op, found = self._graph.op, dict[str, list[str]]()
        for place, (x, weight, axis) in enumerate(self._head.products):
            if place in self._at_x:
                found.setdefault(x, []).append(self._graph.reshape_like(self._at_x[place], x))
            if self._at_weights[place]:
                found.setdefault(weight, []).append(op("Concat", *self._at_weights[place], axis=axis))
        if self._at_bias:
            found[self._head.bias] = [op("Concat", *self._at_bias, axis=0)]
        return {name: self._graph.total(parts) for name, parts in found.items()}
