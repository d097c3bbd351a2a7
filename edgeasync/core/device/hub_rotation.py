"""Retries of a device: the next hub of its list, and repeated messages."""

from random import Random

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 3.0

UNREACHABLE_EVERY_S = 60.0
"""Minimum time between two reports that no hub is reachable."""

DUPLICATE_REFUSALS_MAX = 3
"""Refusals as a duplicate device before the agent ends; it waits for a lease after each."""


class HubRotation:
    """The hubs of a list, by position; `hub` is the current one, or the next to try.

    After the connection to a hub is lost, the device tries the same hub again. If a hub does not
    answer or is full, it tries the next one, but never earlier than that hub requested. All hubs
    share one back-off, so that a device with several hubs does not connect more often.
    """

    def __init__(self, hubs: int, random: Random) -> None:
        self.hub = 0
        self.attempts = 0
        self._hubs = hubs
        self._random = random
        self._not_before_s = [0.0] * hubs
        self._duplicate_refusals = 0
        self._report_at_s = 0.0

    @property
    def is_news(self) -> bool:
        """Whether a failure is this hub's first since the last welcome, so worth a report."""
        return self.attempts == 0 or 1 < self._hubs >= self.attempts

    def welcomed(self) -> None:
        """Reset the back-off."""
        self.attempts = self._duplicate_refusals = 0
        self._report_at_s = 0.0

    def takes_duplicate_refusal(self) -> bool:
        """Count a refusal as a duplicate device; return whether to retry."""
        self._duplicate_refusals += 1
        return self._duplicate_refusals <= DUPLICATE_REFUSALS_MAX

    def is_report_due(self, now_s: float) -> bool:
        """Return whether to report that no hub is reachable.

        It is due if all hubs have failed since the last welcome, at most every
        `UNREACHABLE_EVERY_S`.
        """
        is_due = self.attempts >= self._hubs and now_s >= self._report_at_s
        if is_due:
            self._report_at_s = now_s + UNREACHABLE_EVERY_S
        return is_due

    def fail(self, now_s: float, retry_after_s: float | None, *, move_on: bool) -> float:
        """Record a failure; return when to retry.

        With `move_on`, first select the next of the hubs that may be tried soonest.
        """
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self.attempts, 10))
        self.attempts += 1
        if retry_after_s is not None:
            self._not_before_s[self.hub] = now_s + retry_after_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)
        at_s = now_s + backoff_s * self._random.uniform(0.5, 1.0)
        if move_on:
            turns = [(self.hub + turn) % self._hubs for turn in range(1, self._hubs + 1)]
            self.hub = min(turns, key=lambda hub: max(at_s, self._not_before_s[hub]))
        return max(at_s, self._not_before_s[self.hub])


class Repetition:
    """Repeats a message without an answer at `due_s`.

    `repeated` is set if it was sent twice on this connection, so that two answers may arrive.
    """

    def __init__(self, random: Random) -> None:
        self.due_s = 0.0
        self.repeated = False
        self.busy = False
        """Whether the hub is busy, or asks the device to idle while the device trains on."""
        self._random = random

    def wait(self, now_s: float, for_s: float) -> None:
        """Wait this long for the hub's answer."""
        self.due_s = now_s + for_s

    def soon(self, now_s: float) -> None:
        """Repeat the message soon, because the answer was useless."""
        self.due_s = now_s + BACKOFF_MIN_S

    def back_off(self, now_s: float) -> None:
        """Repeat the message in a few seconds, because it or its answer was malformed."""
        self.due_s = now_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)

    def wait_for_busy(self, now_s: float, retry_after_s: float) -> None:
        """Repeat the message when the busy hub requests it, with a random delay.

        The delay spreads devices that got the same answer.
        """
        spread_s = min(retry_after_s, 2.0 * BACKOFF_MAX_S) * self._random.uniform(0.0, 0.5)
        self.due_s = now_s + retry_after_s + spread_s
        self.busy = True
