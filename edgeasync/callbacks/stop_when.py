"""`StopWhen`: ends a run when a custom rule is met."""

from collections.abc import Callable
from typing import Any

from edgeasync.errors import ConfigError
from edgeasync.sdk.callbacks import StopTraining
from edgeasync.sdk.events import Evaluation, Event, Exchange


class StopWhen:
    """Ends the run when a rule is met; `Run.reason` then describes the rule.

    - `rule`: a function that receives every event and returns true to end the run. Alternatively,
      pass the name of a number in evaluations, such as "loss", to compare with `below` or `above`.
    - `reason`: the value of `Run.reason` after the rule has ended the run.

    In a `Hub` or in `train`, the rule ends the run for all devices. In an `Agent`, it ends only
    that agent, and the rule "loss" also applies to the loss of the agent's local steps.

    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.callbacks import StopWhen, VersionEvent
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> data = np.eye(3), np.arange(3)
    >>> rule = lambda event: isinstance(event, VersionEvent) and event.version >= 5
    >>> until = Stop(updates=10_000)
    >>> train(SoftmaxModel(inputs=3, classes=3), data, workers=1, until=until, callbacks=[StopWhen(rule)]).reason
    'stopped by StopWhen'
    >>> StopWhen("accuracy", above=0.95)
    StopWhen('accuracy', above=0.95)
    """

    def __init__(
        self,
        rule: Callable[[Any], object] | str,
        *,
        below: float | None = None,
        above: float | None = None,
        reason: str = "",
    ) -> None:
        if isinstance(rule, str):
            if (below is None) == (above is None):
                raise ConfigError(f"StopWhen({rule!r}) needs a limit: pass for example below=0.1 or above=0.95")
        elif not callable(rule) or (below, above) != (None, None):
            raise ConfigError(
                "StopWhen needs either a function of an event, or the name of a number and a limit, such as "
                "StopWhen('loss', below=0.1)"
            )
        self._rule = rule
        self._below = below
        self._above = above
        self._reason = reason

    def __repr__(self) -> str:
        bound = f"below={self._below}" if self._above is None else f"above={self._above}"
        return f"StopWhen({self._rule!r}, {bound})" if isinstance(self._rule, str) else f"StopWhen({self._rule!r})"

    def __call__(self, event: Event) -> None:
        """Raise `StopTraining` if the rule is met."""
        if callable(self._rule):
            if self._rule(event):
                raise StopTraining(self._reason or "stopped by StopWhen")
        elif isinstance(event, Evaluation | Exchange):
            self._hold(self._rule, event)

    def _hold(self, name: str, event: Evaluation | Exchange) -> None:
        value = getattr(event, name, None)
        if value is None and isinstance(event, Evaluation):
            raise ConfigError(
                f"StopWhen({name!r}) never ends this run, because its evaluations have no {name}; to measure an "
                "accuracy, pass evaluate= with labels"
            )
        if value is None:
            return
        if self._below is not None and value < self._below:
            raise StopTraining(self._reason or f"{name} {value:.4g} is below {self._below:g}")
        if self._above is not None and value > self._above:
            raise StopTraining(self._reason or f"{name} {value:.4g} is above {self._above:g}")
