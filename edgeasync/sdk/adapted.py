"""What the models of `edgeasync.torch`, `edgeasync.jax` and `edgeasync.sklearn` have in common."""

import copy
from typing import Self

from edgeasync.parameters import ParameterSpec
from edgeasync.sdk.models import Prepared, as_dataset, local_training
from edgeasync.sdk.participants import check_same
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import Trainer


class Adapted:
    """A model of another framework, by its named arrays."""

    spec: ParameterSpec

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
