"""What the gradients of recurrent layers share: backpropagation through time (Werbos 1990), mostly outside time.

The forward operator stays as it is and also gives the state at every time. From all states, the gates of all
times come at once, by the same products as in the forward pass. Only the gradient of the state has to go through
time, and does so in a Scan; those of weights and input are single products over all times again.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from edgeasync.autodiff.graph import Graph, write_nodes
from edgeasync.autodiff.rules.registry import Gradients, Step, TrainingGraphBuilder

X, W, R, B, LENGTHS, INITIAL_H, INITIAL_C, PEEPHOLES = range(8)
"""Positions of an LSTM's inputs; a GRU has the first six of them."""


class RecurrentDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a recurrent layer while its gradient is made: tensors of all times, without that axis.

    Times and batch are one axis where a comment says rows, otherwise they are two.
    """

    graph: TrainingGraphBuilder
    hidden: int
    sizes: tuple[int, int]
    """Times and batch as Reshape takes them: -1 for the one that is free."""
    backwards: bool
    x: str
    """Rows of the input."""
    weights: str
    recurrent: str
    biases: tuple[str, str] | None
    """Of the input's product and of the state's."""
    states: str
    previous: str
    """At each time, the state before it."""
    initial_c: str
    """ "" where the cells begin with zeros."""
    gradients: tuple[str | None, str | None, str | None]
    """Of all states, the last state and the last cells."""

    def rows(self, value: str, width: int | None = None) -> str:
        """Make times and batch one axis."""
        return self.graph.op("Reshape", value, self.graph.ints(-1, width or self.hidden))

    def times(self, rows: str, width: int | None = None) -> str:
        """Make times and batch two axes again."""
        return self.graph.op("Reshape", rows, self.graph.ints(*self.sizes, width or self.hidden))

    def gates(self, value: str, count: int) -> list[str]:
        """Cut weights or biases into those of each gate."""
        return self.graph.add("Split", value, outputs=count, axis=0, num_outputs=count)

    def bias(self) -> str:
        """Return both biases as one; only for cells that add both alike."""
        return self.graph.op("Add", *self.biases) if self.biases else ""

    def zeros(self) -> str:
        """Return zeros of the shape of the state at one time."""
        if -1 not in self.sizes:
            return self.graph.constant(np.zeros((self.sizes[1], self.hidden), np.float32))
        return self.graph.op("ConstantOfShape", self.graph.op("Shape", self.states, start=1))

    def last_gradient(self) -> str:
        """Return the gradient that reaches the last state from outside the recurrence."""
        graph, (every, last, _) = self.graph, self.gradients
        found = [last] if last else []
        if every:
            index = graph.constant(np.int64(0 if self.backwards else -1))
            found.append(graph.op("Gather", every, index, axis=0))
        return graph.total(found) if found else self.zeros()

    def earlier_gradients(self) -> list[str]:
        """Return, for each time, the gradient from outside at the state before it; without one, nothing."""
        every = self.gradients[0]
        return [] if every is None else [shifted(self.graph, every, backwards=self.backwards)]

    def scan(self, states: list[str], inputs: list[str], body: "Body", *, reverse: bool) -> list[str]:
        """Append a loop over this direction's times, or against them; return the last states, then the outputs."""
        return scan(self.graph, states, inputs, body, backwards=self.backwards != reverse)


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell's own part of the gradient finds, by tensor name; weights as they lie in ONNX."""

    before_input: str
    """Rows of the gradients of the gates' inputs, as the input's product reaches them."""
    recurrent: str
    """The gradient of the state's weights."""
    state_bias: str
    """That of the state's bias, "" where it is as the input's."""
    initial: list[str]
    """Those of the initial state and, for an LSTM, of the initial cells."""


Body = Callable[[list[str], list[str]], tuple[list[str], list[str]]]
"""From the states and the inputs at one time: the next states and the outputs."""


def scan(graph: Graph, states: list[str], inputs: list[str], body: Body, *, backwards: bool) -> list[str]:
    """Append a Scan over axis 0; return its last states, then its outputs.

    `body` adds nodes to the same graph, which end up in the loop; other tensors can be read from there too.
    """
    outside, graph.nodes = graph.nodes, []
    before = [graph.new_name("state") for _ in states]
    slices = [graph.new_name("slice") for _ in inputs]
    after, results = body(before, slices)
    nodes, graph.nodes = graph.nodes, outside
    proto = helper.make_graph(
        write_nodes(nodes, {}),
        graph.new_name("body"),
        [_of_any_shape(name) for name in (*before, *slices)],
        [_of_any_shape(name) for name in (*after, *results)],
    )
    way = int(backwards)
    return graph.add(
        "Scan",
        *states,
        *inputs,
        outputs=len(states) + len(results),
        body=proto,
        num_scan_inputs=len(inputs),
        scan_input_directions=[way] * len(inputs),
        scan_output_directions=[way] * len(results),
    )


def _of_any_shape(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def shifted(graph: Graph, value: str, *, backwards: bool, first: str = "") -> str:
    """Move everything one time on; what comes first is `first` or zeros, and the last one is lost."""
    if not first:
        pads = [-1, 0, 0, 1, 0, 0] if backwards else [1, 0, 0, -1, 0, 0]
        return graph.op("Pad", value, graph.ints(*pads))
    bounds = (1, np.iinfo(np.int64).max) if backwards else (0, -1)
    kept = graph.op("Slice", value, *[graph.ints(bound) for bound in bounds], graph.ints(0))
    return graph.op("Concat", *([kept, first] if backwards else [first, kept]), axis=0)


def differentiate(
    step: Step, cell: Callable[[RecurrentDirection], Local], activations: Sequence[str]
) -> Gradients:
    """Return the gradients of all inputs of a recurrent layer; `activations` are those that `cell` knows."""
    _check(step, activations)
    graph, where = step.graph, step.node.where
    width = graph.static_shape(step.input(W), where)[-1]
    x = graph.op("Reshape", step.input(X), graph.ints(-1, width))
    directions = _directions(step, x)
    found = [cell(direction) for direction in directions]
    grad_x = ""
    for direction, local in zip(directions, found, strict=True):
        chain = [grad_x] if grad_x else []
        grad_x = graph.op("Gemm", local.before_input, direction.weights, *chain)
    gradients: list[str | None] = [
        graph.reshape_like(grad_x, step.input(X)),
        _stack(graph, [graph.op("Gemm", local.before_input, x, transA=1) for local in found]),
        _stack(graph, [local.recurrent for local in found]),
        _stack(graph, [_bias_gradient(graph, local) for local in found]) if step.input(B) else None,
        None,
    ]
    return [*gradients, *[_stack(graph, list(parts)) for parts in zip(*[f.initial for f in found], strict=True)]]


def _bias_gradient(graph: Graph, local: Local) -> str:
    total = graph.op("ReduceSum", local.before_input, graph.ints(0), keepdims=0)
    return graph.op("Concat", total, local.state_bias or total, axis=0)


def _stack(graph: Graph, parts: list[str]) -> str:
    wide = [graph.op("Unsqueeze", part, graph.ints(0)) for part in parts]
    return wide[0] if len(wide) == 1 else graph.op("Concat", *wide, axis=0)


def _check(step: Step, activations: Sequence[str]) -> None:
    """Refuse what no exporter writes unless asked for by hand."""
    if step.attribute("layout", 0):
        raise step.refused("layout = 1; put time before the batch (layout = 0)")
    if step.attribute("clip", None) is not None:
        raise step.refused("its gates are clipped")
    if step.attribute("input_forget", 0):
        raise step.refused("its input and forget gates are coupled (input_forget = 1)")
    if step.input(PEEPHOLES):
        raise step.refused("it has peepholes")
    given = [name.decode() if isinstance(name, bytes) else name for name in step.attribute("activations", [])]
    wanted = list(activations) * _count(step)
    if given and [name.lower() for name in given] != [name.lower() for name in wanted]:
        raise step.refused(f"its activations are {', '.join(given)} instead of {', '.join(wanted)}")
    times, *rest = step.shape(X)
    if times is None and None in rest:
        raise step.refused("times and batch are both free; export it with a fixed number of times")
    if step.input(LENGTHS):
        lengths = step.graph.constants.get(step.input(LENGTHS))
        if lengths is None or (lengths != times).any():
            raise step.refused("its sequences have lengths of their own; leave sequence_lens out")


def _count(step: Step) -> int:
    return 2 if step.attribute("direction", "forward") == "bidirectional" else 1


def _directions(step: Step, x: str) -> list[RecurrentDirection]:
    graph, count = step.graph, _count(step)
    hidden = graph.static_shape(step.input(R), step.node.where)[-1]
    times, batch, _ = step.shape(X)
    states = step.output(0)
    every, last, cells = [*step.gradients, None, None, None][:3]
    reverse = step.attribute("direction", "forward") == "reverse"
    made = []
    for index in range(count):
        backwards = reverse or index == 1
        own = _pick(graph, states, index, count, 1)
        initial_h, initial_c = (_initial(step, position, index, count) for position in (INITIAL_H, INITIAL_C))
        # The states themselves have no axis of directions any more, so neither have the initial ones.
        first = graph.op("Unsqueeze", initial_h, graph.ints(0)) if initial_h else ""
        biases = None
        if step.input(B):
            bias = _pick(graph, step.input(B), index, count, 0)
            first_bias, second_bias = graph.add("Split", bias, outputs=2, axis=0, num_outputs=2)
            biases = (first_bias, second_bias)
        made.append(
            RecurrentDirection(
                graph=graph,
                hidden=hidden,
                sizes=(-1 if times is None else times, -1 if batch is None else batch),
                backwards=backwards,
                x=x,
                weights=_pick(graph, step.input(W), index, count, 0),
                recurrent=_pick(graph, step.input(R), index, count, 0),
                biases=biases,
                states=own,
                previous=shifted(graph, own, backwards=backwards, first=first),
                initial_c=initial_c,
                gradients=(
                    every and _pick(graph, every, index, count, 1),
                    last and _pick(graph, last, index, count, 0),
                    cells and _pick(graph, cells, index, count, 0),
                ),
            )
        )
    return made


def _initial(step: Step, position: int, index: int, count: int) -> str:
    """Return an initial state of one direction, "" for zeros, which need no copying."""
    name = step.input(position)
    if not name or (name in step.graph.constants and not step.graph.constants[name].any()):
        return ""
    return _pick(step.graph, name, index, count, 0)


def _pick(graph: Graph, value: str, index: int, count: int, axis: int) -> str:
    """Return one direction of a tensor, without the axis of directions."""
    if count == 1:
        return graph.op("Squeeze", value, graph.ints(axis))
    return graph.op("Gather", value, graph.constant(np.int64(index)), axis=axis)
