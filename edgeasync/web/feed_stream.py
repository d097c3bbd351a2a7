"""Streams the hub's feed to one viewer."""

import asyncio
import re
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeasync.runtime.hub_feed import FeedClosedError, HubFeed
from edgeasync.web.access import RequestRefusedError
from edgeasync.web.guard import SLICE_BYTES

_NUMBER = re.compile(rb'\{"lineage":"[^"]*","number":(\d+),')

CONTENT_TYPE = "application/x-ndjson"


def number_of(updates: bytes) -> int:
    """Return the number of the last of some encoded updates, one per line."""
    found = _NUMBER.match(updates, updates.rfind(b"\n") + 1)
    assert found is not None
    return int(found[1])


class FeedResponse(Response):
    """One `FeedUpdate` per line, first a whole one, until the viewer leaves or the hub ends.

    It also ends when `check` raises `RequestRefusedError`, because the viewer's token was revoked.
    `on_end` is called at the end. The viewers share the encoded updates, and each of them has only a
    few slices buffered.
    """

    media_type = CONTENT_TYPE

    def __init__(self, feed: HubFeed, check: Callable[[], None], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._feed = feed
        self._check = check
        self._on_end = on_end

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send the updates."""
        stream = asyncio.current_task()
        assert stream is not None
        left = asyncio.create_task(_until_disconnect(receive))
        left.add_done_callback(lambda task: None if task.cancelled() else stream.cancel())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_updates(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not left.done():
                raise
            stream.uncancel()
        finally:
            left.cancel()
            self._on_end()

    async def _send_updates(self, send: Send) -> None:
        try:
            updates = await self._feed.whole()
            while True:
                await _send_lines(updates, send)
                updates = await self._feed.after(number_of(updates))
                self._check()
        except (FeedClosedError, RequestRefusedError):
            return


async def _send_lines(updates: bytes, send: Send) -> None:
    """Send updates and a newline, and copy only the last slice for that."""
    place = (len(updates) - 1) // SLICE_BYTES * SLICE_BYTES
    if place:
        await send({"type": "http.response.body", "body": memoryview(updates)[:place], "more_body": True})
    await send({"type": "http.response.body", "body": updates[place:] + b"\n", "more_body": True})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
