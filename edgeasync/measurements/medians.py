"""Medians of short lists, lists of recent values, and past medians of votes."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

RECENT = 5
"""Number of measurements whose median is used as a device's time.

The median of five remains valid if two of them are outliers.
"""

WINDOW = 64
"""Maximum number of voters whose latest reports are stored, and maximum number of past medians."""

QUARTER = WINDOW // 4
"""Number of latest medians that describe the current state of training."""


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value. It is faster than `statistics.median`."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2.0


def factor(ratio: float) -> str:
    """Format a ratio, for example to a median, with three significant digits.

    >>> [factor(ratio) for ratio in (0.5, 13.42, 585_123.0, 1e30)]
    ['0.5', '13.4', '585,000', '1e+30']
    """
    return f"{float(f'{ratio:.3g}'):,.10g}"


def median_of_recent(values: list[float], value: float) -> float:
    """Append a measurement, keep the last `RECENT` of them, and return their median."""
    values.append(value)
    if len(values) > RECENT:
        del values[0]
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2.0


def add_recent(values: list[T], value: T, count_max: int) -> None:
    """Append a value, and drop the oldest if there are more than `count_max`.

    A list is used because a deque cannot be encoded, and the lists are short.
    """
    values.append(value)
    if len(values) > count_max:
        del values[0]


class PastMedians:
    """The latest `WINDOW` medians of votes in a durable list, and medians of this list.

    `usual` is the median of the whole list, and `newest` is the median of its last `QUARTER`
    values. Both are NaN while the list is empty.
    """

    __slots__ = ("_ordered", "_ordered_newest", "_values", "newest", "usual")

    def __init__(self, values: list[float]) -> None:
        self._values = values
        self._ordered, self._ordered_newest = sorted(values), sorted(values[-QUARTER:])
        self.usual = self.newest = math.nan
        if values:
            self.usual, self.newest = median(self._ordered), median(self._ordered_newest)

    def add(self, value: float) -> None:
        """Append a median, and drop the oldest one if there are more than `WINDOW`."""
        values, ordered, ordered_newest = self._values, self._ordered, self._ordered_newest
        values.append(value)
        insort(ordered, value)
        insort(ordered_newest, value)
        if len(values) > QUARTER:
            del ordered_newest[bisect_left(ordered_newest, values[-QUARTER - 1])]
        if len(values) > WINDOW:
            del ordered[bisect_left(ordered, values[0])], values[0]
        half, quarter = len(ordered) // 2, len(ordered_newest) // 2
        self.usual = (ordered[half] + ordered[~half]) / 2.0
        self.newest = (ordered_newest[quarter] + ordered_newest[~quarter]) / 2.0

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._ordered.clear()
        self._ordered_newest.clear()
        self.usual = self.newest = math.nan
