"""For how long a peer takes up no proposal of a proposer whose rounds do not become whole.

Each failed round costs its members up to a whole round's bytes. So what a member sends between two whole rounds
is bounded, whatever a proposer does. And where two proposers preempt each other, one of them soon waits for longer
than a round of the other takes.
"""

FREE = 3
"""How many rounds of a proposer may fail, between two whole ones, before it has to wait."""

DOUBLINGS_MAX = 5
"""It then waits for a lease, and twice as long after each failed round that follows, this many times."""


class Backoff:
    """The failed rounds of each proposer since a round with it was whole."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._failed: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def note_failed(self, proposer: str, now_s: float) -> None:
        """Note that a round failed for which this proposer is responsible."""
        failed = self._failed[proposer] = self._failed.get(proposer, 0) + 1
        if failed > FREE:
            self._until_s[proposer] = now_s + self._lease_s * 2 ** min(failed - FREE - 1, DOUBLINGS_MAX)

    def note_whole(self, members: tuple[str, ...]) -> None:
        """Forget the failed rounds of all members of a whole one."""
        for name in members:
            self._failed.pop(name, None)
            self._until_s.pop(name, None)

    def until_s(self, proposer: str) -> float:
        """Return from when on a proposal is taken up."""
        return self._until_s.get(proposer, 0.0)
