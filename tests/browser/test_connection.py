"""The page asks for a token, and returns by itself when its hub does."""

import pytest

from tests.support.browser.made_fleet import MadeFleet

expect = pytest.importorskip("playwright.sync_api").expect

REFUSED = ("401",)
BROKEN = ("ERR_", "net::")


def enter(page, token):
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Continue").click()


def version(page):
    """Return the place where the page shows the model's version."""
    return page.locator("#figures > div", has_text="version").locator("dd").first


def test_a_page_without_a_token_asks_until_it_has_the_right_one(serve, visit, fleet):
    server = serve(fleet, token="viewer-token")
    page = visit(server.url, live=False, errors=REFUSED)
    expect(page.locator("#token-words")).to_have_text("this page needs a token, from run/tokens/viewer")
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(page.locator("#connection")).to_have_text("waiting for a token")
    page.keyboard.press("Escape")
    expect(page.locator("#token")).to_be_visible()
    enter(page, "wrong")
    expect(page.locator("#token-field")).to_have_value("")
    enter(page, " viewer-token ")
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#token")).to_be_hidden()
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    assert page.evaluate("[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]") == [
        ["viewer-token"],
        [],
        "",
    ]
    assert not [url for url in server.requests if "token" in url and url != "/token.js"]
    assert "token" not in page.url


def test_escape_does_not_close_the_form_that_reading_needs(serve, visit, fleet):
    server = serve(fleet, token="viewers-token")
    page = visit(server.url, errors=("401",), live=False)
    field = page.get_by_label("Token", exact=True)
    field.fill("viewers-")
    for _ in range(4):
        page.keyboard.press("Escape")
    expect(field).to_have_value("viewers-")
    field.fill("viewers-token")
    page.keyboard.press("Enter")
    page.locator("#connection[data-state=live]").wait_for()


def test_another_tab_does_not_have_the_token(serve, visit, fleet):
    server = serve(fleet, token="viewer-token")
    page = visit(server.url, live=False, errors=REFUSED)
    enter(page, "viewer-token")
    expect(page.locator("#connection")).to_have_text("live")
    other = page.context.new_page()
    other.goto(server.url)
    expect(other.locator("#token")).to_be_visible()


def test_a_page_says_that_its_hub_is_gone_and_returns_with_it(serve, visit, fleet):
    server = serve(fleet)
    page = visit(server.url, errors=BROKEN)
    server.stop()
    expect(page.locator("#connection")).to_contain_text("disconnected, trying again · shown as of")
    expect(page.locator("#figures")).to_have_css("filter", "grayscale(1)")
    assert page.locator(".rows [role=row]:visible").count() > 5
    other = MadeFleet(3, seed=8)
    server.fleet = other
    server.start()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#place")).to_contain_text(other.lineage)
    expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "4")
    server.tick()
    expect(version(page)).to_have_text(str(other.version))


def test_a_page_shows_why_a_hub_refuses_it_and_tries_again(serve, visit, fleet):
    server = serve(fleet)
    server.busy = "100 viewers follow this hub already; close a page"
    page = visit(server.url, live=False, errors=("503",))
    expect(page.locator("#connection")).to_have_text(f"disconnected, trying again · {server.busy}")
    server.busy = ""
    expect(page.locator("#connection")).to_have_text("live")


def test_a_download_from_a_hub_that_is_gone_says_so(serve, visit, fleet):
    server = serve(fleet)
    page = visit(server.url, errors=("ERR_", "net::"))
    server.stop()
    expect(page.locator("#connection")).to_contain_text("disconnected")
    page.get_by_role("link", name="Newest model").click()
    expect(page.locator("#toast")).to_contain_text("No answer from the hub")


def test_an_order_to_a_hub_that_is_gone_says_so(serve, visit, fleet):
    server = serve(fleet)
    page = visit(f"{server.url}#device=barn-2", errors=BROKEN)
    button = page.get_by_role("button", name="Quarantine", exact=True)
    expect(button).to_be_visible()
    server.stop()
    expect(page.locator("#connection")).to_contain_text("disconnected")
    button.click()
    expect(page.locator("#toast")).to_have_text("No answer from the hub; try again once the page is live")


def test_updates_that_do_not_follow_each_other_lead_to_a_whole_one(server, visit, fleet):
    page = visit(server.url, errors=("Error: update 3 follows 2, but this page has 1",))
    fleet.tick()  # the page misses this one
    server.tick()
    expect(version(page)).to_have_text(str(fleet.version))
    expect(page.locator("#connection")).to_have_text("live")


def test_a_connection_on_which_nothing_arrives_is_replaced(server, visit, fleet):
    page = visit(server.url, clock=True)
    fleet.tick()
    page.clock.fast_forward(14_000)
    expect(page.locator("#connection")).to_have_text("live")
    page.clock.fast_forward(2_000)
    page.clock.run_for(2_000)
    expect(version(page)).to_have_text(str(fleet.version))
    expect(page.locator("#connection")).to_have_text("live")


def test_a_hidden_page_stops_following_after_a_minute_until_it_is_visible(server, visit):
    page = visit(server.url, clock=True)
    hide = "isHidden => { Object.defineProperty(document, 'hidden', { configurable: true, value: isHidden }); }"
    page.evaluate(hide, True)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    for _ in range(5):
        page.clock.fast_forward(11_000)
        server.tick()
        expect(version(page)).to_have_text(str(server.fleet.version))
    page.clock.fast_forward(6_000)
    expect(page.locator("#connection")).to_contain_text("paused while hidden")
    while server.viewers:
        server.tick()
    page.evaluate(hide, False)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#connection")).to_have_text("live")
    assert server.viewers == 1


def test_a_closed_page_costs_the_hub_nothing(server, page, fleet):
    assert server.viewers == 1
    page.close()
    while server.viewers:
        server.tick()  # the server notices a broken connection when it writes
    assert server.viewers == 0
