"""The files of the page, in memory."""

import hashlib
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeasync.web.access import RequestRefusedError

FOLDER = Path(__file__).parent / "page"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
"""The types of files that browsers may request. No other file is served."""


class PageFile(msgspec.Struct, frozen=True):
    """A file, its type, and a tag that changes with its content."""

    content: bytes
    kind: str
    tag: str


class PageFiles:
    """The files in a folder by path. They are read once, so that requests never wait for a disk."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files: dict[str, PageFile] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in TYPES and path.is_file():
                content = path.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                self._files[path.relative_to(folder).as_posix()] = PageFile(content, TYPES[path.suffix], tag)

    def answer(self, request: Request) -> Response:
        """Return a file, or raise `RequestRefusedError`. Browsers check before each use whether it has changed."""
        file = self._files.get(request.path_params["path"] or "index.html")
        if file is None:
            raise RequestRefusedError(404, "no such file; open /")
        headers = {"etag": file.tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.kind})
