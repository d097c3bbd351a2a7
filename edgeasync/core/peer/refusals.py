"""What a peer does not accept, and of what people are told."""

from collections import Counter

from edgeasync.core.peer.effects import PeerEffect, PeerReport
from edgeasync.core.peer.neighbours import Neighbours

NORMAL = frozenset(
    {
        "a message before a ping",
        "a ping of an earlier start",
        "a repeated piece",
        "a round that is over",
        "a round that was not proposed",
        "an old ping",
    }
)
"""Refusals that late, early or repeated messages bring about; people are not told."""


class Refused(Exception):  # noqa: N818 (it is an answer, and no error of this program)
    """A message that does not fit the round; the sentence says why. With `fatal` the round cannot become whole."""

    def __init__(self, sentence: str, *, fatal: bool = False) -> None:
        super().__init__(sentence)
        self.fatal = fatal


class Refusals:
    """Counts what was not accepted, by a short text such as "a corrupt piece"."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.counts: Counter[str] = Counter()
        self._neighbours = neighbours
        self._told: set[tuple[str, str]] = set()

    def note(self, peer: str, why: str, detail: str = "") -> list[PeerEffect]:
        """Count one; tell people of the first of its kind from each peer, unless it is normal."""
        self.counts[why] += 1
        if why in NORMAL or peer not in self._neighbours or not self.is_first(peer, why):
            return []
        return [PeerReport("refused", detail or why, peer)]

    def is_first(self, peer: str, why: str) -> bool:
        """Return whether people have not been told this of a peer yet; from now on they have."""
        told = (peer, why) in self._told
        self._told.add((peer, why))
        return not told
