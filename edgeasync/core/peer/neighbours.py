"""What a peer knows about the listed peers: which are live, and which hear each other."""

import math
from collections.abc import Iterator

import msgspec

from edgeasync.core.peer.effects import PeerReport
from edgeasync.core.peer.events import Norms
from edgeasync.core.peer.settings import PeerCoreSettings, interval_of
from edgeasync.protocol.peer_messages import Abandon, Offer, PeerPing, RoundId, RoundMember

OTHER_FROZEN = "its frozen arrays, which are not transmitted, differ from this device's"
NOT_LISTED = "a message from an unlisted peer"
OTHER_INTERVAL = "another interval between rounds"

NO_PING = PeerPing(incarnation=0, count=0, fingerprint="", number=0, ready=False, heard=())
"""A placeholder for the ping of a peer from which no ping was received yet."""


class Neighbour:
    """What this peer knows about another one, such as its latest ping and when it was heard.

    `early_offers` maps steps to the offers of a round whose proposal has not arrived yet. This
    happens because another peer sends the proposal. `norms` are the norms of the payloads that the
    other peer sent in the last complete round.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard_s = self.doubted_s = -math.inf
        self.ping = NO_PING
        self.early_offers: dict[int, Offer] = {}
        self.norms: Norms | None = None
        self.told_live = False
        """Whether the other peer was live in the last report about it."""

    def has_completed(self, round_id: RoundId) -> bool:
        """Return whether the other peer reported that it has the mean of this round.

        A report about a later round counts as well.
        """
        return self.ping.completed is not None and self.ping.completed >= round_id

    def has_taken(self, round_id: RoundId) -> bool:
        """Return whether the other peer reported that it is in this round, or has its mean."""
        return self.ping.current == round_id or self.has_completed(round_id)

    def keep_early(self, offer: Offer) -> None:
        """Store an offer of a round that was not proposed yet; drop the offers of other rounds."""
        if any(kept.round != offer.round for kept in self.early_offers.values()):
            self.early_offers.clear()
        self.early_offers[offer.step] = offer


class Neighbours:
    """The peers in the list of the peer `name`.

    A peer is *heard* for the duration of a lease after its last message. It is *live* if it also
    reports that it hears this peer, since a link that works in only one direction is useless for a
    round.
    """

    def __init__(self, name: str, peers: tuple[str, ...], settings: PeerCoreSettings) -> None:
        self._name = name
        self._lease_s = settings.lease_s
        self._settings = settings
        self._listed: dict[str, Neighbour] = {}
        self._alone = False
        self.replace(peers)

    def __iter__(self) -> Iterator[Neighbour]:
        return iter(self._listed.values())

    def __contains__(self, name: object) -> bool:
        return name in self._listed

    def __getitem__(self, name: str) -> Neighbour:
        return self._listed[name]

    def stranger(self, name: str, now_s: float) -> str:
        """Return why a message that is not a ping is ignored, or ""."""
        if name not in self._listed:
            return NOT_LISTED
        return "" if self.hears(self._listed[name], now_s) else "a message before a ping"

    def replace(self, peers: tuple[str, ...]) -> None:
        """Replace the list, and drop peers that are no longer listed."""
        names = sorted(set(peers) - {self._name})
        self._listed = {name: self._listed.get(name) or Neighbour(name) for name in names}

    def refusal(self, name: str, ping: PeerPing, now_s: float) -> str:
        """Return why a ping is refused, or "".

        A lower incarnation is accepted once the lease of the higher one has expired, because the
        peer may have been restored from a backup.
        """
        if ping.fingerprint != self._settings.fingerprint:
            return "another model, or other settings of the exchange"
        if self._settings.frozen == "refuse" and self.has_other_frozen(ping):
            return (
                f"{OTHER_FROZEN}; load the same base model on all devices, or set frozen = 'warn' on all of them"
            )
        if interval_of(ping.round_every_s, ping.round_steps) != self._settings.interval:
            return OTHER_INTERVAL
        known = self._listed[name].ping
        if ping.incarnation < known.incarnation and self.hears(self._listed[name], now_s):
            return "a ping from before a restart"
        if ping.incarnation == known.incarnation and ping.count <= known.count:
            return "an old ping"
        return ""

    def has_other_frozen(self, ping: PeerPing) -> bool:
        """Return whether the frozen arrays of a peer are known to differ from this device's."""
        ours, theirs = self._settings.frozen_arrays, ping.frozen
        if ours is None or theirs is None:
            return False
        return ours.framework == theirs.framework and ours.checksum != theirs.checksum

    def hears(self, neighbour: Neighbour, now_s: float) -> bool:
        """Return whether the peer sent a message within the duration of a lease."""
        return now_s < neighbour.heard_s + self._lease_s

    def heard(self, now_s: float) -> tuple[str, ...]:
        """Return the names of the peers that sent a message within the duration of a lease."""
        return tuple([each.name for each in self if self.hears(each, now_s)])

    def is_live(self, neighbour: Neighbour, now_s: float) -> bool:
        """Return whether this peer and the other peer hear each other."""
        return self.hears(neighbour, now_s) and self._name in neighbour.ping.heard

    def live(self, now_s: float) -> list[Neighbour]:
        """Return the live peers, sorted by name."""
        return [each for each in self if self.is_live(each, now_s)]

    def knows(self, member: RoundMember, now_s: float) -> bool:
        """Return whether a member of a round is a live peer in the same incarnation."""
        neighbour = self._listed.get(member.name)
        if neighbour is None or not self.is_live(neighbour, now_s):
            return False
        return neighbour.ping.incarnation == member.incarnation

    def doubt(self, names: tuple[str, ...], now_s: float) -> None:
        """Record that another peer has lost these peers.

        This peer does not include them in a round until it hears them again.
        """
        for name in names:
            if name in self._listed:
                self._listed[name].doubted_s = now_s

    def note_abandon(self, name: str, abandon: Abandon) -> None:
        """Record that a peer has left a round, and whether it is ready for another round."""
        neighbour = self._listed[name]
        neighbour.ping = msgspec.structs.replace(neighbour.ping, current=None, ready=abandon.ready)

    def changes(self, now_s: float) -> list[PeerReport]:
        """Return reports about peers that have become live, or are no longer live."""
        reports = []
        live = 0
        for each in self:
            is_live = self.is_live(each, now_s)
            live += is_live
            if is_live != each.told_live:
                each.told_live = is_live
                reports.append(PeerReport("peer_found" if is_live else "peer_lost", peer=each.name))
        if self._alone != (not live):
            self._alone = not live
            if self._alone:
                reports.append(PeerReport("alone"))
        return reports

    def next_silence_s(self, now_s: float) -> float:
        """Return the time at which the next lease of a peer expires."""
        return min((each.heard_s + self._lease_s for each in self if self.hears(each, now_s)), default=math.inf)


def all_hear_each_other(candidates: list[Neighbour]) -> list[Neighbour]:
    """Return the candidates that all hear one another, selected greedily in order."""
    chosen: list[Neighbour] = []
    for one in candidates:
        if all(one.name in other.ping.heard and other.name in one.ping.heard for other in chosen):
            chosen.append(one)
    return chosen
