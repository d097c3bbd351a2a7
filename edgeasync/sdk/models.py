"""Converts a model that the user passes into one that a hub and its devices can train."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.autodiff.settings import Base, GraphSettings
from edgeasync.config import FilePath, Section, convert, expanded, to_table
from edgeasync.data.dataset import Dataset, Features, Inputs, Targets
from edgeasync.data.files import load
from edgeasync.durable.run_folder import FORWARD_FILE
from edgeasync.errors import ConfigError, DataError
from edgeasync.graphs.evaluation import make_evaluator
from edgeasync.graphs.graph_model import HubGraph, build_graph, with_own_loss
from edgeasync.graphs.graph_process import load_graph_apart
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.graphs.user_code import flatten
from edgeasync.lora import LoraSetting
from edgeasync.losses import LossSetting, check_loss, find_loss, kind_of
from edgeasync.metrics import check_metrics
from edgeasync.parameters import Arrays, ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen
from edgeasync.sdk.participants import check_same
from edgeasync.training.evaluation import EvaluationResult, Evaluator, add_up, mean_of, rows_at_once
from edgeasync.training.losses import LossSum
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel
from edgeasync.training.plan import LocalTraining, ReceivedGraph, ShippedModel, TrainingPlan
from edgeasync.training.trainer import Trainer

_log = logging.getLogger(__name__)

KINDS = (
    "layers of edgeasync.nn, the path of an ONNX file, an onnx.ModelProto, a SoftmaxModel or MlpModel, an object "
    "with `parameters` and `gradient`, or named arrays together with trainers of your own as data"
)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is ready to train.

    - `make_trainer`: a function that creates a trainer from data, a seed and a number of threads.
      Some trainers ignore the number of threads.
    - `described`: the model as in a settings file, or `None` if it is defined only by Python code.
    - `loss`: the kind of the model's loss, or `None` if unknown.
    - `accumulates`: whether the model's trainers support `accumulation_steps`.
    - `frozen`: the checksum of the model's arrays that are not exchanged.
    - `restore`: a function that converts trained arrays into a model of the user's type.
    """

    spec: ParameterSpec
    initial: Vector
    make_trainer: Callable[[Dataset, int, int], Trainer]
    make_evaluator: Callable[[Dataset], Evaluator]
    restore: Callable[[Arrays], Any]
    described: SoftmaxModel | MlpModel | OnnxModel | None = None
    graph: HubGraph | None = None
    frozen: Frozen | None = None
    loss: str | None = None
    accumulates: bool = True

    @property
    def in_chunks(self) -> bool:
        """Whether the loss computes the scores in chunks, so that devices cannot measure metrics."""
        return self.graph is not None and self.graph.in_chunks

    @property
    def shipped(self) -> SoftmaxModel | MlpModel | ShippedModel | None:
        """The description of the model that is sent to a device."""
        return ShippedModel() if isinstance(self.described, OnnxModel) else self.described

    def evaluator(self, given: object, name: str) -> Evaluator:
        """Create an evaluator on data, or from a function of the named arrays."""
        if callable(given):
            return evaluator_of(given, self.spec)
        return self.make_evaluator(as_dataset(given, name))


def graph_settings(
    loss: LossSetting = "cross_entropy",
    output: str | None = None,
    train: str | Sequence[str] = (),
    freeze: str | Sequence[str] = (),
    *,
    recompute: bool = False,
    lora: LoraSetting | None = None,
    base: Base | None = None,
) -> GraphSettings:
    """Build the settings of a training graph; raises `ConfigError` for invalid arguments."""
    table: dict[str, Any] = {"output": output, "recompute": recompute, "lora": to_table(lora), "base": base}
    for name, patterns in (("train", train), ("freeze", freeze)):
        if patterns:
            table[name] = [patterns] if isinstance(patterns, str) else patterns
    settings = convert(table, GraphSettings, where="the arguments")
    return msgspec.structs.replace(settings, loss=check_loss(loss, "train"))


def prepare(
    model: object, example: Dataset | None, local: LocalTraining, *, graph: GraphSettings, run: Path, seed: int
) -> Prepared:
    """Prepare a model for a run in the folder `run`; `example` determines the input's shape.

    Raises `ConfigError` for an unsupported object, and `GraphError` for an ONNX model that cannot
    be trained.
    """
    check_training(model, local)
    if isinstance(model, str | Path):
        return _onnx(model, None, graph, local)
    if _is_layer(model):
        model = _written(model, example, seed)
    if callable(serialize := getattr(model, "SerializeToString", None)):
        return _onnx(run / FORWARD_FILE, serialize(), graph, local)
    _check_unsaid(model, graph)
    if isinstance(model, SoftmaxModel | MlpModel):
        return _numpy(model, local, graph.loss, seed)
    if callable(prepare_itself := getattr(model, "prepare", None)):  # such as edgeasync.torch.model
        prepared: Prepared = prepare_itself(local)
        return prepared
    if isinstance(getattr(model, "parameters", None), Mapping):
        return _own(model, local)
    if isinstance(model, Mapping):
        spec, initial = flatten(model, "the model")
        return Prepared(
            spec=spec, initial=initial, make_trainer=_no_trainer, make_evaluator=_no_evaluator, restore=dict
        )
    if hasattr(model, "gradient") and not hasattr(model, "parameters"):
        raise ConfigError(
            f"{_name(model)} has no `parameters`; add this attribute, a dict of the initial named arrays"
        )
    raise ConfigError(f"{_name(model)} is not a supported model; pass {KINDS}")


def _check_unsaid(model: object, graph: GraphSettings) -> None:
    """Raise `ConfigError` if a graph setting is set that applies only to ONNX models and layers."""
    default = GraphSettings()
    for name in ("output", "train", "freeze", "recompute", "lora", "base"):
        if getattr(graph, name) != getattr(default, name):
            raise ConfigError(
                f"{name} requires an ONNX model or layers of edgeasync.nn, and {_name(model)} is neither; remove "
                "it (freeze parameters of a torch module with requires_grad_(False))"
            )


def _written(model: Any, example: Dataset | None, seed: int) -> Any:
    """Convert layers to an `onnx.ModelProto`."""
    from edgeasync import nn  # noqa: PLC0415 - already imported by the layer's author

    if example is None:
        raise ConfigError(
            "layers of edgeasync.nn need the shape of an example: pass data to train, or input_shape=(64,) to Hub"
        )
    return nn.to_onnx(model, example.x.shape[1:], seed=seed)


def check_training(model: object, local: LocalTraining) -> None:
    """Raise `ConfigError` for settings that a model of another framework would ignore."""
    if callable(check := getattr(model, "check_training", None)):
        check(local)


def prepare_as(model: Any, spec: ParameterSpec, local: LocalTraining) -> Prepared:
    """Prepare a model that is defined by Python code, with its arrays in the hub's order.

    Raises `ConfigError` for another kind of model, and `ModelMismatchError` if the model's arrays
    differ from the hub's.
    """
    if hasattr(model, "ordered_as"):
        found: Prepared = model.ordered_as(spec).prepare(local)
        return msgspec.structs.replace(found, accumulates=False)
    if not isinstance(parameters := getattr(model, "parameters", None), Mapping):
        raise ConfigError(
            f"{_name(model)} has no Python trainer; pass a model of edgeasync.torch, jax or sklearn, or an object "
            "with `parameters` and `gradient`"
        )
    check_same(flatten(parameters, _name(model))[0].parameters, spec)
    return _own(model, local, [parameter.name for parameter in spec.parameters])


def _is_layer(model: object) -> bool:
    layers = sys.modules.get("edgeasync.nn.layer")
    return layers is not None and isinstance(model, layers.Layer)


def _numpy(model: SoftmaxModel | MlpModel, local: LocalTraining, loss: LossSetting, seed: int) -> Prepared:
    if find_loss(loss) != find_loss("cross_entropy"):
        raise ConfigError(
            f"{_name(model)} always uses the loss cross_entropy; for {loss!r} build the model with edgeasync.nn"
        )
    plan = TrainingPlan(model=model, local=local)
    return Prepared(
        spec=model.spec,
        initial=model.initial(seed),
        make_trainer=lambda data, seed, _: plan.make_trainer(data, seed),
        make_evaluator=lambda data: make_evaluator(model, None, data),
        restore=lambda _: model,
        described=model,
        loss="cross_entropy",
    )


def _onnx(file: str | Path, forward: bytes | None, settings: GraphSettings, local: LocalTraining) -> Prepared:
    """Prepare an ONNX model from the bytes in `forward` or, if they are `None`, from `file`."""
    described = with_own_loss(OnnxModel(file=FilePath.parse(file), **msgspec.structs.asdict(settings)))
    graph = load_graph_apart(described) if forward is None else build_graph(forward, described, "the model")
    for remark in graph.remarks:
        _log.warning("%s", remark)
    plan = TrainingPlan(model=ShippedModel(), local=local)

    def restore(arrays: Arrays) -> Any:
        import onnx  # noqa: PLC0415 - installed wherever forward models are trained

        from edgeasync.autodiff.export import export_model  # noqa: PLC0415 - needs onnx

        if graph.forward is None:
            raise ConfigError(
                f"{described.file}: a training graph cannot be returned as a trained model; train the forward "
                "model instead"
            )
        return onnx.load_model_from_string(export_model(graph.forward, arrays))

    return Prepared(
        spec=graph.spec,
        initial=graph.initial,
        make_trainer=lambda data, seed, threads: plan.make_trainer(
            data, seed, ReceivedGraph(graph.graph, graph.spec, threads)
        ),
        make_evaluator=lambda data: make_evaluator(described, graph, data),
        restore=restore,
        described=described,
        graph=graph,
        frozen=graph.frozen,
        loss=None if graph.forward is None else kind_of(described.loss),
    )


def _own(model: Any, local: LocalTraining, order: Sequence[str] | None = None) -> Prepared:
    if not callable(getattr(model, "gradient", None)):
        raise ConfigError(
            f"{_name(model)} has no method `gradient(arrays, x, y)`; add one that returns a loss and gradients"
        )
    names = model.parameters if order is None else order
    spec, initial = flatten({name: model.parameters[name] for name in names}, _name(model))
    if local.metrics:
        raise ConfigError(
            f"metrics: {_name(model)} reports no scores; use layers, ONNX, or trainers with a `metrics()` method"
        )

    def gradient(vector: Vector, x: Features, y: Targets, out: Vector) -> float:
        loss, gradients = _call(model, spec.views(vector), x, y)
        for name, view in spec.views(out).items():
            view[...] = _gradient_of(model, gradients, name, view.shape)
        return loss

    def make_trainer(data: Dataset, seed: int, _: int) -> Trainer:
        trial = np.empty_like(initial)
        gradient(initial.copy(), data.features[:1], data.y[:1], trial)  # to report mistakes early
        return local.make_trainer(spec, gradient, data, seed)

    def make_evaluator(data: Dataset) -> Evaluator:
        _own_evaluator(model, spec, data.take(np.arange(1)))(initial)  # to report mistakes early
        return _own_evaluator(model, spec, data)

    return Prepared(
        spec=spec,
        initial=initial,
        make_trainer=make_trainer,
        make_evaluator=make_evaluator,
        restore=dict,
    )


def _call(model: Any, arrays: Arrays, x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
    found = model.gradient(arrays, _plain(x), y)
    if not (isinstance(found, Sequence) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise ConfigError(
            f"{_name(model)}.gradient returned {type(found).__name__}; return the loss and a dict of gradients"
        )
    return float(found[0]), found[1]


def _plain(x: Features) -> Any:
    """Convert features to the type that the user's model expects: an array, or a dict of arrays."""
    return x.arrays if isinstance(x, Inputs) else x


def _gradient_of(model: Any, gradients: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    if name not in gradients:
        raise ConfigError(
            f"{_name(model)}.gradient returned no gradient for {name!r}; return one for each parameter"
        )
    values = np.asarray(gradients[name])
    if values.shape != shape:
        raise ConfigError(f"{_name(model)}: the gradient of {name!r} has shape {values.shape}, not {shape}")
    return values


def _own_evaluator(model: Any, spec: ParameterSpec, data: Dataset) -> Evaluator:
    """Create an evaluator for the mean loss and, if the model predicts classes, the accuracy."""
    features = data.features.arrays.values() if isinstance(data.features, Inputs) else [data.x]
    rows = rows_at_once(sum(int(np.prod(array.shape[1:])) for array in features))
    predicts = hasattr(model, "predict") and data.y.dtype.kind == "i"

    def loss_of(arrays: Arrays, x: Features, y: Targets) -> LossSum:
        loss = _call(model, arrays, x, y)[0]
        if not predicts:
            return mean_of(loss, y, None)
        predicted = np.asarray(model.predict(arrays, _plain(x)))
        if predicted.shape != y.shape:
            raise ConfigError(
                f"{_name(model)}.predict returned shape {predicted.shape} for {len(y)} examples; "
                "return one class number for each"
            )
        return mean_of(loss, y, predicted)

    return lambda vector: add_up(data.features, data.y, rows, partial(loss_of, spec.views(vector)))


def evaluator_of(evaluate: Callable[[Arrays], Any], spec: ParameterSpec) -> Evaluator:
    """Create an evaluator from a function of the named arrays.

    The function returns a loss, a loss and an accuracy, or an `EvaluationResult`.
    """

    def evaluator(parameters: Vector) -> EvaluationResult:
        found = evaluate(spec.views(parameters))
        if isinstance(found, EvaluationResult):
            return found
        loss, accuracy = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        try:
            loss, accuracy = float(loss), None if accuracy is None else float(accuracy)
        except (TypeError, ValueError):
            raise ConfigError(
                f"evaluate returned {type(found).__name__}; return a loss, or a tuple of a loss and an accuracy"
            ) from None
        if accuracy is not None and not 0.0 <= accuracy <= 1.0:
            raise ConfigError(f"evaluate returned the accuracy {accuracy:g}; return a fraction from 0 to 1")
        return EvaluationResult(loss, accuracy, 0)

    return evaluator


def maker_of(initial: Mapping[str, npt.ArrayLike] | npt.ArrayLike) -> Callable[[ParameterSpec], Vector]:
    """Return a function that builds a vector for the hub's model from the values in `initial`.

    `initial` contains named arrays or a flat vector. The function raises `ModelMismatchError` if
    names or shapes differ from those of the hub's model.
    """
    if not isinstance(initial, Mapping):
        vector = np.array(initial, np.float32)

        def checked(spec: ParameterSpec) -> Vector:
            spec.check(vector)
            return vector

        return checked
    arrays = {name: np.array(array, np.float32) for name, array in initial.items()}
    return lambda spec: spec.flatten(arrays)


def _no_trainer(data: Dataset, seed: int, threads: int) -> Trainer:  # noqa: ARG001
    raise ConfigError("named arrays alone cannot be trained on data; pass trainers, or a model instead")


def _no_evaluator(data: Dataset) -> Evaluator:  # noqa: ARG001
    raise ConfigError("named arrays alone cannot be evaluated on data; pass a function as evaluate")


def _name(model: object) -> str:
    return f"the model {type(model).__name__}"


def as_dataset(data: object, where: str) -> Dataset:
    """Convert data to a dataset: a `Dataset`, a tuple `(x, y)` or a file path.

    Raises `DataError` for anything else.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | Path):
        return load(expanded(data))
    if isinstance(data, tuple) and len(data) == 2:
        return Dataset.of(data[0], data[1], where=where)
    raise DataError(
        f"{where} is {type(data).__name__}; pass a Dataset, a tuple (x, y) of arrays, or the path of a .npz or "
        ".csv file"
    )


def local_training(
    optimizer: object = None, batch_size: int | None = None, metrics: object = (), **numbers: Any
) -> LocalTraining:
    """Build the settings of local training; `None` means the default.

    Raises `ConfigError` for invalid arguments.
    """
    table: dict[str, Any] = {"batch_size": batch_size, **numbers}
    table = {name: value for name, value in table.items() if value is not None}
    table["metrics"] = to_table(check_metrics(metrics, "train"))
    if optimizer is not None:
        stages = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
        if wrong := [stage for stage in stages if not isinstance(stage, Section)]:
            raise ConfigError(
                f"optimizer is {wrong[0]!r}; pass an optimizer such as SGD(learning_rate=0.1), or a list of stages"
            )
        table["optimizer"] = [to_table(stage) for stage in stages]
    return convert(table, LocalTraining, where="train")
