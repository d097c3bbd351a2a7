"""Chooses the output of a model that the loss uses."""

from collections.abc import Iterator

import msgspec
import onnx
from onnx import TensorProto

from edgeasync.autodiff.batch import data_inputs
from edgeasync.autodiff.graph import Node, free_inputs, needed, read_nodes
from edgeasync.autodiff.reading import check_domains, initial_values
from edgeasync.errors import GraphError, argument

_FLOATS = frozenset({TensorProto.UNDEFINED, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})

_ENDING = frozenset(
    {
        "Add", "ArgMax", "Cast", "Clip", "Div", "Exp", "Flatten", "HardSigmoid", "Identity", "Log", "LogSoftmax",
        "Max", "Min", "Mul", "Neg", "Reciprocal", "ReduceMax", "ReduceSum", "Reshape", "Sigmoid", "Softmax",
        "Squeeze", "Sub", "TopK", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that compute probabilities, their maximum, or a label from scores."""


_LAYERS = frozenset({"Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})


class Output(msgspec.Struct, frozen=True):
    """The chosen tensor, and the reason why it was chosen among several outputs."""

    name: str
    remark: str | None = None


def choose_output(model: onnx.ModelProto, output: str | None) -> Output:
    """Return the tensor that the loss uses: `output`, or else the only output that it can mean.

    An output that is computed from another one without weights is skipped, such as the
    probabilities beside the scores. If an output is computed by layers from all others, such as the
    scores beside an embedding, it is chosen.

    Raises `GraphError` if the output is ambiguous, missing, or computed by operators that devices
    do not support.
    """
    names = [str(value.name) for value in model.graph.output]
    if not names:
        raise GraphError("the model has no output; export the model again")
    if output is not None:
        if output not in {made for node in model.graph.node for made in node.output}:
            raise GraphError(f"the model has no tensor {output!r}; its outputs are {', '.join(names)}")
        found = Output(output)
    else:
        found = Output(names[0]) if len(names) == 1 else _only(model, names)
    check_domains(model, found.name)
    return found


def _only(model: onnx.ModelProto, names: list[str]) -> Output:
    """Choose one of several outputs. Raises `GraphError` if the choice is ambiguous."""
    floats = [value for value in model.graph.output if _may_be_float(value)]
    candidates = [str(value.name) for value in floats]
    if len(candidates) == 1:
        return Output(candidates[0])
    dictionaries = [node.input[0] for node in model.graph.node if node.op_type == "ZipMap"]
    if not candidates and len(dictionaries) == 1:
        return Output(dictionaries[0], f"trains {dictionaries[0]!r}, from which a ZipMap node makes dictionaries")
    way = _Way(model)
    trained = [name for name in candidates if way.is_trained(name)]
    scores = [name for name in trained if not any(way.is_ending(other, name) for other in trained)]
    last = [name for name in scores if all(way.has_layer(other, name) for other in scores if other != name)]
    if len(last) == 1:
        reasons = ["no other output depends on the data and on weights"] if trained == last else []
        if made := [repr(name) for name in trained if name not in scores]:
            reasons.append(f"{', '.join(made)} is computed from scores without weights")
        if used := [repr(name) for name in scores if name not in last]:
            reasons.append(f"layers compute it from {', '.join(used)}")
        said = f"the model has {len(names)} outputs; trains {last[0]!r}, because {' and '.join(reasons)}"
        return Output(last[0], f"{said}; to train another, set output")
    name = (*dictionaries, *scores, *candidates, *names)[0]
    check_domains(model, name)  # otherwise following the advice would fail again
    told = [f"{value.name} of shape {_shape(value)}" for value in floats] or names
    raise GraphError(
        f"the model has {len(names)} outputs ({', '.join(told)}); choose the one to train: "
        f"{argument('output', name)}, "
        + ("the input of the ZipMap node, which makes dictionaries" if dictionaries else "for example")
    )


class _Way:
    """Follows the computation of outputs backwards, and ignores Identity nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._same: dict[str, str] = {}
        self._nodes: list[Node] = []
        for node in read_nodes(model.graph.node):
            node.inputs = [self._same.get(name, name) for name in node.inputs]
            if node.op == "Identity":
                self._same[node.outputs[0]] = node.inputs[0]
            else:
                self._nodes.append(node)
        self._makers = {name: node for node in self._nodes for name in node.outputs}
        self._inputs = {entry.name for entry in data_inputs(model)}
        values = initial_values(model).items()
        self._weights = {name for name, value in values if value.dtype.kind == "f" and value.size > 1}

    def _before(self, name: str) -> set[str]:
        nodes = needed(self._nodes, [self._same.get(name, name)])
        return {each for node in nodes for each in free_inputs(node)}

    def is_trained(self, name: str) -> bool:
        """Return whether a tensor depends on the data and on arrays that may be parameters."""
        before = self._before(name)
        return not before.isdisjoint(self._inputs) and not before.isdisjoint(self._weights)

    def has_layer(self, before: str, name: str) -> bool:
        """Return whether a tensor is computed from the tensor `before` by at least one layer."""
        before, name = self._same.get(before, before), self._same.get(name, name)
        reached, layered = {before}, set[str]()
        for node in needed(self._nodes, [name]):
            if reached.isdisjoint(inputs := free_inputs(node)):
                continue
            reached.update(node.outputs)
            if node.op in _LAYERS or not layered.isdisjoint(inputs):
                layered.update(node.outputs)
        return name in layered

    def is_ending(self, scores: str, name: str) -> bool:
        """Return whether a tensor is computed from `scores` alone, by operators without weights."""
        scores, name = self._same.get(scores, scores), self._same.get(name, name)
        waiting, found = [name], False
        while waiting and scores != name:
            each = waiting.pop()
            if each == scores:
                found = True
            elif each in self._inputs or each in self._weights:
                return False
            elif (node := self._makers.get(each)) is not None and node.op != "Constant":
                if node.op not in _ENDING:
                    return False
                waiting += node.inputs
        return found


def _may_be_float(value: onnx.ValueInfoProto) -> bool:
    """Return whether the type of an output permits its use by a loss."""
    return value.type.WhichOneof("value") in (None, "tensor_type") and value.type.tensor_type.elem_type in _FLOATS


def _shape(value: onnx.ValueInfoProto) -> str:
    return "(" + ", ".join(_sizes(value)) + ")"


def _sizes(value: onnx.ValueInfoProto) -> Iterator[str]:
    for dim in value.type.tensor_type.shape.dim:
        yield str(dim.dim_value or dim.dim_param or "?")
