"""Training settings that a hub sends to its devices: model, batches and local optimizer."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from edgeasync.config import Section, convert
from edgeasync.data.dataset import Dataset, batches, warn_of_one_class
from edgeasync.errors import ConfigError, GraphError, ModelMismatchError
from edgeasync.metrics import Meter, MetricSettings, find_metrics
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.optimizers import SGD, TransformKind, check_chain
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.micro_batches import AccumulationSteps, MicroBatch, check_accumulation, worth_splitting
from edgeasync.training.numpy_models import Model
from edgeasync.training.trainer import Trainer

if TYPE_CHECKING:
    from edgeasync.training.onnx_session import Provider


class LocalTraining(Section, frozen=True):
    """Settings for training on a device between two exchanges."""

    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    """Examples per batch; a device with fewer examples uses all of them."""
    optimizer: Annotated[tuple[TransformKind, ...], Meta(min_length=1)] = (SGD(learning_rate=0.05),)
    """Optimizer stages that a gradient passes through before it is subtracted; at least one."""
    keep_optimizer_state: bool = False
    """Keep momentum and averages from one assignment to the next, instead of resetting them."""
    accumulation_steps: AccumulationSteps = 1
    """Batches per local step. A device uses each of its examples at most once per step. Not for
    models with batch norms; see [Large batches on small
    devices](/train/optimizer.md#large-batches-on-small-devices).
    """
    micro_batch_size: MicroBatch | None = None
    """Largest number of examples computed at once, or `auto`. The device sums the gradients of the
    parts, with the same result as for the whole batch. `auto` chooses a size by speed and memory of
    each device. Not for models with batch norms. A device may override this key in `[agent]`.
    """
    metrics: MetricSettings = ()
    """Metrics that devices measure on training batches besides the loss: `accuracy`, `top_k`,
    `mae`, `f1`. See [Metrics of devices](/train/evaluation.md#metrics-of-devices).
    """

    def __post_init__(self) -> None:
        check_chain(self.optimizer)

    def steps_of(self, epochs: float, examples: int) -> int:
        """Return the number of local steps for `epochs` passes over this number of examples."""
        return math.ceil(epochs * examples / min(self.batch_size * self.accumulation_steps, examples))

    def make_trainer(
        self,
        spec: ParameterSpec,
        gradient: Callable[..., float | None],
        dataset: Dataset,
        seed: int,
        meter: Meter | None = None,
    ) -> GradientTrainer:
        """Return a trainer with a gradient function, to which `meter` is passed if given."""
        drawn = batches(dataset, self.batch_size, seed)
        if meter is not None:
            gradient = partial(gradient, meter=meter)
        return GradientTrainer(
            spec,
            gradient,
            self.optimizer,
            drawn,
            keep_optimizer_state=self.keep_optimizer_state,
            accumulation_steps=min(self.accumulation_steps, drawn.per_epoch),
            micro_batch_size=worth_splitting(self.micro_batch_size, drawn.batch_size),
            meter=meter,
        )

    def make_meter(self, loss: str, *, ignored_label: int | None = None) -> Meter | None:
        """Return a meter for the metrics with this kind of loss, or `None` without metrics."""
        return Meter(find_metrics(self.metrics, loss), ignored_label=ignored_label) if self.metrics else None

    def check_model(self, spec: ParameterSpec, loss: str | None) -> None:
        """Raise `ConfigError` if devices would reject this model.

        `loss` is None if its kind is unknown.
        """
        check_accumulation(spec, self.accumulation_steps, worth_splitting(self.micro_batch_size, self.batch_size))
        if loss is not None:
            find_metrics(self.metrics, loss)


class ShippedModel(Section, frozen=True, tag_field="kind", tag="graph"):
    """The training graph that the hub's welcome announces. It describes the model completely."""

    local: Patterns | UnsetType = UNSET


class CodeModel(Section, frozen=True, tag_field="kind", tag="custom"):
    """A model defined by the hub's own code. Devices need their own trainer for it."""

    local: Patterns | UnsetType = UNSET


class ReceivedGraph(msgspec.Struct, frozen=True):
    """A screened training graph on a device, with the device's settings for running it."""

    graph: bytes
    spec: ParameterSpec
    threads: int = 1
    provider: "Provider" = "auto"


class TrainingPlan(Section, frozen=True):
    """A model and its training settings, sent in the hub's welcome as plain tables."""

    model: Model | ShippedModel | CodeModel
    local: LocalTraining = LocalTraining()

    def make_trainer(
        self,
        dataset: Dataset,
        seed: int,
        received: ReceivedGraph | None = None,
        *,
        spec: ParameterSpec | None = None,
    ) -> Trainer:
        """Return a trainer on this device's data.

        A plan with a graph needs `received`. Raises `DataError` if the data does not match the
        model, `ConfigError` for a model defined by the hub's code, and `GraphError` if the graph
        cannot be run. A model in the plan itself must match `spec`, if that is given; otherwise it
        raises `ModelMismatchError` before it allocates memory.
        """
        if isinstance(self.model, ShippedModel):
            if received is None:
                raise GraphError(
                    "the hub's settings use a training graph, but its Welcome announces none; upgrade the hub"
                )
            from edgeasync.training.onnx_trainer import OnnxTrainer  # noqa: PLC0415 - imports onnxruntime

            return OnnxTrainer(
                received.graph,
                received.spec,
                dataset,
                self.local,
                seed=seed,
                threads=received.threads,
                provider=received.provider,
            )
        if isinstance(self.model, CodeModel):
            raise ConfigError(
                "the hub's model is defined by Python code; start this agent with its own trainer (--trainer), "
                "such as 'package.module:factory'"
            )
        if spec is not None and self.model.spec != spec:
            raise ModelMismatchError(
                "the model in the hub's settings differs from the hub's model; do not trust this hub"
            )
        self.model.check_data(dataset)
        warn_of_one_class(dataset.y)
        return self.local.make_trainer(
            self.model.spec, self.model.gradient, dataset, seed, self.local.make_meter("cross_entropy")
        )


def read_plan(settings: Mapping[str, object]) -> TrainingPlan:
    """Check the settings in a hub's welcome.

    Raises `ConfigError` if they are unknown or invalid.
    """
    return convert(dict(settings), TrainingPlan, where="the hub's settings")
