"""Decides when a round is due for a peer, and when a proposal is too early."""

import math

from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.protocol.peer_messages import AbandonReason, Propose, RoundId

LINGER_LEASES_MAX = 8
"""Maximum number of leases for which a peer waits for a proposer that is still in its last
round.
"""


class Schedule:
    """Decides when rounds may start: by time or trainer steps, and by earlier rounds."""

    def __init__(self, settings: PeerCoreSettings) -> None:
        self._settings = settings
        self.due_s = math.inf
        """The time at which the next round is due."""
        self.linger_until_s = -math.inf
        """The time until which to wait for the proposer of the last complete round, if it is still
        in that round.
        """
        self.half_due = True
        """Whether the trainer has taken half of `round_steps` since the last round started."""
        self.waiting: Propose | None = None
        """A proposal that waits until half of the steps are taken."""
        self._applied_s = self._half_s = -math.inf
        self._wanted = self._is_retry = False
        self._retried: RoundId | None = None
        """A round that is complete here, but was abandoned by another member, so that it may be
        repeated early.
        """

    def begin(self, now_s: float) -> None:
        """Start the clock of the schedule."""
        interval_s = self._settings.interval_s
        self.due_s = math.inf if interval_s is None else now_s + interval_s

    def note_wanted(self, now_s: float, *, in_round: bool) -> None:
        """Record that the trainer has taken the number of steps after which a round is due."""
        self._wanted = True
        if not in_round:
            self.due_s = min(self.due_s, max(now_s, self._half_s))

    def take_waiting(self) -> Propose | None:
        """Record that half of the steps are taken; return the proposal that waited for them."""
        self.half_due = True
        waiting, self.waiting = self.waiting, None
        return waiting

    def is_early(self, completed: RoundId | None, now_s: float) -> bool:
        """Return whether less than half of the interval has passed since the last complete round.

        If another member has abandoned that round, it may be repeated immediately, but only once.
        """
        return (completed is None or completed != self._retried) and self._is_within_half(now_s)

    def _is_within_half(self, now_s: float) -> bool:
        interval_s = self._settings.interval_s
        return interval_s is not None and now_s < self._applied_s + interval_s / 2

    # -- outcomes of rounds ------------------------------------------------------------------------------------

    def note_begun(self, now_s: float) -> None:
        """Record that a round starts."""
        self._is_retry = self._is_within_half(now_s)
        self.half_due, self.waiting = self._settings.round_steps is None, None
        self._wanted = False

    def note_retried(self, round_id: RoundId) -> None:
        """Record that another member has abandoned a round that is complete here."""
        if not self._is_retry:
            self._retried = round_id

    def note_given_up(self, reason: AbandonReason, now_s: float) -> None:
        """Record that this peer has abandoned the round, and for which reason."""
        self.half_due = True
        half_s = max(self._settings.ping_s, (self._settings.interval_s or 0.0) / 2)
        waits = {"early": half_s, "left": 0.0, "lost": 0.0, "left_out": self._settings.lease_s}
        self.due_s = now_s + waits.get(reason, self._settings.ping_s)

    def note_applied(self, now_s: float) -> None:
        """Record that the round's mean is in the model."""
        self._applied_s = now_s

    def note_ended(self, now_s: float) -> None:
        """Record that no other member needs this peer in the round any more."""
        interval_s = self._settings.interval_s
        if interval_s is not None:  # not early even for a member that completed this round only now
            self._half_s = now_s + interval_s / 2
            self.due_s = max(self._applied_s + interval_s, self._half_s)
        else:
            self.due_s = now_s if self._wanted else math.inf
        self.linger_until_s = now_s + LINGER_LEASES_MAX * self._settings.lease_s
