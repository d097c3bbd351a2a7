"""A card that Imager has written: what `prepare.sh` puts there and, at size `nightly`, its first boot."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from edgeasync.durable.keys import HubKeys
from edgeasync.net.status import fetch_status
from tests.support.boards.card import USER_DATA, Card, write_boot
from tests.support.programs.processes import PATIENCE_S, until, write_data
from tests.support.size import repetitions

pytestmark = pytest.mark.process

CLONE = Path(__file__).parents[2]
PREPARE = CLONE / "devices/card/prepare.sh"
SETTINGS = '[throttle]\ntemperature_c_max = 75\n\n[agent]\ndata = "/var/lib/edgeasync/readings.npz"\n'


def prepare(*arguments):
    """Run `prepare.sh`; return what it printed, and its code."""
    told = subprocess.run(["sh", PREPARE, *arguments], capture_output=True, text=True, check=False)
    return told.stdout + told.stderr, told.returncode


@pytest.fixture
def things(tmp_path):
    """Return a card's boot partition, a bundle, settings and data, as `prepare.sh` takes them."""
    (tmp_path / "bundle").mkdir()
    shutil.copy(CLONE / "devices/install.sh", tmp_path / "bundle")
    (tmp_path / "agent.toml").write_text(SETTINGS)
    data = write_data(tmp_path / "greenhouse-1.npz")
    return write_boot(tmp_path / "boot"), tmp_path / "bundle", tmp_path / "agent.toml", data


def test_a_card_gets_all_that_its_first_boot_needs(things):
    boot = things[0]
    for token in ("edgeasync1_first-1", "edgeasync1_second_2"):  # a second time replaces the first
        told, code = prepare(*things, token)
        assert code == 0, told
        assert token not in told
        found = {str(path.relative_to(boot)) for path in boot.rglob("*") if path.is_file()}
        assert found == {
            "cmdline.txt", "meta-data", "user-data", "vendor-data", "edgeasync/agent.toml",
            "edgeasync/data/readings.npz", "edgeasync/first-boot.sh", "edgeasync/install.sh",
        }  # fmt: skip
        wanted = SETTINGS.replace("[agent]\n", f'[agent]\nenrol = "{token}"\n')
        assert (boot / "edgeasync/agent.toml").read_text() == wanted
    assert (boot / "vendor-data").read_text() == "#!/bin/sh\nexec sh /boot/firmware/edgeasync/first-boot.sh\n"
    assert (boot / "user-data").read_text() == USER_DATA


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda boot, bundle, settings, data: (boot / "meta-data").unlink(), "lacks cmdline.txt or meta-data"),
        (lambda boot, bundle, settings, data: (bundle / "install.sh").unlink(), "has no install.sh"),
        (lambda boot, bundle, settings, data: settings.unlink(), "cannot be read; pass the agent's settings file"),
        (lambda boot, bundle, settings, data: data.unlink(), "cannot be read; pass the board's data file"),
        (
            lambda boot, bundle, settings, data: settings.write_text('[agent]\ndata = "readings.npz"\n'),
            'has no line data = "/var/lib/edgeasync/FILE"',
        ),
        (
            lambda boot, bundle, settings, data: settings.write_text(f'{SETTINGS}enrol = "old"\n'),
            "already contains a token",
        ),
        (
            lambda boot, bundle, settings, data: (boot / "vendor-data").write_text("#cloud-config\n"),
            "vendor-data already exists",
        ),
        (
            lambda boot, bundle, settings, data: settings.write_text(f'{SETTINGS}enrol="old"\n'),
            "already contains a token",
        ),
        (
            lambda boot, bundle, settings, data: settings.write_text(f'{SETTINGS}hub_key = "00"\n'),
            "has a hub_key",
        ),
        (
            lambda boot, bundle, settings, data: settings.write_text(f'{SETTINGS}hub = "tcp://hub:5555"\n'),
            "names a hub, but the TOKEN already does; remove the line hub",
        ),
        (
            lambda boot, bundle, settings, data: settings.write_text(SETTINGS.replace(".npz", ".csv")),
            "is not a .csv file",
        ),
    ],
    ids=[
        "no card",
        "no bundle",
        "no settings",
        "no data",
        "data elsewhere",
        "two tokens",
        "vendor data",
        "two tokens without spaces",
        "a knock and a token",
        "a hub and a token",
        "data of another kind",
    ],
)
def test_a_mistake_is_told_before_anything_is_written(things, spoil, words):
    boot = things[0]
    spoil(*things)
    told, code = prepare(*things, "edgeasync1_token")
    assert code == 2
    assert words in told
    assert len(told.splitlines()) == 1
    assert not (boot / "edgeasync").exists()


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ('hub = "tcp://hub:5555"\ninsecure = false', "has no enrol, hub_key or insecure = true"),
        ("insecure = true", "does not name the hub"),
        ('hub_key = "00"', "does not name the hub"),
    ],
)
def test_a_card_by_which_no_hub_can_be_joined_is_not_made(things, way, words):
    things[2].write_text(f"{SETTINGS}{way}\n")
    told, code = prepare(*things)
    assert (code, len(told.splitlines())) == (2, 1)
    assert words in told
    assert not (things[0] / "edgeasync").exists()


@pytest.mark.parametrize("token", ["", 'edgeasync1_"\nhub = "tcp://elsewhere:5555', "an error message"])
def test_a_card_without_a_way_in_is_not_made(things, token):
    """The token is empty if the command that makes it has failed."""
    told, code = prepare(*things, token)
    assert code == 2
    assert "edgeasync keys enrol" in told
    assert not (things[0] / "edgeasync").exists()


def test_a_card_whose_settings_say_the_way_in_needs_no_token(things):
    hub = 'hub = "tcp://hub:5555"'
    for way in (f'{hub}\nhub_key = "00"', f"{hub}\ninsecure = true", 'enrol = "edgeasync1_own"'):
        things[2].write_text(f"{SETTINGS}{way}\n")
        told, code = prepare(*things)
        assert code == 0, told
        assert (things[0] / "edgeasync/agent.toml").read_text() == f"{SETTINGS}{way}\n"


if repetitions("cards that start for the first time"):

    def test_a_fresh_card_installs_itself_without_a_network_and_joins(commands):
        folder = commands.folder
        bundle, settings = folder / "bundle", folder / "agent.toml"
        told = commands.run("bundle", CLONE, "--platform", "x86", "--python", "3.13", "--out", bundle)
        assert told.returncode == 0, told.stderr
        settings.write_text(f"{SETTINGS}step_s_min = 0.01\n")
        data = write_data(folder / "greenhouse-1.npz")
        keys = HubKeys.init(folder / "keys")
        _, address = commands.hub(commands.settings(), "--keys", keys.folder)
        token = keys.issue_token("greenhouse-1", (address,), time.time(), valid_s=86_400.0).text()
        card = Card(folder)
        told, code = prepare(card.boot, bundle, settings, data, token)
        assert code == 0, told

        told = card.first_boot()
        assert "Valid schema /boot/firmware/user-data" in told
        assert re.search(r"install.sh: edgeasync .* is in /opt/edgeasync", told)
        assert told.splitlines()[-1] == "greenhouse-1", told
        assert (card.root / "root/of-imager").exists()  # what Imager wrote was done, too
        unit = card.root / "etc/systemd/system/edgeasync-agent.service"
        assert unit.read_text() == (CLONE / "devices/edgeasync-agent.service").read_text()
        left = {str(path.relative_to(card.boot)) for path in card.boot.rglob("*") if path.suffix != ".whl"}
        assert not left & {"edgeasync/agent.toml", "edgeasync/data"}

        boot = commands.start(
            "systemctl start edgeasync-agent; sleep infinity",
            under=card.enter(network=True), python="sh", program=("-c",),
        )  # fmt: skip

        def trains():
            devices = fetch_status(address, PATIENCE_S, keys.folder)["devices"]
            return [device["id"] for device in devices if device["updates_applied"]]

        assert until(trains, "an update of the board's") == ["greenhouse-1"]
        boot.kill()
