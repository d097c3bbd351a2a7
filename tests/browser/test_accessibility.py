"""axe finds nothing serious, in light and dark, at both widths, with each part of the page open."""

import pytest

from edgeasync.core.hub.attention import find_attention
from edgeasync.protocol.status import ActiveAlarm
from tests.browser.conftest import DESKTOP, PHONE
from tests.support.browser.made_fleet import pending_key

expect = pytest.importorskip("playwright.sync_api").expect
axe = pytest.importorskip("axe_playwright_python.sync_playwright")


def findings(page):
    """Return what axe finds serious or critical."""
    violations = axe.Axe().run(page).response["violations"]
    return [
        (found["id"], node["html"][:200], node["failureSummary"])
        for found in violations
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(size, scheme, serve, visit, fleet):
    fleet.pending = [pending_key(1)]
    fleet.denied = {"unknown_key": 2}
    fleet.disk_trouble = "No space left on device"
    fleet.alarms.append(ActiveAlarm("", "the loss is 4 times its lowest", "rollback", 90.0, []))
    server = serve(fleet, operator="operator-token")
    page = visit(server.url, size=size, scheme=scheme, errors=("401", "ERR_", "net::"))
    assert findings(page) == []
    page.get_by_role("searchbox").fill("pump")
    page.get_by_role("grid").press("ArrowDown")
    page.get_by_role("button", name="loss", exact=True).click()
    assert findings(page) == []
    urgent = find_attention(fleet.status())[0].device
    page.goto(f"{page.url}#device={urgent}")
    expect(page.locator("#device dl").first).to_be_visible()
    assert findings(page) == []
    page.get_by_role("button", name="Quarantine", exact=True).click()
    expect(page.locator("#token")).to_be_visible()
    assert findings(page) == []
    page.get_by_role("button", name="Cancel").click()
    server.stop()
    expect(page.locator("#connection")).to_contain_text("disconnected")
    assert findings(page) == []


def test_axe_would_find_something(page):
    page.evaluate("() => document.querySelector('#filter').removeAttribute('aria-label')")
    page.evaluate("() => { const text = document.querySelector('#learning-words'); text.style.color = '#eee'; }")
    assert {name for name, _, _ in findings(page)} >= {"color-contrast"}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(size, server, visit):
    page = visit(server.url, size=size)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    cut = page.locator(".rows [role=row]:visible").evaluate_all(
        "(rows, width) => rows.filter(row => row.getBoundingClientRect().right > width).length", size["width"]
    )
    assert cut == 0
