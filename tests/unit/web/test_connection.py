"""Connections of the page, without a hub."""

import asyncio
import gc
import weakref
from collections import Counter

import pytest

from edgeasync.web.listener import PageListener, Rates

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("reads", [True, False])
def test_a_closed_connection_is_freed_without_the_garbage_collector(reads):
    seen = []

    async def answer(scope, receive, send):
        connection = scope["state"]["connection"]
        seen.append((weakref.ref(connection), connection._lost))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    async def visit():
        listener = PageListener(
            "127.0.0.1:*", "page", answer, tls=lambda: None, rates=Rates(), refused=Counter(), connections_max=9
        )
        await listener.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(REQUEST)
        assert (await reader.read(-1 if reads else 1))[:1] == b"H"
        writer.close()
        await seen[0][1].wait()
        for _ in range(10):  # uvicorn and the loop end the connection's tasks
            await asyncio.sleep(0)
        await listener.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(visit())
        assert [connection() for connection, _ in seen] == [None]
    finally:
        gc.enable()
