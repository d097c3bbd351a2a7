"""Reads a model file as others publish it, and brings it into the form that can be trained."""

import msgspec
import onnx

from edgeasync.autodiff import precision, reading
from edgeasync.autodiff.batch import (
    EXAMPLES,
    difference,
    examples,
    fixed_size,
    free_batch,
    is_close,
    run_all,
    settled,
)
from edgeasync.autodiff.branches import SelectedResult, resolve_branches
from edgeasync.autodiff.contract import is_training_graph
from edgeasync.autodiff.graph import RANDOM_OPERATORS, read_nodes
from edgeasync.autodiff.producers import producer_of
from edgeasync.errors import GraphError

BROADCAST_SINCE = 7
"""First opset in which arithmetic repeats the values of smaller tensors."""


class Published(msgspec.Struct, frozen=True):
    """A model without branches, whose batch size is dynamic if the file allows it."""

    model: onnx.ModelProto
    notes: tuple[str, ...]
    """What was changed, one sentence each, beginning with a fixed batch size."""
    warnings: tuple[str, ...] = ()
    """What could not be changed, one sentence each."""
    fixed: onnx.ModelProto | None = None
    """The model with the batch size of the file, if `model` has a dynamic one instead."""


def read(data: bytes) -> Published:
    """Parse a serialized forward model, and convert it to a supported opset.

    If nodes are replaced by the nodes of their branches, weights that are cast to float32 are
    stored in float32, and a fixed batch size becomes dynamic. Raises `GraphError` if the file is
    invalid, or if its branches cannot be trained.
    """
    if is_training_graph(data):
        raise GraphError("this is a training graph; pass the forward model that it was built from")
    original = reading.inline_functions(reading.load(data))
    halves = precision.widen_halves(original)
    if reading.opset_of(original) >= BROADCAST_SINCE:
        reading.replace_scalers(original)
    model = original
    if fixed_size(original) is not None or any(node.op_type == "If" for node in original.graph.node):
        model = onnx.ModelProto()
        model.CopyFrom(original)
    selections = resolve_branches(model)
    before, model = model, reading.convert(model)
    if model is not before:
        _check_conversion(before, model)
    precision.widen_weights(model)
    size, notes, warnings, fixed = fixed_size(model), list[str](), list[str](), None
    _check_selections(model, selections, size)
    if size is not None:
        freed, reason = free_batch(model, original)
        if reason is None:
            fixed = model
            notes.append(
                f"the file has the batch size {size}, but trains with any, because random examples give the same "
                "together as one by one"
            )
        else:
            warnings.append(
                f"the batch size stays {size}, as in the file, because {reason}; to train with another, export "
                "the model with a dynamic batch size"
            )
        model = freed
    elif selections and (found := difference(original, model)) is not None and found.ran:
        raise GraphError(
            f"{selections[0].where} chooses by the data, and cannot be computed for each example: {found.reason}; "
            "write the model without a branch"
        )
    if selections:
        first, *others = dict.fromkeys(selection.where for selection in selections)
        chooses = f" and {len(others)} other If nodes choose" if others else " chooses"
        notes.append(
            f"{first}{chooses} by the data; both branches are computed and trained, each with the examples that "
            "take it"
        )
    if halves:
        notes.append("the file computes in float16, but trains in float32")
    return Published(model, tuple(notes), tuple(warnings), fixed)


def _check_conversion(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Raise `GraphError` if a model computes other values after the conversion of its opset."""
    if any(node.op_type in RANDOM_OPERATORS - {"Dropout"} for node in before.graph.node):
        return
    try:
        feeds = examples(before, fixed_size(before) or EXAMPLES)
        first, second = [run_all(settled(model), feeds) for model in (before, after)]
    except Exception:  # noqa: BLE001 - of onnxruntime; preparation reports it
        return
    for node in after.graph.node:
        for name in node.output:
            if name in first and name in second and not is_close(first[name], second[name]):
                raise GraphError(
                    f"{read_nodes([node])[0].where}: onnx cannot convert it from opset "
                    f"{reading.opset_of(before)}, because it then computes other values; "
                    f"{producer_of(before).opset}"
                )


def _check_selections(model: onnx.ModelProto, selections: tuple[SelectedResult, ...], size: int | None) -> None:
    """Raise `GraphError` if the results of two branches have different shapes."""
    if not selections:
        return
    try:
        found = run_all(model, examples(model, size or EXAMPLES))
    except Exception:  # noqa: BLE001 - of onnxruntime; preparation reports it
        return
    for selection in selections:
        shapes = [found[name].shape for name in (selection.then, selection.other)]
        if shapes[0] != shapes[1]:
            raise GraphError(
                f"{selection.where} chooses by the data between results of the shapes {shapes[0]} and "
                f"{shapes[1]}; write the model without a branch"
            )
