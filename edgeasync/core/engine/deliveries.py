"""Sends models and graphs, whole or in pieces, and resumes transfers. No I/O."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from edgeasync.core.arrays.published_model import PublishedPayload, Publisher
from edgeasync.core.engine.hub_transfers import OutgoingTransfers
from edgeasync.core.hub.effects import Assign
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Credit, Fetch, FetchGraph, GraphHeader, Message


class Send(Protocol):
    """A function that sends a message and its payload."""

    def __call__(self, peer: Peer, message: Message, payload: wire.Buffer | None = None) -> None:
        """Send without blocking."""


class Deliveries:
    """Sends devices the published model in a codec that they support, within their credit."""

    def __init__(
        self,
        core: HubCore,
        publisher: Publisher,
        outgoing: OutgoingTransfers,
        send: Send,
        now_s: Callable[[], float],
    ) -> None:
        self.outgoing = outgoing
        self.publisher = publisher
        self._core = core
        self._send = send
        self._now_s = now_s

    def restart(self, peer: Peer, member: Member, fetch: Fetch, now_s: float) -> bool:
        """Suspend the transfer that a `Fetch` replaces.

        Return whether a transfer will be resumed.
        """
        self.outgoing.suspend(peer, now_s)
        if fetch.partial is not None:
            self.outgoing.note_partial(peer, fetch.partial)
        return self.outgoing.can_resume(member)

    def send_pieces(self, peer: Peer, credit: Credit, now_s: float) -> bool:
        """Send the pieces that a credit allows.

        Return false if the credit belongs to no transfer.
        """
        credited = self.outgoing.credit(peer, credit, now_s)
        if credited is None:
            return False
        transfer, pieces = credited
        if (member := self._core.members.by_peer(peer)) is not None:
            member.link.observe_window(transfer.window)
        for piece, part in pieces:
            self._send(peer, piece, part)
        return True

    def assign(self, effect: Assign) -> None:
        """Send an assignment of the published model, or resume a suspended assignment.

        If every interrupted assignment restarted with the newest model, a device on a bad link
        might never receive a complete model.
        """
        member = self._core.members.by_peer(effect.peer)
        if member is None:
            return  # the device left while the assignment waited for a fold
        kept = self.outgoing.resume(member)
        if kept is None:
            version = effect.version
            if effect.plain:
                offer = self.publisher.offer_newest(member.owner)
            else:
                offer = self.publisher.offer(
                    effect.base, effect.codec, held=effect.held, owner=member.owner, coarse=effect.coarse
                )
        else:
            # The device has a partial download of an older version.
            before, payload = kept
            version, offer = (
                before.version,
                PublishedPayload(payload, before.checksum, before.codec, before.deltas),
            )
        message = Assignment(
            version=version,
            local_steps=effect.local_steps,
            codec=offer.codec,
            checksum=offer.checksum,
            payload_bytes=len(offer.payload),
            ack=effect.ack,
            deltas=offer.deltas,
            push_codec=effect.push_codec,
            learning_rate_factor=effect.learning_rate_factor,
        )
        self._announce(member, message, offer.payload)

    def prepare(self, effect: Assign) -> Callable[[], None] | None:
        """Return the slow encoding that must run before an assignment, or `None`."""
        member = self._core.members.by_peer(effect.peer)
        if member is None or effect.plain or self.outgoing.can_resume(member):
            return None
        device = effect.base, effect.held, member.owner
        if not self.publisher.needs_coding(*device, coarse=effect.coarse):
            return None
        return partial(self.publisher.prepare, *device)

    def restart_graph(self, peer: Peer, fetch: FetchGraph) -> None:
        """Drop the transfer that a repeated request abandons.

        Raises `ProtocolError` if the hub has no base, but the device requests one. The core cannot
        check this, because a replay has no base.
        """
        self.outgoing.drop(peer)
        if fetch.base and (self._core.graph is None or self._core.graph.base is None):
            raise ProtocolError("this hub has no base; its Welcome did not announce one")

    def send_graph(self, peer: Peer, *, base: bool) -> None:
        """Send the training graph, or announce a transfer of its base."""
        graph, member = self._core.graph, self._core.members.by_peer(peer)
        assert graph is not None
        if member is None:
            return
        if not base:
            message = GraphHeader(graph.fingerprint, graph.checksum, len(graph.payload))
            self._announce(member, message, graph.payload)
        elif (shipped := graph.base) is not None:
            message = GraphHeader(shipped.file.fingerprint, shipped.checksum, shipped.file.nbytes)
            self._announce(member, message, shipped.content, resumable=True)

    def _announce(
        self, member: Member, message: Assignment | GraphHeader, payload: wire.Buffer, *, resumable: bool = False
    ) -> None:
        """Send a message with its payload, or start a transfer of the payload in pieces.

        A `resumable` payload is always sent in pieces, because the device may have a part of it.
        """
        message = self.outgoing.announce(member, message, payload, self._now_s(), resumable=resumable)
        self._send(member.peer, message, None if message.transfer else payload)
