"""Spread a daily quota over the day: how long a device waits between two exchanges.

At any time, a device spends the rest of the day's bytes at the same multiple of an even rate. So
the first exchanges follow each other quickly, later ones ever more slowly, and the last bytes are
used at the end of the day. While training improves the model, the multiple is high. Once training
has plateaued, the rate is even, which saves bytes for later improvements.
"""

import math
from typing import NamedTuple

LEARNING_SPEND_RATE = 6.0
"""Spending rate while training improves the model, as a multiple of an even rate."""

EVEN_SPEND_RATE = 1.0

CHANGE_MIN = 0.1
CHANGE_OF_FIRST_MIN = 0.02
"""A loss has changed if it differs by `CHANGE_MIN` of its last value, and by this share of the
run's first losses.
"""

EXCHANGES_UNCHANGED = 16
"""Exchanges of each device without a changed loss after which training has plateaued."""


class Allowance(NamedTuple):
    """The rest of a day: bytes left for exchanges, and seconds."""

    left_bytes: float
    remaining_s: float


def period_s(allowance: Allowance, exchange_bytes: float, spend_rate: float) -> float:
    """Return the seconds from one exchange to the next, at most until the next day begins."""
    left_bytes, remaining_s = allowance
    if left_bytes < exchange_bytes:
        return remaining_s
    return min(remaining_s, exchange_bytes * remaining_s / (spend_rate * left_bytes)) if exchange_bytes else 0.0


def has_changed(loss: float, mark: float, first: float) -> bool:
    """Return whether a loss differs from a mark by more than noise. The first mark is infinite."""
    if math.isinf(mark):
        return True
    least = max(CHANGE_MIN * abs(mark), CHANGE_OF_FIRST_MIN * abs(first))
    return abs(loss - mark) > least
