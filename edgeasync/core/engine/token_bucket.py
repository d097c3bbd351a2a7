"""A rate limit that allows bursts."""

import msgspec


class Rate(msgspec.Struct, frozen=True):
    """The number of tokens gained per second, and the maximum number of tokens."""

    per_s: float
    burst: float


class TokenBucket:
    """A token bucket, which refills over time. The time is passed to every call."""

    __slots__ = ("_now_s", "_rate", "_tokens")

    def __init__(self, rate: Rate, now_s: float) -> None:
        self._rate = rate
        self._tokens = rate.burst
        self._now_s = now_s

    def take(self, now_s: float, count: float = 1.0) -> bool:
        """Take tokens; return false if the bucket contains too few."""
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
        """Return the number of tokens in the bucket."""
        return min(self._rate.burst, self._tokens + (now_s - self._now_s) * self._rate.per_s)
