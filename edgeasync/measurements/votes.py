"""Votes: one number of each voter, the newest, and what is usual by their medians."""

import math
from bisect import bisect_left, insort
from itertools import islice

import msgspec

from edgeasync.measurements.medians import WINDOW, median

PEAK_SHARE = 0.3
"""Votes up to this share of the highest median count as usual, however low the others' are by now."""

DEVICES_MIN = 3
"""The least number of devices, or voters, to compare, the suspect included: of two, either may be wrong."""

DEVIATIONS_MAX = 8.0
"""A score that is further below the median than this many median deviations is not believed."""

DEVIATION_MIN = 0.05
"""The median deviation counts as at least this share of the median: voters may be very much alike."""


class Votes(msgspec.Struct, dict=True):
    """One number of each voter, the newest, of the `WINDOW` voters heard last; finite numbers only.

    A voter is a key or, without keys, a device id: a key that speaks under many names has one vote. Once somebody
    has asked for the median, the numbers are kept in order.
    """

    newest: dict[str, float] = {}

    def __post_init__(self) -> None:
        self._kept: list[float] | None = None

    def __len__(self) -> int:
        """Return how many voters have voted."""
        return len(self.newest)

    def cast(self, voter: str, value: float) -> None:
        """Put a number in the place of the voter's last one."""
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
        """Take a voter's first number; forget that of the voter that was silent for longest if there are many."""
        newest = self.newest
        if len(newest) >= WINDOW:
            self.withdraw(next(iter(newest)))
        newest[voter] = value
        if self._kept is not None:
            insort(self._kept, value)

    def replace(self, voter: str, value: float) -> None:
        """Change a voter's number; the voter keeps its place among those heard last."""
        if (kept := self._kept) is not None:
            del kept[bisect_left(kept, self.newest[voter])]
            insort(kept, value)
        self.newest[voter] = value

    def has_turn(self, voter: str) -> bool:
        """Return whether the voter is not of the half that was cast last."""
        newest = self.newest
        return voter not in newest or voter in islice(newest, (len(newest) + 1) // 2)

    def withdraw(self, voter: str) -> None:
        """Forget a voter's number, if there is one."""
        before = self.newest.pop(voter, None)
        if before is not None and self._kept is not None:
            del self._kept[bisect_left(self._kept, before)]

    def clear(self) -> None:
        """Forget all numbers."""
        self.newest.clear()
        self._kept = None

    @property
    def ordered(self) -> list[float]:
        """The numbers in order."""
        return sorted(self.newest.values())

    @property
    def median(self) -> float:
        """The median of the numbers, NaN without any."""
        kept = self._kept
        if kept is None:
            kept = self._kept = self.ordered
        half = len(kept) // 2
        return (kept[half] + kept[~half]) / 2.0 if kept else math.nan

    @property
    def least_credible(self) -> float:
        """The number below which nobody is believed; minus infinity with fewer than three voters.

        It is as far below the median as `DEVIATIONS_MAX` times the median distance from the median.
        """
        if len(self.newest) < DEVICES_MIN:
            return -math.inf
        usual = median(self.newest.values())
        deviation = median([abs(value - usual) for value in self.newest.values()])
        return usual - DEVIATIONS_MAX * max(deviation, DEVIATION_MIN * abs(usual))

    @property
    def reached_by_most(self) -> float:
        """The highest number that more than half of the voters reach, NaN without any: half is no majority."""
        ordered = self.ordered
        return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


class VotesWithPeak(Votes, dict=True):
    """Votes, and the highest that their median has been.

    As a model learns, the updates of those whose data it knows get shorter and shorter. Those of a device whose
    data it does not know yet stay long, and are no fault. So what is usual never falls under a share of the peak.
    `firsts` has the first number of each voter: before there are enough to compare there is no median to note.
    """

    noted: float = 0.0
    firsts: dict[str, float] = {}

    def __post_init__(self) -> None:
        Votes.__post_init__(self)
        self._peak: float | None = None

    @property
    def peak(self) -> float:
        """The highest median so far, that of the first numbers included; 0 while too few voters are known."""
        peak = self._peak
        if peak is None:
            peak = 0.0
            if len(self.newest) >= DEVICES_MIN:
                peak = max(self.noted, median(self.firsts.values()) if self.firsts else 0.0)
            self._peak = peak
        return peak

    def admit(self, voter: str, value: float) -> None:
        """Take a voter's first number, which may change the peak."""
        firsts = self.firsts
        if len(firsts) >= WINDOW:
            del firsts[next(iter(firsts))]
        firsts[voter] = value
        Votes.admit(self, voter, value)
        self._peak = None

    def withdraw(self, voter: str) -> None:
        """Forget a voter's numbers, if there are any."""
        Votes.withdraw(self, voter)
        self.firsts.pop(voter, None)
        self._peak = None

    def note_peak(self) -> None:
        """Note the median if it is higher than any before; call this only when most voters have voted."""
        if self.newest:
            self.noted = max(self.noted, median(self.newest.values()))
        self._peak = None

    def clear(self) -> None:
        """Forget all votes, and the peak."""
        Votes.clear(self)
        self.firsts.clear()
        self.noted = 0.0
        self._peak = None

    def usual(self, slack: float = 0.0) -> float:
        """Return what nobody need explain; infinity while too few voters are known, or all votes are 0.

        With `slack`, from 0 to 1, it is at least this share of the peak.
        """
        if len(self.newest) < DEVICES_MIN:
            return math.inf
        return max(self.median, max(PEAK_SHARE, slack) * self.peak) or math.inf
