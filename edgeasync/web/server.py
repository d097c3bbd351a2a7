"""Serves a hub's page and metrics on the hub's event loop."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from edgeasync.config import expanded
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.files import make_folder
from edgeasync.durable.keys import HubKeys
from edgeasync.errors import AddressError, EdgeAsyncError, StorageError
from edgeasync.net.connection_bounds import SPARE_MAX, STRANGERS_MAX
from edgeasync.net.connections import FILES_KEPT, connections_that_fit
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import RunSettings
from edgeasync.runtime.page_settings import PageSection, is_local, split_address
from edgeasync.web.access import PageAccess
from edgeasync.web.api import PageApi
from edgeasync.web.app import PageApp
from edgeasync.web.files import PageFiles
from edgeasync.web.guard import PageGuard
from edgeasync.web.listener import CONNECTIONS_MAX, PageListener, Rates
from edgeasync.web.metrics import HubMetrics
from edgeasync.web.reloaded import Reloaded
from edgeasync.web.tls import files_of, load_tls
from edgeasync.web.tokens import PageTokens


class PagePlan(msgspec.Struct, frozen=True):
    """Checked settings of a page: the addresses by table, the certificate, the tokens and the hub's keys.

    `connections_max` applies to each address.
    """

    page: PageSection
    binds: dict[str, str]
    devices: tuple[str, ...]
    tls: ssl.SSLContext | None
    tokens: PageTokens
    keys: HubKeys | None
    connections_max: int


def plan_page(settings: RunSettings) -> PagePlan:
    """Check the settings of a page and its metrics, and create missing tokens.

    Raises `AddressError` for an address beyond this machine without TLS, and `ConfigError` or
    `StorageError` if the certificate or the tokens cannot be used.
    """
    page, metrics = settings.page, settings.metrics
    binds = {table: bind for table, bind in (("page", page.bind), ("metrics", metrics.bind)) if bind is not None}
    for table, bind in binds.items():
        if not is_local(bind) and page.certificate is None and not page.insecure:
            raise AddressError(
                f"[{table}] bind {bind}: without TLS, the network could read the page's tokens; set certificate "
                "of [page] (--page-certificate FILE), bind to 127.0.0.1, or, if you trust that network, set "
                "insecure of [page] (--page-insecure)"
            )
    tls = load_tls(page)
    tokens = PageTokens.open(_folder_of_tokens(settings))
    keys = None if settings.hub.keys is None else HubKeys(expanded(settings.hub.keys))
    connections_max = _connections_max(settings.limits) // len(binds)
    return PagePlan(page, binds, metrics.devices, tls, tokens, keys, connections_max)


def _connections_max(limits: Limits) -> int:
    """Return the number of connections to the page for which the process has descriptors besides the devices'."""
    spare = connections_that_fit() - limits.devices_max - STRANGERS_MAX - SPARE_MAX
    return max(FILES_KEPT // 2, min(spare, CONNECTIONS_MAX))


def _folder_of_tokens(settings: RunSettings) -> Path:
    """Return the folder of the hub's keys or, without keys, of its run, which is created."""
    if settings.hub.keys is not None:
        return expanded(settings.hub.keys)
    run = expanded(settings.hub.run)
    try:
        make_folder(run)
    except OSError as error:
        raise StorageError(
            f"{run}: cannot be created: {error.strerror}; choose another folder for run (--run)"
        ) from error
    return run


class PageServer:
    """The page and the metrics of a hub, each with an address of its own.

    A changed token or certificate is valid within a second.
    """

    def __init__(self, hub: HubRuntime, plan: PagePlan) -> None:
        self._hub = hub
        self.plan = plan
        refused = self._refused = Counter[str]()
        self._rates = Rates()
        api = self._api = PageApi(hub, plan.keys)
        self._metrics = HubMetrics(hub, plan.devices, viewers=lambda: api.viewers, refused=lambda: refused)
        self._tokens = Reloaded(
            plan.tokens, plan.tokens.files, partial(PageTokens.open, plan.tokens.folder), self._without_tokens
        )
        self._tls = Reloaded(plan.tls, files_of(plan.page), partial(load_tls, plan.page), self._keep_tls)
        self._listeners: dict[str, PageListener] = {}

    def _without_tokens(self, error: EdgeAsyncError, old: PageTokens) -> PageTokens:
        self._hub.warn(f"{error}; until then, the page accepts no token")
        return PageTokens.unknown(old.folder)

    def _keep_tls(self, error: EdgeAsyncError, old: ssl.SSLContext | None) -> ssl.SSLContext | None:
        self._hub.warn(f"{error}; until then, the page uses the old certificate")
        return old

    async def open(self) -> None:
        """Listen, using the running loop. Raises `AddressError`."""
        now_s = asyncio.get_running_loop().time
        try:
            for table, bind in self.plan.binds.items():
                files = PageFiles() if table == "page" else None
                listener = self._listeners[table] = self._make_listener(table, bind, files, now_s)
                await listener.open()
        except BaseException:
            await self.close()
            raise

    def _make_listener(
        self, table: str, bind: str, files: PageFiles | None, now_s: Callable[[], float]
    ) -> PageListener:
        plan, hosts, (host, _) = self.plan, self.plan.page.hosts, split_address(bind)
        access = PageAccess(host, hosts, self._tokens, self._refused, open_reading=is_local(bind) and not hosts)
        app = PageApp(self._hub, access, self._metrics, self._api, files).make()
        guard = PageGuard(app, access, lambda address: self._rates.take(address, now_s()))
        return PageListener(
            bind, table, guard, tls=self._tls, rates=self._rates, refused=self._refused,
            connections_max=plan.connections_max,
        )  # fmt: skip

    @property
    def urls(self) -> Mapping[str, str]:
        """The URLs of the page and of the metrics, by table."""
        return {table: self._url(self.plan.binds[table], one.port) for table, one in self._listeners.items()}

    def _url(self, bind: str, port: int) -> str:
        host, _ = split_address(bind)
        shown = next(iter(self.plan.page.hosts), "localhost" if host == "*" else host)
        return f"{'http' if self.plan.tls is None else 'https'}://{f'[{shown}]' if ':' in shown else shown}:{port}"

    async def close(self) -> None:
        """End all feeds and connections within a second."""
        for listener in self._listeners.values():
            listener.refuse_new()
        await asyncio.gather(*(listener.close() for listener in self._listeners.values()))
