"""Which of a forward model's initializers are trained, by name patterns and by what an exporter tells of them."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import msgspec
import numpy as np
import onnx

from edgeasync.autodiff.exporters import kinds_of_inputs
from edgeasync.autodiff.graph import FLOAT, Array
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError

FROZEN = "edgeasync.frozen"
"""The metadata key of a forward model under which `to_onnx` names, in JSON, what was frozen in torch."""


class Selection(msgspec.Struct, frozen=True):
    """Names of what is trained, of the running statistics that move, and of what only the file says is frozen."""

    trained: list[str]
    statistics: set[str]
    frozen: list[str]


def select(model: onnx.ModelProto, values: Mapping[str, Array], settings: GraphSettings) -> Selection:
    """Choose by the patterns of `settings`.

    Raises `GraphError` for a model without float32 parameters, and for a pattern that matches nothing.

    Running statistics move where anything of their batch norm is chosen. What the file says was frozen stays so
    unless `train` is given.
    """
    statistics, norms = _statistics(model, values)
    candidates = _candidates(model, values, settings.train or ())
    names = list(dict.fromkeys([*candidates, *sorted(statistics)]))
    if not names:
        raise GraphError(_nothing_to_train(values))
    chosen = _chosen(names, settings)
    frozen = [name for name in _frozen(model) if name in chosen and settings.train is None]
    chosen -= set(frozen)
    live = {name for norm in norms if chosen.intersection(norm) for name in norm[2:]}
    return Selection([name for name in candidates if name in chosen and name not in statistics], live, frozen)


def _frozen(model: onnx.ModelProto) -> list[str]:
    said = next((entry.value for entry in model.metadata_props if entry.key == FROZEN), "[]")
    try:
        return msgspec.json.decode(said, type=list[str])
    except msgspec.DecodeError as error:
        raise GraphError(f"the model's metadata {FROZEN!r} is not a list of names; export it again") from error


def _candidates(model: onnx.ModelProto, values: Mapping[str, Array], named: Collection[str]) -> list[str]:
    """Return what may be trained: float32 initializers with a dimension, and any that is named in full.

    A scalar, or an exponent, is a constant of the formula unless somebody says that it is not.
    """
    untrained = {name for node in model.graph.node for name in _fixed_inputs(node)}
    untrained.update(name for name, kind in kinds_of_inputs(model).items() if kind != "PARAMETER")
    return [
        name
        for name, value in values.items()
        if value.dtype == FLOAT
        and value.size
        and np.isfinite(value).all()
        and (name in named or (value.ndim and name not in untrained))
    ]


def _fixed_inputs(node: onnx.NodeProto) -> Iterable[str]:
    first = {"Clip": 1, "Dropout": 1, "Pad": 1, "Resize": 1, "Pow": 1, "OneHot": 0}.get(node.op_type)
    return () if first is None else node.input[first:]


def _statistics(model: onnx.ModelProto, values: Mapping[str, Array]) -> tuple[set[str], list[tuple[str, ...]]]:
    """Return the running statistics, and scale, bias, mean and variance of every batch norm."""
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


def _nothing_to_train(values: Mapping[str, Array]) -> str:
    """Say why a model has no parameter: half precision is the usual cause."""
    others = sorted({str(value.dtype) for value in values.values() if value.ndim and value.dtype != FLOAT})
    if any("float" in name for name in others):
        return f"the model has no float32 parameter, only {', '.join(others)}; export it in float32"
    return "the model has no parameter: no float32 initializer with a dimension"


def _chosen(names: list[str], settings: GraphSettings) -> set[str]:
    for pattern in (*(settings.train or ()), *settings.freeze):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise GraphError(f"no parameter matches {pattern!r}; there are {', '.join(names)}")
    return {
        name
        for name in names
        if (settings.train is None or settings.names(name))
        and not any(fnmatchcase(name, pattern) for pattern in settings.freeze)
    }
