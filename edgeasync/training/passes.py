"""A wrapper that stops a trainer after a given number of passes over its data."""

from typing import Any

import numpy as np

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.training.trainer import ResumableTrainer, StepResult, StepsEndedError, Trainer

_OWN, _TRAINER = "examples", "trainer."

_OPTIONAL = ("flush", "interrupt", "metrics", "reset", "scale_learning_rate", "score")
"""Methods of optional protocols, which are forwarded if the inner trainer has them."""


class PassesTrainer:
    """Delegates to another trainer until that trainer has processed a number of examples.

    The count is part of the saved state, so a resumed trainer continues to count from it.
    """

    def __init__(self, trainer: Trainer, examples_max: int) -> None:
        self._trainer = trainer
        self._examples_max = examples_max
        self._examples = 0
        for name in _OPTIONAL:
            if hasattr(trainer, name):
                setattr(self, name, getattr(trainer, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)  # such as `evaluate`, which is optional

    @property
    def spec(self) -> ParameterSpec:
        """Names, shapes and roles of the model's arrays."""
        return self._trainer.spec

    def begin(self, parameters: Vector) -> None:
        """Start an assignment with the inner trainer."""
        self._trainer.begin(parameters)

    def step(self) -> StepResult:
        """Take one local step. Raises `StepsEndedError` after the last pass."""
        if self._examples >= self._examples_max:
            raise StepsEndedError("all passes over the data are completed")
        result = self._trainer.step()
        self._examples += result.examples
        return result

    def state(self) -> TrainerState:
        """Return the number of processed examples, and the state of the inner trainer."""
        inner = self._trainer.state() if isinstance(self._trainer, ResumableTrainer) else {}
        own = {_OWN: np.array([self._examples], np.int64)}
        return own | {_TRAINER + name: array for name, array in inner.items()}

    def restore(self, state: TrainerState) -> None:
        """Resume from a saved state.

        Raises `ValueError` if the state belongs to another trainer or other data.
        """
        inner = {name.removeprefix(_TRAINER): array for name, array in state.items() if name != _OWN}
        if _OWN not in state or state[_OWN].shape != (1,):
            raise ValueError("the state contains no count of examples")
        if isinstance(self._trainer, ResumableTrainer):
            self._trainer.restore(inner)
        self._examples = int(state[_OWN][0])
