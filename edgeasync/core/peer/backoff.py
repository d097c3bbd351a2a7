"""Determines how long a peer declines proposals by a proposer whose rounds keep failing.

A failed round may cost its members as many bytes as a complete round. The back-off limits what a
member sends between two complete rounds, whatever a proposer does. If two proposers preempt each
other's rounds, one of them soon has to wait longer than a round of the other one takes.
"""

FREE = 3
"""Number of rounds of a proposer that may fail between two complete rounds before the proposer must
wait.
"""

DOUBLINGS_MAX = 5
"""After `FREE` failures, the proposer waits for the duration of a lease. Each further failure
doubles the wait, up to this number of times.
"""


class Backoff:
    """Counts the failed rounds of each proposer since its last complete round."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._failed: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def note_failed(self, proposer: str, now_s: float) -> None:
        """Record a failed round for which this proposer is responsible."""
        failed = self._failed[proposer] = self._failed.get(proposer, 0) + 1
        if failed > FREE:
            self._until_s[proposer] = now_s + self._lease_s * 2 ** min(failed - FREE - 1, DOUBLINGS_MAX)

    def note_whole(self, members: tuple[str, ...]) -> None:
        """Reset the failures of all members of a complete round."""
        for name in members:
            self._failed.pop(name, None)
            self._until_s.pop(name, None)

    def until_s(self, proposer: str) -> float:
        """Return the earliest time at which the proposals of this proposer are accepted."""
        return self._until_s.get(proposer, 0.0)
