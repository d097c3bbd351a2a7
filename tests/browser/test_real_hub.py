"""The page of real hubs with real devices, over the hub's own server."""

from pathlib import Path

import pytest

from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import HubKeys, fingerprint
from edgeasync.web.tokens import PageTokens
from tests.support.programs.processes import Commands, free_address
from tests.support.security.keyed import start_hub

expect = pytest.importorskip("playwright.sync_api").expect

pytestmark = pytest.mark.process

DEVICES = ("pump-1", "pump-2", "barn-1")
LOGGED = ("401", "404", "503", "ERR_", "net::")
"""Words in the browser's log lines of requests that the hub refuses, or cannot answer while it is gone."""


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path, forks=True) as commands:
        yield commands


def start_page(commands, hub):
    """Return the URL of a hub's page, and its tokens."""
    url, _, folder = hub.wait_for("page")["detail"].partition("; the tokens are in ")
    return url, PageTokens.open(commands.folder / folder)


def version(page):
    """Return the version that the page shows."""
    return int(
        page.locator("#figures > div", has_text="version").locator("dd").first.inner_text().replace(",", "")
    )


def wait_for_progress(page):
    """Wait until the page shows a newer version."""
    before = page.locator("#figures > div", has_text="version").locator("dd").first
    expect(before).not_to_have_text(before.inner_text())


def enter_token(page, token):
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Continue").click()


def test_a_fleet_is_followed_through_a_quarantine_and_a_kill_of_its_hub(commands, visit):
    flags = ("--bind", free_address(), "--page", free_address().removeprefix("tcp://"))
    settings = commands.settings()
    hub, address = commands.hub(settings, *flags)
    url, tokens = start_page(commands, hub)
    for name in DEVICES:
        commands.agent(address, name)
    page = visit(url, errors=LOGGED)
    expect(page.locator("#states")).to_contain_text("3 training")
    wait_for_progress(page)
    expect(page.locator("#chart canvas")).to_have_count(1)
    expect(page.locator("#event-list")).to_contain_text("joined")

    page.get_by_role("gridcell", name="barn-1", exact=True).click()
    expect(page.locator("#device dl > div", has_text="address").locator("dd")).to_have_text("127.0.0.1")
    page.get_by_role("button", name="Quarantine", exact=True).click()
    enter_token(page, tokens.operator)
    expect(page.locator("#toast")).to_have_text("barn-1: quarantined")
    expect(page.locator("#attention-list")).to_contain_text("barn-1")
    expect(page.locator("#states")).to_contain_text("1 quarantined")
    page.get_by_role("button", name="Release", exact=True).click()
    expect(page.locator("#states")).not_to_contain_text("quarantined")
    page.keyboard.press("Escape")

    hub.kill()
    expect(page.locator("#connection")).to_contain_text("disconnected")
    known = version(page)
    hub, _ = commands.hub(settings, *flags)
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#states")).to_contain_text("3 training")
    wait_for_progress(page)
    assert version(page) >= known
    with page.expect_download() as download:
        page.get_by_role("link", name="Newest model").click()
    assert download.value.suggested_filename == "model.safetensors"
    assert Path(download.value.path()).read_bytes()


def test_a_device_that_knocks_is_let_in_on_the_page(commands, visit, tmp_path):
    keys = HubKeys.init(tmp_path / "keys")
    hub, address = start_hub(commands, keys, "--knocking", "--page", "127.0.0.1:*")
    url, tokens = start_page(commands, hub)
    page = visit(url, errors=LOGGED)
    expect(page.locator("#no-pending")).to_be_visible()
    agent = commands.agent(address, "pi-1", "--hub-key", keys.pair().public.hex())
    agent.wait_for("waiting")
    shown = fingerprint(DeviceKeys(commands.folder / "pi-1").own().public)
    expect(page.locator("#pending code")).to_have_text([shown])
    page.get_by_role("textbox", name=f"Name of the device with key {shown}").fill("pi-1")
    page.keyboard.press("Enter")
    enter_token(page, tokens.operator)
    expect(page.locator("#toast")).to_have_text("pi-1 may join")
    agent.wait_for("joined")
    expect(page.locator("#states")).to_contain_text("1 training")
    expect(page.locator("#no-pending")).to_be_visible()


def test_a_page_whose_token_is_revoked_asks_for_another(commands, visit):
    hub, _ = commands.hub(commands.settings(), "--page", "127.0.0.1:*", "--page-hosts", "hub.example.org")
    url, tokens = start_page(commands, hub)
    page = visit(url.replace("hub.example.org", "127.0.0.1"), live=False, errors=LOGGED)
    enter_token(page, tokens.viewer)
    expect(page.locator("#connection")).to_have_text("live")
    tokens.files[0].unlink()
    expect(page.get_by_label("Token", exact=True)).to_be_visible()
    enter_token(page, tokens.operator)
    expect(page.locator("#connection")).to_have_text("live")
