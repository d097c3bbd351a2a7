"""Runs training graphs on stock onnxruntime, with parameters and gradients in flat vectors.

The graph follows the contract in `docs/reference/training_graph.md`. onnxruntime reads parameters
in place, and writes gradients directly to the vector that the optimizer reads. So a step copies
only running statistics.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime

from edgeasync.data.dataset import (
    Dataset,
    Features,
    Inputs,
    batches,
    check_answers,
    check_names,
    input_of,
    warn_of_one_class,
)
from edgeasync.errors import ConfigError, DataError, GraphError, ModelMismatchError
from edgeasync.metrics import Accuracy, Meter, MetricSetting, find_metrics
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.structs import parse_json
from edgeasync.training.evaluation import EvaluationResult
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.input_form import InputForm
from edgeasync.training.memory_fit import fitting_rows
from edgeasync.training.micro_batches import Machine, MicroBatch, worth_splitting
from edgeasync.training.onnx_session import PROVIDERS, Provider, explain, open_session, providers_that_start
from edgeasync.training.plan import NO_SCORES, LocalTraining
from edgeasync.training.trainer import StepResult

TARGET, LOSS, WEIGHT, GRADIENT, NEXT = "target", "loss", "loss_weight", ".grad", ".new"

SCORES_AT = 2
"""Position of the model's scores among the bound outputs. The loss and its weight precede them."""


class OnnxTrainer(GradientTrainer):
    """A `Trainer` that runs a training graph on this device's data.

    `graph` is a training graph built by `edgeasync model build`. `local` contains the training
    settings that a settings file has in `[local]`. If the graph has a fixed batch size, it
    overrides `local.batch_size`. `threads` is the number of cores that a step may use. If the graph
    has a base, `base_folder` is the folder that contains it.

    Raises `GraphError` if the graph cannot be loaded or violates the contract, `ModelMismatchError`
    if it does not train the arrays of `spec`, `DataError` if the data does not match the graph, and
    `ConfigError` if batches would be split although the graph does not allow that.

    >>> import numpy as np
    >>> from edgeasync import SGD, Dataset, OnnxTrainer, nn
    >>> from edgeasync.autodiff.build import build_training_graph
    >>> from edgeasync.autodiff.settings import GraphSettings
    >>> from edgeasync.training.plan import LocalTraining
    >>> forward = nn.to_onnx(nn.Linear(4, 2), (4,))
    >>> built = build_training_graph(forward.SerializeToString(), GraphSettings())
    >>> data = Dataset.of(np.eye(4), [0, 1, 0, 1])
    >>> local = LocalTraining(optimizer=(SGD(learning_rate=0.1),), batch_size=2)
    >>> trainer = OnnxTrainer(built.model, built.spec, data, local)
    >>> trainer.begin(built.initial.copy())
    >>> trainer.step().examples
    2
    """

    def __init__(
        self,
        graph: bytes,
        spec: ParameterSpec,
        dataset: Dataset,
        local: LocalTraining,
        *,
        seed: int = 0,
        threads: int = 1,
        provider: Provider = "auto",
        machine: Machine | None = None,
        base_folder: Path | None = None,
    ) -> None:
        self._dataset = dataset
        self._machine = machine or Machine()
        self._graph = gradient = GraphGradient(
            graph, spec, threads=threads, provider=provider, base_folder=base_folder
        )
        gradient.check_data(dataset)
        if not gradient.own_target:
            warn_of_one_class(dataset.y)
        fixed = gradient.batch_size
        self._place = drawn = batches(dataset, fixed or local.batch_size, seed, full=fixed is not None)
        accumulation_steps = min(local.accumulation_steps, drawn.per_epoch)
        micro_batch_size = worth_splitting(local.micro_batch_size, drawn.batch_size)
        if accumulation_steps > 1 or micro_batch_size is not None:
            gradient.check_parts(micro_batch_size)
        super().__init__(
            spec,
            gradient,
            local.optimizer,
            drawn,
            keep_optimizer_state=local.keep_optimizer_state,
            accumulation_steps=accumulation_steps,
            micro_batch_size=micro_batch_size,
            meter=gradient.measure(local.metrics) if local.metrics else None,
            machine=self._machine,
        )
        self._rows = micro_batch_size if isinstance(micro_batch_size, int) else drawn.batch_size
        """Number of examples to evaluate at once, as many as a step computes."""
        self._untried_rows: int | None = None
        """Number of examples to compute at once. It is `None` after the memory for them has been
        checked.
        """
        if fixed is None and micro_batch_size != "auto":  # else the number is fixed, or chosen step by step
            self._untried_rows = micro_batch_size or drawn.batch_size

    def begin(self, parameters: Vector) -> None:
        """Start an assignment: from now on, train the vector `parameters` in place.

        The first call tests how many examples fit into memory. Batches that do not fit are split.
        Raises `NoMemoryError` if such a batch must not be split.
        """
        if (wanted := self._untried_rows) is not None:
            self._untried_rows = None
            rows = fitting_rows(lambda rows: self._try(parameters, rows), wanted, self._machine)
            if rows < wanted:
                self._rows = rows
                self.compute_at_most(rows)
        super().begin(parameters)

    def _try(self, parameters: Vector, rows: int) -> None:
        """Run the graph on the first `rows` examples without changing the parameters."""
        self._graph.evaluate_batch(parameters, self._dataset.take(np.arange(min(rows, len(self._dataset)))), None)

    def step(self) -> StepResult:
        """Take one local step on one batch.

        The position in the data is the seed for the graph's random numbers, so a resumed trainer
        draws the same numbers. The seed applies to the whole process, because onnxruntime has only
        one generator.
        """
        onnxruntime.set_seed(zlib.crc32(self._place.state().tobytes()))
        return super().step()

    @property
    def batch_size(self) -> int | None:
        """The fixed batch size of the graph, or `None` if the graph accepts any batch size."""
        return self._graph.batch_size

    @property
    def loss(self) -> str:
        """The kind of the graph's loss, such as `cross_entropy`."""
        return self._graph.loss

    def evaluate(self, parameters: Vector, dataset: Dataset) -> EvaluationResult:
        """Evaluate `parameters` on `dataset` with the training graph. Return loss and accuracy.

        May be called from any thread. As many examples are computed at once as in a step, so that
        an evaluation needs no more memory. Batch norms use the batch's statistics and dropouts are
        active, as in training. Raises `DataError` if the data does not match the graph.
        """
        self._graph.check_data(dataset)
        rows = self._graph.batch_size or self._rows
        count = len(dataset) if self._graph.batch_size is None else len(dataset) // rows * rows
        if not count:
            raise DataError(
                f"{len(dataset)} examples do not fill a batch of {rows}, the fixed batch size of the hub's graph; "
                "pass more data"
            )
        meter = self._graph.accuracy_meter()
        total = counted = 0.0
        for start in range(0, count, rows):
            part = dataset.take(np.arange(start, min(start + rows, count)))
            loss, weight = self._graph.evaluate_batch(parameters, part, meter)
            total, counted = total + loss * weight, counted + weight
        accuracy = None if meter is None else meter.take().get("accuracy")
        return EvaluationResult(total / counted if counted else math.nan, accuracy, count)

    def interrupt(self) -> None:
        """Interrupt the running step, in case the graph contains an endless loop."""
        self._graph.interrupt()

    @staticmethod
    def starts_on(provider: Literal["cpu", "cuda", "tensorrt"]) -> bool:
        """Return whether onnxruntime can use this execution provider here."""
        if PROVIDERS[provider] not in onnxruntime.get_available_providers():
            return False  # without the warning that `open_session` logs
        return PROVIDERS[provider] in providers_that_start(provider, 1)


class GraphGradient:
    """A training graph as a gradient function: `gradient(parameters, x, y, out) -> loss`.

    Each call also writes the updated running statistics to `parameters`.
    """

    def __init__(
        self,
        graph: bytes,
        spec: ParameterSpec,
        *,
        threads: int = 1,
        provider: Provider = "auto",
        base_folder: Path | None = None,
    ) -> None:
        self._spec = spec
        self._session = open_session(graph, threads, provider, base_folder=base_folder)
        self._metadata = self._session.get_modelmeta().custom_metadata_map
        inputs = {entry.name: entry for entry in self._session.get_inputs()}
        outputs = {entry.name: entry for entry in self._session.get_outputs()}
        self._output = str(self._metadata.get("edgeasync.output", "edgeasync.output"))
        """Name of the graph output that contains the model's scores, unless they are in chunks."""
        self.in_chunks = "edgeasync.chunks" in self._metadata
        """Whether the loss computes the scores in chunks, so that the graph does not return them."""
        _check_contract(spec, inputs, outputs, None if self.in_chunks else self._output)
        data = [name for name in inputs if name != TARGET and name not in {p.name for p in spec.parameters}]
        self._x = tuple([InputForm.of(inputs[name]) for name in data])
        if not data or len({form.rows for form in self._x}) > 1:
            raise GraphError(
                f"the graph's inputs {', '.join(data) or '(none)'} have no common batch size; export the model "
                "again with the same first dimension for all inputs, and build its training graph again"
            )
        self._y = InputForm.of(inputs[TARGET])
        self._loss, self._weight = np.zeros((), np.float32), np.zeros((), np.float32)
        self._binding = self._session.io_binding()
        self._options = onnxruntime.RunOptions()
        self._binding.bind_output(LOSS, "cpu", 0, np.float32, (), self._loss.ctypes.data)
        self._binding.bind_output(WEIGHT, "cpu", 0, np.float32, (), self._weight.ctypes.data)
        self._meter: Meter | None = None
        self._parameters: Vector | None = None
        self._out: Vector | None = None

    @property
    def weight(self) -> float:
        """The weight of the last batch: the number by which its sum of losses was divided."""
        return float(self._weight)

    @property
    def batch_size(self) -> int | None:
        """The fixed batch size of the graph, or `None` if the graph accepts any batch size."""
        return self._x[0].rows

    @property
    def whole(self) -> bool:
        """Whether batches must not be split.

        Batches must not be split if the graph has a fixed batch size, or if the results of parts do
        not add up to the result of the whole batch.
        """
        return self.batch_size is not None or self._smooths_zeros

    @property
    def _smooths_zeros(self) -> bool:
        """Whether the loss combines label smoothing with a class weight of 0.

        In this case, an example of that class contributes to the loss only in a batch with examples
        of other classes, so the results of parts do not add up to the result of the whole batch.
        """
        loss = self._loss_settings
        return bool(loss.get("label_smoothing")) and 0.0 in (loss.get("class_weights") or ())

    @property
    def _loss_settings(self) -> dict[str, Any]:
        """The loss's settings from the graph's metadata, or an empty table if they are missing."""
        try:
            return parse_json(self._metadata.get("edgeasync.loss", "{}"), dict[str, Any])
        except ValueError as error:
            raise GraphError(f"the graph's loss is invalid ({error}); build the graph again") from error

    @property
    def loss(self) -> str:
        """The kind of the graph's loss, such as `cross_entropy`."""
        return str(self._loss_settings["kind"])

    def __call__(self, parameters: Vector, x: Features, y: npt.NDArray[Any], out: Vector) -> float | None:
        """Write the gradient of the batch's mean loss to `out` and return the loss.

        The loss is `None` if the batch has weight 0.

        Raises `DataError` if an index in the data is out of range, and `GraphError` if the graph
        fails for another reason.
        """
        if parameters is not self._parameters or out is not self._out:
            self._bind(parameters, out)
        # Keep references until the run has ended, because the binding contains only addresses.
        fed_x = [self._feed(form, input_of(x, form.name)) for form in self._x]
        fed_y = self._feed(self._y, fed_x[0] if self.own_target else y)
        if self._meter is not None:
            self._binding.bind_output(self._output, "cpu")  # again, as the batch size may differ
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:
            raise explain(error) from error
        if self._meter is not None:
            self._meter.add(self._binding.get_outputs()[SCORES_AT].numpy(), fed_y)
        del fed_x, fed_y
        start = self._spec.trained_length
        parameters[start:] = out[start:]
        return float(self._loss) if self._weight > 0.0 else None

    def evaluate_batch(self, parameters: Vector, batch: Dataset, meter: Meter | None) -> tuple[float, float]:
        """Return the mean loss and the weight of a batch. If `meter` is set, add the scores to it.

        Does not change the parameters, and may be called from any thread. Raises the same errors as
        `__call__`.
        """
        fed = {each.name: each.bring(input_of(batch.features, each.name)) for each in self._x}
        target = self._y.bring(next(iter(fed.values())) if self.own_target else batch.y)
        names = [LOSS, WEIGHT, *([self._output] if meter is not None else [])]
        try:
            found = self._session.run(names, {**self._spec.views(parameters), **fed, self._y.name: target})
        except Exception as error:
            raise explain(error) from error
        if meter is not None:
            meter.add(found[-1], target)
        return float(found[0]), float(found[1])

    def accuracy_meter(self) -> Meter | None:
        """Return a meter for the accuracy, or `None` if there are no labels or no scores."""
        if self.loss != "cross_entropy" or self.in_chunks:
            return None
        return Meter([Accuracy()], ignored_label=self._ignored_label)

    def interrupt(self) -> None:
        """Abort the current run once the running operator has ended, and abort all later runs.

        May be called from any thread.
        """
        self._options.terminate = True

    @property
    def own_target(self) -> bool:
        """Whether each example is its own target, as in an autoencoder."""
        return bool(self._metadata.get("edgeasync.target") == "input")

    def arbitrary_batch(self, rows: int) -> tuple[Features, npt.NDArray[Any]]:
        """Return a batch of valid values: random floats from 0 to 1, and zeros for integers.

        It has `rows` examples, or the fixed batch size of the graph.
        """
        generator = np.random.default_rng(0)

        def fill(form: InputForm) -> npt.NDArray[Any]:
            shape = (self.batch_size or rows, *form.shape)
            return generator.random(shape, np.float32) if form.dtype.kind == "f" else np.zeros(shape, form.dtype)

        x = {form.name: fill(form) for form in self._x}
        return Inputs(x) if len(x) > 1 else next(iter(x.values())), fill(self._y)

    def _feed(self, form: InputForm, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Bind `values` to a graph input.

        The caller must keep the returned array until the run ends.
        """
        fed = form.bring(values)
        self._binding.bind_input(form.name, "cpu", 0, form.dtype.type, fed.shape, fed.ctypes.data)
        return fed

    def _bind(self, parameters: Vector, out: Vector) -> None:
        values, results = self._spec.views(parameters), self._spec.views(out)
        for parameter in self._spec.parameters:
            name, shape = parameter.name, parameter.shape
            result = name + (GRADIENT if parameter.role == "trained" else NEXT)
            self._binding.bind_input(name, "cpu", 0, np.float32, shape, values[name].ctypes.data)
            self._binding.bind_output(result, "cpu", 0, np.float32, shape, results[name].ctypes.data)
        self._parameters, self._out = parameters, out

    def measure(self, metrics: Sequence[MetricSetting]) -> Meter:
        """Create a meter for `metrics`, to which later calls add their scores, and return it.

        Raises `ConfigError` if a metric does not match the loss, or the graph returns no scores.
        """
        if self.in_chunks:
            raise ConfigError(NO_SCORES)
        self._meter = Meter(find_metrics(metrics, self.loss), ignored_label=self._ignored_label)
        self._binding.bind_output(self._output, "cpu")  # the first run binds the gradients, which must follow
        return self._meter

    @property
    def _ignored_label(self) -> int | None:
        ignored = self._metadata.get("edgeasync.ignored_label")
        return None if ignored is None else int(ignored)

    def check_parts(self, micro_batch_size: MicroBatch | None) -> None:
        """Raise `ConfigError` if batches cannot be combined, or cannot be split into parts."""
        if self._smooths_zeros:
            raise ConfigError(
                "the loss has label_smoothing and a class weight of 0, so parts of a batch do not add up to the "
                "whole; remove accumulation_steps and micro_batch_size, or make that class the ignored_label"
            )
        if micro_batch_size is not None and self.batch_size is not None:
            raise ConfigError(
                f"the hub's graph has a fixed batch size of {self.batch_size}; remove micro_batch_size, "
                "or export the model with a free batch size"
            )

    def check_data(self, dataset: Dataset) -> None:
        """Raise `DataError` unless the dataset's examples and targets match the graph."""
        check_names(dataset.features, [form.name for form in self._x])
        for form in self._x:
            form.check(input_of(dataset.features, form.name), "examples")
        if self._loss_settings.get("kind") == "bce_with_logits":
            check_answers(input_of(dataset.features, self._x[0].name) if self.own_target else dataset.y)
        if self.own_target:
            return
        labels = self._y.dtype.kind == "i"
        if labels and dataset.y.dtype.kind != "i":
            raise DataError(
                "targets are floats, but the hub's model expects class numbers; convert them to integers"
            )
        self._y.check(dataset.y, "targets")
        classes, ignored = self._metadata.get("edgeasync.classes"), self._metadata.get("edgeasync.ignored_label")
        counted = dataset.y if ignored is None else dataset.y[dataset.y != int(ignored)]
        if labels and classes is not None and (label := int(counted.max(initial=0))) >= int(classes):
            raise DataError(
                f"label {label} is out of range: the hub's model has {classes} classes; use labels from 0 to "
                f"{int(classes) - 1}"
            )


def _check_contract(
    spec: ParameterSpec,
    inputs: dict[str, onnxruntime.NodeArg],
    outputs: dict[str, onnxruntime.NodeArg],
    scores: str | None,
) -> None:
    for name, entries in ((TARGET, inputs), (LOSS, outputs), (WEIGHT, outputs), (scores, outputs)):
        if name is not None and name not in entries:
            raise GraphError(
                f"the graph has no {name!r}, so it is not a training graph; start the hub with an ONNX model"
            )
    if outputs[LOSS].type != "tensor(float)" or outputs[LOSS].shape:
        raise GraphError(
            f"the graph's loss is {outputs[LOSS].type} {outputs[LOSS].shape}, not a float32 scalar; build it again"
        )
    for parameter in spec.parameters:
        result = parameter.name + (GRADIENT if parameter.role == "trained" else NEXT)
        for name, entries in ((parameter.name, inputs), (result, outputs)):
            entry = entries.get(name)
            if entry is None or tuple(entry.shape) != parameter.shape or entry.type != "tensor(float)":
                found = "is missing" if entry is None else f"is {entry.type} {entry.shape}"
                raise ModelMismatchError(
                    f"{name!r} {found} in the graph, but the hub's model expects float32 {list(parameter.shape)}"
                )
