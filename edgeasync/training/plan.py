"""What a hub tells its devices about training: the model, the batch, and the local optimizer."""

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
    """How a device trains between two exchanges."""

    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    """Examples of a local step; a device with fewer takes all it has."""
    optimizer: Annotated[tuple[TransformKind, ...], Meta(min_length=1)] = (SGD(learning_rate=0.05),)
    """The stages, in order, that a gradient goes through before the device subtracts it; at least one."""
    keep_optimizer_state: bool = False
    """Keep momentum and averages from one assignment to the next; otherwise each begins without them."""
    accumulation_steps: AccumulationSteps = 1
    """Batches that make one local step together. A device takes each of its examples at most once in a step. Not
    for a model with batch norms; [Large batches on small
    devices](/train/optimizer.md#large-batches-on-small-devices).
    """
    micro_batch_size: MicroBatch | None = None
    """The most examples that go through the model at once. The device adds up the gradients of a batch's parts,
    with the result of the whole batch. `"auto"`: each device chooses by its speed and memory. Not for a model with
    batch norms. A device may have this key of its own, see `[agent]`.
    """
    metrics: MetricSettings = ()
    """Metrics that devices measure on their training batches beside the loss: `accuracy`, `top_k`, `mae` and `f1`;
    [Metrics of devices](/train/evaluation.md#metrics-of-devices).
    """

    def __post_init__(self) -> None:
        check_chain(self.optimizer)

    def steps_of(self, epochs: float, examples: int) -> int:
        """Return how many local steps it takes to pass over this number of examples `epochs` times."""
        return math.ceil(epochs * examples / min(self.batch_size * self.accumulation_steps, examples))

    def make_trainer(
        self,
        spec: ParameterSpec,
        gradient: Callable[..., float | None],
        dataset: Dataset,
        seed: int,
        meter: Meter | None = None,
    ) -> GradientTrainer:
        """Return a trainer by a gradient function, which is given the `meter` if there is one."""
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
        """Return what adds up the metrics beside this kind of loss, if there are any."""
        return Meter(find_metrics(self.metrics, loss), ignored_label=ignored_label) if self.metrics else None

    def check_model(self, spec: ParameterSpec, loss: str | None) -> None:
        """Raise `ConfigError` for what devices would refuse for a model; the kind of its loss may not be known."""
        check_accumulation(spec, self.accumulation_steps, worth_splitting(self.micro_batch_size, self.batch_size))
        if loss is not None:
            find_metrics(self.metrics, loss)


class ShippedModel(Section, frozen=True, tag_field="kind", tag="graph"):
    """The training graph that comes with the hub's welcome; it says everything about the model itself."""

    local: Patterns | UnsetType = UNSET


class CodeModel(Section, frozen=True, tag_field="kind", tag="custom"):
    """A model of the hub's own code. A device is not told which: it has a trainer of its own, or cannot train."""

    local: Patterns | UnsetType = UNSET


class ReceivedGraph(msgspec.Struct, frozen=True):
    """A screened training graph on a device: what the hub sent, and what the device itself decides."""

    graph: bytes
    spec: ParameterSpec
    threads: int = 1
    provider: "Provider" = "auto"


class TrainingPlan(Section, frozen=True):
    """A model and how to train it: travels in the hub's welcome as plain tables."""

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
        """Return a trainer on this device's data; raises `DataError` if the data does not fit the model.

        Raises `ConfigError` for a model of the hub's own code.

        A plan that speaks of a graph needs the one `received`; raises `GraphError` if it cannot be run. A model of
        the plan's own must be of `spec`, if that is given; raises `ModelMismatchError` before it takes memory.
        """
        if isinstance(self.model, ShippedModel):
            if received is None:
                raise GraphError(
                    "the hub speaks of a training graph but announces none; start a hub of this version"
                )
            from edgeasync.training.onnx_trainer import OnnxTrainer  # noqa: PLC0415 - only who needs it pays for it

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
                "Python code at the hub describes its model: give this agent a trainer (--trainer) of its own, "
                "such as 'package.module:factory'"
            )
        if spec is not None and self.model.spec != spec:
            raise ModelMismatchError("the model of the hub's settings is not the hub's own: do not trust this hub")
        self.model.check_data(dataset)
        warn_of_one_class(dataset.y)
        return self.local.make_trainer(
            self.model.spec, self.model.gradient, dataset, seed, self.local.make_meter("cross_entropy")
        )


def read_plan(settings: Mapping[str, object]) -> TrainingPlan:
    """Check the settings of a hub's welcome; raises `ConfigError` where they are none this device knows."""
    return convert(dict(settings), TrainingPlan, where="the hub's settings")
