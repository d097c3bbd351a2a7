"""Spread a daily quota over the day by setting the time between a device's exchanges.

The even rate is the number of bytes left divided by the time left until the quota is reset. A
device spends bytes at a constant multiple of this rate. The rate is recomputed for each exchange.
So the intervals between exchanges are short at first and grow over the day, and the quota lasts
until it is reset. While training improves the model, the multiple is high. Once training has
plateaued, the device spends at the even rate, which saves bytes for later improvements.
"""

import math
from typing import NamedTuple

LEARNING_SPEND_RATE = 6.0
"""Spending rate while training improves the model, as a multiple of the even rate."""

EVEN_SPEND_RATE = 1.0

CHANGE_MIN = 0.1
CHANGE_OF_FIRST_MIN = 0.02
"""A loss counts as changed only if it changes by over this share of the run's first losses.

The change must also exceed the share `CHANGE_MIN` of the reference value.
"""

EXCHANGES_UNCHANGED = 16
"""Training has plateaued if no loss changes during this number of exchanges per device."""


class Allowance(NamedTuple):
    """The bytes left of the daily quota, and the seconds until the quota is reset."""

    left_bytes: float
    remaining_s: float


def period_s(allowance: Allowance, exchange_bytes: float, spend_rate: float) -> float:
    """Return the seconds from one exchange to the next, at most until the quota is reset."""
    left_bytes, remaining_s = allowance
    if left_bytes < exchange_bytes:
        return remaining_s
    return min(remaining_s, exchange_bytes * remaining_s / (spend_rate * left_bytes)) if exchange_bytes else 0.0


def has_changed(loss: float, mark: float, first: float) -> bool:
    """Return whether a loss differs from the reference value `mark` by more than noise.

    If `mark` is infinite, as at the start, every loss counts as changed.
    """
    if math.isinf(mark):
        return True
    least = max(CHANGE_MIN * abs(mark), CHANGE_OF_FIRST_MIN * abs(first))
    return abs(loss - mark) > least
