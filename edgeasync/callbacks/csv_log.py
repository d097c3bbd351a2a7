"""`CSVLog`: writes every event as a row of a CSV file."""

import csv
import time
from pathlib import Path
from typing import IO, Any

from edgeasync.config import expanded
from edgeasync.errors import ConfigError
from edgeasync.sdk.events import HANDLERS, End, Event

COLUMNS = (
    "event", "time_s", "device", "number", "outcome", "version", "updates", "loss", "accuracy", "examples",
    "local_steps", "staleness", "bytes_up", "bytes_down", "detail", "reason",
)  # fmt: skip

FLUSH_S = 1.0
"""Maximum time in seconds between writing a row and flushing it to the file."""


class CSVLog:
    """Writes every event as a row of a CSV file, and appends to an existing file.

    The column `event` contains the event's kind: "update", "version", "evaluation", "exchange",
    "join", "leave", "alert" or "end". Each other column contains the event's field of the same
    name, and is empty if the event has no such field.

    >>> import csv, tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.callbacks import CSVLog
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> log = Path(tempfile.mkdtemp()) / "run.csv"
    >>> data = np.eye(3), np.arange(3)
    >>> until = Stop(updates=2)
    >>> _ = train(SoftmaxModel(inputs=3, classes=3), data, workers=1, until=until, callbacks=[CSVLog(log)])
    >>> with log.open() as lines:
    ...     [line["version"] for line in csv.DictReader(lines) if line["event"] == "version"]
    ['1', '2']
    """

    def __init__(self, path: str | Path) -> None:
        self._path = expanded(path)
        self._file: IO[str] | None = None
        self._flushed_s = 0.0

    def __call__(self, event: Event) -> None:
        """Write an event.

        Raises `ConfigError` if the file has different columns, and `OSError` if it cannot be
        written.
        """
        file = self._file or self._open()
        kind = HANDLERS[type(event)].removeprefix("on_")
        csv.writer(file).writerow([kind, *[_text(getattr(event, name, None)) for name in COLUMNS[1:]]])
        if isinstance(event, End):
            file.close()
            self._file = None
        elif time.monotonic() >= self._flushed_s + FLUSH_S:
            file.flush()
            self._flushed_s = time.monotonic()

    def _open(self) -> IO[str]:
        header = ",".join(COLUMNS)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8", newline="")
        file.seek(0)
        first = file.readline().rstrip("\r\n")
        if not first:
            csv.writer(file).writerow(COLUMNS)
        elif first != header:
            file.close()
            raise ConfigError(f"{self._path}: not a file written by CSVLog; choose another path")
        self._file = file
        return file


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
