"""Listens for HTTP connections on the hub's event loop, and limits them.

A client's connection costs the hub at most one buffer. Each address may open only so many
connections and send only so many requests a second, so that clients without a token cannot slow the
hub down. If there are too many connections, the one that has waited longest for a request is closed.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from edgeasync.core.engine.token_bucket import Rate, TokenBucket
from edgeasync.durable.keys import network_of
from edgeasync.errors import AddressError
from edgeasync.runtime.page_settings import split_address
from edgeasync.web.connection import PageConnection

CONNECTIONS_MAX = 256
"""Maximum number of connections, including those whose TLS handshake has not ended.

If the process may open few files, there are fewer.
"""

HANDSHAKES_MAX = 64
"""Maximum number of unfinished TLS handshakes."""

HANDSHAKE_S = 5.0
"""Timeout of a TLS handshake."""

IDLE_S = 15.0
"""How long a connection may wait for a complete request."""

ADDRESS_RATE = Rate(40.0, 400.0)
"""Connections of an address, and further requests on them. Loading the page needs about twenty."""

TOTAL_RATE = Rate(200.0, 800.0)
"""Connections that the hub accepts from all addresses together."""

ADDRESSES_MAX = 4096
"""Number of addresses whose rates are remembered."""

CLOSE_S = 0.5
"""How long a closing listener waits for its last answers."""

SEND_BUFFER_BYTES = 1 << 18
"""The kernel's buffer per connection. Without a limit, it may grow to several megabytes."""

HEADER_BYTES_MAX = 1 << 14
"""Maximum size of a request's line and headers."""

BACKLOG = 128


class Rates:
    """How often each address may connect or send a request."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, address: str, now_s: float) -> bool:
        """Count a connection or request; return whether the address is within its rate."""
        network = network_of(address)
        bucket = self._buckets.get(network)
        if bucket is None:
            bucket = self._buckets[network] = TokenBucket(ADDRESS_RATE, now_s)
            if len(self._buckets) > ADDRESSES_MAX:
                del self._buckets[next(iter(self._buckets))]
        return bucket.take(now_s)


class PageListener:
    """Listens on one address, and passes requests to an ASGI application.

    `tls` returns the certificate for the next connection. `refused` counts closed connections by
    reason. `rates` may be shared with other listeners.
    """

    def __init__(
        self,
        bind: str,
        table: str,
        app: Callable[..., Any],
        *,
        tls: Callable[[], ssl.SSLContext | None],
        rates: Rates,
        refused: Counter[str],
        connections_max: int,
    ) -> None:
        self._bind, self._table = bind, table
        self._app, self._tls = app, tls
        self._rates, self._refused = rates, refused
        self._connections_max = connections_max
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0
        self._connections: dict[PageConnection, None] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.port = 0

    async def open(self) -> None:
        """Listen, using the running loop. Raises `AddressError`."""
        self._loop = asyncio.get_running_loop()
        self._config = uvicorn.Config(
            self._app,
            loop="none",
            http=PageConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_keep_alive=int(IDLE_S),
        )
        self._config.load()
        self._state = ServerState()
        host, self.port = split_address(self._bind)
        try:
            for family, address in await self._resolve(host):
                self._sockets.append(self._listen(family, address))
        except OSError as error:
            for one in self._sockets:
                one.close()
            raise AddressError(
                f"{self._bind}: cannot listen on this address: {error.strerror}; stop the program that uses it, "
                f"or set bind of [{self._table}] (--{self._table}) to another port or an address of this machine"
            ) from error
        self._accepting = TokenBucket(TOTAL_RATE, self._loop.time())
        for one in self._sockets:
            self._spawn(self._accept(one))

    async def _resolve(self, host: str) -> list[tuple[int, str]]:
        if host == "*":
            six = [(socket.AF_INET6, "::")] if socket.has_ipv6 else []
            return [(socket.AF_INET, "0.0.0.0"), *six]  # noqa: S104 - the settings name all addresses
        found = await self._loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [*dict.fromkeys((int(family), str(place[0])) for family, *_, place in found)]

    def _listen(self, family: int, address: str) -> socket.socket:
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setblocking(False)
            one.bind((address, self.port))
            one.listen(BACKLOG)
        except OSError:
            one.close()
            raise
        self.port = one.getsockname()[1]
        return one

    # -- connections ------------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        with listening:
            while True:
                try:
                    connection, (address, *_) = await self._loop.sock_accept(listening)
                except OSError:  # the process has no descriptor left
                    await asyncio.sleep(1.0)
                    continue
                if not self._admit(connection, address):
                    connection.close()
                if not self._accepting.take(self._loop.time()):
                    await asyncio.sleep(1.0 / TOTAL_RATE.per_s)

    def _admit(self, connection: socket.socket, address: str) -> bool:
        if not self._rates.take(address, self._loop.time()):
            self._refused["rate"] += 1
            return False
        if self._handshakes >= HANDSHAKES_MAX or not self._make_room():
            self._refused["connections"] += 1
            return False
        self._spawn(self._connect(connection, address))
        return True

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request if there are too many connections."""
        if len(self._connections) + self._handshakes < self._connections_max:
            return True
        idle = [one for one in self._connections if not one.busy]
        if idle:
            self._refused["connections"] += 1
            min(idle, key=lambda one: one.idle_since_s).abort()
        return bool(idle)

    async def _connect(self, connection: socket.socket, address: str) -> None:
        tls = self._tls()
        self._handshakes += 1
        try:
            with contextlib.suppress(OSError, TimeoutError):
                await self._loop.connect_accepted_socket(
                    lambda: PageConnection(self._config, self._state, address, self._on_open, self._on_close),
                    connection,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
                )
        finally:
            self._handshakes -= 1

    def _on_open(self, connection: PageConnection) -> None:
        self._connections[connection] = None
        if self._sweep is None:
            self._sweep = self._loop.call_later(IDLE_S / 3, self._close_idle)

    def _on_close(self, connection: PageConnection) -> None:
        self._connections.pop(connection, None)

    def _close_idle(self) -> None:
        self._sweep = None
        limit_s = self._loop.time() - IDLE_S
        for one in [*self._connections]:
            if not one.busy and one.idle_since_s < limit_s:
                one.abort()
        if self._connections:
            self._sweep = self._loop.call_later(IDLE_S / 3, self._close_idle)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the end ----------------------------------------------------------------------------------------------

    def refuse_new(self) -> None:
        """Stop accepting connections."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Wait for the last answers for up to `CLOSE_S`, then close all connections."""
        self.refuse_new()
        for one in [*self._connections]:
            if one.busy:
                one.shutdown()
            else:
                one.abort()
        answers = [*self._state.tasks]
        if answers:
            await asyncio.wait(answers, timeout=CLOSE_S)
        for one in [*self._connections]:
            one.abort()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        if self._sweep is not None:
            self._sweep.cancel()
