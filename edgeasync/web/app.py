"""The page's URLs."""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_feed import FeedClosedError
from edgeasync.web.access import PageAccess, RequestRefusedError, Role
from edgeasync.web.api import PageApi
from edgeasync.web.files import PageFiles
from edgeasync.web.guard import error_response
from edgeasync.web.metrics import CONTENT_TYPE, HubMetrics

Answer = Callable[[Request], Awaitable[Response]]


class PageApp:
    """Answers requests about a hub. Without `files`, it serves only metrics and probes."""

    def __init__(
        self,
        hub: HubRuntime,
        access: PageAccess,
        metrics: HubMetrics,
        api: PageApi,
        files: PageFiles | None = None,
    ) -> None:
        self._hub = hub
        self._access = access
        self._metrics = metrics
        self._api = api
        self._files = files

    def routes(self) -> list[Route]:
        """Return the routes of this application."""
        routes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            self._route("/metrics", self._answer_metrics),
        ]
        if self._files is None:
            return routes
        api, device, key = self._api, "/api/devices/{name:path}", "/api/pending/{fingerprint}"
        return [
            *routes,
            self._route("/api/feed", self._feed),
            self._route("/api/models/newest", api.newest_model),
            self._route("/api/models/best", api.best_model),
            self._order(f"{device}/quarantine", api.quarantine),
            self._order(f"{device}/release", api.release),
            self._order(f"{key}/accept", api.accept_key),
            self._order(f"{key}/refuse", api.refuse_key),
            self._route(device, api.device),
            Route("/{path:path}", self._answer_file),
        ]

    def make(self) -> Starlette:
        """Return the ASGI application."""
        handlers = {RequestRefusedError: self._refuse, HTTPException: self._refuse}
        return Starlette(routes=self.routes(), exception_handlers=handlers)

    def _order(self, path: str, answer: Answer) -> Route:
        return self._route(path, answer, needs="operator", method="POST")

    def _route(self, path: str, answer: Answer, *, needs: Role = "viewer", method: str = "GET") -> Route:
        """Return a route whose requests need a token and a hub that has read its run's folder."""

        async def checked(request: Request) -> Response:
            self._access.check_role(request.headers, needs)
            if not self._hub.recovered:
                raise RequestRefusedError(
                    503, "the hub is reading its run's folder; try again in a second", "busy"
                )
            try:
                return await answer(request)
            except FeedClosedError:
                raise RequestRefusedError(503, "the hub is ending; start it again", "busy") from None

        return Route(path, checked, methods=[method])

    async def _healthz(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        ready = self._hub.recovered and not self._hub.core.stopped
        return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)

    async def _feed(self, request: Request) -> Response:
        return await self._api.feed(request, partial(self._access.check_role, request.headers, "viewer"))

    async def _answer_metrics(self, _: Request) -> Response:
        return Response(
            await self._metrics.render(), headers={"cache-control": "no-store", "content-type": CONTENT_TYPE}
        )

    async def _answer_file(self, request: Request) -> Response:
        assert self._files is not None
        return self._files.answer(request)

    async def _refuse(self, _: Request, error: Exception) -> Response:
        if isinstance(error, RequestRefusedError):
            self._access.count(error)
            return error_response(error)
        assert isinstance(error, HTTPException)
        words = {404: "no such page or file; open /", 405: "this address does not support this method"}
        sentence = words.get(error.status_code, error.detail)
        return error_response(RequestRefusedError(error.status_code, sentence), error.headers or {})
