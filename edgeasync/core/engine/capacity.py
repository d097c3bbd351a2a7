"""Limits on the hub's memory: for updates that wait, and for snapshots and graphs that are being sent."""

from edgeasync.core.arrays.hub_model import Model
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.engine.fold_queue import FoldQueue
from edgeasync.core.engine.hub_transfers import IncomingTransfers, OutgoingTransfers
from edgeasync.core.engine.log_writer import LogWriter
from edgeasync.core.hub.membership import Owner
from edgeasync.core.hub.settings import HubCoreSettings


class Capacity:
    """Compares what the hub holds with its limits, and drops transfers to make room.

    At a limit it first drops transfers that have not moved for a lease, since a member that only pings must not
    keep its place. Then it drops suspended transfers, the oldest first.
    """

    def __init__(
        self,
        settings: HubCoreSettings,
        *,
        model: Model,
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

    def for_update(self, now_s: float, owner: Owner | None = None) -> bool:
        """Return whether the hub may receive and hold one more update; drop transfers if that makes room."""
        if self._log_writer.is_behind:
            return False
        # A suspended push of this device takes no place from it: it is resumed, or dropped before the new one.
        held_max = self._limits.updates_held_max + self._incoming.is_suspended(owner)
        if self._updates_held() < held_max:
            return True
        self._drop_stalled(now_s)
        while self._updates_held() >= held_max:
            if not self._incoming.drop_oldest_suspended(spare=owner):
                return False
        return True

    def for_snapshot(self, now_s: float) -> bool:
        """Return whether the hub may send one more snapshot or its deltas; drop transfers if that makes room."""
        if self._snapshots_held() < self._limits.snapshots_max:
            return True
        self._drop_stalled(now_s)
        while self._snapshots_held() >= self._limits.snapshots_max:
            if not self._outgoing.drop_oldest_suspended():
                return False
        return True

    def for_graph(self, now_s: float) -> bool:
        """Return whether the hub may send the graph to one more device; drop transfers if that makes room.

        All these transfers share one payload: each costs only the pieces in libzmq's queue.
        """
        if self._outgoing.graphs >= self._limits.snapshots_max:
            self._drop_stalled(now_s)
        return self._outgoing.graphs < self._limits.snapshots_max

    def _updates_held(self) -> int:
        return len(self._incoming) + self.measuring + self._model.updates_waiting

    def _snapshots_held(self) -> int:
        return self._model.snapshots_alive + self._publisher.outdated_alive + self._fold_queue.assignments

    def _drop_stalled(self, now_s: float) -> None:
        self._incoming.drop_stalled(now_s - self._lease_s)
        self._outgoing.drop_stalled(now_s - self._lease_s)
