"""Builds a training graph from a forward ONNX model. Plain onnxruntime can run this graph."""

import json
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import onnx

from edgeasync.autodiff import (
    adapters,
    contract,
    differentiate,
    forward,
    precision,
    published,
    reading,
    user_loss,
)
from edgeasync.autodiff.chunks import add_loss_in_chunks, find_head
from edgeasync.autodiff.contract import is_training_graph
from edgeasync.autodiff.endings import check_ending, classes_are_last
from edgeasync.autodiff.exporters import check_export, folded_scalars, warnings_of
from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, RANDOM_OPERATORS, Array, Shape
from edgeasync.autodiff.losses import TARGET, add_loss, target_type
from edgeasync.autodiff.outputs import choose_output
from edgeasync.autodiff.probing import open_in_place
from edgeasync.autodiff.producers import producer_of
from edgeasync.autodiff.quantize import Weights, find_weights, quantize, quantize_file
from edgeasync.autodiff.quantized_weights import dequantize_late, simplify
from edgeasync.autodiff.selection import Selection, select
from edgeasync.autodiff.settings import NEXT_ERROR, GraphSettings, follow
from edgeasync.errors import GraphError, argument, native_reason
from edgeasync.lora import find_lora
from edgeasync.losses import CrossEntropy, Loss, OnnxLoss, find_loss, kind_of
from edgeasync.parameters import AXES_MAX, NAME_MAX, Parameter, ParameterSpec, Vector
from edgeasync.protocol.operators import ALLOWED, ALLOWED_OWN


class TrainingGraph(msgspec.Struct, frozen=True):
    """A serialized training graph, and the layout and initial values of its trained arrays."""

    model: bytes
    spec: ParameterSpec
    initial: Vector
    warnings: tuple[str, ...] = ()
    """What may be wrong with the model file, one sentence each."""
    notes: tuple[str, ...] = ()
    """What the build chose or changed, one sentence each."""
    in_chunks: bool = False
    """Whether the loss computes the scores in chunks, so that the graph does not return them."""
    forward: bytes | None = None
    """The forward model, if `lora` added adapters or `base` quantized weights."""


TRIES = 3
"""Maximum number of further errors to report. Each one is found by following the advice of the
error before it.
"""


def build_training_graph(model: bytes, settings: GraphSettings) -> TrainingGraph:
    """Convert a serialized forward model to a training graph.

    Raises `GraphError` if the model cannot be trained. The message also lists further errors, which
    would occur after following the advice for the first one.
    """
    try:
        return _build(model, settings)
    except GraphError as error:
        raise GraphError(NEXT_ERROR.join(_refusals(model, settings, str(error)))) from error


def _refusals(model: bytes, settings: GraphSettings, first: str) -> list[str]:
    """Return the message `first`, and the messages of the errors that would follow.

    Each further error is found by following the advice in the message before it.
    """
    found, given = [first], settings
    for _ in range(TRIES):
        if (advised := follow(given, found[-1])) is None:
            break
        given = advised
        try:
            _build(model, given)
        except GraphError as error:
            found.append(str(error))
        else:
            break
    return found


def _build(model: bytes, settings: GraphSettings) -> TrainingGraph:
    if is_training_graph(model):
        raise GraphError("this is already a training graph; pass the forward model")
    if settings.lora is not None:
        adapted = adapters.adapt(model, find_lora(settings.lora), settings.train or ())
        train = (*adapted.names, *(settings.train or ()))
        made = _build_read(adapted.model, msgspec.structs.replace(settings, train=train, lora=adapted.lora))
        forward = made.forward or adapted.model
        return msgspec.structs.replace(made, notes=(adapted.note, *made.notes), forward=forward)
    return _build_read(model, settings)


def _build_read(model: bytes, settings: GraphSettings) -> TrainingGraph:
    made, weights = _build_with_any_batch(model, settings)
    if weights is None:
        return made
    return msgspec.structs.replace(made, forward=quantize_file(model, weights))


def _build_with_any_batch(model: bytes, settings: GraphSettings) -> tuple[TrainingGraph, Weights | None]:
    """Build with a dynamic batch size or, if only this can be trained, with the fixed one of the file.

    Return also the frozen weights that the training graph stores quantized.
    """
    try:
        return _build_published(published.read(model), settings)
    except GraphError as error:
        found = published.read(model)  # again, because the first one has been changed
        if found.fixed is None:
            raise
        said = f"the batch size stays as in the file, because only a fixed one can be trained: {error}"
        kept = msgspec.structs.replace(
            found, model=found.fixed, notes=found.notes[1:], warnings=(said, *found.warnings)
        )
        try:
            return _build_published(kept, settings)
        except GraphError:
            raise error from None  # fixing the batch size does not help


def _build_published(found: published.Published, settings: GraphSettings) -> tuple[TrainingGraph, Weights | None]:
    proto, notes, warnings = found.model, [*found.notes], found.warnings
    del found  # otherwise, the values before quantization would stay in memory
    precision.widen_inputs(proto)
    chosen = choose_output(proto, settings.output)
    notes += [chosen.remark] if chosen.remark else []
    output = chosen.name
    selection = select(proto, reading.initial_values(proto), settings)
    weights = None if settings.base is None else find_weights(proto, selection.trained, settings.base)
    if weights is not None:
        proto = quantize(proto, weights)
        notes.append(f"{len(weights.axes)} frozen weights are stored in {weights.base}")
    elif settings.base is not None:
        notes.append("uses the frozen weights as they were quantized before")
    loss = find_loss(settings.loss)
    sample: Shape
    if isinstance(loss, OnnxLoss):
        joined = user_loss.join(proto, output, loss.content)
        prepared = forward.prepare(
            joined.model, joined.total, selection.trained, selection.statistics, prediction=output
        )
        user_loss.take_target(prepared, joined.prediction)
        sample = tuple([forward.PROBES[0] if dim is None else dim for dim in prepared.shapes[TARGET]])
    else:
        prepared = forward.prepare(proto, output, selection.trained, selection.statistics)
    _check_devices(proto, prepared)
    if (ending := check_ending(prepared, loss)) is not None:
        said = f"{kind_of(loss)} trains the scores before it, {ending.scores!r}"
        if isinstance(loss, CrossEntropy) and ending.axis is None:
            said += f" (if several answers of an example may be yes, set {argument('loss', 'bce_with_logits')})"
        notes.append(f"output {output!r} {ending.said}; {said}; exported models still return the output")
        prepared = forward.prepare(proto, ending.scores, selection.trained, selection.statistics)
    if not isinstance(loss, OnnxLoss):
        sample = target_type(loss, prepared.output_sample)[1]
    check_export(proto, prepared, selection.statistics, settings)
    if selection.frozen:
        notes.append(
            f"not trained, because frozen in torch: {', '.join(selection.frozen)}; to train them, name them in "
            "train"
        )
    warnings = (*warnings, *_warnings(proto, prepared, selection, settings))
    made = _assemble(prepared, settings, selection)
    prepared.constants.clear()  # the run needs the memory
    prepared.parameters.clear()
    _check_run(made, prepared, sample)
    return msgspec.structs.replace(made, warnings=warnings, notes=(*notes, *made.notes)), weights


def _check_devices(model: onnx.ModelProto, prepared: ForwardGraph) -> None:
    """Raise `GraphError` if devices do not support an operator, even if it needs no gradient.

    Random operators are accepted here, because `to_onnx` replaces them later, and the hub checks
    the finished graph.
    """
    for node in prepared.nodes:
        if node.op not in (ALLOWED_OWN if node.domain else ALLOWED | RANDOM_OPERATORS):
            rest = "write the model with other operators"
            if node.domain or "Integer" in node.op or node.op.startswith("QLinear"):
                rest = producer_of(model).foreign
            raise GraphError(f"{node.where}: operator {node.op} is not supported on devices; {rest}")


def _check_parameters(parameters: Sequence[Parameter]) -> None:
    """Raise `GraphError` if devices would not accept the name or shape of a parameter."""
    for parameter in parameters:
        if not 0 < len(parameter.name) <= NAME_MAX or len(parameter.shape) > AXES_MAX:
            raise GraphError(
                f"parameter {parameter.name[:60]!r} has {len(parameter.name)} characters in its name and "
                f"{len(parameter.shape)} axes, but the limits are {NAME_MAX} and {AXES_MAX}; rename or reshape it "
                "in the model, or freeze it by a pattern"
            )


def _warnings(
    model: onnx.ModelProto, prepared: ForwardGraph, selection: Selection, settings: GraphSettings
) -> tuple[str, ...]:
    found = []
    part = settings.lora is not None  # then, nobody expects that all weights are trained
    if not part and (held := [name for name in selection.held if name in prepared.constants]):
        found.append(
            f"weights in Constant nodes are not trained: {', '.join(held)}; to train them, set "
            f"{argument('train', *(settings.train or ('*',)), *held)}"
        )
    if selection.unfit:
        of_which = ", ".join([f"{name} ({what})" for name, what in selection.unfit.items()])
        found.append(
            f"only finite float32 weights are trained, so these are not: {of_which}; to train them, export "
            "the model in float32"
        )
    constants = prepared.constants.items()
    nans = [name for name, value in constants if value.dtype.kind == "f" and np.isnan(value).any()]
    if nans and not selection.unfit and settings.train is None:
        found.append(f"constants contain NaN, so that all results may be NaN: {', '.join(nans)}; correct the file")
    if not part and (folded := folded_scalars(model, prepared)):
        of_which = ", ".join([f"{name} of {origin}" for name, origin in folded.items()])
        found.append(
            f"scalars computed by the exporter are not trained: {of_which}; {producer_of(model).plain}, "
            f"or set {argument('train', *(settings.train or ('*',)), *folded)}"
        )
    output = prepared.output
    if isinstance(find_loss(settings.loss), CrossEntropy) and classes_are_last(prepared):
        found.append(
            f"cross_entropy uses axis 1 of output {output!r} as classes, but the last layer computes the "
            f"last axis of {prepared.shapes[output]}; if that is the classes' axis, transpose the output, "
            f"in torch with scores.movedim({len(prepared.shapes[output]) - 1}, 1)"
        )
    return (*found, *warnings_of(model, prepared, settings))


def read_training_graph(model: bytes, initial: Mapping[str, Array]) -> TrainingGraph:
    """Parse an existing training graph, and arrange its initial values in a flat vector.

    Raises `GraphError` if the graph violates the contract, and `ModelMismatchError` if the values
    do not match the graph.
    """
    if not is_training_graph(model):
        raise GraphError("not a training graph; build one with edgeasync model build")
    proto = reading.read(model)
    spec = contract.read_spec(proto)
    in_chunks = any(entry.key == contract.CHUNKS for entry in proto.metadata_props)
    return TrainingGraph(model, spec, spec.flatten(initial), in_chunks=in_chunks)


def _assemble(prepared: ForwardGraph, settings: GraphSettings, selection: Selection) -> TrainingGraph:
    trained = [name for name in selection.trained if name in prepared.parameters]
    simplify(prepared, [prepared.output, prepared.prediction])
    loss = find_loss(settings.loss)
    head = find_head(prepared) if isinstance(loss, CrossEntropy) else None
    if head is not None:
        prepared.nodes = [node for node in prepared.nodes if node not in head.nodes]
    graph, steps = differentiate.begin(prepared, trained, selection.statistics)
    if isinstance(loss, OnnxLoss):
        kind, shape = prepared.dtypes[TARGET], prepared.shapes[TARGET]
    else:
        kind, shape = target_type(loss, prepared.shapes[prepared.output])
    if settings.target == "input":
        _check_autoencoder(prepared, shape)
    graph.shapes[TARGET], graph.dtypes[TARGET] = shape, kind
    if isinstance(loss, OnnxLoss):
        parts = user_loss.add(graph, prepared)
    elif isinstance(loss, CrossEntropy) and head is not None:
        parts = add_loss_in_chunks(graph, loss, head)
    else:
        parts = add_loss(graph, loss, prepared.output)
    found = differentiate.reverse(graph, steps, parts.gradients, recomputed=settings.recompute)
    dequantize_late(graph)
    lost = [name for name in trained if name not in found]
    trained = [name for name in trained if name in found]
    if not trained:
        frozen = [name for name in selection.frozen if name in prepared.constants]
        told = f"trained: {', '.join(lost)}" if lost else "no parameter is selected"
        if frozen:
            told += f"; to train {', '.join(frozen)}, which torch had frozen, set {argument('train', *frozen)}"
        raise GraphError(f"no trained parameter affects output {prepared.prediction!r}; {told}")
    graph.constants |= {name: prepared.parameters[name] for name in lost}
    statistics = [name for name in prepared.parameters if name in graph.statistics]
    results = {"loss": parts.loss, contract.WEIGHT: parts.weight}
    results |= {name + contract.GRADIENT: found[name] for name in trained}
    results |= {name + contract.NEXT: graph.statistics[name] for name in statistics}
    parameters = [Parameter(name, prepared.parameters[name].shape) for name in trained]
    parameters += [Parameter(name, prepared.parameters[name].shape, "statistic") for name in statistics]
    _check_parameters(parameters)
    spec = ParameterSpec(tuple(parameters))
    metadata, notes = _metadata(prepared, loss, settings), list[str]()
    if head is not None:
        metadata[contract.CHUNKS] = str(head.chunks)
        notes.append(f"the loss computes the scores in {head.chunks} chunks, so devices measure no accuracy")
    model = contract.serialize(prepared, graph, spec, results, metadata)
    initial = spec.flatten({parameter.name: prepared.parameters[parameter.name] for parameter in spec.parameters})
    return TrainingGraph(model, spec, initial, notes=tuple(notes), in_chunks=head is not None)


def _metadata(prepared: ForwardGraph, loss: Loss, settings: GraphSettings) -> dict[str, str]:
    found = {
        contract.CONTRACT: contract.CONTRACT_VERSION,
        contract.OUTPUT: prepared.prediction,
        "edgeasync.target": settings.target,
        "edgeasync.loss": json.dumps({"kind": "onnx"})
        if isinstance(loss, OnnxLoss)
        else msgspec.json.encode(loss).decode(),
    }
    if settings.lora is not None:
        found |= adapters.metadata_of(find_lora(settings.lora))
    if isinstance(loss, CrossEntropy):
        found["edgeasync.classes"] = str(prepared.shapes[prepared.output][1])
        if loss.ignored_label is not None:
            found["edgeasync.ignored_label"] = str(loss.ignored_label)
    return found


def _check_run(made: TrainingGraph, prepared: ForwardGraph, target: Shape) -> None:
    """Run one step, so that an unusable graph fails here instead of on every device."""
    shapes = {parameter.name: parameter.shape for parameter in made.spec.parameters}
    feeds: dict[str, Array] = dict(made.spec.views(made.initial))
    for name in prepared.inputs:
        size = [forward.PROBES[0] if dim is None else dim for dim in prepared.shapes[name]]
        feeds[name] = np.zeros(size, prepared.dtypes[name])
    try:
        session, constants = open_in_place(made.model)
        kind = next(entry.type for entry in session.get_inputs() if entry.name == TARGET)
        feeds[TARGET] = np.zeros([dim or 0 for dim in target], np.int64 if kind == "tensor(int64)" else FLOAT)
        names = [entry.name for entry in session.get_outputs()]
        results = session.run(names, feeds | constants)
    except Exception as error:
        raise GraphError(
            f"the training graph does not run: {native_reason(error)}; write that part of the model with other "
            "operators"
        ) from error
    for name, value in zip(names, results, strict=True):
        if name == prepared.prediction:
            continue
        expected = shapes.get(contract.parameter_of(name), ())
        if value.shape != expected:
            raise GraphError(
                f"the training graph is wrong: {name!r} has shape {value.shape}, expected {expected}; this is a "
                "bug in edgeasync, please report it with the model"
            )


def _check_autoencoder(prepared: ForwardGraph, target: tuple[int | None, ...]) -> None:
    if len(prepared.inputs) != 1 or prepared.shapes[prepared.inputs[0]] != target:
        shapes = ", ".join(str(prepared.shapes[name]) for name in prepared.inputs)
        raise GraphError(
            f"target = 'input' needs one input with the output's shape {target}; the inputs have {shapes}"
        )
