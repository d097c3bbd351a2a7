"""Retries of a device: which hub of its list to try next, and when to repeat messages."""

from random import Random

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 3.0

FAILING_MAX_S = 60.0
"""Maximum time until a device repeats a request whose answers it cannot use."""

UNREACHABLE_EVERY_S = 60.0
"""Minimum time between two reports that no hub is reachable."""

DUPLICATE_REFUSALS_MAX = 3
"""Number of refusals as a duplicate device after which the agent ends. It waits for the duration of
a lease after each refusal.
"""


class HubRotation:
    """The hubs of a list, by position; `hub` is the current hub, or the hub to try next.

    If the connection to a hub is lost, the device tries the same hub again. If a hub does not
    answer or is full, the device tries the next hub. If a hub has asked the device to retry later,
    the device does not try it earlier. All hubs share one back-off, so that a device with several
    hubs does not connect more often than one with a single hub.
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
        """Whether a failure should be reported: it is this hub's first since the last welcome."""
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

        The report is due if all hubs have failed since the last welcome, but at most once per
        `UNREACHABLE_EVERY_S`.
        """
        is_due = self.attempts >= self._hubs and now_s >= self._report_at_s
        if is_due:
            self._report_at_s = now_s + UNREACHABLE_EVERY_S
        return is_due

    def fail(self, now_s: float, retry_after_s: float | None, *, move_on: bool) -> float:
        """Record a failure; return the time at which to retry.

        If `move_on` is set, first select the next hub among those that may be tried soonest.
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
    """Repeats an unanswered message at the time `due_s`.

    `repeated` is set if the message was sent again on this connection. Two answers may then arrive.
    """

    def __init__(self, random: Random) -> None:
        self.due_s = 0.0
        self.repeated = False
        self.busy = False
        """Whether the hub is busy, or has asked the device to idle while the device continues to
        train.
        """
        self._random = random

    def wait(self, now_s: float, for_s: float) -> None:
        """Wait for the hub's answer for this number of seconds."""
        self.due_s = now_s + for_s

    def soon(self, now_s: float) -> None:
        """Repeat the message soon, because the answer could not be used."""
        self.due_s = now_s + BACKOFF_MIN_S

    def back_off(self, now_s: float, failures: int = 1) -> None:
        """Repeat the message in a few seconds, because the message or its answer could not be used.

        If this was not the first of several failures, wait longer, but at most `FAILING_MAX_S`.
        """
        for_s = min(BACKOFF_MAX_S * 2.0 ** min(failures - 1, 10), FAILING_MAX_S)
        self.due_s = now_s + for_s * self._random.uniform(0.5, 1.0)

    def wait_for_busy(self, now_s: float, retry_after_s: float) -> None:
        """Repeat the message after the time that the busy hub requested, plus a random delay.

        The delay spreads the retries of devices that got the same answer.
        """
        spread_s = min(retry_after_s, 2.0 * BACKOFF_MAX_S) * self._random.uniform(0.0, 0.5)
        self.due_s = now_s + retry_after_s + spread_s
        self.busy = True
