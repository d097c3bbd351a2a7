"""Runs models while a training graph is built, without keeping all of their tensors in memory."""

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnxruntime

from edgeasync.autodiff.graph import Array, Node, free_inputs, model_of, refill, tensor, value_info
from edgeasync.autodiff.serialization import detach, is_large

PART_NODES = 16
"""Maximum number of nodes that run together. Their results are in memory at the same time."""


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Open an onnxruntime session for a model, without optimization and without log output.

    The session allocates every tensor separately. With onnxruntime's arena, one result that is kept
    would keep the memory of all results.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def run_every_tensor(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a model, and return everything that its nodes compute. Raises the errors of onnxruntime."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    names = [name for node in model.graph.node for name in node.output if name]
    del whole.graph.value_info[:]
    refill(whole.graph.output, [onnx.ValueInfoProto(name=name) for name in names])
    return dict(zip(names, open_session(whole.SerializeToString()).run(names, feeds), strict=True))


def open_in_place(model: bytes) -> tuple[onnxruntime.InferenceSession, dict[str, Array]]:
    """Open a session that does not copy the large constants of a serialized model.

    Return the session, and these constants, which each run needs as further inputs.
    """
    light, values = detach(model)
    refill(light.graph.initializer, [entry for entry in light.graph.initializer if entry.name not in values])
    light.graph.input.extend([value_info(name, value.dtype, value.shape) for name, value in values.items()])
    return open_session(light.SerializeToString()), values


class PartedModel:
    """A model whose nodes run in parts, one after the other.

    So only the tensors of one part, and those that later parts read, are in memory. `nodes` are in
    topological order. `constants` are the tensors that are neither computed nor passed to `run`.
    """

    def __init__(self, nodes: Sequence[Node], constants: Mapping[str, Array], *, opset: int) -> None:
        nodes = _computed_late(nodes, constants)
        self._parts = [
            _Part(nodes[start : start + PART_NODES], constants, opset)
            for start in range(0, len(nodes), PART_NODES)
        ]
        last = {name: number for number, part in enumerate(self._parts) for name in part.reads}
        self._keeps = [
            {name for name in part.outputs if last.get(name, 0) > number}
            for number, part in enumerate(self._parts)
        ]
        self._drops = [
            {name for name in part.reads if last[name] == number} for number, part in enumerate(self._parts)
        ]

    def run(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield the names and values of all tensors that nodes compute.

        Running statistics in `feeds` may be overwritten. Raises the errors of onnxruntime.
        """
        known = dict(feeds)
        for part, keeps, drops in zip(self._parts, self._keeps, self._drops, strict=True):
            values = part.run(known)
            known |= {name: values[name] for name in keeps}
            for name in drops:
                known.pop(name, None)
            yield from values.items()


def _computed_late(nodes: Sequence[Node], constants: Mapping[str, Array]) -> list[Node]:
    """Move nodes that read only constants to the first nodes that need them.

    Otherwise, all weights would be dequantized before the first layer runs.
    """
    placed, waiting, known = list[Node](), dict[str, Node](), set(constants)
    for node in nodes:
        if known.issuperset(free_inputs(node)):
            known.update(node.outputs)
            waiting |= {name: node for name in node.outputs if name}
        else:
            _place(node, waiting, placed)
    while waiting:
        _place(_take(next(iter(waiting)), waiting), waiting, placed)
    return placed


def _place(node: Node, waiting: dict[str, Node], placed: list[Node]) -> None:
    """Append a node, after those nodes in `waiting` that it needs."""
    open_nodes = [node]
    while open_nodes:
        needed = next((name for name in free_inputs(open_nodes[-1]) if name in waiting), None)
        if needed is None:
            placed.append(open_nodes.pop())
        else:
            open_nodes.append(_take(needed, waiting))


def _take(name: str, waiting: dict[str, Node]) -> Node:
    node = waiting[name]
    for each in node.outputs:
        waiting.pop(each, None)
    return node


class _Part:
    """Consecutive nodes of a model, which run in one session."""

    def __init__(self, nodes: Sequence[Node], constants: Mapping[str, Array], opset: int) -> None:
        self._nodes, self._opset = nodes, opset
        self.outputs = [name for node in nodes for name in node.outputs if name]
        self.reads = {name for node in nodes for name in free_inputs(node)}.difference(self.outputs)
        read = {name: value for name, value in constants.items() if name in self.reads}
        self._fed = {name: value for name, value in read.items() if is_large(value.dtype, value.shape)}
        self._stored = {name: value for name, value in read.items() if name not in self._fed}
        self._session: onnxruntime.InferenceSession | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def run(self, known: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of all outputs. `known` contains the tensors that are not constants."""
        feeds = {name: known[name] for name in self.reads if name in known} | self._fed
        shapes = {name: value.shape for name, value in feeds.items()}
        if self._session is None or shapes != self._shapes:
            self._session, self._shapes = self._open(feeds), shapes
        return dict(zip(self.outputs, self._session.run(self.outputs, feeds), strict=True))

    def _open(self, feeds: Mapping[str, Array]) -> onnxruntime.InferenceSession:
        """Open a session for inputs of these shapes, which onnxruntime needs to load some operators."""
        model = model_of(
            self._nodes,
            [value_info(name, value.dtype, value.shape) for name, value in feeds.items()],
            [onnx.ValueInfoProto(name=name) for name in self.outputs],
            [tensor(name, value) for name, value in self._stored.items()],
            opset=self._opset,
        )
        return open_session(model.SerializeToString())
