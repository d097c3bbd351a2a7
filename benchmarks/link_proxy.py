"""A slow and unreliable link in user space: a TCP proxy with a rate and cuts."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Self

CHUNK_BYTES = 8 << 10
SOCKET_BUFFER_BYTES = 16 << 10
"""Small, so that the system's buffers do not hide seconds of a slow link's queue."""

LATENESS_S = 0.01


class Way:
    """One direction: its rate, what passed and when, and the totals at which it breaks."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.total = 0
        self.cuts: list[int] = []
        self.passed: list[tuple[float, int]] = []
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    @property
    def chunk_bytes(self) -> int:
        """Bytes forwarded at a time: 10 ms of a slow link."""
        return CHUNK_BYTES if self.bytes_per_s is None else min(CHUNK_BYTES, int(LATENESS_S * self.bytes_per_s))

    async def let_pass(self, size: int) -> bool:
        """Wait as long as `size` bytes take; return whether the connection must then break."""
        if self.bytes_per_s is not None:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - LATENESS_S) + size / self.bytes_per_s
            if self._free_at_s > now_s:
                await asyncio.sleep(self._free_at_s - now_s)
        self.total += size
        self.passed.append((time.monotonic(), size))
        if self.cuts and self.total >= self.cuts[0]:
            del self.cuts[0]
            return True
        return False


class Proxy:
    """Listens on a local port and forwards to another; rates are bytes per second each way."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.up, self.down = Way(bytes_per_s), Way(bytes_per_s)
        self.connections = 0
        self.address = ""
        self._sockets: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, target: str) -> Self:
        """Listen, and forward to an address."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._loop = asyncio.get_running_loop()
        self._listener = _small(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._spawn(self._accept())
        return self

    async def stop(self) -> None:
        """Break all open connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in (*self._sockets, self._listener):
            one.close()

    async def _accept(self) -> None:
        while True:
            device, _ = await self._loop.sock_accept(self._listener)
            self.connections += 1
            device.setblocking(False)
            hub = _small(socket.socket())
            hub.setblocking(False)
            pair = (_small(device), hub)
            self._sockets.update(pair)
            try:
                await self._loop.sock_connect(hub, self._target)
            except OSError:
                self._close(pair)
                continue
            self._spawn(self._carry(pair))

    async def _carry(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """Forward both ways until one side ends or the connection must break."""
        device, hub = pair
        ways = [
            asyncio.create_task(self._pump(device, hub, self.up)),
            asyncio.create_task(self._pump(hub, device, self.down)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._close(pair)

    async def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(source, way.chunk_bytes):
                cut = await way.let_pass(len(data))
                if cut:
                    return
                await self._loop.sock_sendall(sink, data)

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for one in pair:
            self._sockets.discard(one)
            one.close()

    def _spawn(self, work: "asyncio.Future[None] | object") -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _small(one: socket.socket) -> socket.socket:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


@contextlib.contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """Run the proxy in a thread; the caller may change its rates."""
    proxy, listening = Proxy(), threading.Event()

    async def serve() -> None:
        await proxy.start(target)
        listening.set()
        await ended.wait()
        await proxy.stop()

    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    listening.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
