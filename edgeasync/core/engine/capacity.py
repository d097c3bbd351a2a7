"""Limits on the hub's memory: for updates that wait, and for snapshots and graphs that are being sent.

Once half of the places are taken, transfers of one key hold a share of them at most: a key that announces updates
and sends none must leave places for the others.
"""

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.engine.fold_queue import FoldQueue
from edgeasync.core.engine.hub_transfers import IncomingTransfers, OutgoingTransfers
from edgeasync.core.engine.log_writer import LogWriter
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.settings import HubCoreSettings

SHARE = 4
"""One key's transfers hold a fourth of the places at most."""


class Capacity:
    """Compares what the hub holds with its limits, and drops transfers to make room.

    At a limit it first drops transfers that have not moved for a lease, since a member that only pings must not
    keep its place. Then it drops suspended transfers, the oldest first.
    """

    def __init__(
        self,
        settings: HubCoreSettings,
        *,
        model: HubModel,
        publisher: Publisher,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        fold_queue: FoldQueue,
        log_writer: LogWriter,
    ) -> None:
        self.measuring = 0
        """How many updates arrived in pieces and are being checked in the background."""
        self._limits = settings.limits
        self._lease_s = settings.liveness.lease_s
        self._model = model
        self._publisher = publisher
        self._incoming = incoming
        self._outgoing = outgoing
        self._fold_queue = fold_queue
        self._log_writer = log_writer

    def for_update(self, now_s: float, member: Member | None = None) -> bool:
        """Return whether the hub may receive and hold one more update; drop transfers if that makes room.

        `member` is who announces the update in pieces.
        """
        if self._log_writer.is_behind:
            return False
        places, held = self._limits.updates_held_max, self._updates_held()
        if 2 * held < places:
            return True
        if _is_crowding(member, self._incoming, places):
            return False
        # A suspended push of this device takes no place from it: it is resumed, or dropped before the new one.
        owner = None if member is None else member.owner
        held_max = places + self._incoming.is_suspended(owner)
        if held < held_max:
            return True
        self._drop_stalled(now_s)
        while self._updates_held() >= held_max:
            if not self._incoming.drop_oldest_suspended(spare=owner):
                return False
        return True

    def for_snapshot(self, now_s: float, member: Member | None = None) -> bool:
        """Return whether the hub may send one more snapshot or its deltas; drop transfers if that makes room.

        `member` is who it is for, if that is known.
        """
        places, held = self._limits.snapshots_max, self._snapshots_held()
        if 2 * held < places:
            return True
        if _is_crowding(member, self._outgoing, places):
            return False
        if held < places:
            return True
        self._drop_stalled(now_s)
        while self._snapshots_held() >= self._limits.snapshots_max:
            if not self._outgoing.drop_oldest_suspended():
                return False
        return True

    def for_graph(self, now_s: float, member: Member | None) -> bool:
        """Return whether the hub may send the graph to one more device; drop transfers if that makes room.

        All these transfers share one payload: each costs only the pieces in libzmq's queue.
        """
        places = self._limits.snapshots_max
        if self._outgoing.graphs >= places:
            self._drop_stalled(now_s)
        graphs = self._outgoing.graphs
        return graphs < places and (2 * graphs < places or not _is_crowding(member, self._outgoing, places))

    def _updates_held(self) -> int:
        return len(self._incoming) + self.measuring + self._model.updates_waiting

    def _snapshots_held(self) -> int:
        return self._model.snapshots_alive + self._publisher.outdated_alive + self._fold_queue.assignments

    def _drop_stalled(self, now_s: float) -> None:
        self._incoming.drop_stalled(now_s - self._lease_s)
        self._outgoing.drop_stalled(now_s - self._lease_s)


def _is_crowding(member: Member | None, transfers: IncomingTransfers | OutgoingTransfers, places: int) -> bool:
    """Return whether the member's key already has its share of the places."""
    return member is not None and transfers.held_by(member) >= max(1, places // SHARE)
