"""Fixtures of the tests of the page: Debian's chromium, driven by Playwright, and servers of made fleets."""

import contextlib
import shutil

import pytest

from tests.support.browser.made_fleet import MadeFleet
from tests.support.programs.processes import PATIENCE_S

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def browser():
    """Yield a browser. Playwright occupies this thread's event loop, so it ends with the module."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("these tests need chromium: .ci/system_packages installs it")
    playwright.expect.set_options(timeout=1e3 * PATIENCE_S)
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def serve():
    """Serve fleets, each at an address of its own, until the end of the test."""
    pytest.importorskip("aiohttp")
    from tests.support.browser.page_server import PageServer  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        yield lambda fleet, **options: stack.enter_context(PageServer(fleet, **options))


@pytest.fixture
def visit(browser):
    """Open pages. At the end of the test, none may have logged an error or thrown an exception."""
    with contextlib.ExitStack() as stack:

        def open_page(url, *, size=DESKTOP, scheme="light", errors=(), live=True, clock=False):
            context = browser.new_context(viewport=size, color_scheme=scheme)
            stack.callback(context.close)
            context.set_default_timeout(1e3 * PATIENCE_S)
            page = context.new_page()
            if clock:
                page.clock.install()
            found = []
            page.on("pageerror", lambda error: found.append(str(error)))
            page.on("console", lambda line: line.type in ("error", "warning") and found.append(line.text))
            stack.callback(check, found, errors)
            page.goto(url)
            if live:
                page.locator("#connection[data-state=live]").wait_for()
            return page

        yield open_page


def check(found, allowed):
    """Check that each error that a page logged contains one of the allowed words."""
    assert [line for line in found if not any(words in line for words in allowed)] == []


@pytest.fixture
def fleet():
    """Return a fleet of 60: one of each planted trouble, and two of some."""
    return MadeFleet(60)


@pytest.fixture
def server(serve, fleet):
    """Serve the fleet of 60."""
    return serve(fleet)


@pytest.fixture
def page(server, visit):
    """Return the page of the fleet of 60, once it is live."""
    return visit(server.url)
