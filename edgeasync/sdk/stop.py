"""Conditions that end training."""

from collections.abc import Callable
from typing import Any

import msgspec

from edgeasync.config import convert
from edgeasync.core.hub.settings import StopCondition
from edgeasync.errors import ConfigError


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run, passed to `Stop(when=...)`."""

    updates: int
    version: int
    seconds: float
    epochs: float
    """The number of passes over all workers' data since the start of this call of `train`."""
    loss: float | None
    """The median of the losses that the devices reported last, or `None` without losses."""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Training ends at the first of these conditions; `None` disables a condition.

    - `updates`: the number of updates applied to the model in the whole run.
    - `minutes`: the duration of the whole run, not counting times when no hub was running.
    - `loss`, `accuracy`: an evaluation has at most this loss, or at least this accuracy (0 to 1).
      Devices do not wait for evaluations, so the final model may be newer than the evaluated one.
    - `epochs`: the number of passes over all workers' data since the start of this call of `train`.
    - `when`: a function that is called with a `TrainingProgress` after every version, and returns
      true to end training.

    >>> from edgeasync import Stop
    >>> Stop(minutes=10, accuracy=0.95)
    Stop(updates=None, minutes=10, loss=None, accuracy=0.95, epochs=None, when=None)
    >>> until = Stop(when=lambda progress: progress.seconds > 5 and progress.updates > 100)
    """

    updates: int | None = None
    minutes: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    epochs: float | None = None
    when: Callable[[TrainingProgress], Any] | None = None

    def condition(self) -> StopCondition:
        """Return the conditions that the hub checks; raises `ConfigError` for invalid values."""
        if self == Stop():
            raise ConfigError(
                "until has no condition, so training would never end; use for example Stop(updates=...)"
            )
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError(f"until.epochs is {self.epochs}; set a number above 0")
        table = {name: getattr(self, name) for name in ("updates", "minutes", "loss", "accuracy")}
        return convert(
            {name: value for name, value in table.items() if value is not None}, StopCondition, where="until"
        )
