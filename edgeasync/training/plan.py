"""What a hub tells its devices about training: the model, the batch, and the local optimizer."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from edgeasync.config import Section, convert
from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.policy import TransformKind
from edgeasync.policies.transforms import SGD
from edgeasync.training.numpy_models import Model
from edgeasync.training.trainer import GradientTrainer


class LocalTraining(Section, frozen=True):
    """How a device trains between two exchanges."""

    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    optimizer: Annotated[tuple[TransformKind, ...], Meta(min_length=1)] = (SGD(learning_rate=0.05),)
    keep_optimizer_state: bool = False


class TrainingPlan(Section, frozen=True):
    """A model and how to train it: travels in the hub's welcome as plain tables."""

    model: Model
    local: LocalTraining = LocalTraining()

    def make_trainer(self, dataset: Dataset, seed: int) -> GradientTrainer:
        """Return a trainer on this device's data; raises `DataError` if the data does not fit the model."""
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
