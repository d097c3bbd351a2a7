"""Determines which peers made a round fail, and excludes them from rounds for a while.

If one member of a ring stops, the members behind it stop as well, and each of them reports the
member for which it waits. The report with the lowest step names the culprit. If a member accuses a
second culprit before any round completes, the accuser is excluded, too, because its own link may be
bad.
"""

from edgeasync.protocol.peer_messages import Abandon

DOUBLINGS_MAX = 5
"""A culprit is excluded for the duration of a lease. Each repetition doubles the time, up to this
number of times.
"""


class Suspicion:
    """The accusations made about the last abandoned round, and the resulting exclusions."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._members: frozenset[str] = frozenset()
        self._settled = False
        self._accusations: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._accused_before: dict[str, tuple[str, ...]] = {}
        self._left_out: dict[str, tuple[int, float]] = {}

    def begin(self, accuser: str, abandon: Abandon, members: tuple[str, ...]) -> None:
        """Record that a round of these members was abandoned, with the first accusation."""
        self._members, self._settled, self._accusations = frozenset(members), False, {}
        self._note(accuser, abandon)

    def accuse(self, accuser: str, abandon: Abandon) -> None:
        """Record the reason why another member abandoned the same round."""
        if self._members.issuperset((accuser, *abandon.awaited)):
            self._note(accuser, abandon)

    def _note(self, accuser: str, abandon: Abandon) -> None:
        """Record an accusation.

        If the round was already judged or has lost a member, accusations have no effect.
        """
        if abandon.reason in {"left", "lost"}:
            self._settled = True
        elif abandon.awaited:
            self._accusations.setdefault(accuser, (abandon.step, abandon.awaited))

    def judge(self, now_s: float) -> list[str]:
        """Exclude the culprits of the last abandoned round, and return their names."""
        accusations, self._accusations = self._accusations, {}
        if self._settled or not accusations:
            return []
        self._settled = True  # otherwise, a late accusation would be judged on its own
        lowest = min(step for step, _ in accusations.values())
        culprits: set[str] = set()
        for accuser, (step, awaited) in accusations.items():
            if step != lowest:
                continue
            culprits.update(awaited)
            if set(self._accused_before.setdefault(accuser, awaited)).isdisjoint(awaited):
                culprits.add(accuser)
        for name in culprits:
            doublings, _ = self._left_out.get(name, (0, 0.0))
            self._left_out[name] = (min(doublings + 1, DOUBLINGS_MAX), now_s + self._lease_s * 2**doublings)
        return sorted(culprits)

    def leaves_out(self, name: str, now_s: float) -> bool:
        """Return whether a peer is excluded from rounds now."""
        return name in self._left_out and now_s < self._left_out[name][1]

    def declines(self, name: str, now_s: float) -> bool:
        """Return whether to decline the proposals of a peer, because it is excluded repeatedly.

        Accusations may be lost, so members may disagree about a first culprit. If one exclusion
        were enough, they would then decline one another's rounds.
        """
        return self.leaves_out(name, now_s) and self._left_out[name][0] > 1

    def forgive(self, names: tuple[str, ...]) -> None:
        """Clear the accusations against peers that have completed a round or have restarted."""
        for name in names:
            self._left_out.pop(name, None)
        self._accused_before.clear()
        self._accusations = {}
