"""`AsyncTrainingMonitor`: detects divergence by thresholds, raises alerts and applies remedies."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgeasync.async_train.ignored import ignore
from edgeasync.async_train.stepped_by import SteppedBy
from edgeasync.async_train.warm_up import AsyncTrainer
from edgeasync.async_train.watching import WATCHED
from edgeasync.callbacks import AlertEvent, Event
from edgeasync.errors import ConfigError
from edgeasync.policies.monitor import Monitor, ThresholdDetector

WINDOW = 16
"""Number of losses over which the variance is computed."""

REDUCTION = 0.5
"""Factor by which the remedy "reduce_lr" multiplies learning rates."""

METRICS = ("loss", "loss_variance", "gradient_norm")
REMEDIES = {
    "increase_sync_frequency": "increase_frequency",
    "reduce_lr": "reduce_local_lr",
    "rollback": "rollback",
    "alert": "alert",
}


class AsyncTrainingMonitor:
    """Compares training metrics with thresholds, and collects `alerts`.

    - `model`: the model, or the `AsyncTrainer` that trains it. If a class of the toolbox trains the
      model through a hub in this program, that hub monitors all workers and applies the remedy; in
      this case, create the monitor before training starts. In your own loop, call `step` instead.
    - `divergence_metrics`: the metrics to monitor: "loss", "loss_variance" or "gradient_norm".
    - `alert_threshold`: the highest normal value, or a dict with the highest normal value of each
      metric.
    - `remediation_strategy`: "increase_sync_frequency", "reduce_lr", "rollback", or "alert" for
      alerts only. In your own loop, "increase_sync_frequency" has no effect, and "reduce_lr"
      applies to the optimizers that step the model.

    >>> from edgeasync.async_train import AsyncTrainingMonitor
    >>> monitor = AsyncTrainingMonitor(None, divergence_metrics=["loss"], alert_threshold=2.0)
    >>> monitor.on_alert(lambda alert: print(alert.detail))
    >>> for loss in (1.0, 3.0, 3.5):
    ...     calm = monitor.step(loss)
    the loss is 3 (threshold 2)
    """

    def __init__(
        self,
        model: Any,
        divergence_metrics: Sequence[str] = ("loss_variance", "gradient_norm"),
        alert_threshold: float | Mapping[str, float] = 0.5,
        remediation_strategy: str = "increase_sync_frequency",
    ) -> None:
        self._thresholds = _thresholds(divergence_metrics, alert_threshold, remediation_strategy)
        self._strategy = remediation_strategy
        self.policy = _policy(self._thresholds, remediation_strategy)
        self.alerts: list[AlertEvent] = []
        """All alerts so far; `alert.device` is set if the alert is about one device."""
        self._told: list[Callable[[AlertEvent], object]] = []
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._alarmed: set[str] = set()
        self._steps = 0
        if isinstance(model, AsyncTrainer):
            model.check_may_watch()
            model = model.model
        self._model = WATCHED.add(model, self)
        self._watched = False
        self._stepped_by = SteppedBy(self._model) if remediation_strategy == "reduce_lr" else None
        self._calm: Any = None

    def begin(self) -> None:
        """Record that from now on a hub monitors the training and applies the remedy."""
        self._watched = True

    def stepped(self, optimizer: object) -> None:
        """Record an optimizer of `optim` that has stepped the model."""
        if self._stepped_by is not None:
            self._stepped_by.note(optimizer)

    def on_alert(self, callback: Callable[[AlertEvent], object]) -> None:
        """Call `callback` with every alert from now on."""
        self._told.append(callback)

    def step(self, loss: float) -> bool:
        """Check a step's loss and the model's gradients; return whether all metrics are normal."""
        self._steps += 1
        self._losses.append(float(loss))
        model = self._model()
        figures = _figures(self._losses, model)
        high = {name for name, most in self._thresholds.items() if not figures[name] <= most}
        news, self._alarmed = sorted(high - self._alarmed), high
        for name in news:
            detail = f"the {name} is {figures[name]:.3g} (threshold {self._thresholds[name]:g})"
            self.see(AlertEvent(time_s=float(self._steps), device="", detail=detail))
        if news and not self._watched:
            self._remedy(model)
        elif not high and self._strategy == "rollback":
            self._calm = _copy(model)
        return not high

    def _remedy(self, model: Any) -> None:
        """Apply the remedy after an alert in a loop without a hub."""
        if self._strategy == "rollback" and self._calm is not None:
            model.load_state_dict(self._calm)
        elif self._strategy != "alert" and not (self._stepped_by and self._stepped_by.reduce(REDUCTION)):
            why = "it cannot be applied: it needs a hub in this program or, to reduce a rate, an optimizer"
            ignore("AsyncTrainingMonitor", why, remediation_strategy=self._strategy)

    def see(self, event: Event) -> None:
        """Record an event of the hub if it is an alert; ignore other events."""
        if isinstance(event, AlertEvent):
            self.alerts.append(event)
            for callback in self._told:
                callback(event)


def _thresholds(metrics: Sequence[str], threshold: float | Mapping[str, float], remedy: str) -> dict[str, float]:
    """Return the threshold of each metric; raises `ConfigError` for invalid arguments."""
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ConfigError(f"divergence_metrics contains {unknown[0]!r}; choose from {', '.join(METRICS)}")
    if remedy not in REMEDIES:
        raise ConfigError(f"remediation_strategy is {remedy!r}; choose one of {', '.join(REMEDIES)}")
    found = {name: threshold[name] if isinstance(threshold, Mapping) else threshold for name in metrics}
    if wrong := [value for value in found.values() if not 0.0 <= value < math.inf]:
        raise ConfigError(f"alert_threshold is {wrong[0]!r}; pass a number, 0 or more")
    return found


def _policy(thresholds: Mapping[str, float], remedy: Any) -> Monitor:
    detectors: list[Any] = [
        ThresholdDetector(metric=name, threshold=most, remedy=REMEDIES[remedy])  # type: ignore[arg-type]
        for name, most in thresholds.items()
    ]
    return Monitor(detectors=tuple(detectors), clip=0.0)


def _figures(losses: Sequence[float], model: Any) -> dict[str, float]:
    variance = statistics.pvariance(losses) if all(map(math.isfinite, losses)) else math.inf
    return {"loss": losses[-1], "loss_variance": variance, "gradient_norm": _norm(model)}


def _norm(model: Any) -> float:
    """Return the norm of a model's gradients, or 0 if it has no gradients."""
    if hasattr(model, "gradient_sum"):
        return 0.0 if model.gradient_sum is None else float(np.linalg.norm(model.gradient_sum))
    if not callable(getattr(model, "parameters", None)):
        return 0.0
    gradients = [tensor.grad for tensor in model.parameters() if getattr(tensor, "grad", None) is not None]
    return math.sqrt(sum(float((gradient.detach() ** 2).sum()) for gradient in gradients))


def _copy(model: Any) -> Any:
    """Return a copy of a model's values for a rollback."""
    if not hasattr(model, "state_dict"):
        return None
    return {
        name: array.clone() if hasattr(array, "clone") else array for name, array in model.state_dict().items()
    }
