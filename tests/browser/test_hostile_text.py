"""Whatever devices and peers call themselves, the page shows it as text, in its place."""

import json
from pathlib import Path

import pytest

import edgeasync
from edgeasync.cli.output import visible
from edgeasync.core.hub.attention import duration
from edgeasync.protocol.feed import PendingKey
from tests.browser.conftest import DESKTOP, PHONE
from tests.support.browser.made_fleet import MadeFleet

expect = pytest.importorskip("playwright.sync_api").expect

HOSTILE = {
    "script": "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>",
    "terminal": "a\x1b[31mred\x1b]0;title\x07\x00",
    "bidi": "abc\u202egnp.exe\u2066\u200f",
    "hebrew": "\u05e9\u05dc\u05d5\u05dd-7",
    "long": "x" * 10_000,
    "marks": "Z" + "\u0351" * 400,
    "lines": "one\ntwo\u2028three",
    "surrogates": "emoji \U0001f600 " + "\U0001f600" * 200,
    "address": "javascript:window.broken = 1",
    "fragment": "a/b?c#d%zz",
}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_text_of_devices_is_shown_harmlessly_in_every_panel(size, serve, visit):
    fleet = MadeFleet(6)
    for text in HOSTILE.values():
        fleet.add(text, machine=text, software=text, why=text, pace_percent=0, state="paused", pace_reason=text)
        fleet.change(text, last_error=text, last_error_s=1.0)
        fleet.report("alarm", text, text)
        fleet.report(text, text, text)
    fleet.unseen = list(HOSTILE.values())
    fleet.disk_trouble = HOSTILE["script"] + HOSTILE["long"]
    fleet.denied = dict.fromkeys(HOSTILE.values(), 1)
    fleet.pending = [PendingKey(text, text, 0, refused=False) for text in HOSTILE.values()]
    page = visit(serve(fleet).url, size=size)
    for text in [text for text in HOSTILE.values() if len(text) < 1000]:  # a longer address is refused
        page.evaluate("text => { location.hash = `device=${encodeURIComponent(text)}`; }", text)
        title = page.locator("#device-title")
        expect(title).to_have_text(shortened(text, 100), use_inner_text=False)
        expect(page.locator("#device dl").first).to_be_visible()
        check(page, size)
        page.keyboard.press("Escape")
    page.get_by_role("searchbox").fill("<script>")
    expect(page.locator("#shown")).to_have_text("1 of 16")
    check(page, size)


def shortened(text, length):
    """Return a text as the page shows it at a length in UTF-16, with the white space that locators see."""
    units = text.encode("utf-16-le")
    cut = text if len(units) <= 2 * length else units[: 2 * length].decode("utf-16-le", "ignore") + "…"
    return " ".join(visible(cut).split())


def check(page, size):
    """Check that nothing ran, that no character acts on its surroundings, and that nothing is too wide."""
    assert page.evaluate("window.broken") is None
    assert page.locator("main script, main img, aside script, aside img").count() == 0
    shown = page.locator("body").inner_text()
    assert [one for one in shown if not one.isprintable() and one not in "\n\t\xa0"] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert {row["height"] for row in page.locator(".rows [role=row]:visible").evaluate_all(BOXES)} == {30}


def test_the_page_never_parses_text_as_markup():
    for path in (Path(edgeasync.__file__).parent / "web/page").glob("*.js"):
        code = path.read_text("utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in code, path.name


BOXES = "rows => rows.map(row => ({ height: row.getBoundingClientRect().height }))"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_the_page_escapes_as_the_terminal_does(text, page):
    shown = page.evaluate("async text => (await import('/text.js')).visible(text)", text)
    assert shown == visible(text)


def test_lone_surrogates_break_nothing(page):
    lone = json.loads('"\\ud800x"')
    assert page.evaluate("async text => (await import('/text.js')).visible(text)", lone) == "\\ud800x"
    assert page.evaluate("async text => (await import('/dom.js')).deviceHref(text)", lone) == "#device=%EF%BF%BDx"


NUMBERS = [
    (0.0, "0"),
    (0.00024, "2.4e-4"),
    (1e-9, "1e-9"),
    (0.05, "0.05"),
    (2.3456, "2.35"),
    (123456.0, "123,456"),
    (2_586_123.0, "2.59e6"),
]


@pytest.mark.parametrize(("value", "shown"), NUMBERS)
def test_numbers_have_three_significant_digits(value, shown, page):
    assert page.evaluate("async value => (await import('/text.js')).significant(value)", value) == shown


@pytest.mark.parametrize(
    "value", [0.0, 0.25, 5.48, 42.0, 90.9, 119.0, 150.0, 600.0, 7199.0, 9000.0, 170_000.0, 200_000.0, 864_001.0]
)
def test_durations_are_written_as_in_the_terminal(value, page):
    shown = page.evaluate("async value => (await import('/text.js')).duration(value)", value)
    assert shown == duration(value)
