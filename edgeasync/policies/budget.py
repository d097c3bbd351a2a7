"""Spends a day's bytes: how long a device waits from one exchange to the next, given what is left.

The rest of a day is spent at the same multiple of an even pace all day: the first exchanges follow one another
quickly, later ones ever more slowly, and the last bytes go as the day ends. While the fleet learns the multiple is
high, since exchanges buy most then. Once it learns nothing new the pace is even, which keeps bytes for when it
learns again.
"""

import math
from typing import NamedTuple

LEARNING_SPEND_RATE = 6.0
"""How many times as fast as evenly the rest of the day's bytes is spent while the fleet learns."""

EVEN_SPEND_RATE = 1.0

CHANGE_MIN = 0.1
CHANGE_OF_FIRST_MIN = 0.02
"""A loss has changed if it differs by this share of what it was, and by this share of the run's first losses."""

EXCHANGES_UNCHANGED = 16
"""Exchanges of each device without a change of the loss after which the fleet learns nothing new."""


class Allowance(NamedTuple):
    """The rest of a day: bytes left for exchanges, and seconds."""

    left_bytes: float
    remaining_s: float


def period_s(allowance: Allowance, exchange_bytes: float, spend_rate: float) -> float:
    """Return the seconds from one exchange to the next: up to the next day if the bytes do not allow another."""
    left_bytes, remaining_s = allowance
    if left_bytes < exchange_bytes:
        return remaining_s
    return min(remaining_s, exchange_bytes * remaining_s / (spend_rate * left_bytes)) if exchange_bytes else 0.0


def has_changed(loss: float, mark: float, first: float) -> bool:
    """Return whether a loss differs from a mark by more than noise; the first mark is infinite."""
    if math.isinf(mark):
        return True
    least = max(CHANGE_MIN * abs(mark), CHANGE_OF_FIRST_MIN * abs(first))
    return abs(loss - mark) > least
