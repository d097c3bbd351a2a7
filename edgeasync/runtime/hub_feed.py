"""The hub's feed for coroutines on the hub's event loop."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from edgeasync.core.engine.feed import Feed, FleetTotals
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.durable.keys import HubKeys, fingerprint
from edgeasync.errors import StorageError
from edgeasync.host.file_watch import Stamp, stamp_of
from edgeasync.protocol.feed import PendingKey
from edgeasync.protocol.status import DeviceStatus


class FeedClosedError(Exception):
    """The hub is ending, so there are no more updates."""


class FeedSource:
    """The shell of `Feed`: the hub's clock, timers and description, and the file of pending keys."""

    def __init__(
        self,
        now_s: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        describe: Callable[[], dict[str, Any]],
        keys: HubKeys | None,
    ) -> None:
        self.now_s = now_s
        self.after = after
        self.describe = describe
        self._keys = keys
        self._stamp: Stamp | None = None
        self._pending: list[PendingKey] = []

    def wall_s(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def pending_keys(self) -> list[PendingKey] | None:
        """Return the unknown keys that have tried to connect, newest first; `None` without keys.

        The file is read only if it has changed.
        """
        if self._keys is None:
            return None
        stamp = stamp_of(self._keys.pending_file)
        if stamp != self._stamp:
            try:
                found = self._keys.pending()
            except StorageError:
                return self._pending  # a command is replacing the file, or reports that it is damaged
            self._stamp = stamp
            self._pending = [
                PendingKey(fingerprint(one.key), one.address, round(one.seen_s), one.refused)
                for one in sorted(found, key=lambda one: -one.seen_s)
            ]
        return self._pending


class HubFeed:
    """Lets coroutines wait for updates of the feed. `HubRuntime` creates it.

    After `close`, every method raises `FeedClosedError`.
    """

    def __init__(self, engine: HubEngine, source: FeedSource) -> None:
        self._engine, self._source = engine, source
        self._feed = Feed(engine, source)
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._closed = False

    @property
    def number(self) -> int:
        """The number of the newest update: read it when `whole` or `after` has returned."""
        return self._feed.number

    async def whole(self) -> bytes:
        """Return a whole `FeedUpdate` as JSON. All callers share one encoding of each update."""
        return await self._ask(self._feed.whole)

    async def after(self, number: int) -> bytes:
        """Wait for an update after a number; return it as JSON.

        A caller that missed updates receives several lines, or a whole update.
        """
        return await self._ask(partial(self._feed.after, number))

    async def device(self, name: str) -> bytes | None:
        """Return the `DeviceDetails` of a device as JSON; `None` if the hub does not know it."""
        return await self._ask(partial(self._feed.device, name)) or None

    def counters(self) -> FleetTotals:
        """Return totals of the fleet, which may be a second old."""
        self._check()
        return self._feed.totals()

    def describe(self, names: Iterable[str]) -> list[DeviceStatus]:
        """Return the status of devices. It need not be durable. Unknown names are skipped."""
        self._check()
        members = self._engine.core.members.members
        known = [members[name] for name in names if name in members]
        return self._engine.core.describe_devices(known, self._source.now_s())

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self._feed.close()
        for future in [*self._waiting]:
            if not future.done():
                future.set_exception(FeedClosedError())

    async def _ask(self, ask: Callable[[Callable[[bytes], None]], None]) -> bytes:
        self._check()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            ask(lambda text: None if future.done() else future.set_result(text))
            return await future
        finally:
            self._waiting.discard(future)

    def _check(self) -> None:
        if self._closed:
            raise FeedClosedError
