"""Who kept a round from becoming whole, and is left out of rounds for a while.

Where one member of a ring stops, those behind it stop as well, and each says whom it waits for. The one that waits
at the lowest step waits for the culprit. A member that accuses a second one before a round has become whole is
left out, too: its own link may be the bad one.
"""

from edgeasync.protocol.peer_messages import Abandon

DOUBLINGS_MAX = 5
"""A culprit is left out for a lease, and twice as long each time that follows, this many times."""


class Suspicion:
    """The accusations of the last round that was given up, and their consequences."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._members: frozenset[str] = frozenset()
        self._settled = False
        self._accusations: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._accused_before: dict[str, tuple[str, ...]] = {}
        self._left_out: dict[str, tuple[int, float]] = {}

    def begin(self, accuser: str, abandon: Abandon, members: tuple[str, ...]) -> None:
        """Note that a round of these members was given up, and why the first of them did so."""
        self._members, self._settled, self._accusations = frozenset(members), False, {}
        self._note(accuser, abandon)

    def accuse(self, accuser: str, abandon: Abandon) -> None:
        """Note why another member gave the same round up."""
        if self._members.issuperset((accuser, *abandon.awaited)):
            self._note(accuser, abandon)

    def _note(self, accuser: str, abandon: Abandon) -> None:
        """Note an accusation. A round that was judged, or has lost a member, needs no culprit."""
        if abandon.reason in {"left", "lost"}:
            self._settled = True
        elif abandon.awaited:
            self._accusations.setdefault(accuser, (abandon.step, abandon.awaited))

    def judge(self, now_s: float) -> list[str]:
        """Leave those out whom the last round's accusations name, and return them."""
        accusations, self._accusations = self._accusations, {}
        if self._settled or not accusations:
            return []
        self._settled = True  # an accusation that comes late would count alone
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
        """Return whether a peer is left out of rounds now."""
        return name in self._left_out and now_s < self._left_out[name][1]

    def declines(self, name: str, now_s: float) -> bool:
        """Return whether proposals of a peer are declined: it is left out, and not for the first time.

        Accusations may be lost, so members may disagree about a first culprit. They would decline one another's
        rounds.
        """
        return self.leaves_out(name, now_s) and self._left_out[name][0] > 1

    def forgive(self, names: tuple[str, ...]) -> None:
        """Forget what these were accused of: a round with them has become whole, or they have started again."""
        for name in names:
            self._left_out.pop(name, None)
        self._accused_before.clear()
        self._accusations = {}
