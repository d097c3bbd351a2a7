"""Each panel of the page shows what the feed says, and follows it."""

import itertools

import msgspec
import pytest

from edgeasync.core.hub.attention import find_attention
from edgeasync.protocol.status import ActiveAlarm
from tests.browser.conftest import DESKTOP, PHONE
from tests.support.browser.made_fleet import MadeFleet, pending_key

expect = pytest.importorskip("playwright.sync_api").expect

REFUSED = ("401", "403")
"""Words in the browser's log line of an answer that asks for a token."""


def figures(page):
    """Return the totals at the top, by name."""
    return {item.split("\n")[0]: item.split("\n")[1] for item in page.locator("#figures > div").all_inner_texts()}


def facts(page):
    """Return what the view of one device shows, by name."""
    items = page.locator("#device dl > div")
    return dict(zip(items.locator("dt").all_inner_texts(), items.locator("dd").all_inner_texts(), strict=True))


def test_totals_name_the_hub_and_follow_it(server, page, fleet):
    expect(page.locator("#place")).to_have_text(f"{fleet.status().address} · lineage {fleet.lineage}")
    shown = figures(page)
    assert shown["version"] == str(fleet.version)
    assert shown["updates"] == str(fleet.updates)
    assert shown["period"] == "215 ms"
    server.tick()
    version = page.locator("#figures > div", has_text="version").locator("dd").first
    expect(version).to_have_text(str(fleet.version))
    expect(page).to_have_title(f"({len(find_attention(fleet.status()))}) edgeasync")


def test_devices_that_need_attention_are_listed_worst_first_with_the_terminals_words(page, fleet):
    found = find_attention(fleet.status())
    assert {one.reason for one in found} >= {
        "lost",
        "quarantined",
        "warned",
        "stuck",
        "paused",
        "rejected",
        "slow_link",
        "slow",
    }
    assert page.locator("#attention-list .name").all_inner_texts() == [one.device for one in found]
    assert page.locator("#attention-list .words").all_inner_texts() == [one.words for one in found]
    expect(page.locator("#attention-count")).to_have_text(str(len(found)))


def test_the_reasons_of_eight_devices_fit_a_small_screen(serve, visit):
    fleet = MadeFleet(30)
    cause = (
        "its updates are 585,000 times as long as usual: check the scale of its inputs and its learning rate; "
        "the model does not fit its data (loss 97.7, the fleet's 0.0833): check labels and inputs"
    )
    fleet.alarms = [ActiveAlarm(name, cause, "alert", 92.0, []) for name in list(fleet.devices)[:2]]
    page = visit(serve(fleet).url)
    shown = page.locator("#attention-list")
    eighth, room = shown.locator("li").nth(7).bounding_box(), shown.bounding_box()
    assert eighth["y"] + eighth["height"] <= room["y"] + room["height"]


def test_the_keyboards_place_in_the_list_survives_updates(server, page, fleet):
    words = page.locator("#attention-list .words").first
    before = words.inner_text()
    page.locator("#attention-list a").first.focus()
    fleet.time += 7200.0
    server.tick()
    expect(words).not_to_have_text(before)
    expect(page.locator("#attention-list a").first).to_be_focused()


def test_the_keyboards_place_outlives_its_item(server, page, fleet):
    link = page.locator("#attention-list a", has_text="gate-5")
    link.focus()
    fleet.change("gate-5", updates_rejected={})
    server.tick()
    expect(link).to_have_count(0)
    expect(page.locator("#attention-list")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#attention-list a").first).to_be_focused()


def test_a_fleet_without_trouble_needs_no_attention(serve, visit):
    page = visit(serve(MadeFleet(0)).url)
    expect(page.locator("#no-attention")).to_have_text("Nobody.")
    expect(page.locator("#no-rows")).to_have_text("No device has joined yet.")
    expect(page.locator("#attention-list")).to_be_hidden()
    assert page.title() == "edgeasync"


def test_events_are_listed_newest_first_and_problems_can_be_selected(server, page, fleet):
    fleet.report("not_writing", "", "No space left on device")
    fleet.report("joined", "new-1", "start 1")
    server.tick()
    names = page.locator("#event-list .event")
    expect(names.first).to_have_text("joined")
    expect(names.nth(1)).to_have_text("not writing")
    page.get_by_role("button", name="problems").click()
    expect(names.first).to_have_text("not writing")
    assert "joined" not in names.all_inner_texts()
    page.get_by_role("button", name="all", exact=True).click()
    expect(names.first).to_have_text("joined")


def test_the_chart_shows_losses_over_time_or_versions(server, page, fleet):
    chart = page.locator("#chart")
    expect(chart.locator("canvas")).to_have_count(1)
    expect(page.locator("#learning-words")).to_contain_text("lower than")
    legend = chart.locator(".u-legend tr")
    expect(legend).to_have_count(4)
    page.get_by_role("button", name="version", exact=True).click()
    expect(legend.first).to_contain_text(f"version{fleet.version}")
    server.tick()
    expect(legend.first).to_contain_text(f"version{fleet.version}")
    log = page.get_by_role("button", name="log", exact=True)
    expect(log).to_have_attribute("aria-pressed", "true")
    log.click()
    expect(log).to_have_attribute("aria-pressed", "false")


def test_the_chart_shows_the_accuracy_once_there_is_one(serve, visit):
    fleet = MadeFleet(3)
    fleet.history = [msgspec.structs.replace(point, evaluation_accuracy=None) for point in fleet.history[:5]]
    server = serve(fleet)
    page = visit(server.url)
    expect(page.locator("#chart .u-legend tr:visible")).to_have_count(3)
    while fleet.history[-1].evaluation_accuracy is None:
        server.tick()
    expect(page.locator("#chart .u-legend tr:visible")).to_have_count(4)
    expect(page.locator("#chart canvas")).to_have_count(1)


def replaced(fleet, **values):
    return [msgspec.structs.replace(point, **values) for point in fleet.history]


HISTORIES = {
    "perfect": lambda fleet: replaced(fleet, evaluation_accuracy=1.0),
    "one point": lambda fleet: fleet.history[:1],
    "one version": lambda fleet: replaced(fleet, version=0),
    "one moment": lambda fleet: replaced(fleet, time=fleet.time),
    "equal losses": lambda fleet: replaced(fleet, loss=0.5, evaluation_loss=0.5),
    "no loss": lambda fleet: replaced(fleet, loss=0.0, evaluation_loss=0.0),
    "rewards": lambda fleet: replaced(fleet, loss=-3.0),
    "huge losses": lambda fleet: [*fleet.history, *replaced(fleet, loss=1.7e308, evaluation_loss=-1.7e308)],
    "tiny losses": lambda fleet: [*fleet.history, *replaced(fleet, loss=5e-324)],
}


@pytest.mark.parametrize("make", HISTORIES.values(), ids=HISTORIES)
def test_the_chart_shows_any_history(serve, visit, make):
    fleet = MadeFleet(3)
    fleet.history = make(fleet)
    page = visit(serve(fleet).url)
    for name in ("version", "time", "log", "log"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator("#chart canvas")).to_have_count(1)


@pytest.mark.parametrize(("size", "seconds"), [(DESKTOP, 70), (DESKTOP, 75), (DESKTOP, 240), (PHONE, 240)])
def test_times_below_the_chart_do_not_touch(size, seconds, serve, visit):
    fleet = MadeFleet(3)
    fleet.history = fleet.history[-seconds:]
    page = visit(serve(fleet).url, size=size)
    page.evaluate(
        "() => { const old = uPlot; window.uPlot = function (...all) { return (window.plot = new old(...all)) } }"
    )
    for chosen in ("version", "time"):
        page.get_by_role("button", name=chosen, exact=True).click()
    places = page.evaluate("() => plot.axes[0]._splits.map((time) => plot.valToPos(time, 'x'))")
    longest = max(map(len, page.evaluate("() => plot.axes[0]._values")))
    assert len(places) > 2
    assert min(right - left for left, right in itertools.pairwise(places)) >= 8 + 6.5 * longest


def test_a_run_without_updates_has_no_chart(serve, visit):
    fleet = MadeFleet(3)
    fleet.history.clear()
    page = visit(serve(fleet).url)
    expect(page.locator("#no-chart")).to_be_visible()
    expect(page.locator("#chart")).to_be_hidden()


def test_troubles_of_the_whole_fleet_are_said_at_the_top(serve, visit, fleet):
    fleet.disk_trouble = "disk full"
    cause = "the loss is 4 times its lowest"
    fleet.alarms.append(ActiveAlarm("", cause, "rollback", 90.0, []))
    page = visit(serve(fleet).url)
    assert page.locator("#notices li").all_inner_texts() == [
        "cannot write the run's folder: disk full; the hub accepts no updates until it can write again",
        f"alarm: fleet, for 90 s: {cause}; rolled back to an earlier model, at half the hub's learning rate",
    ]


def test_one_device_is_opened_from_the_table_and_follows_the_feed(server, page, fleet):
    name = "silo-4"
    page.get_by_role("searchbox").fill(name)
    page.get_by_role("gridcell", name=name, exact=True).click()
    expect(page.locator("#device-title")).to_have_text(name)
    expect(page.locator("#device dl > div").first).to_be_visible()
    assert facts(page)["machine"] == f"{fleet.devices[name].machine}, edgeasync 0.1.0"
    assert page.url.endswith(f"#device={name}")
    fleet.change(name, temperature_c=71.0)
    server.tick()
    expect(page.locator("#device dl > div", has_text="temperature").locator("dd")).to_have_text("71 C")
    page.go_back()
    expect(page.locator("#device")).to_be_hidden()


def test_a_link_to_a_device_opens_it(server, visit, fleet):
    lost = next(one for one in find_attention(fleet.status()) if one.reason == "lost")
    page = visit(f"{server.url}#device={lost.device}")
    expect(page.locator("#device .notice")).to_have_text(lost.words)
    assert facts(page)["left"] == "no message for 15 s"
    expect(page.locator("#device ol .event").first).to_have_text("lost")


def test_a_device_that_never_came_and_an_unknown_one_say_so(serve, visit):
    fleet = MadeFleet(3)
    fleet.unseen = ["barn-9"]
    server = serve(fleet)
    page = visit(server.url, errors=("404",))
    page.locator("#attention-list a", has_text="barn-9").click()
    expect(page.locator("#device .notice")).to_contain_text("it has not connected in this run")
    expect(page.locator("#device dl > div")).to_have_count(0)
    page.goto(f"{server.url}#device=nobody")
    expect(page.locator("#device .notice")).to_have_text("nobody: the hub knows no such device")


def test_pending_keys_are_accepted_and_refused_with_the_operators_token(serve, visit, fleet):
    fleet.pending = [pending_key(1), pending_key(2), pending_key(3, refused=True)]
    fleet.denied = {"unknown_key": 3}
    server = serve(fleet, operator="operator-token")
    page = visit(server.url, errors=REFUSED)
    expect(page.locator("#pending-count")).to_have_text("2")
    assert page.locator("#pending code").all_inner_texts() == [one.fingerprint for one in fleet.pending[:2]]
    expect(page.locator("#denied")).to_have_text("1 refused keys · refused connections: 3 with an unknown key")
    item = page.locator("#pending-list li").first
    item.get_by_role("textbox").fill("barn-1")
    item.get_by_role("button", name="Accept").click()
    expect(page.locator("#token-words")).to_have_text("this needs the operator's token, from run/tokens/operator")
    page.get_by_label("Token", exact=True).fill("operator-token")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#toast")).to_have_text("barn-1 may join")
    page.locator("#pending-list li").nth(1).get_by_role("button", name="Refuse").click()
    expect(page.locator("#toast")).to_contain_text("refused")
    first, second = fleet.pending[0].fingerprint, fleet.pending[1].fingerprint
    assert server.orders == [
        (f"/api/pending/{first}/accept", {"name": "barn-1"}),
        (f"/api/pending/{second}/refuse", {}),
    ]
    fleet.pending = [pending_key(3)]
    server.tick()
    expect(page.locator("#pending code")).to_have_text([fleet.pending[0].fingerprint])


def test_what_was_typed_for_a_pending_key_survives_updates(serve, visit, fleet):
    fleet.pending = [pending_key(1), pending_key(2)]
    server = serve(fleet)
    page = visit(server.url)
    name = page.locator("#pending-list li").nth(1).get_by_role("textbox")
    name.fill("barn-2")
    fleet.pending = [pending_key(2), pending_key(3)]
    server.tick()
    expect(page.locator("#pending code")).to_have_text([one.fingerprint for one in fleet.pending])
    expect(page.locator("#pending-list li").first.get_by_role("textbox")).to_have_value("barn-2")


def test_a_hub_without_keys_has_no_list_of_them(page):
    expect(page.locator("#pending")).to_be_hidden()


def test_an_operator_quarantines_a_device(serve, visit, fleet):
    server = serve(fleet, operator="operator-token")
    page = visit(f"{server.url}#device=barn-2", errors=REFUSED)
    button = page.get_by_role("button", name="Quarantine", exact=True)
    button.click()
    page.get_by_role("button", name="Cancel").click()
    expect(button).to_be_enabled()
    assert server.orders == []
    button.click()
    page.get_by_label("Token", exact=True).fill("operator-token")
    page.keyboard.press("Enter")
    expect(page.locator("#toast")).to_have_text("barn-2: quarantined")
    assert server.orders == [("/api/devices/barn-2/quarantine", {})]


@pytest.mark.parametrize("token", ["", "viewer-token"])
def test_models_are_downloaded_with_and_without_a_token(token, serve, visit, fleet):
    page = visit(serve(fleet, token=token).url, live=not token, errors=REFUSED)
    if token:
        page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("button", name="Continue").click()
    for which in ("newest", "best"):
        with page.expect_download() as download:
            page.get_by_role("link", name=f"{which} model").click()
        assert download.value.suggested_filename == f"{which}-{fleet.version}.safetensors"
        assert download.value.path().read_bytes() == b"model"


def test_a_chosen_theme_is_kept(server, visit):
    page = visit(server.url, scheme="light")
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="light and dark").click()
    dark = page.evaluate(background)
    page.reload()
    assert dark == page.evaluate(background) != light
    page.get_by_role("button", name="light and dark").click()
    assert page.evaluate(background) == light


def test_a_logarithmic_axis_has_labels_at_round_numbers_only(page):
    script = "async values => (await import('/chart.js')).fewDecades(null, values)"
    assert page.evaluate(script, [0.000145, 0.001, 0.005, 0.01, 10.0]) == [None, 0.001, None, 0.01, 10.0]
    assert page.evaluate(script, [0.07, 0.1, 0.2, 0.3, 0.5, 1.0]) == [None, 0.1, 0.2, None, 0.5, 1.0]
