"""The core's clock, which continues from a saved time and never goes back."""

import math
from collections.abc import Callable


class OffsetClock:
    """A clock that starts at `first_s` and advances with `source`, in seconds.

    It adds the time elapsed on `source` to `first_s`. If it added a fixed offset to the time of
    `source`, rounding could make the result smaller than `first_s`, and the clock would go
    backwards.
    """

    def __init__(self, source: Callable[[], float], first_s: float) -> None:
        self.source = source
        self._began_s = source()
        self._first_s = first_s

    def __call__(self) -> float:
        """Return the current time."""
        return self._shown_at(self.source())

    def when(self, time_s: float) -> float:
        """Return the time on `source` at which this clock returns at least `time_s`.

        This holds despite rounding.
        """
        source_s = self._began_s + (time_s - self._first_s)
        while (shown_s := self._shown_at(source_s)) < time_s:
            source_s += max(time_s - shown_s, math.ulp(source_s))
        return source_s

    def _shown_at(self, source_s: float) -> float:
        return self._first_s + (source_s - self._began_s)
