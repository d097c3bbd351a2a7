"""Training settings that a hub sends to its devices: the model, batches and local optimizer."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
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


NO_SCORES = (
    "metrics need all scores of the model, but the loss computes them in chunks to save memory; remove metrics"
)
"""Message of the error if metrics are set for a graph that does not return its scores."""


class LocalTraining(Section, frozen=True):
    """Settings for local training on a device between two exchanges with the hub."""

    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    """Examples per batch; a device with fewer examples uses all of them."""
    optimizer: Annotated[tuple[TransformKind, ...], Meta(min_length=1)] = (SGD(learning_rate=0.05),)
    """Optimizer stages that a gradient passes through before it is subtracted; at least one."""
    keep_optimizer_state: bool = False
    """Keep momentum and averages from one assignment to the next, instead of resetting them."""
    accumulation_steps: AccumulationSteps = 1
    """Batches per local step. A device uses each of its examples at most once per step. Models with
    batch norms do not support this; see [Large batches on small
    devices](/train/optimizer.md#large-batches-on-small-devices).
    """
    micro_batch_size: MicroBatch | None = None
    """Largest number of examples computed at once, or `auto`. The device adds up the gradients of
    the parts, with the same result as for the whole batch. `auto` chooses a size from the speed and
    memory of each device. Models with batch norms do not support this. A device may override this
    key in `[agent]`.
    """
    metrics: MetricSettings = ()
    """Metrics that devices measure on training batches besides the loss: `accuracy`, `top_k`,
    `mae`, `f1`. See [Metrics of devices](/train/evaluation.md#metrics-of-devices).
    """

    def __post_init__(self) -> None:
        check_chain(self.optimizer)

    def steps_of(self, epochs: float, examples: int) -> int:
        """Return the number of local steps in `epochs` passes over this number of examples."""
        return math.ceil(epochs * examples / min(self.batch_size * self.accumulation_steps, examples))

    def make_trainer(
        self,
        spec: ParameterSpec,
        gradient: Callable[..., float | None],
        dataset: Dataset,
        seed: int,
        meter: Meter | None = None,
    ) -> GradientTrainer:
        """Return a trainer for this gradient function.

        If `meter` is set, the function adds scores to it.
        """
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
        """Return a meter for the configured metrics, or `None` if no metrics are configured."""
        return Meter(find_metrics(self.metrics, loss), ignored_label=ignored_label) if self.metrics else None

    def check_model(self, spec: ParameterSpec, loss: str | None, *, in_chunks: bool = False) -> None:
        """Raise `ConfigError` if devices with these settings would reject this model.

        `loss` is the kind of the loss, or `None` if unknown. `in_chunks` tells whether the loss
        computes the scores in chunks.
        """
        if in_chunks and self.metrics:
            raise ConfigError(NO_SCORES)
        check_accumulation(spec, self.accumulation_steps, worth_splitting(self.micro_batch_size, self.batch_size))
        if loss is not None:
            find_metrics(self.metrics, loss)


class ShippedModel(Section, frozen=True, tag_field="kind", tag="graph"):
    """A model that the hub sends as a training graph, which describes the model completely."""

    local: Patterns | UnsetType = UNSET


class CodeModel(Section, frozen=True, tag_field="kind", tag="custom"):
    """A model that is defined by code on the hub. Each device needs its own trainer for it."""

    local: Patterns | UnsetType = UNSET


class ReceivedGraph(msgspec.Struct, frozen=True):
    """A training graph that a device has received and screened, and how the device runs it.

    If the graph has a base, `base_folder` contains it.
    """

    graph: bytes
    spec: ParameterSpec
    threads: int = 1
    provider: "Provider" = "auto"
    base_folder: Path | None = None


class TrainingPlan(Section, frozen=True):
    """A model and its training settings. The hub's welcome message contains both as tables."""

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
        """Return a trainer that trains the model on `dataset`.

        If the model is a training graph, `received` must contain it. If the plan itself defines the
        model and `spec` is set, this method compares the two before it allocates memory. It raises
        `ModelMismatchError` if they differ.

        Raises `DataError` if the data does not match the model, `ConfigError` if the model is
        defined by the hub's code, and `GraphError` if the graph cannot be run.
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
                base_folder=received.base_folder,
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
    """Parse and check the training settings in a hub's welcome message.

    Raises `ConfigError` if a setting is unknown or invalid.
    """
    return convert(dict(settings), TrainingPlan, where="the hub's settings")
