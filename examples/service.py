"""Train two models in a web service (aiohttp, uvloop), with two hubs on the service's event loop.

    python service.py --port 8080 --run runs/service

    curl http://127.0.0.1:8080/hubs                    addresses and versions of both hubs
    curl http://127.0.0.1:8080/hubs/small/events       events, as server-sent events
    curl http://127.0.0.1:8080/hubs/small/model -O     the newest version, as .npz

Agents join with `edgeasync agent --hub ADDRESS --data FILE`. On SIGTERM the service saves both models.
"""

import argparse
import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from aiohttp import web

from edgeasync import EdgeAsyncError, Hub
from edgeasync.callbacks import UpdateEvent
from edgeasync.training.numpy_models import MlpModel, SoftmaxModel

HUBS = web.AppKey("hubs", Mapping[str, Hub])
ANYWHERE = "tcp://127.0.0.1:*"


async def end_by_rule(hub: Hub, loss: float) -> None:
    """Finish the hub once a device reports a loss below `loss`."""
    async for event in hub.events():
        if isinstance(event, UpdateEvent) and event.loss is not None and event.loss < loss:
            hub.finish(f"{event.device} has a loss of {event.loss:.3g}")


def make_app(hubs: Mapping[str, Hub], loss: float) -> web.Application:
    async def hold(_: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for hub in hubs.values():
                await stack.enter_async_context(hub)
                group.create_task(end_by_rule(hub, loss))
            yield

    async def stop(_: web.Application) -> None:
        for hub in hubs.values():
            hub.stop()

    app = web.Application()
    app[HUBS] = hubs
    app.cleanup_ctx.append(hold)
    app.on_shutdown.append(stop)  # ends the event streams, for which the service then waits
    app.add_routes([
        web.get("/hubs", show),
        web.get("/hubs/{name}/events", stream),
        web.get("/hubs/{name}/model", download),
    ])  # fmt: skip
    return app


def find(request: web.Request) -> Hub:
    try:
        return request.app[HUBS][request.match_info["name"]]
    except KeyError:
        raise web.HTTPNotFound(text="no hub has this name\n") from None


async def show(request: web.Request) -> web.Response:
    return web.json_response({name: describe(hub) for name, hub in request.app[HUBS].items()})


def describe(hub: Hub) -> dict[str, object]:
    try:
        status = hub.status()
    except EdgeAsyncError as ended:
        return {"run": str(hub.path), "ended": str(ended)}
    return {
        "address": hub.address,
        "run": str(hub.path),
        "version": status["version"],
        "devices": status["devices"],
    }


async def stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    events = find(request).events()
    await response.prepare(request)
    async for event in events:
        content = msgspec.json.encode(event)
        await response.write(b"event: %s\ndata: %s\n\n" % (type(event).__name__.lower().encode(), content))
    return response


async def download(request: web.Request) -> web.Response:
    file = io.BytesIO()
    try:
        arrays: dict[str, Any] = {**find(request).snapshot()}
    except EdgeAsyncError as ended:
        raise web.HTTPGone(text=f"{ended}\n") from None
    np.savez(file, **arrays)
    return web.Response(body=file.getvalue(), content_type="application/octet-stream")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two models of handwritten digits in a web service.")
    parser.add_argument("--port", type=int, default=8080, help="of the service, on this machine")
    parser.add_argument("--run", type=Path, default=Path("runs/service"), help="folder for both runs")
    parser.add_argument("--loss", type=float, default=0.1, help="a hub ends once a device has a lower loss")
    arguments = parser.parse_args()
    hubs = {
        "small": Hub(SoftmaxModel(inputs=64, classes=10), run=arguments.run / "small", bind=ANYWHERE),
        "large": Hub(MlpModel(inputs=64, hidden=(64,), classes=10), run=arguments.run / "large", bind=ANYWHERE),
    }
    app = make_app(hubs, arguments.loss)
    web.run_app(app, host="127.0.0.1", port=arguments.port, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
