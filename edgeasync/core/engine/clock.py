"""The core's clock, which continues from a saved time and never goes back."""

import math
from collections.abc import Callable


class OffsetClock:
    """A clock that starts at `first_s` and advances with `source`, in seconds.

    It adds the time that has passed on `source` to `first_s`. An offset added to the time of
    `source` could be rounded to less than `first_s`, and the clock would go back.
    """

    def __init__(self, source: Callable[[], float], first_s: float) -> None:
        self.source = source
        self._began_s = source()
        self._first_s = first_s

    def __call__(self) -> float:
        """Return the current time."""
        return self._shown_at(self.source())

    def when(self, time_s: float) -> float:
        """Return the time on `source` at which this clock shows at least `time_s`.

        The result is exact despite rounding.
        """
        source_s = self._began_s + (time_s - self._first_s)
        while (shown_s := self._shown_at(source_s)) < time_s:
            source_s += max(time_s - shown_s, math.ulp(source_s))
        return source_s

    def _shown_at(self, source_s: float) -> float:
        return self._first_s + (source_s - self._began_s)
