"""Damage that exporters do to a model on its way here, and that would train in silence: each is refused.

They fold batch norms into convolutions, merge tensors that happen to be equal, and compute constants beforehand
that then look like parameters. How each is recognized was found out with torch 2.13 and skl2onnx 1.20.
"""

import re
from collections.abc import Mapping

import numpy as np
import onnx

from edgeasync.autodiff import forward
from edgeasync.autodiff.forward import Forward
from edgeasync.autodiff.graph import FLOAT, Array
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError, argument
from edgeasync.losses import BinaryCrossEntropy, CrossEntropy, find_loss

CHECKED = "edgeasync.checked"
"""The metadata key of a forward model whose parameters are surely its author's: `to_onnx` compared their names."""


def check_export(model: onnx.ModelProto, prepared: Forward, statistics: set[str], settings: GraphSettings) -> None:
    """Raise `GraphError` if what is to be trained is not what its author wrote; says how to export it instead."""
    _check_output(prepared, settings)
    if model.producer_name == "pytorch":
        _check_folds(prepared)
        _check_origins(prepared, _said(model, _FOLDED_FROM), settings)
    if not any(entry.key == CHECKED for entry in model.metadata_props):
        _check_identity(prepared, statistics.union(settings.train or ()))
    _check_statistics(prepared, statistics)


def kinds_of_inputs(model: onnx.ModelProto) -> dict[str, str]:
    """Return what torch's newer exporter says an initializer was: PARAMETER, BUFFER, CONSTANT_TENSOR."""
    return _said(model, KIND)


_MOVING = frozenset({"Cast", "Concat", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only move values: probabilities stay probabilities, and so does 1 - p."""


def _check_output(prepared: Forward, settings: GraphSettings) -> None:
    """Refuse probabilities where the loss takes raw scores: it would train, and wrongly."""
    if prepared.dtypes[prepared.output] != FLOAT:
        raise GraphError(f"output {prepared.output!r} is {prepared.dtypes[prepared.output]}, not float32")
    makers = {name: node for node in prepared.nodes for name in node.outputs}
    if prepared.output not in makers:
        raise GraphError(f"output {prepared.output!r} is an input of the model; nothing can be trained")
    if not isinstance(find_loss(settings.loss), CrossEntropy | BinaryCrossEntropy):
        return
    sources = [makers[prepared.output]]
    while sources:
        last = sources.pop()
        if last.op in ("Sigmoid", "Softmax"):
            raise GraphError(
                f"output {prepared.output!r} comes from {last.op}, but this loss takes the scores before it; "
                f"give {argument('output', last.inputs[0])}"
            )
        if last.op in _MOVING or (last.op == "Sub" and last.inputs[0] in prepared.constants):
            sources += [makers[name] for name in last.inputs if name in makers]


def _check_identity(prepared: Forward, excused: set[str]) -> None:
    """Refuse a parameter that an exporter made of several equal ones, unless it is named in full."""
    for name in prepared.parameters.keys() - excused:
        # A reader that stops the gradient reads a parameter by that name on purpose.
        readers = [node for node in prepared.nodes if name in node.inputs and node.op != "Identity"]
        if (
            len(readers) > 1
            and forward.is_uniform(value := prepared.parameters[name])
            and (value.size > 1 or value.flat[0] in (0.0, 1.0))
        ):
            raise GraphError(
                f"parameter {name!r} is read by {readers[0].where} and {readers[1].where}, and all its values are "
                "equal: the exporter merged parameters; export without optimization "
                f"(torch.onnx.export(..., optimize=False)), or give {argument('train', name, '*')} if it is "
                "shared on purpose"
            )


_FOLDED_INTO = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _check_folds(prepared: Forward) -> None:
    """Refuse to train weights into which torch's exporters have multiplied a batch norm that came after.

    The older exporter, in evaluation mode, gives the product a number for a name. The newer one keeps the
    parameter's name, but the product has the name of the batch norm's result, one of several that it takes apart.
    """
    for node in prepared.nodes:
        if node.op not in _FOLDED_INTO or not prepared.parameters.keys() & node.inputs:
            continue
        if node.inputs[1].startswith("onnx::Conv") or node.outputs[0].startswith("getitem"):
            raise GraphError(
                f"{node.where} holds a batch norm that the exporter folded into it, and without it the model "
                "trains differently: export in training mode (dynamo=False, "
                "training=torch.onnx.TrainingMode.TRAINING) or without optimization (dynamo=True, "
                f"optimize=False), or give {argument('freeze', node.inputs[1])}"
            )


KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"


def _said(model: onnx.ModelProto, key: str) -> dict[str, str]:
    """Return what torch's newer exporter notes of tensors: whether they are parameters, and of what computed."""
    infos = model.graph.value_info
    return {info.name: note.value for info in infos for note in info.metadata_props if note.key == key}


_NAMED_BY_EXPORTER = re.compile(r"val_\d+|onnx::.*")
_WEIGHTED = frozenset({"GRU", "LSTM", "MatMul", "RNN"})


def _check_origins(prepared: Forward, folded: Mapping[str, str], settings: GraphSettings) -> None:
    """Refuse to train what torch's exporters computed beforehand, unless it is surely a weight turned round.

    It may as well be a constant such as an attention's scale, or made of several parameters, or of one that is
    trained besides: an embedding whose table is the last layer's weight too would become two.
    """
    for name, value in prepared.parameters.items():
        if name in (settings.train or ()) or not (name in folded or _NAMED_BY_EXPORTER.fullmatch(name)):
            continue
        readers = [node for node in prepared.nodes if name in node.inputs]
        joined = any(node.op == "MatMul" for node in readers) and folded.get(name, "").count("'") > 2
        if joined or any(node.op not in _WEIGHTED for node in readers) or _has_twin(prepared, name, value):
            raise GraphError(
                f"{readers[0].where} reads {name!r}, which the exporter computed, of a parameter or of constants: "
                "export without that (dynamo=True, optimize=False; or dynamo=False, do_constant_folding=False), "
                f"or give {argument('freeze', name)} or {argument('train', name, '*')}"
            )


def _has_twin(prepared: Forward, name: str, value: Array) -> bool:
    """Return whether another parameter holds the same values, in whatever order."""
    if forward.is_uniform(value):
        return False
    values = np.sort(value, axis=None)
    return any(
        other != name and twin.size == value.size and np.array_equal(np.sort(twin, axis=None), values)
        for other, twin in prepared.parameters.items()
    )


def _check_statistics(prepared: Forward, live: set[str]) -> None:
    """Refuse running statistics that an exporter merged with each other or with parameters that are equal."""
    readers: dict[str, tuple[str, int, str]] = {}
    for node in prepared.nodes:
        for position, name in enumerate(node.inputs):
            if name not in live:
                continue
            reader = (node.op, position, node.inputs[1])
            if reader[:2] not in _STATISTIC_READERS or readers.setdefault(name, reader) != reader:
                raise GraphError(
                    f"{node.where} reads the running statistic {name!r}, which something else reads in another "
                    "way: the exporter merged tensors that were equal; export without optimization "
                    "(torch.onnx.export(..., optimize=False))"
                )


_STATISTIC_READERS = frozenset({("BatchNormalization", 3), ("BatchNormalization", 4)})
