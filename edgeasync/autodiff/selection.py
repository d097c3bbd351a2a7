"""Selects the initializers to train, by name patterns and by hints that the exporter left."""

from collections.abc import Collection, Iterator, Mapping

import msgspec
import numpy as np
import onnx

from edgeasync.autodiff import reading
from edgeasync.autodiff.exporters import kinds_of_inputs
from edgeasync.autodiff.graph import FLOAT, Array
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.parameters import matches
from edgeasync.structs import parse_json

FROZEN = "edgeasync.frozen"
"""Metadata key with a JSON list of parameters that were frozen in torch. `to_onnx` writes it."""


class Selection(msgspec.Struct, frozen=True):
    """The selected names of trained parameters, updated statistics and frozen arrays."""

    trained: list[str]
    statistics: set[str]
    frozen: list[str]
    held: list[str]
    """Layer weights in Constant nodes.

    They are not trained, because the model stores other layer weights as initializers.
    """
    unfit: dict[str, str]
    """Layer weights that cannot be trained, with the reason: their precision, or values that are
    not finite.
    """


def select(model: onnx.ModelProto, values: Mapping[str, Array], settings: GraphSettings) -> Selection:
    """Select what to train by the patterns of `settings`.

    The running statistics of a batch norm are updated if any of its parameters is trained.
    Parameters that the file marks as frozen stay frozen unless a pattern of `train` matches them;
    statistics must be named in full. Raises `GraphError` if the model has no float32 parameter, or
    if a pattern matches nothing.
    """
    statistics, norms = _statistics(model, values)
    candidates = _candidates(model, values, settings.train or ())
    names = list(dict.fromkeys([*candidates, *sorted(statistics)]))
    if not names:
        raise GraphError(_nothing_to_train(model, values))
    chosen = _chosen(names, settings)
    thawed = {name for name in names if settings.names(name)}.difference(statistics).union(settings.train or ())
    said = [name for name in _frozen(model) if name not in thawed]
    frozen = [name for name in said if name in chosen]
    chosen -= set(said)
    live = {name for norm in norms if chosen.intersection(norm) for name in norm[2:]}.difference(said)
    trained = [name for name in candidates if name in chosen and name not in statistics]
    layers = _read_by_layers(model)
    held = [name for name in reading.held_by_constants(model) if name in layers and name not in candidates]
    unfit = {
        name: str(value.dtype) if value.dtype != FLOAT else "not finite"
        for name, value in values.items()
        if name in layers and name not in said and "float" in str(value.dtype)
        if value.dtype != FLOAT or not np.isfinite(value).all()
    }
    return Selection(trained, live, frozen, held, unfit if settings.train is None else {})


def _frozen(model: onnx.ModelProto) -> list[str]:
    said = next((entry.value for entry in model.metadata_props if entry.key == FROZEN), "[]")
    try:
        return parse_json(said, list[str])
    except ValueError as error:
        raise GraphError(
            f"the model's metadata {FROZEN!r} is not a list of names; export the model again"
        ) from error


def _candidates(model: onnx.ModelProto, values: Mapping[str, Array], named: Collection[str]) -> list[str]:
    """Return the names of tensors that may be parameters.

    These are float32 initializers with at least one axis, and all tensors that the settings name in
    full.

    Scalars, exponents, Constant nodes, and zeros as the initial state of a recurrent layer are
    assumed to be constants, unless the settings name them or torch's newer exporter marked them as
    parameters. However, if no layer has
    a weight that is an initializer, the weights are in Constant nodes, as paddle2onnx writes them.
    """
    untrained, kinds = _fixed(model), kinds_of_inputs(model)
    untrained.update(name for name, kind in kinds.items() if kind != "PARAMETER")
    untrained.update(_zero_states(model, values).difference(kinds))
    held = reading.held_by_constants(model).keys()

    def may_be(name: str, value: Array) -> bool:
        if value.dtype != FLOAT or not value.size or not np.isfinite(value).all():
            return False
        return name in named or bool((value.ndim or name in kinds) and name not in untrained)

    found = [name for name, value in values.items() if may_be(name, value)]
    layers, weights = _read_by_layers(model), _weights(model, values)
    apart = any(name in layers and name not in held for name in found)
    return [name for name in found if name in named or name not in held or (name in weights and not apart)]


_WEIGHTED = frozenset(
    {"BatchNormalization", "Conv", "ConvTranspose", "GRU", "Gather", "Gemm", "InstanceNormalization", "LSTM",
     "LayerNormalization", "MatMul", "RNN"}
)  # fmt: skip


def _reads(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, list[str]]]:
    """Yield the nodes that compute values, with their inputs.

    A transposed or reshaped weight is replaced by the weight itself.
    """
    same: dict[str, str] = {}
    for node in model.graph.node:
        read = [same.get(name, name) for name in node.input]
        if node.op_type in _MOVING and read:
            same[node.output[0]] = read[0]
        else:
            yield node, read


def _read_by_layers(model: onnx.ModelProto) -> set[str]:
    return {name for node, read in _reads(model) if node.op_type in _WEIGHTED for name in read}


def _weights(model: onnx.ModelProto, values: Mapping[str, Array]) -> set[str]:
    """Return the weights of layers, and tensors that are added to or multiplied by layer outputs.

    A scalar that is added or multiplied is assumed to belong to a formula such as a hard sigmoid,
    unless the layer has only one output value.
    """
    found, made, single = _read_by_layers(model), set[str](), set[str]()
    for node, read in _reads(model):
        if node.op_type in _WEIGHTED:
            made.update(node.output)
            if any(1 in values[name].shape for name in read if name in values):
                single.update(node.output)
        elif node.op_type in ("Add", "Mul") and made.intersection(read):
            found.update(name for name in read if name in values and (values[name].size > 1 or single & {*read}))
            made.update(node.output)
    return found


_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_MOVING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def _fixed(model: onnx.ModelProto) -> set[str]:
    """Return inputs that configure an operator, such as the bounds of a Clip."""
    found: set[str] = set()
    for node in reversed(model.graph.node):
        first = _FIXED_FROM.get(node.op_type)
        if first is not None:
            found.update(node.input[first:])
        elif node.op_type in _MOVING and found.intersection(node.output):
            found.add(node.input[0])
    return found


_FIXED_FROM = {
    "Clip": 1, "DequantizeLinear": 1, "Dropout": 1, "MatMulNBits": 1, "OneHot": 0, "Pad": 1, "Pow": 1,
    "QuantizeLinear": 1, "Resize": 1, "RotaryEmbedding": 1,
}  # fmt: skip
"""For each operator, the position of its first input that is configuration instead of data."""


def _zero_states(model: onnx.ModelProto, values: Mapping[str, Array]) -> set[str]:
    """Return the initial states of recurrent layers that are all zeros, before they are expanded."""
    expanded = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Expand"}
    states = [name for node in model.graph.node if node.op_type in _RECURRENT for name in node.input[5:7]]
    named = {expanded.get(name, name) for name in states}
    return {name for name in named if name in values and not values[name].any()}


def _statistics(model: onnx.ModelProto, values: Mapping[str, Array]) -> tuple[set[str], list[tuple[str, ...]]]:
    """Return the running statistics, and the scale, bias, mean and variance of each batch norm."""
    same: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.output[0] not in values:
            same[node.output[0]] = same.get(node.input[0], node.input[0])
    norms = [
        tuple([same.get(name, name) for name in node.input[1:5]])
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
    ]
    return {name for norm in norms for name in norm[2:]}, norms


def _nothing_to_train(model: onnx.ModelProto, values: Mapping[str, Array]) -> str:
    """Return the reason why a model has no trainable parameter, usually its half precision."""
    others = sorted({str(value.dtype) for value in values.values() if value.ndim and value.dtype != FLOAT})
    if any("float" in name for name in others):
        return f"the model has no float32 parameter, only {', '.join(others)}; export it in float32"
    if any(value.dtype == FLOAT and not np.isfinite(value).all() for value in values.values()):
        return "all parameters of the model contain NaN or infinite values; choose another file"
    if any(node.op_type in ("DequantizeLinear", "QLinearConv", "QLinearMatMul") for node in model.graph.node):
        return "all weights of the model are quantized; use the original file, before it was quantized"
    return (
        "the model has no parameter, that is, no float32 initializer with at least one axis; check the file, or "
        "export it again"
    )


def _chosen(names: list[str], settings: GraphSettings) -> set[str]:
    for pattern in (*(settings.train or ()), *settings.freeze):
        if not any(matches(name, pattern) for name in names):
            raise GraphError(f"no parameter matches {pattern!r}; the parameters are {', '.join(names)}")
    return {
        name
        for name in names
        if (settings.train is None or settings.names(name))
        and not any(matches(name, pattern) for pattern in settings.freeze)
    }
