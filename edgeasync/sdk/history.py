"""The history of a run as columns: the type of `Run.history` and `Hub.history`."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.config import expanded
from edgeasync.durable.files import replace_file
from edgeasync.durable.history import EvaluationRow, Rows, UpdateRow
from edgeasync.durable.run_folder import RunFolder
from edgeasync.errors import ConfigError

Column = npt.NDArray[Any]


class Table:
    """Named numpy columns of equal length.

    >>> import numpy as np
    >>> table = Table({"version": np.array([1, 2]), "loss": np.array([0.5, 0.25])})
    >>> table["loss"].min(), len(table), table.columns
    (np.float64(0.25), 2, ('version', 'loss'))
    >>> [row["version"] for row in table]
    [1, 2]
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise KeyError(f"{name!r}: unknown column; the columns are {', '.join(self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict of Python values."""
        for values in zip(*(column.tolist() for column in self._columns.values()), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} rows of {', '.join(self._columns)}>"

    def to_csv(self, path: str | Path) -> Path:
        """Write the table as CSV with a header, and return the path; unknown values are left empty.

        Raises `StorageError` if the file cannot be written.
        """
        path = expanded(path)
        replace_file(path, self.csv_text().encode(), private=False)
        return path

    def csv_text(self) -> str:
        """Return the table as CSV with a header; unknown values are left empty."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self._columns)
        for row in self:
            writer.writerow(["" if value is None or value != value else value for value in row.values()])  # noqa: PLR0124
        return text.getvalue()

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame; raises `ConfigError` if pandas is not installed."""
        return _library("pandas").DataFrame(self._columns)

    def to_polars(self) -> Any:
        """Return a polars.DataFrame; raises `ConfigError` if polars is not installed."""
        return _library("polars").DataFrame(
            {name: column.tolist() if column.dtype == object else column for name, column in self._columns.items()}
        )


class History(Table):
    """The history of a run: one row for each update that the hub applied, buffered or rejected.

    A long history lacks some rows of its older half. The column `row` skips their numbers.

    | column | content |
    |---|---|
    | `time` | the hub's time in seconds, excluding times when the hub was not running |
    | `version` | the number of the newest version after the update |
    | `update` | the update's number, as counted by its device |
    | `device` | the name of the device |
    | `outcome` | `applied`, `buffered` (until the next version), or the reason of the rejection |
    | `loss` | the mean loss of the update's local steps, as reported by the device |
    | `staleness` | the number of versions that the hub created after the update's base |
    | `local_steps`, `examples` | the number of local steps, and of examples in these steps |
    | `bytes` | the size of the encoded update |
    | `updates` | the total number of updates applied to the model, including this one |
    | `row` | the update's number in the run, from 1 |
    | `metrics.NAME` | one column for each metric that a device reported |

    Unknown values are NaN. `evaluations` is a separate table with the columns `time`, `version`,
    `loss` and `accuracy`. If rows may be missing because the file is missing or damaged, `reason`
    describes the problem.

    >>> from edgeasync import Run
    >>> history = Run.open("runs/digits").history  # doctest: +SKIP
    >>> history["loss"][-100:].mean(), history.evaluations["accuracy"].max()  # doctest: +SKIP
    (0.21, 0.95)
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(_update_columns(rows.updates))
        self.evaluations = Table(_evaluation_columns(rows.evaluations))
        """The evaluations of the run."""
        self.reason = rows.trouble
        """The reason why rows may be missing; empty if the history is complete."""

    @classmethod
    def read(cls, run: Path) -> "History":
        """Read the history from a run's folder; a hub may be writing to it."""
        return cls(RunFolder(run).history())

    def plot(self) -> Any:
        """Return a matplotlib figure of losses and accuracies.

        The range of the loss axis ignores outliers, which would compress the rest of the curve. A
        notebook shows the figure if this call is the last line of a cell. Raises `ConfigError` if
        matplotlib is not installed.
        """
        figure = _library("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        curves = axes.plot(self["time"], self["loss"], ".", markersize=2, alpha=0.4, label="loss of updates")
        found = self.evaluations
        if len(found):
            curves += axes.plot(found["time"], found["loss"], "C1", label="loss of evaluations")
        axes.set_xlabel("time, s")
        axes.set_ylabel("loss")
        if (limits := _robust_limits(self["loss"], found["loss"])) is not None:
            axes.set_ylim(*limits)
        if not np.isnan(found["accuracy"]).all():
            right = axes.twinx()
            curves += right.plot(found["time"], found["accuracy"], "C2", label="accuracy")
            right.set_ylabel("accuracy")
            right.set_ylim(0.0, 1.0)
        axes.legend(handles=curves)  # one legend for both axes
        return figure


def _update_columns(rows: list[UpdateRow]) -> dict[str, Column]:
    columns: dict[str, Column] = {
        "time": _floats([row.time_s for row in rows]),
        "version": _counts([row.version for row in rows]),
        "update": _counts([row.number for row in rows]),
        "device": _objects([row.device for row in rows]),
        "outcome": _objects([row.outcome for row in rows]),
        "loss": _floats([row.loss for row in rows]),
        "staleness": _floats([row.staleness for row in rows]),
        "local_steps": _counts([row.local_steps for row in rows]),
        "examples": _counts([row.examples for row in rows]),
        "bytes": _counts([row.nbytes for row in rows]),
        "updates": _counts([row.updates for row in rows]),
        "row": _counts([row.row for row in rows]),
    }
    names = sorted({name for row in rows if row.metrics for name in row.metrics})
    for name in names:
        columns[f"metrics.{name}"] = _floats([row.metrics.get(name) if row.metrics else None for row in rows])
    return columns


def _evaluation_columns(rows: list[EvaluationRow]) -> dict[str, Column]:
    return {
        "time": _floats([row.time_s for row in rows]),
        "version": _counts([row.version for row in rows]),
        "loss": _floats([row.loss for row in rows]),
        "accuracy": _floats([row.accuracy for row in rows]),
    }


def _robust_limits(*curves: Column) -> tuple[float, float] | None:
    """Return limits for an axis, ignoring outliers; return `None` if all values are equal.

    An outlier is outside the middle 98 % of its curve's values. It is also more than 3
    interquartile ranges above the upper quartile, or below the lower quartile.
    """
    shown = []
    for curve in curves:
        values = np.sort(curve[np.isfinite(curve)])
        if not len(values):
            continue
        quarter, three_quarters = np.percentile(values, [25, 75])
        reach, most = 3.0 * (three_quarters - quarter), len(values) - 1
        low = min(values[math.ceil(0.01 * most)], quarter - reach)
        high = max(values[math.floor(0.99 * most)], three_quarters + reach)
        shown += [one for one in values.tolist() if low <= one <= high]
    if not shown or not min(shown) < max(shown):
        return None
    margin = 0.05 * (max(shown) - min(shown))
    return min(shown) - margin, max(shown) + margin


def _floats(values: list[Any]) -> Column:
    return np.array(values, np.float64)  # None becomes NaN


def _counts(values: list[int]) -> Column:
    return np.array(values, np.int64)


def _objects(values: list[str]) -> Column:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{package} is not installed: install it (pip install {package}), or use to_csv"
        ) from error
