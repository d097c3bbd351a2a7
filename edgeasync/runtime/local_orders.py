"""Orders of operators that reach a hub from its own process, such as those of its page."""

import asyncio
import itertools
from collections.abc import Callable

from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.events import Peer
from edgeasync.durable.allow_list import Key
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Order, Refuse

ANSWER_S = 10.0
"""How long to wait until the hub has carried out an order, and its journal contains it."""

PREFIX = b"\0local"
"""Begins the routing ids of local operators. A ROUTER never gives such an id to a connection."""

Receive = Callable[[Peer, bytes, None, Sender], None]


class LocalOrders:
    """Passes orders to the hub as if they were an operator's messages. Use it on the hub's event loop.

    So they are checked, logged and reported like those of `edgeasync device`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._numbers = itertools.count()
        self._waiting: dict[Peer, asyncio.Future[Refuse | None]] = {}

    async def give(self, order: Order, key: Key) -> Refuse | None:
        """Send an order; return the hub's refusal, or `None` once the order is carried out and durable.

        `key` identifies the operator; it is empty without keys. Raises `TimeoutError`.
        """
        peer = PREFIX + str(next(self._numbers)).encode()
        answer: asyncio.Future[Refuse | None] = asyncio.get_running_loop().create_future()
        self._waiting[peer] = answer
        try:
            self._receive(peer, wire.encode(order), None, Sender(key, "page", "operator") if key else ANYBODY)
            async with asyncio.timeout(ANSWER_S):
                return await answer
        finally:
            del self._waiting[peer]

    def accepts(self, peer: Peer, header: bytes) -> bool:
        """Return whether a message is an answer to an order, which is then complete."""
        if not peer.startswith(PREFIX):
            return False
        answer = self._waiting.get(peer)
        if answer is not None and not answer.done():
            message = wire.decode(header)
            answer.set_result(message if isinstance(message, Refuse) else None)
        return True
