"""Sends a file to one client."""

import asyncio
import os
from collections.abc import Callable
from typing import BinaryIO

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

READ_BYTES = 1 << 20
"""How much of a file is read at a time, in a thread."""


class DownloadResponse(Response):
    """The content of an open file, which the response closes. A file that is replaced meanwhile does no harm.

    `on_end` is called at the end.
    """

    def __init__(self, file: BinaryIO, name: str, on_end: Callable[[], None]) -> None:
        headers = {
            "cache-control": "no-store",
            "content-disposition": f'attachment; filename="{name}"',
            "content-length": str(os.fstat(file.fileno()).st_size),
        }
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._file = file
        self._on_end = on_end

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Send the file."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while scope["method"] != "HEAD" and (part := await asyncio.to_thread(self._file.read, READ_BYTES)):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._file.close()
            self._on_end()
