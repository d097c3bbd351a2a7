"""A rate limit, which allows a burst after a quiet time."""

import msgspec


class Rate(msgspec.Struct, frozen=True):
    """The tokens gained in a second, and the most that a quiet time gathers."""

    per_s: float
    burst: float


class TokenBucket:
    """Holds up to a burst of tokens, and gains some every second. Every call is given the time."""

    __slots__ = ("_now_s", "_rate", "_tokens")

    def __init__(self, rate: Rate, now_s: float) -> None:
        self._rate = rate
        self._tokens = rate.burst
        self._now_s = now_s

    def take(self, now_s: float, count: float = 1.0) -> bool:
        """Take tokens; return whether there were as many."""
        rate = self._rate
        tokens = self._tokens + (now_s - self._now_s) * rate.per_s
        tokens = min(tokens, rate.burst)
        self._now_s = now_s
        if tokens < count:
            self._tokens = tokens
            return False
        self._tokens = tokens - count
        return True

    def tokens(self, now_s: float) -> float:
        """Return how many tokens there are."""
        return min(self._rate.burst, self._tokens + (now_s - self._now_s) * self._rate.per_s)
