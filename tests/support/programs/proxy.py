"""A TCP proxy on an event loop that counts what passes, and breaks every connection at given byte counts."""

import asyncio
import contextlib

CHUNK_BYTES = 1 << 16


class CuttingProxy:
    """Forwards to a port of this machine; `cuts_up` and `cuts_down` are totals at which it breaks off."""

    def __init__(self, port, *, cuts_up=(), cuts_down=()):
        self.port = 0
        self.bytes_up = self.bytes_down = self.cuts = 0
        self._target = port
        self._cuts_up, self._cuts_down = list(cuts_up), list(cuts_down)
        self._tasks, self._writers = set(), set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    async def _connected(self, device_reader, device_writer):
        self._tasks.add(asyncio.current_task())
        self._writers.add(device_writer)
        try:
            hub_reader, hub_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            device_writer.transport.abort()
            return
        self._writers.add(hub_writer)
        await asyncio.gather(
            self._pump(device_reader, hub_writer, self._count_up),
            self._pump(hub_reader, device_writer, self._count_down),
        )

    async def _pump(self, reader, writer, count):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if count(len(data)):
                    self.cuts += 1
                    break
                writer.write(data)
                await writer.drain()
        reader._transport.abort()
        writer.transport.abort()

    def _count_up(self, size):
        self.bytes_up += size
        return _is_due(self._cuts_up, self.bytes_up)

    def _count_down(self, size):
        self.bytes_down += size
        return _is_due(self._cuts_down, self.bytes_down)


def _is_due(cuts, total):
    due = bool(cuts) and total >= cuts[0]
    if due:
        del cuts[0]
    return due
