"""The page of a hub that does not exist: its files, and the feed of a made fleet, in a thread of its own."""

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path

import msgspec
from aiohttp import web

import edgeasync
from tests.support.browser.made_fleet import MadeFleet
from tests.support.programs.processes import PATIENCE_S

PAGE = Path(edgeasync.__file__).parent / "web/page"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer:
    """Serves a fleet at an address that stays the same when it is stopped and started again.

    Its methods may be called from any other thread. `orders` are the operators' orders it received,
    and `busy` is a sentence with which it refuses new viewers.
    """

    def __init__(self, fleet, *, token="", operator=""):
        self.fleet = fleet
        self.token, self.operator = token, operator
        self.orders = []
        self.requests = []
        self.busy = ""
        self.port = 0
        self.start()

    def start(self):
        """Listen, on the same port as before."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start())

    def stop(self):
        """Break all connections, and stop listening, as a killed hub does."""
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self._loop.is_closed():
            self.stop()

    @property
    def url(self):
        """The address of the page."""
        return f"http://127.0.0.1:{self.port}/"

    def tick(self):
        """Send every viewer what changes in a second."""
        self._run(self._send(msgspec.json.encode(self.fleet.tick()) + b"\n"))

    @property
    def viewers(self):
        """Number of pages that follow the feed."""
        return len(self._queues)

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    async def _start(self):
        self._queues = set()
        app = web.Application(middlewares=[self._guard])
        app.add_routes([
            web.get("/", self._index),
            web.get("/api/feed", self._feed),
            web.get("/api/devices/{id:(?s:.+)}", self._device),
            web.get("/api/models/{which}", self._model),
            web.post("/api/{what}/{id:(?s:.+)}/{verb}", self._order),
            web.static("/", PAGE),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self):
        for queue in self._queues:
            queue.put_nowait(None)
        await self._runner.cleanup()

    async def _send(self, line):
        for queue in self._queues:
            queue.put_nowait(line)

    @web.middleware
    async def _guard(self, request, handler):
        self.requests.append(str(request.rel_url))
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        known = {self.token, self.operator} - {""}
        if request.method == "POST" and given not in {self.operator} & known:
            return refusal(403 if given else 401, "this needs the operator's token, from run/tokens/operator")
        if request.path.startswith("/api/") and self.token and given not in known:
            return refusal(401, "this page needs a token, from run/tokens/viewer")
        response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = POLICY
        return response

    async def _index(self, _):
        return web.FileResponse(PAGE / "index.html")

    async def _feed(self, request):
        if self.busy:
            return refusal(503, self.busy)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        queue = asyncio.Queue()
        await response.write(msgspec.json.encode(self.fleet.whole()) + b"\n")
        self._queues.add(queue)
        try:
            with contextlib.suppress(ConnectionError):  # the page was closed
                while (line := await queue.get()) is not None:
                    await response.write(line)
        finally:
            self._queues.discard(queue)
        return response

    async def _device(self, request):
        details = self.fleet.details(request.match_info["id"])
        if details is None:
            return refusal(404, f"{request.match_info['id']}: the hub knows no such device")
        return web.Response(body=msgspec.json.encode(details), content_type="application/json")

    async def _model(self, request):
        name = f"{request.match_info['which']}-{self.fleet.version}.safetensors"
        return web.Response(body=b"model", headers={"Content-Disposition": f'attachment; filename="{name}"'})

    async def _order(self, request):
        self.orders.append((request.path, await request.json()))
        return web.json_response({})


def refusal(status, sentence):
    """Return an error as the hub does."""
    return web.json_response({"error": sentence}, status=status)


def main():
    """Serve a fleet of as many devices as the command line says, until Ctrl-C."""
    with PageServer(MadeFleet(int(sys.argv[1]))) as server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        while True:
            time.sleep(1.0)
            server.tick()


if __name__ == "__main__":
    main()
