"""The page's data and orders, as JSON."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeasync.core.hub.effects import HubReport
from edgeasync.durable.allow_list import check_name
from edgeasync.durable.keys import HubKeys
from edgeasync.errors import ConfigError, StorageError
from edgeasync.protocol.messages import DEVICE_ID_PATTERN, Order
from edgeasync.runtime.hub import HubRuntime
from edgeasync.web.access import RequestRefusedError
from edgeasync.web.download import DownloadResponse
from edgeasync.web.feed_stream import CONTENT_TYPE, FeedResponse

VIEWERS_MAX = 100
"""Maximum number of open feeds."""

DOWNLOADS_MAX = 4
"""Maximum number of models that are sent at the same time."""

BODY_BYTES_MAX = 1024
BODY_S = 5.0
"""Maximum size of a request's body, and the time within which it must arrive."""

_DEVICE = re.compile(DEVICE_ID_PATTERN)


class _Accepted(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that accepts a key."""

    name: str


class PageApi:
    """Answers the requests below `/api`. `keys` is `None` for a hub without keys."""

    def __init__(self, hub: HubRuntime, keys: HubKeys | None) -> None:
        self._hub = hub
        self._keys = keys
        self._downloads = 0
        self.viewers = 0
        """Number of open feeds."""

    # -- reading ----------------------------------------------------------------------------------------------

    async def feed(self, request: Request, check: Callable[[], None]) -> Response:
        """Stream the feed until `check` raises `RequestRefusedError`."""
        if request.method == "HEAD":
            return Response(media_type=CONTENT_TYPE)
        if self.viewers >= VIEWERS_MAX:
            raise RequestRefusedError(503, f"{VIEWERS_MAX} viewers follow this hub already; close a page", "busy")
        self.viewers += 1
        return FeedResponse(self._hub.feed, check, self._on_left)

    def _on_left(self) -> None:
        self.viewers -= 1

    async def device(self, request: Request) -> Response:
        """Return the details of a device."""
        details = await self._hub.feed.device(_device_of(request))
        if details is None:
            raise RequestRefusedError(404, "the hub does not know this device")
        return _json(details)

    async def newest_model(self, _: Request) -> Response:
        """Send the file of the newest saved version."""
        return await self._download(self._hub.model_file, "no version has been saved yet; try again later")

    async def best_model(self, _: Request) -> Response:
        """Send the file of the best version."""
        return await self._download(self._hub.best_file, "no version has been evaluated yet; try again later")

    async def _download(self, path: Path, absent: str) -> Response:
        if self._downloads >= DOWNLOADS_MAX:
            raise RequestRefusedError(
                503, f"{DOWNLOADS_MAX} clients are downloading models; try again later", "busy"
            )
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise RequestRefusedError(404, absent) from None
        self._downloads += 1
        return DownloadResponse(file, path.name, self._on_downloaded)

    def _on_downloaded(self) -> None:
        self._downloads -= 1

    # -- orders -----------------------------------------------------------------------------------------------

    async def quarantine(self, request: Request) -> Response:
        """Exclude a device."""
        return await self._order(Order(_device_of(request), "quarantine"))

    async def release(self, request: Request) -> Response:
        """Release a device."""
        return await self._order(Order(_device_of(request), "release"))

    async def _order(self, order: Order) -> Response:
        key = b"" if self._keys is None else self._keys.pair().public
        try:
            refusal = await self._hub.orders.give(order, key)
        except TimeoutError:
            raise RequestRefusedError(
                504, "the hub has not confirmed the order yet; look at the device's state before you repeat it"
            ) from None
        if refusal is not None:
            status = {"unknown_device": 404, "busy": 503}.get(refusal.code, 409)
            raise RequestRefusedError(status, refusal.sentence)
        return _json(msgspec.json.encode({"device": order.device_id, "order": order.order}))

    async def accept_key(self, request: Request) -> Response:
        """Add a pending key to the allow-list."""
        keys, fingerprint = self._known_keys(), request.path_params["fingerprint"]
        try:
            name = check_name(msgspec.json.decode(await _body(request), type=_Accepted).name)
            accepted = await asyncio.to_thread(keys.accept, fingerprint, name)
        except msgspec.MsgspecError:
            raise RequestRefusedError(400, 'the body must be {"name": NAME}', "body") from None
        except (ConfigError, StorageError) as error:
            raise RequestRefusedError(409, str(error)) from None
        detail = f"key {fingerprint}, by an operator on the page"
        self._hub.report(HubReport("admitted", accepted.name, detail))
        return _json(msgspec.json.encode({"fingerprint": fingerprint, "name": accepted.name}))

    async def refuse_key(self, request: Request) -> Response:
        """Refuse a pending key."""
        keys, fingerprint = self._known_keys(), request.path_params["fingerprint"]
        try:
            await asyncio.to_thread(keys.refuse, fingerprint)
        except StorageError as error:
            raise RequestRefusedError(409, str(error)) from None
        self._hub.report(HubReport("refused", detail=f"key {fingerprint}, by an operator on the page"))
        return _json(msgspec.json.encode({"fingerprint": fingerprint}))

    def _known_keys(self) -> HubKeys:
        if self._keys is None:
            raise RequestRefusedError(409, "this hub has no keys; create some with 'edgeasync keys init'")
        return self._keys


def _device_of(request: Request) -> str:
    name = str(request.path_params["name"])
    if not _DEVICE.match(name):
        raise RequestRefusedError(404, "this is not a device's name")
    return name


def _json(content: bytes) -> Response:
    return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises `RequestRefusedError` if it is too large or too slow."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise RequestRefusedError(413, f"the body has more than {BODY_BYTES_MAX} bytes", "body")
    except TimeoutError:
        raise RequestRefusedError(408, f"the body has not arrived within {BODY_S:g} s", "body") from None
    return body
