"""Which hub of its list a device tries next, and when."""

from random import Random

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 3.0


class HubRotation:
    """The hubs by their place in the list: `hub` is the one that the device speaks to, or tries next.

    A hub that was lost is tried again first; after one that did not answer or is full comes the next. No hub is
    tried earlier than it asked for. All share one back-off, so that a list does not make a device connect oftener.
    """

    def __init__(self, hubs: int, random: Random) -> None:
        self.hub = 0
        self.attempts = 0
        self._hubs = hubs
        self._random = random
        self._not_before_s = [0.0] * hubs

    @property
    def is_news(self) -> bool:
        """Whether a failure is the first of this hub since the last welcome: later ones need not be told."""
        return self.attempts == 0 or 1 < self._hubs >= self.attempts

    @property
    def all_failed(self) -> bool:
        """Whether every hub of the list has failed since the last welcome."""
        return self.attempts >= self._hubs

    def welcomed(self) -> None:
        """Reset the back-off."""
        self.attempts = 0

    def fail(self, now_s: float, retry_after_s: float | None, *, move_on: bool) -> float:
        """Return when to try `hub`: the same one, or with `move_on` the next that may be tried as soon as any."""
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self.attempts, 10))
        self.attempts += 1
        if retry_after_s is not None:
            self._not_before_s[self.hub] = now_s + retry_after_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)
        at_s = now_s + backoff_s * self._random.uniform(0.5, 1.0)
        if move_on:
            turns = [(self.hub + turn) % self._hubs for turn in range(1, self._hubs + 1)]
            self.hub = min(turns, key=lambda hub: max(at_s, self._not_before_s[hub]))
        return max(at_s, self._not_before_s[self.hub])
