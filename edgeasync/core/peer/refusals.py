"""Counts and reports the messages that a peer refuses."""

from collections import Counter

from edgeasync.core.peer.effects import PeerEffect, PeerReport
from edgeasync.core.peer.neighbours import Neighbours

NORMAL = frozenset(
    {
        "a message before a ping",
        "a ping from before a restart",
        "a repeated piece",
        "a round that is over",
        "a round that was not proposed",
        "an old ping",
    }
)
"""Reasons to refuse late, early or repeated messages, which are not reported."""


class Refused(Exception):  # noqa: N818 (an answer to a peer, not a program error)
    """A message does not fit the round. If `fatal` is set, the round cannot be completed."""

    def __init__(self, sentence: str, *, fatal: bool = False) -> None:
        super().__init__(sentence)
        self.fatal = fatal


class Refusals:
    """Counts refused messages by the reason, a short text such as "a corrupt piece"."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.counts: Counter[str] = Counter()
        self._neighbours = neighbours
        self._told: set[tuple[str, str]] = set()

    def note(self, peer: str, why: str, detail: str = "") -> list[PeerEffect]:
        """Count a refusal; report the first one of its kind per peer, unless the kind is normal."""
        self.counts[why] += 1
        if why in NORMAL or peer not in self._neighbours or not self.is_first(peer, why):
            return []
        return [PeerReport("refused", detail or why, peer)]

    def is_first(self, peer: str, why: str) -> bool:
        """Return whether a refusal was not reported for a peer before, and mark it as reported."""
        told = (peer, why) in self._told
        self._told.add((peer, why))
        return not told
