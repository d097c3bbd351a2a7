"""Metrics that devices measure in addition to the loss, for `train(metrics=...)` and `Hub`.

A device computes its metrics on its training batches, from the scores that training computes
anyway, over all local steps between two exchanges. It sends them with the update. Each metric is
the quotient of two sums, so batches of any size can be added up.

>>> import numpy as np
>>> from edgeasync import Stop, metrics, nn, train
>>> x, seen = np.random.default_rng(0).normal(size=(200, 3)), []
>>> kinds = ["accuracy", metrics.TopK(k=2)]
>>> run = train(nn.Linear(3, 2), (x, x[:, 0] > 0), metrics=kinds, until=Stop(updates=20), callbacks=[seen.append])
>>> {name for event in seen for name in getattr(event, "metrics", {})} == {"accuracy", "top_2"}
True
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgeasync.config import Section, convert
from edgeasync.errors import ConfigError
from edgeasync.protocol.messages import METRICS_MAX

__all__ = ["F1", "MAE", "Accuracy", "Meter", "TopK"]

Array = npt.NDArray[Any]
Count = float | npt.NDArray[np.float64]
Sums = tuple[Count, Count]
"""The numerator and denominator of a metric: numbers, or arrays with one entry per class."""


class Accuracy(Section, frozen=True, tag_field="kind", tag="accuracy"):
    """The fraction of correct predictions. A prediction is the most likely class, or a binary output.

    >>> from edgeasync.metrics import Accuracy, Meter
    >>> meter = Meter([Accuracy()])
    >>> meter.add([[0.1, 0.9], [0.8, 0.2]], [1, 1])
    >>> meter.take()
    {'accuracy': 0.5}
    """

    @property
    def name(self) -> str:
        """The metric's name in `Update.metrics`."""
        return "accuracy"

    def sums(self, scores: Array, targets: Array) -> Sums:
        """Return the number of correct predictions and the number of all predictions."""
        right = scores.argmax(1) == targets if targets.dtype.kind == "i" else (scores > 0.0) == (targets > 0.5)
        return float(right.sum()), float(right.size)


class TopK(Section, frozen=True, tag_field="kind", tag="top_k"):
    """The fraction of examples whose label is among the `k` most likely classes.

    >>> from edgeasync.metrics import Meter, TopK
    >>> meter = Meter([TopK(k=2)])
    >>> meter.add([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], [1, 2])
    >>> meter.take()
    {'top_2': 0.5}
    """

    k: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Number of most likely classes among which the label must be."""

    @property
    def name(self) -> str:
        """The metric's name in `Update.metrics`."""
        return f"top_{self.k}"

    def sums(self, scores: Array, targets: Array) -> Sums:
        """Count the examples whose label is among the `k` most likely classes, and all examples."""
        own = np.take_along_axis(scores, targets[:, None], 1)
        right = ((scores > own).sum(1) < self.k) & ~np.isnan(own[:, 0])
        return float(right.sum()), float(right.size)


class MAE(Section, frozen=True, tag_field="kind", tag="mae"):
    """The mean absolute difference of values from their targets.

    >>> from edgeasync.metrics import MAE, Meter
    >>> meter = Meter([MAE()])
    >>> meter.add([[1.0], [2.0]], [[1.0], [4.0]])
    >>> meter.take()
    {'mae': 1.0}
    """

    @property
    def name(self) -> str:
        """The metric's name in `Update.metrics`."""
        return "mae"

    def sums(self, scores: Array, targets: Array) -> Sums:
        """Return the sum of absolute differences, and the number of values."""
        return float(np.abs(scores - targets).sum(dtype=np.float64)), float(scores.size)


class F1(Section, frozen=True, tag_field="kind", tag="f1"):
    """The harmonic mean of precision and recall, averaged over the classes that occur.

    If the model has binary outputs, the metric is computed over all outputs together.

    >>> from edgeasync.metrics import F1, Meter
    >>> meter = Meter([F1()])
    >>> meter.add([[1.0], [1.0], [-1.0]], [[1.0], [0.0], [1.0]])
    >>> meter.take()
    {'f1': 0.5}
    """

    @property
    def name(self) -> str:
        """The metric's name in `Update.metrics`."""
        return "f1"

    def sums(self, scores: Array, targets: Array) -> Sums:
        """Return, per class, 2 TP and 2 TP + FP + FN, whose quotient is F1."""
        if targets.dtype.kind != "i":
            said, meant = scores > 0.0, targets > 0.5
            return 2.0 * float((said & meant).sum()), float(said.sum() + meant.sum())
        classes, said = scores.shape[1], scores.argmax(1)

        def count(labels: Array) -> npt.NDArray[np.float64]:
            found: npt.NDArray[np.float64] = np.bincount(labels, minlength=classes).astype(np.float64)
            return found

        return 2.0 * count(targets[said == targets]), count(said) + count(targets)


Metric = Accuracy | TopK | MAE | F1
MetricSetting = Literal["accuracy", "top_k", "mae", "f1"] | Metric
"""A metric: a name, an object of this module or, in a settings file, a table with `kind`."""

MetricSettings = Annotated[tuple[MetricSetting, ...], Meta(max_length=METRICS_MAX)]

_METRICS: dict[str, Metric] = {"accuracy": Accuracy(), "top_k": TopK(), "mae": MAE(), "f1": F1()}

_MEANT_FOR: dict[str, tuple[type, ...]] = {
    "cross_entropy": (Accuracy, TopK, F1),
    "bce_with_logits": (Accuracy, F1),
    "onnx": (),
}
"""Valid metrics for each kind of loss. For losses that are not listed, only `MAE` is valid."""


def find_metrics(settings: Sequence[MetricSetting], loss: str) -> list[Metric]:
    """Return the metrics for settings and a kind of loss.

    Raises `ConfigError` if a metric is not valid for this kind of loss.

    >>> from edgeasync.metrics import find_metrics
    >>> [metric.name for metric in find_metrics(["f1", "top_k"], "cross_entropy")]
    ['f1', 'top_5']
    """
    found = [_METRICS[setting] if isinstance(setting, str) else setting for setting in settings]
    meant = _MEANT_FOR.get(loss, (MAE,))
    for metric in found:
        if not isinstance(metric, meant):
            names = ", ".join(name for name, each in _METRICS.items() if isinstance(each, meant))
            choose = f"choose from {names}" if names else "remove it"
            raise ConfigError(f"metrics: {metric.name} does not apply to the loss {loss}; {choose}")
    names_found = [metric.name for metric in found]
    if twice := sorted({name for name in names_found if names_found.count(name) > 1}):
        raise ConfigError(f"metrics contains {twice[0]} twice; remove one")
    return found


def check_metrics(metrics: object, where: str) -> tuple[MetricSetting, ...]:
    """Validate metrics: objects of this module, names or tables. Raises `ConfigError`.

    >>> from edgeasync.metrics import check_metrics
    >>> check_metrics("accuracy", "train")
    ('accuracy',)
    """
    given = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
    try:
        table = {"metrics": msgspec.to_builtins(given, enc_hook=int)}
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: metrics is {metrics!r}; pass names such as 'accuracy', or objects of edgeasync.metrics"
        ) from None
    return convert(table, _Given, where=where).metrics


class _Given(Section, frozen=True):
    metrics: MetricSettings


class Meter:
    """Sums up metrics over batches. A custom trainer may use one.

    Examples with the label `ignored_label` are skipped, as in the loss.

    >>> from edgeasync.metrics import Accuracy, Meter
    >>> meter = Meter([Accuracy()], ignored_label=9)
    >>> meter.add([[0.1, 0.9], [0.8, 0.2]], [1, 9])
    >>> meter.take()
    {'accuracy': 1.0}
    """

    def __init__(self, metrics: Sequence[Metric], *, ignored_label: int | None = None) -> None:
        self._metrics = tuple(metrics)
        self._ignored_label = ignored_label
        self._sums: list[Sums | None] = [None] * len(self._metrics)

    def add(self, scores: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        """Add a batch: raw scores (n, classes, ...) and labels (n, ...), or outputs and targets."""
        self._add(np.asarray(scores), np.asarray(targets))

    def _add(self, scores: Array, targets: Array) -> None:
        if targets.dtype.kind in "bu" and targets.size != scores.size:
            targets = targets.astype(np.int64)  # labels, as in a dataset
        if targets.dtype.kind == "i":
            # For scores (n, classes, ...), each position counts as an example.
            scores, targets = np.moveaxis(scores, 1, -1).reshape(-1, scores.shape[1]), targets.ravel()
            if self._ignored_label is not None:
                counts = targets != self._ignored_label
                scores, targets = scores[counts], targets[counts]
        else:
            targets = targets.reshape(scores.shape)
        for number, metric in enumerate(self._metrics):
            found, before = metric.sums(scores, targets), self._sums[number]
            self._sums[number] = found if before is None else (before[0] + found[0], before[1] + found[1])

    def take(self) -> dict[str, float]:
        """Return the metrics by name, and reset the sums. Metrics without data are omitted."""
        taken = {
            metric.name: _quotient(*sums)
            for metric, sums in zip(self._metrics, self._sums, strict=True)
            if sums is not None and np.any(sums[1])
        }
        self._sums = [None] * len(self._metrics)
        return taken


def _quotient(count: Count, of: Count) -> float:
    """Divide `count` by `of`; for arrays, return the mean over the classes that occur."""
    occurs = np.asarray(of) > 0.0
    return float(np.mean(np.asarray(count)[occurs] / np.asarray(of)[occurs]))
