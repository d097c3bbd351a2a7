"""Votes and their medians. A vote is the latest number of a voter."""

import math
from bisect import bisect_left, insort
from itertools import islice

import msgspec

from edgeasync.measurements.medians import WINDOW, median

PEAK_SHARE = 0.3
"""Votes up to this share of the peak are normal, even if the median is now far lower."""

DEVICES_MIN = 3
"""Minimum number of devices or voters to compare.

If there are only two and they differ, either may be wrong.
"""

DEVIATIONS_MAX = 8.0
"""A score is not credible if it is lower than the median by more than 8 median deviations."""

DEVIATION_MIN = 0.05
"""Minimum median deviation as a share of the median, in case all voters are nearly equal."""


class Votes(msgspec.Struct, dict=True):
    """The latest finite number of each of the last `WINDOW` voters.

    A voter is a key or, without keys, a device id, so a key with many device ids has only one vote.
    Once the median has been used, a sorted copy of the numbers is maintained.
    """

    newest: dict[str, float] = {}

    def __post_init__(self) -> None:
        self._kept: list[float] | None = None

    def __len__(self) -> int:
        """Return the number of voters that have voted."""
        return len(self.newest)

    def cast(self, voter: str, value: float) -> None:
        """Add or replace a voter's number."""
        newest = self.newest
        before = newest.pop(voter, None)
        if before is None:
            self.admit(voter, value)
            return
        newest[voter] = value
        if (kept := self._kept) is not None:
            del kept[bisect_left(kept, before)]
            insort(kept, value)

    def admit(self, voter: str, value: float) -> None:
        """Add a voter's first number. At the limit, drop the voter with the oldest number."""
        newest = self.newest
        if len(newest) >= WINDOW:
            self.withdraw(next(iter(newest)))
        newest[voter] = value
        if self._kept is not None:
            insort(self._kept, value)

    def replace(self, voter: str, value: float) -> None:
        """Change a voter's number without changing the order of the voters."""
        if (kept := self._kept) is not None:
            del kept[bisect_left(kept, self.newest[voter])]
            insort(kept, value)
        self.newest[voter] = value

    def has_turn(self, voter: str) -> bool:
        """Return whether a voter's next vote counts. The half that voted last must wait."""
        newest = self.newest
        return voter not in newest or voter in islice(newest, (len(newest) + 1) // 2)

    def withdraw(self, voter: str) -> None:
        """Drop a voter's number, if any."""
        before = self.newest.pop(voter, None)
        if before is not None and self._kept is not None:
            del self._kept[bisect_left(self._kept, before)]

    def clear(self) -> None:
        """Drop all numbers."""
        self.newest.clear()
        self._kept = None

    @property
    def ordered(self) -> list[float]:
        """The numbers, sorted."""
        return sorted(self.newest.values())

    @property
    def median(self) -> float:
        """The median of the numbers; NaN without numbers."""
        kept = self._kept
        if kept is None:
            kept = self._kept = self.ordered
        half = len(kept) // 2
        return (kept[half] + kept[~half]) / 2.0 if kept else math.nan

    @property
    def least_credible(self) -> float:
        """The lowest credible number; minus infinity with fewer than three voters.

        It is the median minus `DEVIATIONS_MAX` times the median distance of the numbers from the
        median.
        """
        if len(self.newest) < DEVICES_MIN:
            return -math.inf
        usual = median(self.newest.values())
        deviation = median([abs(value - usual) for value in self.newest.values()])
        return usual - DEVIATIONS_MAX * max(deviation, DEVIATION_MIN * abs(usual))

    @property
    def reached_by_most(self) -> float:
        """The highest number that more than half of the voters reach or exceed; NaN without numbers."""
        ordered = self.ordered
        return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


class VotesWithPeak(Votes, dict=True):
    """Votes, and the highest value that their median has had (the peak).

    For example, the votes are norms of updates. As the model learns, these norms shrink for devices
    with common data. They remain large for a device with uncommon data, although it is not faulty.
    So the norm that counts as normal never falls below a share of the peak. `firsts` contains each
    voter's first number. The peak is at least the median of these numbers. Later votes raise it
    only once most voters have voted.
    """

    noted: float = 0.0
    firsts: dict[str, float] = {}

    def __post_init__(self) -> None:
        Votes.__post_init__(self)
        self._peak: float | None = None

    @property
    def peak(self) -> float:
        """The highest median so far, including the median of all voters' first numbers.

        It is 0 while too few voters are known.
        """
        peak = self._peak
        if peak is None:
            peak = 0.0
            if len(self.newest) >= DEVICES_MIN:
                peak = max(self.noted, median(self.firsts.values()) if self.firsts else 0.0)
            self._peak = peak
        return peak

    def admit(self, voter: str, value: float) -> None:
        """Add a voter's first number, which may change the peak."""
        firsts = self.firsts
        if len(firsts) >= WINDOW:
            del firsts[next(iter(firsts))]
        firsts[voter] = value
        Votes.admit(self, voter, value)
        self._peak = None

    def withdraw(self, voter: str) -> None:
        """Drop the latest and the first number of a voter, if any."""
        Votes.withdraw(self, voter)
        self.firsts.pop(voter, None)
        self._peak = None

    def note_peak(self) -> None:
        """Raise the peak to the median if it is higher. Call this only when most voters have voted."""
        if self.newest:
            self.noted = max(self.noted, median(self.newest.values()))
        self._peak = None

    def clear(self) -> None:
        """Drop all votes and the peak."""
        Votes.clear(self)
        self.firsts.clear()
        self.noted = 0.0
        self._peak = None

    def usual(self, slack: float = 0.0) -> float:
        """Return the highest number that is normal; infinity if voters are too few, or all numbers are 0.

        The result is at least `slack` (from 0 to 1) times the peak.
        """
        if len(self.newest) < DEVICES_MIN:
            return math.inf
        return max(self.median, max(PEAK_SHARE, slack) * self.peak) or math.inf
