"""When a round is due for a peer, and when it is too early for one: by time, or by the trainer's steps."""

import math

from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.protocol.peer_messages import AbandonReason, Propose, RoundId

LINGER_LEASES_MAX = 8
"""How many leases a peer waits for a proposer that says its round is still in progress."""


class Schedule:
    """Which round may begin when, by what became of the rounds before."""

    def __init__(self, settings: PeerCoreSettings) -> None:
        self._settings = settings
        self.due_s = math.inf
        """When the next round is due."""
        self.linger_until_s = -math.inf
        """Until when the proposer of the last whole round is waited for, while it is still in that round."""
        self.half_due = True
        """Whether the trainer has taken half of `round_steps` since the last round began."""
        self.waiting: Propose | None = None
        """A proposal that waits for that."""
        self._applied_s = self._half_s = -math.inf
        self._wanted = self._is_retry = False
        self._retried: RoundId | None = None
        """A round that another member has given up, but not this one: it may be repeated early."""

    def begin(self, now_s: float) -> None:
        """Let time pass from now on."""
        interval_s = self._settings.interval_s
        self.due_s = math.inf if interval_s is None else now_s + interval_s

    def note_wanted(self, now_s: float, *, in_round: bool) -> None:
        """Note that the trainer has taken the steps after which a round is due."""
        self._wanted = True
        if not in_round:
            self.due_s = min(self.due_s, max(now_s, self._half_s))

    def take_waiting(self) -> Propose | None:
        """Note that half of the steps are taken; return the proposal that has waited for that."""
        self.half_due = True
        waiting, self.waiting = self.waiting, None
        return waiting

    def is_early(self, completed: RoundId | None, now_s: float) -> bool:
        """Return whether less than half the interval has passed since the last whole round.

        A round that another member has given up may be repeated at once, but only one time.
        """
        return (completed is None or completed != self._retried) and self._is_within_half(now_s)

    def _is_within_half(self, now_s: float) -> bool:
        interval_s = self._settings.interval_s
        return interval_s is not None and now_s < self._applied_s + interval_s / 2

    # -- what becomes of rounds --------------------------------------------------------------------------------

    def note_begun(self, now_s: float) -> None:
        """Note that a round begins here."""
        self._is_retry = self._is_within_half(now_s)
        self.half_due, self.waiting = self._settings.round_steps is None, None
        self._wanted = False

    def note_retried(self, round_id: RoundId) -> None:
        """Note that another member has given up a round whose mean is here."""
        if not self._is_retry:
            self._retried = round_id

    def note_given_up(self, reason: AbandonReason, now_s: float) -> None:
        """Note that this peer has given up the round, and why."""
        self.half_due = True
        half_s = max(self._settings.ping_s, (self._settings.interval_s or 0.0) / 2)
        waits = {"early": half_s, "left": 0.0, "lost": 0.0, "left_out": self._settings.lease_s}
        self.due_s = now_s + waits.get(reason, self._settings.ping_s)

    def note_applied(self, now_s: float) -> None:
        """Note that the round's mean is in the model."""
        self._applied_s = now_s

    def note_ended(self, now_s: float) -> None:
        """Note that nobody needs this peer in the round any more."""
        interval_s = self._settings.interval_s
        if interval_s is not None:  # and not early for a member that has completed the round only now
            self._half_s = now_s + interval_s / 2
            self.due_s = max(self._applied_s + interval_s, self._half_s)
        else:
            self.due_s = now_s if self._wanted else math.inf
        self.linger_until_s = now_s + LINGER_LEASES_MAX * self._settings.lease_s
