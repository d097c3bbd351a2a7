"""From a forward ONNX model to a training graph that plain onnxruntime runs.

The interface of a training graph is a contract (`docs/training_graph.md`):

- inputs: the forward model's own, `target`, and one for each trained parameter and running statistic, by its name;
- outputs: `loss`, the metrics, `<parameter>.grad` and `<statistic>.new`;
- everything that is not trained is an initializer.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import msgspec
import numpy as np
import onnx
from onnx import helper

from edgeasync.autodiff import differentiate, forward
from edgeasync.autodiff.forward import Forward
from edgeasync.autodiff.graph import (
    FLOAT,
    IR_VERSION,
    Array,
    Node,
    Shape,
    needed,
    tensor,
    value_info,
    write_nodes,
)
from edgeasync.autodiff.losses import TARGET, LossParts, add_loss, target_type
from edgeasync.autodiff.rules import TrainingGraphBuilder
from edgeasync.autodiff.settings import BinaryCrossEntropy, CrossEntropy, GraphSettings, find_loss
from edgeasync.errors import GraphError
from edgeasync.parameters import Parameter, ParameterSpec, Role, Vector

CONTRACT = "edgeasync.contract"
"""The metadata key that marks a training graph; its value is the version of the contract."""

CONTRACT_VERSION = "1"


class TrainingGraph(msgspec.Struct, frozen=True):
    """A serialized training graph, the layout of what it trains, and the values that begins with."""

    model: bytes
    spec: ParameterSpec
    initial: Vector


def build_training_graph(model: bytes, settings: GraphSettings) -> TrainingGraph:
    """Differentiate a serialized forward model; raises `GraphError` if it cannot be trained as asked."""
    if is_training_graph(model):
        raise GraphError("this is a training graph already; give the forward model")
    proto = forward.parse(model)
    output = forward.choose_output(proto, settings.output)
    values = forward.initial_values(proto)
    candidates = _candidates(proto, values)
    statistics, norms = _statistics(proto, values)
    chosen = _chosen([*candidates, *statistics], settings)
    live = {name for norm in norms if chosen.intersection(norm) for name in norm[2:]}
    trained = [name for name in candidates if name in chosen and name not in statistics]
    prepared = forward.prepare(proto, output, trained, live)
    _check_output(prepared, settings)
    if proto.producer_name == "pytorch":
        _check_folds(prepared)
        _check_origins(prepared, _said(proto, _FOLDED_FROM), settings)
    _check_statistics(prepared, live)
    made = _assemble(prepared, settings, trained, live)
    _check_run(made, prepared, target_type(find_loss(settings.loss), prepared.output_sample)[1])
    return made


def _candidates(model: onnx.ModelProto, values: Mapping[str, Array]) -> list[str]:
    """Return what may be trained: float32 initializers with a dimension. A scalar is a constant of the formula."""
    untrained = {name for node in model.graph.node for name in _fixed_inputs(node)}
    untrained.update(name for name, kind in _said(model, _KIND).items() if kind != "PARAMETER")
    return [
        name
        for name, value in values.items()
        if value.dtype == FLOAT
        and value.ndim
        and value.size
        and name not in untrained
        and np.isfinite(value).all()
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


def _chosen(names: list[str], settings: GraphSettings) -> set[str]:
    for pattern in (*settings.train, *settings.freeze):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise GraphError(f"no parameter matches {pattern!r}; there are {', '.join(names) or 'none'}")
    return {
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in settings.train)
        and not any(fnmatchcase(name, pattern) for pattern in settings.freeze)
    }


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
                f"name {last.inputs[0]!r} as the output"
            )
        if last.op in _MOVING or (last.op == "Sub" and last.inputs[0] in prepared.constants):
            sources += [makers[name] for name in last.inputs if name in makers]


def _assemble(prepared: Forward, settings: GraphSettings, chosen: list[str], live: set[str]) -> TrainingGraph:
    trained = [name for name in chosen if name in prepared.parameters]
    _check_identity(prepared, trained)
    graph, steps = differentiate.begin(prepared, trained, live)
    loss = find_loss(settings.loss)
    kind, shape = target_type(loss, prepared.shapes[prepared.output])
    if settings.target == "input":
        _check_autoencoder(prepared, shape)
    graph.shapes[TARGET], graph.dtypes[TARGET] = shape, kind
    parts = add_loss(graph, loss, prepared.output)
    found = differentiate.reverse(graph, steps, prepared.output, parts.gradient)
    lost = [name for name in trained if name not in found]
    trained = [name for name in trained if name in found]
    if not trained:
        raise GraphError(
            f"no trained parameter reaches output {prepared.output!r}: {', '.join(lost) or 'none chosen'}"
        )
    graph.constants |= {name: prepared.parameters[name] for name in lost}
    statistics = [name for name in prepared.parameters if name in graph.statistics]
    results = {"loss": parts.loss, **parts.metrics}
    results |= {f"{name}.grad": found[name] for name in trained}
    results |= {f"{name}.new": graph.statistics[name] for name in statistics}
    spec = ParameterSpec(
        tuple([
            *[Parameter(name, prepared.parameters[name].shape) for name in trained],
            *[Parameter(name, prepared.parameters[name].shape, "statistic") for name in statistics],
        ])
    )  # fmt: skip
    metadata = {
        CONTRACT: CONTRACT_VERSION,
        "edgeasync.output": prepared.output,
        "edgeasync.target": settings.target,
        "edgeasync.loss": msgspec.json.encode(loss).decode(),
    }
    if isinstance(loss, CrossEntropy):
        metadata["edgeasync.classes"] = str(prepared.shapes[prepared.output][1])
    model = _serialize(prepared, graph, spec, parts, results, metadata)
    initial = spec.flatten({parameter.name: prepared.parameters[parameter.name] for parameter in spec.parameters})
    return TrainingGraph(model, spec, initial)


def _check_identity(prepared: Forward, trained: list[str]) -> None:
    """Refuse a parameter that an exporter made of several that happened to be equal."""
    for name in trained:
        readers = [node for node in prepared.nodes if name in node.inputs]
        if (
            len(readers) > 1
            and forward.is_uniform(value := prepared.parameters[name])
            and (value.size > 1 or value.flat[0] in (0.0, 1.0))
        ):
            raise GraphError(
                f"parameter {name!r} is read by {readers[0].where} and {readers[1].where}, and all its values are "
                "equal: the exporter merged parameters; export without optimization "
                "(torch.onnx.export(..., optimize=False))"
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
                f"optimize=False), or freeze {node.inputs[1]!r}"
            )


_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
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
        if name in settings.train or not (name in folded or _NAMED_BY_EXPORTER.fullmatch(name)):
            continue
        readers = [node for node in prepared.nodes if name in node.inputs]
        joined = any(node.op == "MatMul" for node in readers) and folded.get(name, "").count("'") > 2
        if joined or any(node.op not in _WEIGHTED for node in readers) or _has_twin(prepared, name, value):
            raise GraphError(
                f"{readers[0].where} reads {name!r}, which the exporter computed, of a parameter or of constants: "
                "export without that (dynamo=True, optimize=False; or dynamo=False, do_constant_folding=False), "
                "or name it in `freeze` or in `train`"
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


def _check_run(made: TrainingGraph, prepared: Forward, target: Shape) -> None:
    """Take one step, so that a graph which onnxruntime cannot run is refused here and not by every device."""
    shapes = {parameter.name: parameter.shape for parameter in made.spec.parameters}
    feeds: dict[str, Array] = dict(made.spec.views(made.initial))
    for name in prepared.inputs:
        size = [forward.PROBES[0] if dim is None else dim for dim in prepared.shapes[name]]
        feeds[name] = np.zeros(size, prepared.dtypes[name])
    try:
        session = forward.open_session(made.model)
        kind = next(entry.type for entry in session.get_inputs() if entry.name == TARGET)
        feeds[TARGET] = np.zeros([dim or 0 for dim in target], np.int64 if kind == "tensor(int64)" else FLOAT)
        names = [entry.name for entry in session.get_outputs()]
        results = session.run(names, feeds)
    except Exception as error:
        raise GraphError(f"the training graph does not run: {forward.first_line(error)}") from error
    for name, value in zip(names, results, strict=True):
        expected = shapes.get(name.rpartition(".")[0], ())
        if value.shape != expected:
            raise GraphError(f"the training graph is wrong: {name!r} has shape {value.shape}, not {expected}")


def _check_autoencoder(prepared: Forward, target: tuple[int | None, ...]) -> None:
    if len(prepared.inputs) != 1 or prepared.shapes[prepared.inputs[0]] != target:
        shapes = ", ".join(str(prepared.shapes[name]) for name in prepared.inputs)
        raise GraphError(
            f"target = 'input' needs one input of the output's shape {target}; the inputs have {shapes}"
        )


def _serialize(
    prepared: Forward,
    graph: TrainingGraphBuilder,
    spec: ParameterSpec,
    parts: LossParts,
    results: dict[str, str],
    metadata: dict[str, str],
) -> bytes:
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    _check_names(prepared, graph, shapes, results)
    graph.nodes = needed(graph.nodes, results.values())
    rename: dict[str, str] = {}
    taken = {*shapes, *prepared.inputs, TARGET}
    for result, name in results.items():
        # One tensor under two names, or an input that is a result as it is, needs a node of its own.
        if name in rename or name in taken or name in graph.constants:
            graph.nodes.append(Node("Identity", [name], [result], {}, result))
        else:
            rename[name] = result
    used = {name for node in graph.nodes for name in node.inputs}
    used |= {name for node in graph.nodes for value in node.attributes.values() if isinstance(value, onnx.GraphProto)
             for inner in value.node for name in inner.input}  # fmt: skip
    inputs = [value_info(name, prepared.dtypes[name], prepared.shapes[name]) for name in prepared.inputs]
    inputs.append(value_info(TARGET, graph.dtypes[TARGET], graph.shapes[TARGET]))
    inputs += [value_info(name, FLOAT, shape) for name, shape in shapes.items()]
    scalars = {"loss", *parts.metrics}
    outputs = [
        value_info(name, FLOAT, () if name in scalars else shapes[name.rsplit(".", 1)[0]]) for name in results
    ]
    constants = [tensor(name, value) for name, value in graph.constants.items() if name in used]
    proto = helper.make_model(
        helper.make_graph(write_nodes(graph.nodes, rename), "training", inputs, outputs, constants),
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", prepared.opset)],
        producer_name="edgeasync",
    )
    helper.set_model_props(proto, metadata)
    return bytes(proto.SerializeToString())


def _check_names(
    prepared: Forward, graph: TrainingGraphBuilder, shapes: Mapping[str, object], results: Mapping[str, str]
) -> None:
    """Refuse names that the contract needs for itself."""
    own = {*prepared.inputs, *shapes, *graph.constants}
    own.update(name for node in prepared.nodes for name in node.outputs)
    for name in (TARGET, *results):
        if name in own:
            raise GraphError(f"the model has a tensor {name!r}, a name that the training graph needs; rename it")
    if both := set(prepared.inputs).intersection(shapes):
        raise GraphError(f"{both.pop()!r} is an input and a parameter; rename one")


def is_training_graph(model: bytes) -> bool:
    """Return whether a serialized model is a training graph made by edgeasync."""
    try:
        proto = onnx.load_model_from_string(model)
    except Exception:  # noqa: BLE001
        return False
    return any(entry.key == CONTRACT for entry in proto.metadata_props)


def read_training_graph(model: bytes, initial: Mapping[str, Array]) -> TrainingGraph:
    """Take a training graph that was built before, and the values its parameters begin with.

    Raises `GraphError` if it does not follow the contract, `ModelMismatchError` if the values are not its own.
    """
    if not is_training_graph(model):
        raise GraphError("this is not a training graph; build one with edgeasync model build")
    spec = read_spec(onnx.load_model_from_string(model))
    return TrainingGraph(model, spec, spec.flatten(initial))


def read_spec(proto: onnx.ModelProto) -> ParameterSpec:
    """Return the layout of what a training graph trains; raises `GraphError` if it trains nothing."""
    results = {entry.name for entry in proto.graph.output}
    found = [
        Parameter(entry.name, tuple([dim.dim_value for dim in entry.type.tensor_type.shape.dim]), role)
        for role, ending in _ENDINGS
        for entry in proto.graph.input
        if entry.name + ending in results
    ]
    if not found or found[0].role != "trained":
        raise GraphError("the training graph has no output <parameter>.grad; build it again")
    return ParameterSpec(tuple(found))


_ENDINGS: tuple[tuple[Role, str], ...] = (("trained", ".grad"), ("statistic", ".new"))
