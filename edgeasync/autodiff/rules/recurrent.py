"""Backpropagation through time (Werbos 1990), the common part for all recurrent layers.

The forward pass also outputs the state at every time step. A GRU's operator remains in the graph.
The gates of all its time steps are computed at once from the states, by the same products as in the
forward pass. An LSTM is replaced by a Scan that outputs its gates. Only the gradient of the state
is computed step by step, in a second Scan. The gradients of the weights and of the input are single
products over all time steps.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from edgeasync.autodiff.graph import Graph, write_nodes
from edgeasync.autodiff.rules.registry import Gradients, Step, TrainingGraphBuilder

X, W, R, B, LENGTHS, INITIAL_H, INITIAL_C, PEEPHOLES = range(8)
"""Positions of the inputs of an LSTM. A GRU has only the first six inputs."""


class RecurrentDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a recurrent layer, with its tensors for all time steps.

    If a tensor is described as "rows", its time and batch axes are merged; otherwise, they are
    separate.
    """

    graph: TrainingGraphBuilder
    hidden: int
    sizes: tuple[int, int]
    """Sizes of the time and batch axes for Reshape, with -1 for the dynamic axis."""
    backwards: bool
    x: str
    """The input, as rows."""
    weights: str
    recurrent: str
    biases: tuple[str, str] | None
    """The bias for the linear map of the input, and the bias for the linear map of the state."""
    states: str
    previous: str
    """The previous state at each time step."""
    initial_c: str
    """The initial cell state, or "" if it is zero."""
    gradients: tuple[str | None, str | None, str | None]
    """Gradients at the outputs: all states, the last state, and the last cell state."""

    def rows(self, value: str, width: int | None = None) -> str:
        """Merge the time and batch axes."""
        return self.graph.op("Reshape", value, self.graph.ints(-1, width or self.hidden))

    def times(self, rows: str, width: int | None = None) -> str:
        """Split rows into time and batch axes."""
        return self.graph.op("Reshape", rows, self.graph.ints(*self.sizes, width or self.hidden))

    def gates(self, value: str, count: int) -> list[str]:
        """Split weights or biases by gate."""
        return self.graph.add("Split", value, outputs=count, axis=0, num_outputs=count)

    def bias(self) -> str:
        """Return the sum of both biases, for cells that add them in the same place."""
        return self.graph.op("Add", *self.biases) if self.biases else ""

    def zeros(self) -> str:
        """Return zeros with the shape of a state."""
        if -1 not in self.sizes:
            return self.graph.constant(np.zeros((self.sizes[1], self.hidden), np.float32))
        return self.graph.op("ConstantOfShape", self.graph.op("Shape", self.states, start=1))

    def last_gradient(self) -> str:
        """Return the part of the last state's gradient that comes from the layer's outputs."""
        graph, (every, last, _) = self.graph, self.gradients
        found = [last] if last else []
        if every:
            index = graph.constant(np.int64(0 if self.backwards else -1))
            found.append(graph.op("Gather", every, index, axis=0))
        return graph.total(found) if found else self.zeros()

    def earlier_gradients(self) -> list[str]:
        """Return the part of the previous states' gradient that comes from the layer's outputs.

        The result is a list with one tensor, or an empty list if the output of all states is not
        used.
        """
        every = self.gradients[0]
        return [] if every is None else [shifted(self.graph, every, backwards=self.backwards)]

    def scan(self, states: list[str], inputs: list[str], body: "Body", *, reverse: bool) -> list[str]:
        """Append a loop over time, in this direction or in `reverse`.

        Return the last states, followed by the outputs.
        """
        return scan(self.graph, states, inputs, body, backwards=self.backwards != reverse)


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the gradients that a cell computes. Gradients of weights have ONNX's layout."""

    before_input: str
    """Gradients, as rows, at the result of the linear map of the input, for all gates."""
    recurrent: str
    """The gradient of the recurrent weights, by which the state is multiplied."""
    state_bias: str
    """The gradient of the bias for the state, or "" if it equals the gradient of the bias for the
    input.
    """
    initial: list[str]
    """The gradients of the initial state and, for an LSTM, of the initial cell state."""


Body = Callable[[list[str], list[str]], tuple[list[str], list[str]]]
"""A function that maps the states and inputs of a time step to the next states and the outputs."""


def scan(graph: Graph, states: list[str], inputs: list[str], body: Body, *, backwards: bool) -> list[str]:
    """Append a Scan over axis 0. Return its last states, followed by its outputs.

    `body` adds nodes to `graph`, and these nodes are then moved into the loop. They can use tensors
    from outside the loop.
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
    """Shift a tensor by one time step.

    The value at the first step becomes `first`, or zeros. The value at the last step is dropped.
    """
    if not first:
        pads = [-1, 0, 0, 1, 0, 0] if backwards else [1, 0, 0, -1, 0, 0]
        return graph.op("Pad", value, graph.ints(*pads))
    bounds = (1, np.iinfo(np.int64).max) if backwards else (0, -1)
    kept = graph.op("Slice", value, *[graph.ints(bound) for bound in bounds], graph.ints(0))
    return graph.op("Concat", *([kept, first] if backwards else [first, kept]), axis=0)


def differentiate(
    step: Step, cell: Callable[[RecurrentDirection], Local], activations: Sequence[str]
) -> Gradients:
    """Return the gradients of all inputs of a recurrent layer.

    `activations` lists the only activation functions that `cell` supports.
    """
    check(step, activations)
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
        stack(graph, [graph.op("Gemm", local.before_input, x, transA=1) for local in found]),
        stack(graph, [local.recurrent for local in found]),
        stack(graph, [_bias_gradient(graph, local) for local in found]) if step.input(B) else None,
        None,
    ]
    return [*gradients, *[stack(graph, list(parts)) for parts in zip(*[f.initial for f in found], strict=True)]]


def _bias_gradient(graph: Graph, local: Local) -> str:
    total = graph.op("ReduceSum", local.before_input, graph.ints(0), keepdims=0)
    return graph.op("Concat", total, local.state_bias or total, axis=0)


def stack(graph: Graph, parts: list[str], axis: int = 0) -> str:
    """Combine tensors of all directions into one with a direction axis."""
    wide = [graph.op("Unsqueeze", part, graph.ints(axis)) for part in parts]
    return wide[0] if len(wide) == 1 else graph.op("Concat", *wide, axis=axis)


def check(step: Step, activations: Sequence[str]) -> None:
    """Raise `GraphError` for unsupported options, which no exporter writes by default."""
    if step.attribute("layout", 0):
        raise step.refused("layout is 1; export it with time before batch (layout = 0)")
    if step.attribute("clip", None) is not None:
        raise step.refused("its gates are clipped")
    if step.attribute("input_forget", 0):
        raise step.refused("its input and forget gates are coupled (input_forget = 1)")
    if step.input(PEEPHOLES):
        raise step.refused("it has peepholes")
    given = [name.decode() if isinstance(name, bytes) else name for name in step.attribute("activations", [])]
    wanted = list(activations) * direction_count(step)
    if given and [name.lower() for name in given] != [name.lower() for name in wanted]:
        raise step.refused(f"its activations are {', '.join(given)} instead of {', '.join(wanted)}")
    times, *rest = step.shape(X)
    if times is None and None in rest:
        raise step.refused("both time and batch sizes are free; export it with a fixed number of time steps")
    if step.input(LENGTHS):
        lengths = step.graph.constants.get(step.input(LENGTHS))
        if lengths is None or (lengths != times).any():
            raise step.refused("its sequences have individual lengths; omit sequence_lens")


def ways(step: Step) -> list[bool]:
    """Return for each direction whether it runs backwards in time."""
    direction = step.attribute("direction", "forward")
    return [False, True] if direction == "bidirectional" else [direction == "reverse"]


def direction_count(step: Step) -> int:
    """Return the number of directions."""
    return 2 if step.attribute("direction", "forward") == "bidirectional" else 1


def _directions(step: Step, x: str) -> list[RecurrentDirection]:
    graph, count = step.graph, direction_count(step)
    hidden = graph.static_shape(step.input(R), step.node.where)[-1]
    times, batch, _ = step.shape(X)
    states = step.output(0)
    every, last, cells = [*step.gradients, None, None, None][:3]
    made = []
    for index, backwards in enumerate(ways(step)):
        own = pick(graph, states, index, count, 1)
        initial_h, initial_c = (initial_state(step, position, index, count) for position in (INITIAL_H, INITIAL_C))
        # The states have no direction axis any more, so the initial ones must not have it either.
        first = graph.op("Unsqueeze", initial_h, graph.ints(0)) if initial_h else ""
        biases = None
        if step.input(B):
            bias = pick(graph, step.input(B), index, count, 0)
            first_bias, second_bias = graph.add("Split", bias, outputs=2, axis=0, num_outputs=2)
            biases = (first_bias, second_bias)
        made.append(
            RecurrentDirection(
                graph=graph,
                hidden=hidden,
                sizes=(-1 if times is None else times, -1 if batch is None else batch),
                backwards=backwards,
                x=x,
                weights=pick(graph, step.input(W), index, count, 0),
                recurrent=pick(graph, step.input(R), index, count, 0),
                biases=biases,
                states=own,
                previous=shifted(graph, own, backwards=backwards, first=first),
                initial_c=initial_c,
                gradients=(
                    every and pick(graph, every, index, count, 1),
                    last and pick(graph, last, index, count, 0),
                    cells and pick(graph, cells, index, count, 0),
                ),
            )
        )
    return made


def initial_state(step: Step, position: int, index: int, count: int) -> str:
    """Return the initial state of one direction, or "" if it is zero."""
    name = step.input(position)
    if not name or (name in step.graph.constants and not step.graph.constants[name].any()):
        return ""
    return pick(step.graph, name, index, count, 0)


def pick(graph: Graph, value: str, index: int, count: int, axis: int) -> str:
    """Return one direction of a tensor, without the direction axis."""
    if count == 1:
        return graph.op("Squeeze", value, graph.ints(axis))
    return graph.op("Gather", value, graph.constant(np.int64(index)), axis=axis)
