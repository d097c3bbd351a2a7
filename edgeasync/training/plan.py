"""What a hub tells its devices about training: the model, the batch, and the local optimizer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from edgeasync.config import Section, convert
from edgeasync.data.dataset import Dataset, batches
from edgeasync.errors import ConfigError, GraphError, ModelMismatchError
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.optimizers import SGD, TransformKind, check_chain
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.numpy_models import Model
from edgeasync.training.trainer import GradientTrainer, Trainer

if TYPE_CHECKING:
    from edgeasync.training.onnx_trainer import Provider


class LocalTraining(Section, frozen=True):
    """How a device trains between two exchanges."""

    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    optimizer: Annotated[tuple[TransformKind, ...], Meta(min_length=1)] = (SGD(learning_rate=0.05),)
    keep_optimizer_state: bool = False

    def __post_init__(self) -> None:
        check_chain(self.optimizer)


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
                self.local.optimizer,
                batch_size=self.local.batch_size,
                seed=seed,
                keep_optimizer_state=self.local.keep_optimizer_state,
                threads=received.threads,
                provider=received.provider,
            )
        if isinstance(self.model, CodeModel):
            raise ConfigError(
                "Python code at the hub describes its model: give this agent a trainer of its own, by "
                "--trainer package.module:factory"
            )
        if spec is not None and self.model.spec != spec:
            raise ModelMismatchError("the model of the hub's settings is not the hub's own: do not trust this hub")
        self.model.check_data(dataset)
        return GradientTrainer(
            self.model.spec,
            self.model.gradient,
            self.local.optimizer,
            batches(dataset, self.local.batch_size, seed),
            keep_optimizer_state=self.local.keep_optimizer_state,
        )


def read_plan(settings: Mapping[str, object]) -> TrainingPlan:
    """Check the settings of a hub's welcome; raises `ConfigError` where they are none this device knows."""
    return convert(dict(settings), TrainingPlan, where="the hub's settings")
