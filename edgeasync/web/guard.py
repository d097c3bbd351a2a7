"""The outermost layer of the page: checks every request, and limits every answer."""

import logging
from collections.abc import Callable, Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeasync.web.access import PageAccess, RequestRefusedError
from edgeasync.web.connection import DisconnectedError, PageConnection, StalledError

LOG = logging.getLogger("edgeasync.web")

SLICE_BYTES = 1 << 16
"""Size of the parts in which an answer is sent. Before each, the client must read earlier ones."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

PROBES = ("/healthz", "/readyz")
"""Paths that anybody may request under any name, because load balancers and supervisors do."""


def error_response(error: RequestRefusedError, headers: Mapping[str, str] = {}) -> Response:
    """Return the answer for an error: a JSON object with a sentence."""
    if error.status == 401:
        headers = {**headers, "www-authenticate": "Bearer"}
    if error.status in (429, 503):
        headers = {**headers, "retry-after": "1"}
    content = msgspec.json.encode({"error": error.sentence})
    return Response(content, error.status, {"cache-control": "no-store", **headers}, "application/json")


class PageGuard:
    """Wraps an ASGI application.

    `allows` returns whether an address may send another request now. The first request on a
    connection was counted with the connection.
    """

    def __init__(self, app: ASGIApp, access: PageAccess, allows: Callable[[str], bool]) -> None:
        self._app = app
        self._access = access
        self._allows = allows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        connection: PageConnection = scope["state"]["connection"]
        guarded = _Sender(scope, send, connection)
        try:
            await self._answer(scope, receive, guarded)
        except StalledError:
            self._access.refused["slow"] += 1
            await connection.end()
        except DisconnectedError:
            await connection.end()
        except Exception:
            LOG.exception("the page failed to answer %s %s", scope["method"], scope["path"])
            if guarded.started:
                await connection.end()
            else:
                failed = RequestRefusedError(500, "the hub failed; see its log")
                await error_response(failed)(scope, receive, guarded)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except RequestRefusedError as error:
            self._access.count(error)
            closing = {"connection": "close"} if error.reason == "rate" else {}
            await error_response(error, closing)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        connection: PageConnection = scope["state"]["connection"]
        connection.requests += 1
        if connection.requests > 1 and not self._allows(connection.address):
            raise RequestRefusedError(429, "too many requests from this address; wait a second", "rate")
        if scope["path"] in PROBES:
            return
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) > 1 or len(headers.getlist("authorization")) > 1:
            raise RequestRefusedError(400, "a header is repeated; send it once", "host")
        self._access.check_site(headers, scope["server"][0] if scope["server"] else "", scope["path"])
        self._access.check_url(scope["raw_path"], scope["query_string"])


class _Sender:
    """Sends an answer in slices, and adds headers to it."""

    def __init__(self, scope: Scope, send: Send, connection: PageConnection) -> None:
        self._send = send
        self._connection = connection
        self._closes = _has_body(scope)  # so that the hub need not read the rest of a body
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._connection.drained()  # raises an error if what follows the request was damaged
            self.started = True
            closing = [(b"connection", b"close")] if self._closes else []
            await self._send({**message, "headers": [*message.get("headers", []), *HEADERS, *closing]})
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        for begin in range(0, max(1, len(body)), SLICE_BYTES):
            await self._connection.drained()
            end = begin + SLICE_BYTES
            part = body if len(body) <= SLICE_BYTES else body[begin:end]
            await self._send({"type": message["type"], "body": part, "more_body": more or end < len(body)})


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
