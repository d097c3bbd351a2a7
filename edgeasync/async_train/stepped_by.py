"""Tracks the optimizers that step a model in this program, to reduce their learning rates."""

import weakref
from collections.abc import Callable
from typing import Any

from edgeasync.async_train.adapters import is_torch
from edgeasync.async_train.optim import Optimizer


class SteppedBy:
    """Tracks the optimizers that step a model.

    Torch's optimizers are detected automatically; other optimizers are recorded by `note`.

    `model` returns the model, or `None` once it has been deleted.
    """

    def __init__(self, model: Callable[[], Any]) -> None:
        self._model = model
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        if is_torch(model()):
            from edgeasync.torch import watch_steps  # noqa: PLC0415 - imports torch

            known = weakref.ref(self)

            def after_step(optimizer: Any) -> None:
                if (this := known()) is not None:
                    this.note_torch(optimizer)

            weakref.finalize(self, watch_steps(after_step))

    def note(self, optimizer: object) -> None:
        """Record an optimizer that steps the model."""
        self._optimizers.add(optimizer)

    def note_torch(self, optimizer: Any) -> None:
        """Record a torch optimizer if it steps a parameter of the module."""
        module = self._model()
        if module is None or optimizer in self._optimizers:
            return
        stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        if any(id(tensor) in stepped for tensor in module.parameters()):
            self.note(optimizer)

    def reduce(self, factor: float) -> bool:
        """Multiply all learning rates by a factor; return whether any optimizer is known."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.scale_learning_rate(factor)
            else:
                for group in optimizer.param_groups:
                    group["lr"] *= factor
        return bool(self._optimizers)
