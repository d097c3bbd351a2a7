"""Rejects models that an exporter changed in ways that would silently alter their training.

Exporters fold batch norms into convolutions, merge equal tensors, and precompute constants that
then look like parameters. The checks were developed with torch 2.13 and skl2onnx 1.20.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from edgeasync.autodiff import reading
from edgeasync.autodiff.adapters import is_adapter
from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import Array, Node, free_inputs, needed, read_nodes
from edgeasync.autodiff.masks import without_masks
from edgeasync.autodiff.producers import kind_of_producer, producer_of
from edgeasync.autodiff.settings import GraphSettings, patterns_for
from edgeasync.autodiff.unrolling import origin
from edgeasync.errors import GraphError, argument

CHECKED = "edgeasync.checked"
"""Metadata key for models whose parameter names `to_onnx` has compared with the torch module."""

EVALUATED = "edgeasync.evaluated"
"""Metadata key that `to_onnx` sets if the model's predictions differ from those of the torch module
in evaluation mode.
"""


def check_export(
    model: onnx.ModelProto, prepared: ForwardGraph, statistics: set[str], settings: GraphSettings
) -> None:
    """Raise `GraphError` if the exporter changed parameters of the original model.

    The message recommends a better way to export the model.
    """
    advice = producer_of(model).plain
    if model.producer_name == "pytorch":
        _check_folds(prepared, settings, advice)
        _check_origins(prepared, _said(model, _FOLDED_FROM), settings, advice)
    if kind_of_producer(model) == "onnxruntime":
        _check_copies(prepared, settings, advice)
    if not any(entry.key == CHECKED for entry in model.metadata_props):
        _check_identity(prepared, statistics, settings, advice)
    _check_statistics(prepared, statistics, advice)


def kinds_of_inputs(model: onnx.ModelProto) -> dict[str, str]:
    """Return the kinds of initializers, as recorded by torch's newer exporter.

    The kinds are PARAMETER, BUFFER and CONSTANT_TENSOR.
    """
    return _said(model, KIND)


def _check_identity(prepared: ForwardGraph, statistics: set[str], settings: GraphSettings, advice: str) -> None:
    """Reject unnamed parameters that an exporter may have merged because they were equal."""
    merged = {}
    for name, value in prepared.parameters.items():
        if name in statistics or settings.names(name):
            continue
        # An Identity that stops the gradient reads the parameter on purpose.
        readers = {origin(node): node for node in prepared.nodes if name in node.inputs and node.op != "Identity"}
        if len(readers) > 1 and reading.is_uniform(value) and (value.size > 1 or value.flat[0] in (0.0, 1.0)):
            merged[name] = [*readers.values()]
    if merged:
        name, (first, second, *_) = next(iter(merged.items()))
        raise GraphError(
            f"parameter {name!r} is used by {first.where} and {second.where}, and all its values are equal, so "
            f"the exporter may have merged two parameters into it; {advice}, or set "
            f"{argument('freeze', *merged)}, or {argument('train', '*')} if it is shared on purpose"
        )


_FOLDED_INTO = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _check_folds(prepared: ForwardGraph, settings: GraphSettings, advice: str) -> None:
    """Reject unnamed weights into which torch's exporters have folded a batch norm.

    In evaluation mode, the older exporter gives the folded weight and bias numbered names. The
    newer exporter keeps the weight's name, but names the layer's output after an output of the
    batch norm.
    """
    unnamed = {name for name in prepared.parameters if not settings.names(name)}
    folded = [
        node
        for node in prepared.nodes
        if node.op in _FOLDED_INTO
        and unnamed.intersection(node.inputs)
        and (_is_renamed(node) or node.outputs[0].startswith("getitem"))
    ]
    if folded:
        names = [name for node in folded for name in node.inputs if name in prepared.parameters]
        raise GraphError(
            f"the exporter folded a batch norm into {folded[0].where}, which changes training; {advice}, or set "
            f"{argument('freeze', *patterns_for(names, prepared.parameters.keys() - set(names)))}, "
            f"or {argument('train', '*')} to train it without a batch norm"
        )


def _is_renamed(node: Node) -> bool:
    """Return whether the older exporter has given both weight and bias of a layer numbered names.

    Keras writes a bias as an Add.
    """
    return len(node.inputs) > 2 and all(name.startswith("onnx::Conv") for name in node.inputs[1:])


KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"


def _said(model: onnx.ModelProto, key: str) -> dict[str, str]:
    """Return, for each tensor, the value that torch's newer exporter recorded under `key`."""
    infos = model.graph.value_info
    return {info.name: note.value for info in infos for note in info.metadata_props if note.key == key}


_NAMED_BY_EXPORTER = re.compile(r"val_\d+|onnx::.*")
_WEIGHTED = frozenset({"GRU", "LSTM", "MatMul", "RNN"})
_LAYERS = _WEIGHTED | {"Add", "Conv", "ConvTranspose", "Gather", "Gemm"}


def _check_origins(
    prepared: ForwardGraph, folded: Mapping[str, str], settings: GraphSettings, advice: str
) -> None:
    """Reject tensors that the exporter precomputed, unless they are clearly transposed weights.

    Such a tensor could be a constant, for example the scale in an attention layer. It could also be
    computed from several parameters, or be a copy of another trained parameter. For example, an
    embedding table that is tied to the last layer would become two independent tables. If no
    parameter has another name, as in files of Keras, only copies are rejected.
    """
    computed, nameless = {}, _is_nameless(prepared)
    for name, value in prepared.parameters.items():
        if settings.names(name) or not (name in folded or _NAMED_BY_EXPORTER.fullmatch(name)):
            continue
        readers = [node for node in prepared.nodes if name in node.inputs]
        joined = any(node.op == "MatMul" for node in readers) and folded.get(name, "").count("'") > 2
        unlike = any(node.op not in _WEIGHTED for node in readers) and not nameless
        if joined or unlike or _has_twin(prepared, name, value):
            computed[name] = readers[0]
    if computed:
        name, reader = next(iter(computed.items()))
        raise GraphError(
            f"{reader.where} uses {name!r}, which the exporter computed from a parameter or constants; "
            f"{advice}, or set {argument('freeze', *computed)} or {argument('train', '*')}"
        )


def _is_nameless(prepared: ForwardGraph) -> bool:
    """Return whether torch's older exporter has given all parameters numbered names."""
    return all(name.startswith("onnx::") for name in prepared.parameters)


def _has_twin(prepared: ForwardGraph, name: str, value: Array) -> bool:
    """Return whether another parameter contains the same values, possibly in a different order."""
    if reading.is_uniform(value):
        return False
    values = np.sort(value, axis=None)
    return any(
        other != name and twin.size == value.size and np.array_equal(np.sort(twin, axis=None), values)
        for other, twin in prepared.parameters.items()
    )


def _check_copies(prepared: ForwardGraph, settings: GraphSettings, advice: str) -> None:
    """Reject weights that are copies of other trained weights.

    If layers share their parameters, as in ALBERT, onnxruntime's optimizer may pack them once for
    each layer. Then the copies would be trained separately.
    """
    trained = {
        name: value
        for name, value in prepared.parameters.items()
        if value.ndim in (1, 2) and not reading.is_uniform(value)
    }
    for other, name in _copies(trained):
        if not settings.names(name):
            raise GraphError(
                f"onnxruntime's optimizer copied parameter {other!r} into {name!r}, so they would be trained "
                f"separately; {advice}, or set {argument('freeze', other, name)} or {argument('train', '*')}"
            )


def _copies(arrays: Mapping[str, Array]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names: an array, and one that contains it or has the same values."""
    alike: dict[tuple[int, float, float], str] = {}
    for name, value in arrays.items():
        twin = alike.setdefault((value.size, float(value.min()), float(value.max())), name)
        if twin != name and np.array_equal(np.sort(value, axis=None), np.sort(arrays[twin], axis=None)):
            yield twin, name
        for other, part in arrays.items():
            width, whole = part.shape[-1], value.shape[-1]
            if value.shape[:-1] == part.shape[:-1] and width < whole:
                parts = [value[..., begin : begin + width] for begin in range(0, whole, width)]
                if any(np.array_equal(each, part) for each in parts):
                    yield other, name


def _check_statistics(prepared: ForwardGraph, live: set[str], advice: str) -> None:
    """Reject running statistics that an exporter merged with other tensors of equal values."""
    readers: dict[str, tuple[str, int, str]] = {}
    for node in prepared.nodes:
        for position, name in enumerate(node.inputs):
            if name not in live:
                continue
            reader = (node.op, position, node.inputs[1])
            if reader[:2] not in _STATISTIC_READERS or readers.setdefault(name, reader) != reader:
                norms = [
                    each for other in prepared.nodes if name in other.inputs[3:] for each in other.inputs[1:5]
                ]
                raise GraphError(
                    f"{node.where} shares the running statistic {name!r} with another node, because the exporter "
                    f"merged tensors with equal values; {advice}, or set "
                    f"{argument('freeze', *dict.fromkeys(norms))}"
                )


_STATISTIC_READERS = frozenset({("BatchNormalization", 3), ("BatchNormalization", 4)})


def warnings_of(model: onnx.ModelProto, prepared: ForwardGraph, settings: GraphSettings) -> list[str]:
    """Return warnings, one sentence each, about changes that the exporter may have made."""
    kind, found = kind_of_producer(model), []
    if any(entry.key == EVALUATED for entry in model.metadata_props):
        found.append(
            "the model's predictions differ from the module's after eval(): forward checks self.training or draws "
            "random numbers, and the exported model always does so; to evaluate, load the trained values into the "
            "module"
        )
    drawing = _drawing(model, prepared)
    checked = any(entry.key == CHECKED for entry in model.metadata_props)
    if kind in ("dynamo", "torchscript") and drawing and not checked:
        found.append(
            f"{_listed(drawing)} draws random numbers in evaluations too, because torch's exporter writes some "
            "dropouts as arithmetic; export with edgeasync.torch.to_onnx"
        )
    if kind == "onnxruntime" and (convolutions := _with_bias(prepared)):
        found.append(
            f"onnxruntime's optimizer folds batch norms into convolutions, such as {_listed(convolutions)}, which "
            "then train without batch statistics; if they had batch norms, use the original file, before "
            "onnxruntime optimized it"
        )
    if kind in ("tf2onnx", "keras", "jax2tf"):
        found += _warnings_of_tf2onnx(prepared)
    if kind == "torchscript" and _is_nameless(prepared):
        found += _warnings_of_nameless(prepared)
    if kind == "torchscript":
        # If `to_onnx` has restored the module's own statistics, it has marked them as buffers.
        noted = kinds_of_inputs(model)
        single = [
            entry.name
            for entry in model.graph.initializer
            if entry.data_type == onnx.TensorProto.FLOAT
            and not entry.dims
            and entry.name not in prepared.parameters
            and not (entry.name in noted or _NAMED_BY_EXPORTER.fullmatch(entry.name))
        ]
        if single and settings.lora is None:
            found.append(
                f"scalars are not trained, because they may be constants: {_listed(single)}; if they are "
                f"parameters, set {argument('train', '*', *single)}"
            )
        norms = [
            node.where
            for node in prepared.nodes
            if node.op == "BatchNormalization"
            and node.attributes.get("training_mode")
            and noted.get(node.inputs[3]) != "BUFFER"
        ]
        if norms:
            found.append(
                f"torch's exporter ran the model in training mode, so the running statistics of {_listed(norms)} "
                "include the example batch; to keep the module's own, export with dynamo=True, optimize=False"
            )
    return found


def _own(prepared: ForwardGraph) -> dict[str, Array]:
    """Return the parameters without adapters, which no exporter has written."""
    return {name: value for name, value in prepared.parameters.items() if not is_adapter(name)}


def _warnings_of_nameless(prepared: ForwardGraph) -> list[str]:
    """Warn of parameters that may be constants, in a file that does not name its parameters."""
    own = _own(prepared)
    readers = [(name, node.op) for node in prepared.nodes for name in node.inputs if name in own]
    layers = {name for name, op in readers if op in _LAYERS}
    if not (others := [name for name in dict(readers) if name not in layers]):
        return []
    return [
        f"the file does not name its parameters, like those of Keras with torch, so {_listed(others)} are trained "
        "although they may be constants, such as the statistics of a batch norm; to keep them as they are, set "
        + argument("freeze", *patterns_for(others, layers))
    ]


def _warnings_of_tf2onnx(prepared: ForwardGraph) -> list[str]:
    found = []
    if bare := _without_bias(prepared):
        found.append(
            f"tf2onnx drops biases whose values are all 0, and these layers have no bias: {_listed(bare)}; if "
            "a layer has one, set it to a small number such as 1e-6 before the conversion"
        )
    if folded := [name for name in _own(prepared) if "_weights_fused_bn" in name or "/batchnorm/" in name]:
        found.append(
            f"tf2onnx folded batch norms into {_listed(folded)}, so they train without batch statistics; to "
            "keep the batch norms, train the model in TensorFlow, or write it with edgeasync.nn"
        )
    return found


def _drawing(model: onnx.ModelProto, prepared: ForwardGraph) -> list[str]:
    """Return nodes that still draw random numbers in an exported model."""
    nodes = read_nodes(without_masks(model.graph))
    left = {name for node in needed(nodes, [entry.name for entry in model.graph.output]) for name in node.inputs}
    return [node.where for node in prepared.nodes if node.op == "RandomUniformLike" and node.outputs[0] in left]


def folded_scalars(model: onnx.ModelProto, prepared: ForwardGraph) -> dict[str, str]:
    """Return scalars that torch's newer exporter precomputed, according to its metadata."""
    folded = _said(model, _FOLDED_FROM)
    used = {name for node in prepared.nodes if node.op != "Clip" for name in free_inputs(node)}
    return {
        entry.name: folded[entry.name].strip("[]")
        for entry in model.graph.initializer
        if entry.data_type == onnx.TensorProto.FLOAT
        and not entry.dims
        and entry.name in folded
        and entry.name in used
        and entry.name not in prepared.parameters
    }


def _with_bias(prepared: ForwardGraph) -> list[str]:
    """Return trained convolutions with a bias, which may be what is left of a batch norm."""
    return [
        node.inputs[1]
        for node in prepared.nodes
        if node.op in ("Conv", "ConvTranspose") and node.inputs[1] in prepared.parameters and any(node.inputs[2:])
    ]


def _without_bias(prepared: ForwardGraph) -> list[str]:
    """Return trained layers that have no trained bias and are not followed by a batch norm.

    A layer has a bias if one is added to its result, or to another summand of its sum. A recurrent
    layer has two such summands.
    """
    shifts, biased = set(prepared.parameters), set[str]()
    for node in prepared.nodes:
        moved = node.op in _MOVING and node.inputs[0] in shifts
        shifted = node.op in _FOLDED_INTO and any(node.inputs[2:])
        if moved or shifted or (node.op == "Add" and not shifts.isdisjoint(node.inputs)):
            shifts.update(node.outputs)
    for node in reversed(prepared.nodes):
        passed = node.op in ("Add", *_MOVING) and not biased.isdisjoint(node.outputs)
        if passed or node.op == "BatchNormalization" or (node.op == "Add" and node.outputs[0] in shifts):
            biased.update(node.inputs)
    own = _own(prepared)
    bare = [
        node.inputs[1]
        for node in prepared.nodes
        if node.op in (*_FOLDED_INTO, "MatMul")
        and node.inputs[1] in own
        and not node.inputs[2:]
        and biased.isdisjoint(node.outputs)
    ]
    return list(dict.fromkeys(bare))


_MOVING = frozenset({"Cast", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})

_LISTED_MAX = 5


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
