"""The table of devices: rows in view only, filter, order, and the keyboard."""

import pytest

from tests.support.browser.made_fleet import MadeFleet

expect = pytest.importorskip("playwright.sync_api").expect

NAMES = """
rows => rows.filter(row => row.offsetParent).sort((one, other) => one.ariaRowIndex - other.ariaRowIndex)
    .map(row => row.querySelector('a').textContent)
"""
FOCUS = """
() => {
    const at = document.activeElement;
    return [at.closest('[id]')?.id ?? '', getComputedStyle(at).outlineStyle];
}
"""


def names(page):
    """Return the devices whose rows exist, from the top."""
    return page.locator(".rows [role=row]").evaluate_all(NAMES)


def heading(page, name):
    return page.get_by_role("columnheader", name=name, exact=True)


def search(page, text):
    page.get_by_role("searchbox").fill(text)


@pytest.fixture
def crowd(serve, visit):
    """Return the page of ten thousand devices."""
    return visit(serve(MadeFleet(10_000)).url)


def test_of_ten_thousand_devices_only_the_rows_in_view_exist(crowd):
    grid = crowd.get_by_role("grid")
    expect(grid).to_have_attribute("aria-rowcount", "10001")
    assert crowd.locator(".rows [role=row]").count() < 60
    grid.evaluate("grid => { grid.scrollTop = grid.scrollHeight; }")
    last = crowd.locator(".rows [aria-rowindex='10001']")
    expect(last).to_be_visible()
    expect(last.get_by_role("link")).to_have_text("silo-1667")
    assert crowd.locator(".rows [role=row]").count() < 60
    assert crowd.locator("body *").count() < 3000


def test_every_word_of_the_filter_must_match(crowd):
    search(crowd, "silo  ZERO paused")
    expect(crowd.locator("#shown")).to_have_text("17 of 10,000")
    assert all(name.startswith("silo") for name in names(crowd))
    search(crowd, "no such device")
    expect(crowd.locator("#no-rows")).to_have_text("No device matches.")
    crowd.keyboard.press("Escape")
    expect(crowd.locator("#shown")).to_have_text("")


def test_the_filter_also_searches_errors_and_reasons(page):
    search(page, "stopped by a signal")
    expect(page.locator("#shown")).to_have_text("1 of 60")
    search(page, "slow link")
    expect(page.locator("#shown")).to_have_text("1 of 60")


def test_counts_by_state_select(page, fleet):
    chips = page.locator("#states button")
    lost = chips.filter(has_text="lost")
    expect(lost).to_have_text("1 lost")
    lost.click()
    expect(lost).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#shown")).to_have_text("1 of 60")
    lost.click()
    expect(page.locator("#shown")).to_have_text("")
    chips.filter(has_text="need attention").click()
    expect(page.locator("#shown")).to_have_text(f"{page.locator('#attention-list li').count()} of 60")


def test_devices_that_need_attention_come_first_then_all_by_name(page):
    urgent = page.locator("#attention-list .name").all_inner_texts()
    shown = names(page)
    assert shown[: len(urgent)] == urgent
    assert shown[len(urgent)] == "barn-1"


def test_a_heading_sorts_both_ways_and_then_by_attention_again(page, fleet):
    loss = heading(page, "loss")
    by_attention = names(page)
    loss.get_by_role("button").click()
    expect(loss).to_have_attribute("aria-sort", "descending")
    known = sorted((device.loss, name) for name, device in fleet.devices.items() if device.loss is not None)
    assert names(page)[:5] == [name for _, name in reversed(known)][:5]
    loss.get_by_role("button").click()
    expect(loss).to_have_attribute("aria-sort", "ascending")
    assert names(page)[1:5] == [name for _, name in known][:4]  # the first one has not reported a loss
    loss.get_by_role("button").click()
    expect(loss).to_have_attribute("aria-sort", "none")
    assert names(page) == by_attention


def test_names_are_sorted_by_their_numbers(page):
    heading(page, "device").get_by_role("button").click()
    search(page, "greenhouse")
    assert names(page) == [f"greenhouse-{number}" for number in range(1, 11)]


def test_an_update_moves_a_device_in_the_order(server, page, fleet):
    heading(page, "loss").get_by_role("button").click()
    page.mouse.move(0, 0)
    fleet.change("pump-3", loss=99.0)
    server.tick()
    expect(page.locator(".rows [aria-rowindex='2'] a")).to_have_text("pump-3")


def test_devices_that_the_hub_forgets_disappear(server, page, fleet):
    search(page, "pump-3")
    expect(page.locator("#shown")).to_have_text("1 of 60")
    page.mouse.move(0, 0)
    fleet.forget("pump-3")
    server.tick()
    expect(page.locator("#shown")).to_have_text("0 of 59")


def test_the_keyboard_filters_chooses_opens_and_closes(page):
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("greenhouse")
    page.keyboard.press("ArrowDown")
    grid = page.get_by_role("grid")
    expect(grid).to_be_focused()
    for key in ("End", "Home", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    chosen = page.locator(".rows [aria-selected=true]:visible")
    expect(chosen).to_have_attribute("aria-rowindex", "4")
    assert grid.get_attribute("aria-activedescendant") == chosen.get_attribute("id")
    name = chosen.get_by_role("link").inner_text()
    page.keyboard.press("Enter")
    expect(page.locator("#device-title")).to_have_text(name)
    expect(page.locator("#device-title")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#device")).to_be_hidden()
    expect(grid).to_be_focused()


def test_the_chosen_row_stays_in_view_and_chosen(crowd):
    crowd.get_by_role("grid").focus()
    crowd.keyboard.press("ArrowDown")
    crowd.keyboard.press("End")
    expect(crowd.locator(".rows [aria-selected=true]:visible")).to_be_in_viewport()
    expect(crowd.locator(".rows [aria-selected=true]:visible")).to_have_attribute("aria-rowindex", "10001")
    crowd.keyboard.press("PageUp")
    expect(crowd.locator(".rows [aria-selected=true]:visible")).to_be_in_viewport()


def test_everything_is_reached_with_the_tab_key_and_shows_its_focus(page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the filter")).to_be_focused()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        place, outline = page.evaluate(FOCUS)
        assert not place or outline == "solid", place
        reached.add(place)
    wanted = {
        "newest",
        "best",
        "theme",
        "by-time",
        "by-version",
        "log-scale",
        "filter",
        "states",
        "table",
        "attention-list",
    }
    assert wanted | {"all-events", "problems", "event-list"} <= reached
