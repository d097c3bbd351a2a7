"""Damage that exporters do to a model on its way here, and that would train in silence: each is refused.

They fold batch norms into convolutions, merge tensors that happen to be equal, and compute constants beforehand
that then look like parameters. How each is recognized was found out with torch 2.13 and skl2onnx 1.20.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from edgeasync.autodiff import reading
from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import Array, Node, free_inputs
from edgeasync.autodiff.producers import kind_of_producer, producer_of
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, argument

CHECKED = "edgeasync.checked"
"""The metadata key of a forward model whose parameters are surely its author's: `to_onnx` compared their names."""

EVALUATED = "edgeasync.evaluated"
"""The metadata key of a forward model that `to_onnx` saw predict otherwise than the module in evaluation mode."""


def check_export(
    model: onnx.ModelProto, prepared: ForwardGraph, statistics: set[str], settings: GraphSettings
) -> None:
    """Raise `GraphError` if what is to be trained is not what its author wrote; says how to export it instead."""
    advice = producer_of(model).plain
    if model.producer_name == "pytorch":
        _check_folds(prepared, advice)
        _check_origins(prepared, _said(model, _FOLDED_FROM), settings, advice)
    if not any(entry.key == CHECKED for entry in model.metadata_props):
        _check_identity(prepared, statistics, settings, advice)
    _check_statistics(prepared, statistics, advice)


def kinds_of_inputs(model: onnx.ModelProto) -> dict[str, str]:
    """Return what torch's newer exporter says an initializer was: PARAMETER, BUFFER, CONSTANT_TENSOR."""
    return _said(model, KIND)


def _check_identity(prepared: ForwardGraph, statistics: set[str], settings: GraphSettings, advice: str) -> None:
    """Refuse parameters of which an exporter may have made one of several equal ones, unless they are named."""
    merged = {}
    for name, value in prepared.parameters.items():
        if name in statistics or settings.names(name):
            continue
        # A reader that stops the gradient reads a parameter by that name on purpose.
        readers = [node for node in prepared.nodes if name in node.inputs and node.op != "Identity"]
        if len(readers) > 1 and reading.is_uniform(value) and (value.size > 1 or value.flat[0] in (0.0, 1.0)):
            merged[name] = readers
    if merged:
        name, (first, second, *_) = next(iter(merged.items()))
        raise GraphError(
            f"parameter {name!r} is read by {first.where} and {second.where}, and all its values are equal: the "
            f"exporter may have merged parameters; {advice}, or give {argument('freeze', *merged)}, or "
            f"{argument('train', '*')} if they are shared on purpose"
        )


_FOLDED_INTO = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _check_folds(prepared: ForwardGraph, advice: str) -> None:
    """Refuse to train weights into which torch's exporters have multiplied a batch norm that came after.

    The older exporter, in evaluation mode, gives the product a number for a name. The newer one keeps the
    parameter's name, but the product has the name of the batch norm's result, one of several that it takes apart.
    """
    folded = [
        node
        for node in prepared.nodes
        if node.op in _FOLDED_INTO
        and prepared.parameters.keys() & node.inputs
        and (node.inputs[1].startswith("onnx::Conv") or node.outputs[0].startswith("getitem"))
    ]
    if folded:
        names = [name for node in folded for name in node.inputs if name in prepared.parameters]
        raise GraphError(
            f"{folded[0].where} holds a batch norm that the exporter folded into it, and without it the model "
            f"trains differently: {advice}, or give {argument('freeze', *names)}"
        )


KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"


def _said(model: onnx.ModelProto, key: str) -> dict[str, str]:
    """Return what torch's newer exporter notes of tensors: whether they are parameters, and of what computed."""
    infos = model.graph.value_info
    return {info.name: note.value for info in infos for note in info.metadata_props if note.key == key}


_NAMED_BY_EXPORTER = re.compile(r"val_\d+|onnx::.*")
_WEIGHTED = frozenset({"GRU", "LSTM", "MatMul", "RNN"})


def _check_origins(
    prepared: ForwardGraph, folded: Mapping[str, str], settings: GraphSettings, advice: str
) -> None:
    """Refuse to train what torch's exporters computed beforehand, unless it is surely a weight turned round.

    It may as well be a constant such as an attention's scale, or made of several parameters, or of one that is
    trained besides: an embedding whose table is the last layer's weight too would become two.
    """
    computed = {}
    for name, value in prepared.parameters.items():
        if settings.names(name) or not (name in folded or _NAMED_BY_EXPORTER.fullmatch(name)):
            continue
        readers = [node for node in prepared.nodes if name in node.inputs]
        joined = any(node.op == "MatMul" for node in readers) and folded.get(name, "").count("'") > 2
        if joined or any(node.op not in _WEIGHTED for node in readers) or _has_twin(prepared, name, value):
            computed[name] = readers[0]
    if computed:
        name, reader = next(iter(computed.items()))
        raise GraphError(
            f"{reader.where} reads {name!r}, which the exporter computed, of a parameter or of constants: "
            f"{advice}, or give {argument('freeze', *computed)} or {argument('train', '*')}"
        )


def _has_twin(prepared: ForwardGraph, name: str, value: Array) -> bool:
    """Return whether another parameter holds the same values, in whatever order."""
    if reading.is_uniform(value):
        return False
    values = np.sort(value, axis=None)
    return any(
        other != name and twin.size == value.size and np.array_equal(np.sort(twin, axis=None), values)
        for other, twin in prepared.parameters.items()
    )


def _check_statistics(prepared: ForwardGraph, live: set[str], advice: str) -> None:
    """Refuse running statistics that an exporter merged with each other or with parameters that are equal."""
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
                    f"{node.where} reads the running statistic {name!r}, which something else reads in another "
                    f"way: the exporter merged tensors that were equal; {advice}, or give "
                    f"{argument('freeze', *dict.fromkeys(norms))}"
                )


_STATISTIC_READERS = frozenset({("BatchNormalization", 3), ("BatchNormalization", 4)})


def warnings_of(model: onnx.ModelProto, prepared: ForwardGraph) -> list[str]:
    """Return what an exporter may have changed in silence, where the file cannot tell: a sentence for each."""
    kind, found = kind_of_producer(model), []
    if any(entry.key == EVALUATED for entry in model.metadata_props):
        found.append(
            "the file predicts otherwise than the module after eval(): forward asks for self.training, or draws "
            "random numbers in training alone, and the file does so in evaluations, too; load what was trained "
            "into the module, and evaluate that"
        )
    drawing = [node.where for node in prepared.nodes if node.op == "RandomUniformLike"]
    if kind == "dynamo" and drawing and not any(entry.key == CHECKED for entry in model.metadata_props):
        found.append(
            f"{_listed(drawing)} draws in evaluations, too, as torch's exporter writes dropouts of whole "
            "channels; edgeasync.torch.to_onnx writes those that draw in training alone"
        )
    if kind in ("tf2onnx", "keras", "jax2tf"):
        if bare := _without_bias(prepared):
            found.append(
                f"tf2onnx leaves out biases whose values are all 0, and these have none: {_listed(bare)}; if the "
                "layer has a bias, set it to a small number such as 1e-6 before the conversion"
            )
        if folded := [name for name in prepared.parameters if "_weights_fused_bn" in name]:
            found.append(
                f"tf2onnx folded batch norms into {_listed(folded)}: they train as one layer, without batch "
                "statistics; train the model in TensorFlow, or write it with edgeasync.nn, to keep the batch norms"
            )
    if kind == "torchscript":
        # `to_onnx` notes as buffers those to which it gave the module's own values back.
        noted = kinds_of_inputs(model)
        single = [
            entry.name
            for entry in model.graph.initializer
            if entry.data_type == onnx.TensorProto.FLOAT
            and not entry.dims
            and entry.name not in prepared.parameters
            and not (entry.name in noted or _NAMED_BY_EXPORTER.fullmatch(entry.name))
        ]
        if single:
            found.append(
                f"single numbers are not trained, as they may be constants: {_listed(single)}; if they are "
                f"parameters, give {argument('train', '*', *single)}"
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
                f"torch's exporter ran the model in training mode, which moved the running statistics of "
                f"{_listed(norms)} by the example batch; training moves them on. To keep the module's own, export "
                "with dynamo=True, optimize=False"
            )
    return found


def folded_scalars(model: onnx.ModelProto, prepared: ForwardGraph) -> dict[str, str]:
    """Return single numbers that torch's newer exporter computed, and of which it says so."""
    folded = _said(model, _FOLDED_FROM)
    used = {name for node in prepared.nodes for name in free_inputs(node)}
    return {
        entry.name: folded[entry.name].strip("[]")
        for entry in model.graph.initializer
        if entry.data_type == onnx.TensorProto.FLOAT
        and not entry.dims
        and entry.name in folded
        and entry.name in used
        and entry.name not in prepared.parameters
    }


def _without_bias(prepared: ForwardGraph) -> list[str]:
    """Return layers of a trained weight whose result no trained bias is added to, and no batch norm follows."""
    readers: dict[str, list[Node]] = {}
    for node in prepared.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)

    def biased(name: str) -> bool:
        return any(
            node.op == "BatchNormalization"
            or (node.op == "Add" and not prepared.parameters.keys().isdisjoint(node.inputs))
            or (node.op in _MOVING and biased(node.outputs[0]))
            for node in readers.get(name, [])
        )

    return [
        node.inputs[1]
        for node in prepared.nodes
        if node.op in ("Conv", "ConvTranspose", "Gemm", "MatMul")
        and node.inputs[1] in prepared.parameters
        and not node.inputs[2:]
        and not biased(node.outputs[0])
    ]


_MOVING = frozenset({"Cast", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})

_LISTED_MAX = 5


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
