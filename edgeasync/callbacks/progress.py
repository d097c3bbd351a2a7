"""`Progress`: shows the progress of a run on one line, or prints a line at regular intervals."""

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edgeasync.sdk.events import End, Evaluation, Event, Exchange, Join, Leave, Update, Version

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

REFRESH_S = 0.1
"""Minimum time in seconds between two updates of the line."""


class Progress:
    """Shows the progress of a run: updates, version, loss, accuracy, devices, time.

    In a terminal, and in a notebook with `ipywidgets`, one line is updated in place. Otherwise a
    plain line is printed every `every_s` seconds and at the end of the run. If `updates` is set to
    the total number of updates, the line contains a progress bar. The output is written to
    `console`, a rich console, and by default to standard error.

    >>> import numpy as np
    >>> from edgeasync import Stop, train
    >>> from edgeasync.callbacks import Progress
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> model, data = SoftmaxModel(inputs=3, classes=3), (np.eye(3), np.arange(3))
    >>> run = train(model, data, workers=1, until=Stop(updates=50), callbacks=[Progress(updates=50)])
    """

    def __init__(
        self, updates: int | None = None, *, every_s: float = 10.0, console: "Console | None" = None
    ) -> None:
        self._total = updates
        self._every_s = every_s
        self._console = console
        self._bar: Bar | None = None
        self._reset()

    def _reset(self) -> None:
        self._updates = self._version = 0
        self._loss: float | None = None
        self._accuracy: float | None = None
        self._devices: set[str] = set()
        self._next_s: float | None = None

    def __call__(self, event: Event) -> None:
        """Process an event, and refresh the line if it was not refreshed recently."""
        self._count(event)
        now_s, ends = time.monotonic(), isinstance(event, End)
        if self._next_s is None:
            self._begin(now_s)
        if not ends and now_s < (self._next_s or 0.0):
            return
        if self._bar is None:
            self._next_s = now_s + self._every_s
            if self._console is not None:
                self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)
        else:
            self._next_s = now_s + REFRESH_S
            self._bar.update(self._bar.task_ids[0], completed=self._updates, description=self._line())
            self._bar.refresh()
        if ends:
            self._end()

    def _count(self, event: Event) -> None:
        match event:
            case Join():
                self._devices.add(event.device)
            case Leave():
                self._devices.discard(event.device)
            case Update():
                self._updates += event.outcome in ("applied", "buffered")
                self._loss = self._loss if event.loss is None else event.loss
            case Exchange():
                self._updates, self._version = self._updates + 1, event.version
                self._loss = self._loss if event.loss is None else event.loss
            case Version():
                self._version = event.version
            case Evaluation():
                self._accuracy = event.accuracy

    def _line(self) -> str:
        devices = len(self._devices)
        told = [f"{self._updates} updates", f"version {self._version}"]
        if self._loss is not None:
            told.append(f"loss {self._loss:.4g}")
        if self._accuracy is not None:
            told.append(f"accuracy {self._accuracy:.1%}")
        told.append(f"{devices} device{'' if devices == 1 else 's'}")
        return ", ".join(told)

    def _begin(self, now_s: float) -> None:
        from rich.console import Console  # noqa: PLC0415 - imported only if needed
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.progress import Progress as Bar  # noqa: PLC0415

        console = self._console = self._console or Console(stderr=True)
        self._next_s = now_s + self._every_s
        if not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)):
            return
        bars = () if self._total is None else (BarColumn(),)
        text = TextColumn("{task.description}", markup=False)
        self._bar = Bar(
            *bars, text, TimeElapsedColumn(), console=console, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._bar.add_task(self._line(), total=self._total)
        self._bar.start()
        self._next_s = now_s

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._reset()
