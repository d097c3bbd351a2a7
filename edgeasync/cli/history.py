"""`edgeasync history`: plots a run's losses and evaluations in the terminal, or prints them as CSV."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from statistics import median

from edgeasync.cli.output import Printer
from edgeasync.core.hub.attention import duration
from edgeasync.durable.run_folder import RunFolder
from edgeasync.errors import StorageError
from edgeasync.sdk.history import History

ROWS = 10
"""Height of a plot in lines."""

WIDTH_MAX = 100
"""Maximum width of a plot in characters, including the labels."""

LABEL = 9
"""Width of the labels of the vertical axis."""

LOG_RATIO = 30.0
"""Losses are plotted on a logarithmic axis if the highest exceeds the lowest by this factor."""


def print_history(run: Path, printer: Printer, *, csv: bool, evaluations: bool) -> None:
    """Print the history of a run. Raises `StorageError` if the run has none."""
    history = History.read(RunFolder.open(run).path)
    if not len(history) and not len(history.evaluations):
        raise StorageError(f"{run}: {history.reason or 'no update yet; start agents, and try again later'}")
    if csv:
        for line in (history.evaluations if evaluations else history).csv_text().splitlines():
            printer.line(line)
        return
    for line in plots(history, min(get_terminal_size().columns, WIDTH_MAX)):
        printer.line(line)
    if history.reason:
        printer.line(f"note: {history.reason}")


def plots(history: History, width: int) -> Iterator[str]:
    """Yield the lines of all plots of a history: losses of updates, then losses and accuracies of evaluations."""
    found = history.evaluations
    curves = [
        ("median loss of updates", history["time"], history["loss"]),
        ("loss of evaluations", found["time"], found["loss"]),
        ("accuracy of evaluations", found["time"], found["accuracy"]),
    ]
    gap = False
    for title, times, values in curves:
        points = [(x, y) for x, y in zip(times.tolist(), values.tolist(), strict=True) if math.isfinite(y)]
        if len(points) > 1:
            if gap:
                yield ""
            gap = True
            yield from plot(title, points, width)


def plot(title: str, points: Sequence[tuple[float, float]], width: int) -> list[str]:
    """Return a plot of points as lines.

    `points` has times in seconds and finite values. Each column of the plot shows the median of the
    values in its part of the time.
    """
    columns = max(10, width - LABEL - 2)
    begin, end = points[0][0], points[-1][0]
    parts: dict[int, list[float]] = {}
    for x, y in points:
        place = int((x - begin) / (end - begin) * (columns - 1)) if end > begin else 0
        parts.setdefault(place, []).append(y)
    medians = {place: median(values) for place, values in parts.items()}
    low, high = min(medians.values()), max(medians.values())
    is_log = low > 0.0 and high > LOG_RATIO * low
    scaled = {place: math.log(value) if is_log else value for place, value in medians.items()}
    bottom, top = min(scaled.values()), max(scaled.values())
    grid = [[" "] * columns for _ in range(ROWS)]
    for place, value in scaled.items():
        share = (top - value) / (top - bottom) if top > bottom else 0.5
        grid[round(share * (ROWS - 1))][place] = "•"
    labels = {0: f"{high:.4g}", ROWS - 1: f"{low:.4g}"}
    lines = [f"{title}, last {points[-1][1]:.4g}" + (" (logarithmic)" if is_log else "")]
    lines += [f"{labels.get(row, ''):>{LABEL}} ┤{''.join(grid[row])}".rstrip() for row in range(ROWS)]
    total = duration(end - begin)
    lines.append(f"{'':>{LABEL}} └{'─' * columns}")
    lines.append(f"{'':>{LABEL}}  0{total:>{columns - 1}}")
    return lines
