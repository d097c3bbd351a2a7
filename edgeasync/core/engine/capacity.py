"""Limits the hub's memory for buffered updates and for payloads being sent.

Once half of the slots are used, the transfers of one key may use only a fraction of them. So a key
that announces updates but never sends them cannot block the other keys.
"""

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.engine.fold_queue import FoldQueue
from edgeasync.core.engine.hub_transfers import IncomingTransfers, OutgoingTransfers
from edgeasync.core.engine.log_writer import LogWriter
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.settings import HubCoreSettings

SHARE = 4
"""The transfers of one key may use 1 / `SHARE` of the slots."""


class Capacity:
    """Compares the hub's memory use with its limits, and drops transfers to free memory.

    At a limit, it first drops transfers that have made no progress for the duration of a lease,
    even if their member still pings. Then it drops suspended transfers, beginning with the oldest.
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
        """The number of updates that arrived in pieces and that the worker is still verifying."""
        self._limits = settings.limits
        self._lease_s = settings.liveness.lease_s
        self._model = model
        self._publisher = publisher
        self._incoming = incoming
        self._outgoing = outgoing
        self._fold_queue = fold_queue
        self._log_writer = log_writer

    def for_update(self, now_s: float, member: Member | None = None) -> bool:
        """Return whether the hub can buffer one more update.

        Drop transfers if that frees enough memory. Pass the sender as `member` if it announces the
        update in pieces.
        """
        if self._log_writer.is_behind:
            return False
        places, held = self._limits.updates_held_max, self._updates_held()
        if 2 * held < places:
            return True
        if _is_crowding(member, self._incoming, places):
            return False
        # The device's own suspended push does not count: the new push resumes or replaces it.
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
        """Return whether the hub can send one more snapshot; drop transfers if needed.

        `member` is the receiver, if it is known.
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
        """Return whether the hub can send the graph once more; drop transfers if needed.

        All transfers of the graph share one payload, so each uses memory only for pieces in
        libzmq's queue.
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
    """Return whether the member's key already uses its share of the slots."""
    return member is not None and transfers.held_by(member) >= max(1, places // SHARE)
