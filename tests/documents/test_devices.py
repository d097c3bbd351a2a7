"""The pages show the units that devices/ has, and units, pages and settings name the same user and folders."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = {"edgeasync-agent.service": "docs/devices/install.md", "edgeasync-hub.service": "docs/hub/deploy.md"}


@pytest.mark.parametrize("name", UNITS)
def test_a_page_shows_the_unit_as_it_is(name):
    shown = re.findall(r"```ini\n(.*?)```", (ROOT / UNITS[name]).read_text("utf-8"), re.DOTALL)
    assert shown == [(ROOT / "devices" / name).read_text("utf-8")]


@pytest.mark.parametrize("name", UNITS)
def test_a_page_makes_what_its_unit_needs(name):
    unit, page = ((ROOT / path).read_text("utf-8") for path in (f"devices/{name}", UNITS[name]))
    user, folder = (re.search(rf"^{key}=(.+)$", unit, re.MULTILINE)[1] for key in ("User", "WorkingDirectory"))
    program, _, settings, _ = re.search(r"^ExecStart=(.+)$", unit, re.MULTILINE)[1].split()
    assert f"--home-dir {folder} {user}" in page
    assert f"git clone URL {program.removesuffix('/.venv/bin/edgeasync')}" in page
    assert f"{folder}/{settings}" in page
    assert f"systemctl enable {name.removesuffix('.service')}" in page.replace("enable --now", "enable")


@pytest.mark.parametrize("name", UNITS)
def test_a_page_says_which_exit_codes_its_unit_does_not_restart_after(name):
    """These are the codes that a restart does not cure. Of an agent that is code 8 too: it has no key yet."""
    unit, page = ((ROOT / path).read_text("utf-8") for path in (f"devices/{name}", UNITS[name]))
    prevented = set(re.search(r"^RestartPreventExitStatus=(.+)$", unit, re.MULTILINE)[1].split())
    rows = re.findall(r"^\| ([0-9, ]+):[^|]*\| ([^|]*) \|", page, re.MULTILINE)
    down = {code for codes, what in rows for code in codes.split(", ") if what == "leaves it down"}
    assert down - {"0"} == prevented
    assert {"2", "3", "5", "8", "10"} <= prevented
    assert not {"1", "9", "11"} & prevented, "a disk has room again, and a key is let in"


@pytest.mark.parametrize("board", ["raspberry-pi", "jetson"])
def test_a_boards_data_lies_where_its_unit_may_read(board):
    settings = tomllib.loads((ROOT / f"devices/{board}.toml").read_text("utf-8"))
    assert settings["agent"]["data"].startswith("/var/lib/edgeasync/")
    assert "state" not in settings["agent"]  # the user's home holds it
