"""Receives updates, verifies and measures them, and creates events. No I/O."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from edgeasync.core.arrays.buffers import BufferPool
from edgeasync.core.arrays.hub_model import HubModel, WaitingUpdate
from edgeasync.core.engine.capacity import Capacity
from edgeasync.core.engine.fold_queue import INLINE_BYTES_MAX
from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.hub_transfers import IncomingTransfers
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import HubEvent, HubReceived, HubReceivedMalformed, Moved, Peer, PushArrived
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member, Owner
from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import (
    Source,
    VectorCodec,
    VectorSource,
    payload_bytes_limit,
)
from edgeasync.protocol.messages import Credit, Push

_NOT_OPENED = VectorSource(np.empty(0, np.float32))
"""A placeholder for the values of an update on which the core will not decide."""

Measured = Callable[[Peer, Callable[[], HubEvent]], None]
"""A function that is called once the worker has measured an update. Its second argument is a
function that creates the event of the update.
"""


class PushIntake:
    """Receives updates, whole or in pieces.

    For large models, the worker measures the updates.
    """

    def __init__(
        self,
        core: HubCore,
        model: HubModel,
        shell: HubShell,
        incoming: IncomingTransfers,
        capacity: Capacity,
        *,
        now_s: Callable[[], float],
        measured: Measured,
    ) -> None:
        self.incoming = incoming
        self._core = core
        self._model = model
        self._shell = shell
        self._capacity = capacity
        self._now_s = now_s
        self._measured = measured
        self._spec = core.spec
        self._takes_models = core.policy_engine.policy.aggregate.update == "model"
        self._buffers = BufferPool(payload_bytes_limit(core.spec))
        self._measuring: Counter[Owner | None] = Counter()
        """The owners of the updates that the worker is measuring, at most one update per owner."""

    def take(
        self,
        peer: Peer,
        member: Member | None,
        push: Push,
        payload: wire.Buffer | None,
        *,
        sender: Sender,
        now_s: float,
    ) -> HubEvent | None:
        """Return the event of a push that was sent whole or announced.

        The core decides only on updates that were verified and measured. Measuring may be slow even
        if the payload is short, so it is skipped for a push that the core refuses or has already
        answered. For large models, the worker measures the update; this method then returns `None`,
        and the event follows later. Raises `ProtocolError` for an invalid payload.
        """
        if push.metrics is not None and not all(map(math.isfinite, push.metrics.values())):
            raise ProtocolError("a metric is not finite")
        codec = self._model.codecs.find(push.codec, push.payload_bytes)
        if self._takes_models and not codec.elementwise:
            raise ProtocolError(f"codec {push.codec} is too lossy for a whole model")
        if push.transfer:
            if payload is not None:
                raise ProtocolError("the message that announces a push in pieces must not have a payload")
            self.incoming.suspend(peer, now_s)  # a repeated announcement abandons the transfer
            return HubReceived(peer, push, self._capacity.for_update(now_s, member), sender.key, moved_by(member))
        if payload is None or len(payload) != push.payload_bytes:
            raise ProtocolError("the payload's length differs from its header")
        if wire.checksum(payload) != push.checksum:
            raise ProtocolError("the payload's checksum differs from its header")
        owner = None if member is None else member.owner
        can_answer = (
            owner not in self._measuring
            and self._capacity.for_update(now_s)
            and self._capacity.for_snapshot(now_s, member)
        )
        if not self._core.decides(push, sender.key, now_s, can_answer=can_answer):
            handle = self._model.keep(WaitingUpdate(_NOT_OPENED, push.codec, payload))
            return PushArrived(peer, push, handle, math.nan, can_answer, sender.key, moved_by(member))
        if owner is not None:
            self.incoming.drop_suspended(owner)  # a whole push replaces the suspended one
        if self._spec.nbytes > INLINE_BYTES_MAX:
            self.measure(peer, push, payload, sender)
            return None
        update, norm = self._model.measure(codec.open(payload))
        handle = self._model.keep(WaitingUpdate(update, push.codec, payload))
        return PushArrived(peer, push, handle, norm, can_answer, sender.key, moved_by(member))

    def receive(self, peer: Peer, member: Member, push: Push, now_s: float) -> Credit:
        """Start or resume receiving a push in pieces; return the credit to send to its sender."""
        transfer = self.incoming.resume(peer, member.owner, push, now_s)
        if transfer is None:
            buffer = self._buffers.take()[: push.payload_bytes].data
            transfer = self.incoming.receive(peer, member, push, buffer, now_s)
        return transfer.credit()

    def measure(self, peer: Peer, push: Push, payload: wire.Buffer, sender: Sender) -> None:
        """Let the worker measure a payload, then pass the event of the push to `measured`."""
        member = self._core.members.by_peer(peer)
        owner = None if member is None else member.owner
        self._capacity.measuring += 1
        self._measuring[owner] += 1
        codec = self._model.codecs.make(push.codec)

        def done(result: tuple[Source, float] | ProtocolError) -> None:
            self._capacity.measuring -= 1
            self._measuring -= Counter({owner: 1})
            self._measured(peer, partial(self._event, peer, push, payload, sender, result))

        self._shell.run_in_background(partial(self._measure, codec, payload), done)

    def _measure(self, codec: VectorCodec, payload: wire.Buffer) -> tuple[Source, float] | ProtocolError:
        """Open a payload and compute the norm of its values; runs in the background."""
        try:
            update = codec.open(payload)
        except ProtocolError as error:
            return error
        return self._model.measure(update)

    def _event(
        self,
        peer: Peer,
        push: Push,
        payload: wire.Buffer,
        sender: Sender,
        result: tuple[Source, float] | ProtocolError,
    ) -> HubEvent:
        if isinstance(result, ProtocolError):
            return HubReceivedMalformed(peer, str(result), True, sender.key)
        update, norm = result
        member = self._core.members.by_peer(peer)
        handle = self._model.keep(WaitingUpdate(update, push.codec, payload))
        can_answer = self._capacity.for_snapshot(self._now_s(), member)
        return PushArrived(peer, push, handle, norm, can_answer, sender.key, moved_by(member))


def moved_by(member: Member | None) -> Moved:
    """Return the bytes of a sender that are not counted yet, and mark them as counted."""
    return (0, 0) if member is None else member.link.take_uncounted()
