"""Runs a hub together with its page and its metrics. Without them, nothing of this package is imported."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edgeasync.errors import ConfigError
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import RunSettings
from edgeasync.runtime.page_settings import MetricsSection, PageSection

if TYPE_CHECKING:
    from edgeasync.web.server import PagePlan

PACKAGES = ("prometheus_client", "starlette", "uvicorn")

OnOpen = Callable[[Mapping[str, str], "PagePlan"], None]


def check_packages() -> None:
    """Raise `ConfigError` if the extra `web` is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the hub's page and metrics need {' and '.join(missing)}: pip install 'edgeasync[web]', or remove "
            "bind of [page] and [metrics] (--page, --metrics)"
        )


def prepare_page(settings: RunSettings) -> "PagePlan | None":
    """Check the settings of a page, and create missing tokens; return `None` if there is neither page nor metrics.

    Raises `ConfigError` if the extra `web` is missing, or if other settings of a page have no effect without
    its address, and the errors of `plan_page`.
    """
    if settings.page.bind is None and settings.metrics.bind is None:
        if (settings.page, settings.metrics) != (PageSection(), MetricsSection()):
            raise ConfigError(
                "[page] or [metrics] has settings, but the hub serves neither; set bind of [page] (--page) or of "
                "[metrics] (--metrics), or remove the settings"
            )
        return None
    check_packages()
    from edgeasync.web.server import plan_page  # noqa: PLC0415 - needs the extra

    return plan_page(settings)


class HubWithPage:
    """A hub that serves its page while it runs. `on_open` is called with the URLs by table, and the plan."""

    def __init__(self, hub: HubRuntime, plan: "PagePlan", on_open: OnOpen) -> None:
        self._hub = hub
        self._plan = plan
        self._on_open = on_open

    async def run(self) -> str:
        """Run the hub and its page; return why the hub ended."""
        from edgeasync.web.server import PageServer  # noqa: PLC0415 - needs the extra

        server = PageServer(self._hub, self._plan)
        await server.open()
        try:
            self._on_open(server.urls, self._plan)
            return await self._hub.run()
        finally:
            await server.close()

    def request_stop(self) -> None:
        """Make `run` return soon."""
        self._hub.request_stop()

    def last_events(self) -> list[str]:
        """Return the core's last events and effects, one per line."""
        return self._hub.last_events()


async def run_with_page(hub: HubRuntime, settings: RunSettings, on_open: OnOpen) -> str:
    """Run a hub, with its page and its metrics if the settings ask for them; return why the hub ended.

    Raises the errors of `prepare_page` and `HubRuntime.run`.
    """
    plan = prepare_page(settings)
    return await (hub if plan is None else HubWithPage(hub, plan, on_open)).run()
