"""Evaluates a hub's model, either in numpy or by running the forward ONNX model.

This package may import both `training/` and `autodiff/`, whereas these two must not import each
other. onnxruntime and the `onnx` package are imported only to evaluate an ONNX model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.autodiff.settings import GraphSettings
from edgeasync.data.dataset import Dataset, Features, check_answers, check_names, input_of
from edgeasync.errors import ConfigError, DataError, GraphError
from edgeasync.graphs.graph_model import HubGraph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    NamedLoss,
    OnnxLoss,
    find_loss,
)
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.training import losses
from edgeasync.training.evaluation import EvaluationResult, Evaluator, NumpyEvaluator, add_up, rows_at_once
from edgeasync.training.input_form import InputForm
from edgeasync.training.numpy_models import Model

Array = npt.NDArray[Any]


def make_evaluator(model: Model | OnnxModel, loaded: HubGraph | None, dataset: Dataset) -> Evaluator:
    """Return an evaluator of a hub's model on `dataset`.

    `loaded` is the loaded graph if the model is an ONNX model.

    Raises `DataError` if the data does not match the model, and `ConfigError` if the model is a
    prebuilt training graph, which has no evaluation mode.
    """
    if not isinstance(model, OnnxModel):
        return NumpyEvaluator(model, dataset)
    if loaded is None or loaded.forward is None:
        raise ConfigError(
            f"{model.file}: a training graph cannot be evaluated on held-out data; use the forward "
            "model that it was built from, or no evaluation data"
        )
    from edgeasync.autodiff.contract import read_output  # noqa: PLC0415 - not needed for numpy models

    trained = msgspec.structs.replace(model, output=read_output(loaded.graph))
    return OnnxEvaluator(loaded.forward, loaded.spec, trained, dataset)


class OnnxEvaluator:
    """An `Evaluator` that runs a forward ONNX model in evaluation mode.

    Batch norms use their running statistics and dropouts are inactive, as in an exported model. The
    session is created once. The parameters are inputs of the model, so each evaluation passes views
    of the vector without copying it. If the model has a fixed batch size, the last batch is padded
    with the first examples of the dataset, whose results do not count. `threads` is the number of
    cores to use.

    Raises `GraphError` if the model cannot be evaluated, `ModelMismatchError` if it does not match
    `spec`, and `DataError` if the data does not match.
    """

    def __init__(
        self, forward: bytes, spec: ParameterSpec, settings: GraphSettings, dataset: Dataset, *, threads: int = 1
    ) -> None:
        from edgeasync.autodiff.losses import target_type  # noqa: PLC0415 - not needed for numpy models
        from edgeasync.training.onnx_session import open_session  # noqa: PLC0415

        loss = find_loss(settings.loss)
        self._spec = spec
        self._session = open_session(evaluation_graph(forward, spec, settings.output), threads, "cpu")
        inputs = {entry.name: entry for entry in self._session.get_inputs()}
        self._fed = [parameter.name for parameter in spec.parameters if parameter.name in inputs]
        self._forms = {name: InputForm.of(entry) for name, entry in inputs.items() if name not in self._fed}
        sizes = {form.rows for form in self._forms.values()}
        if len(sizes) != 1:
            names = ", ".join(self._forms) or "(none)"
            raise GraphError(
                f"the model's inputs {names} have no common batch size; export the model again with the same "
                "batch size for all inputs"
            )
        self._batch = sizes.pop()
        self._x = dataset.features
        self._targets = dataset.x if settings.target == "input" else dataset.y
        check_names(self._x, list(self._forms))
        for name, form in self._forms.items():
            form.check(input_of(self._x, name), "examples")
        if isinstance(loss, OnnxLoss):
            self._evaluate_own(loss, threads)
            return
        # The shape of the scores is only known from a run. Zero parameters suffice.
        scores = self._scores(spec.views(np.zeros(spec.length, np.float32)), self._x[:1])
        dtype, (_, *rest) = target_type(loss, scores.shape)
        self._target = InputForm("target", dtype, tuple([size for size in rest if size is not None]))
        # The targets of an autoencoder are its examples, which a dataset stores as floats in any
        # case.
        if dtype.kind == "i" and settings.target == "label" and dataset.y.dtype.kind != "i":
            raise DataError(
                "targets are floats, but the hub's model expects class numbers; convert them to integers"
            )
        self._target.check(self._targets, "targets")
        if isinstance(loss, CrossEntropy):
            _check_labels(self._targets, scores.shape[1], loss)
        if isinstance(loss, BinaryCrossEntropy):
            check_answers(self._targets)
        self._loss = numpy_loss(loss)
        self._rows = self._batch or rows_at_once(
            max(*[math.prod(form.shape) for form in self._forms.values()], scores.size)
        )

    def _evaluate_own(self, loss: OnnxLoss, threads: int) -> None:
        """Set up a user-defined loss.

        The loss is an ONNX graph that also defines the dtype and shape of the targets.
        """
        from edgeasync.training.onnx_session import open_session  # noqa: PLC0415 - not needed for numpy models

        session = open_session(loss.content, threads, "cpu")
        entry = next(entry for entry in session.get_inputs() if entry.name == "target")
        self._target = InputForm.of(entry)
        if self._target.rows is not None:
            raise GraphError(
                "the loss has a fixed batch size, but evaluation needs a free one; export the loss again"
            )
        self._target.check(self._targets, "targets")

        def total(scores: npt.NDArray[np.float32], targets: Array) -> losses.LossSum:
            (found,) = session.run(None, {"prediction": scores, "target": targets})
            return losses.LossSum(float(found) * len(scores), len(scores))

        self._loss = total
        self._rows = self._batch or rows_at_once(max(math.prod(form.shape) for form in self._forms.values()))

    def __call__(self, parameters: Vector) -> EvaluationResult:
        """Evaluate the vector. Raises `ModelMismatchError` if the vector does not match the model.

        Raises `DataError` if an index in the data is out of range.
        """
        views = self._spec.views(parameters)

        def loss_of(x: Features, targets: Array) -> losses.LossSum:
            return self._loss(self._scores(views, x), self._target.bring(targets))

        return add_up(self._x, self._targets, self._rows, loss_of)

    def _scores(self, views: dict[str, npt.NDArray[np.float32]], x: Features) -> npt.NDArray[np.float32]:
        rows = fed = len(x)
        missing = None
        if self._batch is not None and rows < self._batch:
            fed = self._batch
            missing = np.arange(fed - rows) % len(self._x)
        feeds = {name: views[name] for name in self._fed}
        for name, form in self._forms.items():
            values: Array = input_of(x, name)
            if missing is not None:
                values = np.concatenate([values, input_of(self._x, name)[missing]])
            feeds[name] = form.bring(values)
        try:
            (scores,) = self._session.run(None, feeds)
        except Exception as error:
            from edgeasync.training.onnx_session import explain  # noqa: PLC0415 - not needed for numpy models

            raise explain(error) from error
        if scores.shape[:1] != (fed,):
            raise GraphError(
                f"the model's output has shape {scores.shape} for {fed} examples; it must have one row per example"
            )
        found: npt.NDArray[np.float32] = scores[:rows]
        return found


def numpy_loss(loss: NamedLoss) -> Callable[[npt.NDArray[np.float32], Array], losses.LossSum]:
    """Return the numpy function that computes a built-in loss of training graphs."""
    match loss:
        case CrossEntropy(class_weights=weights, label_smoothing=smoothing, ignored_label=ignored):
            return partial(
                losses.cross_entropy, class_weights=weights, label_smoothing=smoothing, ignored_label=ignored
            )
        case Huber(delta=delta):
            return partial(losses.huber, delta=delta)
        case MeanSquaredError():
            return losses.squared_error
        case MeanAbsoluteError():
            return losses.absolute_error
        case BinaryCrossEntropy():
            return losses.binary_cross_entropy


def evaluation_graph(forward_model: bytes, spec: ParameterSpec, output: str | None) -> bytes:
    """Return the forward model in evaluation mode, with the arrays of `spec` as inputs.

    Nodes that do not contribute to `output` are removed. Raises `GraphError` if the model is
    invalid or lacks the output, and `ModelMismatchError` if the model lacks arrays of `spec`.
    """
    from onnx import TensorProto, ValueInfoProto, helper  # noqa: PLC0415 - devices do not install onnx

    from edgeasync.autodiff import precision, published  # noqa: PLC0415
    from edgeasync.autodiff.export import insert  # noqa: PLC0415
    from edgeasync.autodiff.graph import IR_VERSION, free_inputs, needed, read_nodes  # noqa: PLC0415
    from edgeasync.autodiff.outputs import choose_output  # noqa: PLC0415

    proto = published.read(forward_model).model
    precision.widen_inputs(proto)
    # The values do not matter, because the arrays become inputs below.
    insert(proto, spec.views(np.zeros(spec.length, np.float32)))
    graph = proto.graph
    made = {name for node in graph.node for name in node.output}
    if output is not None and "::" in output and output not in made:
        output = None  # a name that only the training graph uses, for a part of a sequence
    output = choose_output(proto, output).name
    nodes = needed(read_nodes(graph.node), [output])
    made = {name for node in nodes for name in node.outputs if name}
    used = {name for node in nodes for name in free_inputs(node)}
    fed = {parameter.name: parameter.shape for parameter in spec.parameters if parameter.name in used}
    constants = [entry for entry in graph.initializer if entry.name in used and entry.name not in fed]
    inside = {*fed, *[entry.name for entry in constants]}
    inputs = [entry for entry in graph.input if entry.name in used and entry.name not in inside]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in fed.items()]
    kept = helper.make_graph(
        [node for node in graph.node if made.intersection(node.output)],
        "evaluation",
        inputs,
        [ValueInfoProto(name=output)],
        constants,
    )
    model = helper.make_model(kept, opset_imports=proto.opset_import, ir_version=IR_VERSION)
    return bytes(model.SerializeToString())


def _check_labels(labels: Array, classes: int, loss: CrossEntropy) -> None:
    """Raise `DataError` if a label is not a valid class number, or if all labels are ignored."""
    weights, ignored = loss.class_weights, loss.ignored_label
    if ignored is not None:
        labels = labels[labels != ignored]
        if not labels.size:
            raise DataError(
                f"all labels are the ignored label {ignored}, so the loss is undefined; add examples with other "
                "labels"
            )
    for label in (int(labels.max()), int(labels.min())):
        if not 0 <= label < classes:
            raise DataError(
                f"label {label} is out of range: the hub's model has {classes} classes; use labels from 0 to "
                f"{classes - 1}"
            )
    if weights is not None and not any(weights[int(label)] for label in np.unique(labels)):
        raise DataError(
            "all classes of the data have the weight 0 in class_weights, so the loss is undefined; add examples "
            "of other classes"
        )
