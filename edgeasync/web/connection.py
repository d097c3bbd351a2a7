"""One HTTP connection of the page."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

LOG = logging.getLogger("edgeasync.web.connection")
LOG.setLevel(logging.CRITICAL)  # uvicorn warns about each invalid request, and clients can send any number of them

STALLED_S = 10.0
"""How long a client may stop reading while its buffer is full."""


BUFFER_BYTES = 1 << 16
"""How many unsent bytes make an answer wait."""


class StalledError(Exception):
    """A client has stopped reading."""


class DisconnectedError(Exception):
    """A client has closed its connection."""


class PageConnection(H11Protocol):
    """A connection that limits what its client may cost. The transport creates it.

    `idle_since_s` is the time since which it waits for a request, and `requests` counts requests.
    `on_open` and `on_close` are called with it.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        address: str,
        on_open: "Callable[[PageConnection], None]",
        on_close: "Callable[[PageConnection], None]",
    ) -> None:
        app_state: dict[str, Any] = {"connection": self}
        super().__init__(config=config, server_state=state, app_state=app_state)
        self.logger = LOG
        self.access_log = False
        self.address = address
        self.idle_since_s = self.loop.time()
        self.requests = 0
        self._lost = asyncio.Event()
        self._on_open = on_open
        self._on_close = on_close

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Report the connection to the listener."""
        transport.set_write_buffer_limits(high=BUFFER_BYTES)  # the default for TLS is eight times that
        super().connection_made(transport)
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end to the listener, and end the answer."""
        super().connection_lost(exc)
        # All three refer to this connection, and Python frees such cycles only after minutes.
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.app_state = {}
        self._lost.set()
        self._on_close(self)

    def on_response_complete(self) -> None:
        """Note that the connection waits for the next request."""
        self.idle_since_s = self.loop.time()
        super().on_response_complete()

    async def drained(self) -> None:
        """Wait until the client has read most of what was sent.

        Raises `StalledError`, or `DisconnectedError` if nothing can be sent any more.
        """
        if self.flow.write_paused:
            try:
                async with asyncio.timeout(STALLED_S):
                    await self.flow.drain()
            except TimeoutError:
                raise StalledError from None
        if self.transport.is_closing():
            raise DisconnectedError

    async def end(self) -> None:
        """Close the connection at once, and wait until uvicorn knows that it need not complete the answer."""
        self.transport.abort()
        await self._lost.wait()

    def abort(self) -> None:
        """Close the connection at once, without sending what is buffered."""
        self.transport.abort()
