"""When training ends."""

from collections.abc import Callable
from typing import Any

import msgspec

from edgeasync.config import convert
from edgeasync.core.hub.settings import StopCondition
from edgeasync.errors import ConfigError


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is: what `Stop(when=)` decides by."""

    updates: int
    version: int
    seconds: float
    epochs: float
    """Passes over all workers' data since this call."""
    loss: float | None
    """The mean loss that the workers told last, over all of them."""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Training ends at the first of these; what is left out never ends it.

    - `updates` applied to the model, over the whole run;
    - `minutes`, over the whole run; time without a hub does not count;
    - an evaluation with at most this `loss`, or at least this `accuracy` (0 to 1). Devices do not wait for it,
      so the model at the end may be newer than the evaluated one;
    - `epochs`: passes over all workers' data, counted from this call on;
    - `when(progress)` returns true. It is called with every version.

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
        """Return the part that the hub itself watches for; raises `ConfigError` for a value out of range."""
        if self == Stop():
            raise ConfigError("until says nothing: training would never end; give Stop(updates=...), for example")
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError(f"until.epochs is {self.epochs}; give a number over 0")
        table = {name: getattr(self, name) for name in ("updates", "minutes", "loss", "accuracy")}
        return convert(
            {name: value for name, value in table.items() if value is not None}, StopCondition, where="until"
        )
