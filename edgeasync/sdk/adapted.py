"""Base class for models of `edgeasync.torch`, `edgeasync.jax` and `edgeasync.sklearn`."""

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
    """A model of another framework, represented as named arrays."""

    spec: ParameterSpec
    optimizer_is: ClassVar[str]
    """Advice for error messages: how to set the optimizer for a model of this framework."""
    frozen: Frozen | None = None
    """Checksum of the model's arrays that are not exchanged."""
    measures: ClassVar[bool] = False
    """Whether trainers of this model report metrics."""

    def check_training(self, local: LocalTraining) -> None:
        """Raise `ConfigError` for settings that this model would ignore."""
        advice = {
            "optimizer": self.optimizer_is,
            "accumulation_steps": "use a larger batch_size",
            "micro_batch_size": "use a smaller batch_size",
            "metrics": "remove them, or use evaluate",
        }
        usual = LocalTraining()
        for name, instead in advice.items():
            if getattr(local, name) != getattr(usual, name) and not (name == "metrics" and self.measures):
                raise ConfigError(f"{name} does not apply to {type(self).__name__} models: {instead}")

    def prepare(self, local: LocalTraining) -> Prepared:
        """Return this model prepared for training."""
        raise NotImplementedError

    def ordered_as(self, spec: ParameterSpec) -> Self:
        """Return this model with its arrays in the order of the hub's `spec`.

        Raises `ModelMismatchError` if the arrays differ.
        """
        check_same(self.spec.parameters, spec)
        found = copy.copy(self)
        found.spec = spec
        return found

    def trainer(self, data: object, *, batch_size: int | None = None, seed: int = 0) -> Trainer:
        """Create a trainer on `data`, for `train` or for an `Agent`."""
        return self.prepare(local_training(None, batch_size)).make_trainer(as_dataset(data, "data"), seed, 1)
