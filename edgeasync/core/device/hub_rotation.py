"""Which hub of its list a device tries next, and when."""

from random import Random

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 3.0


class HubRotation:
    """The hubs of a list, by position; `hub` is the one that the device talks to, or tries next.

    After a hub is lost, the device tries the same hub again. If a hub does not answer or is full, it tries the
    next one. It tries no hub earlier than that hub asked. All hubs share one back-off, so that a device with
    several hubs does not connect more often.
    """

    def __init__(self, hubs: int, random: Random) -> None:
        self.hub = 0
        self.attempts = 0
        self._hubs = hubs
        self._random = random
        self._not_before_s = [0.0] * hubs

    @property
    def is_news(self) -> bool:
        """Whether a failure is this hub's first since the last welcome: later ones need no report."""
        return self.attempts == 0 or 1 < self._hubs >= self.attempts

    @property
    def all_failed(self) -> bool:
        """Whether every hub of the list has failed since the last welcome."""
        return self.attempts >= self._hubs

    def welcomed(self) -> None:
        """Reset the back-off."""
        self.attempts = 0

    def fail(self, now_s: float, retry_after_s: float | None, *, move_on: bool) -> float:
        """Return when to try `hub`; with `move_on` first set it to the next of those that may be tried soonest."""
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self.attempts, 10))
        self.attempts += 1
        if retry_after_s is not None:
            self._not_before_s[self.hub] = now_s + retry_after_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)
        at_s = now_s + backoff_s * self._random.uniform(0.5, 1.0)
        if move_on:
            turns = [(self.hub + turn) % self._hubs for turn in range(1, self._hubs + 1)]
            self.hub = min(turns, key=lambda hub: max(at_s, self._not_before_s[hub]))
        return max(at_s, self._not_before_s[self.hub])
