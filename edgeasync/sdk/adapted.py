"""What the models of `edgeasync.torch`, `edgeasync.jax` and `edgeasync.sklearn` have in common."""

import copy
from typing import ClassVar, Self

from edgeasync.errors import ConfigError
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import Frozen
from edgeasync.sdk.models import Prepared, as_dataset, local_training
from edgeasync.sdk.participants import check_same
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import Trainer


class Adapted:
    """A model of another framework, by its named arrays."""

    spec: ParameterSpec
    optimizer_is: ClassVar[str]
    """Where its optimizer is said, since `train` has none for it."""
    frozen: Frozen | None = None
    """The checksum of its arrays that do not travel."""
    measures: ClassVar[bool] = False
    """Whether its trainers tell metrics."""

    def check_training(self, local: LocalTraining) -> None:
        """Raise `ConfigError` for settings that would be ignored; a hub may have them for its other devices."""
        advice = {
            "optimizer": self.optimizer_is,
            "accumulation_steps": "give a larger batch_size",
            "micro_batch_size": "give a smaller batch_size",
            "metrics": "leave them out, or evaluate",
        }
        usual = LocalTraining()
        for name, instead in advice.items():
            if getattr(local, name) != getattr(usual, name) and not (name == "metrics" and self.measures):
                raise ConfigError(f"{name} means nothing to {type(self).__name__}: {instead}")

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model as one that can be trained."""
        raise NotImplementedError

    def ordered_as(self, spec: ParameterSpec) -> Self:
        """Return this model with its arrays in a hub's order; raises `ModelMismatchError` if it has others."""
        check_same(self.spec.parameters, spec)
        found = copy.copy(self)
        found.spec = spec
        return found

    def trainer(self, data: object, *, batch_size: int | None = None, seed: int = 0) -> Trainer:
        """Return a trainer on data, for `train` and for an `Agent` of your own."""
        return self.prepare(local_training(None, batch_size)).make_trainer(as_dataset(data, "data"), seed, 1)
