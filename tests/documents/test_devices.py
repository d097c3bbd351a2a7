"""devices/ and the pages show the units that the command writes, and all name the same user and folders."""

import re
import tomllib
from pathlib import Path

import pytest

from edgeasync.ops.service.installation import FOLDER, PROGRAM
from edgeasync.ops.service.unit import Unit

ROOT = Path(__file__).parents[2]
UNITS = {"edgeasync-agent.service": "docs/devices/install.md", "edgeasync-hub.service": "docs/operate/deploy.md"}


@pytest.mark.parametrize("name", UNITS)
def test_a_page_shows_the_unit_as_it_is(name):
    shown = re.findall(r"```ini\n(.*?)```", (ROOT / UNITS[name]).read_text("utf-8"), re.DOTALL)
    assert shown == [(ROOT / "devices" / name).read_text("utf-8")]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_what_the_command_writes(name):
    kind = name.removeprefix("edgeasync-").removesuffix(".service")
    assert (ROOT / "devices" / name).read_text("utf-8") == Unit(kind, PROGRAM, FOLDER).text()


@pytest.mark.parametrize("name", UNITS)
def test_a_page_makes_what_its_unit_needs(name):
    unit, page = ((ROOT / path).read_text("utf-8") for path in (f"devices/{name}", UNITS[name]))
    user, folder = (re.search(rf"^{key}=(.+)$", unit, re.MULTILINE)[1] for key in ("User", "WorkingDirectory"))
    program, kind, settings, *_ = re.search(r"^ExecStart=(.+)$", unit, re.MULTILINE)[1].split()
    assert f"install -o {user} " in page
    assert f"{folder}/" in page
    assert f"{program} service install {kind}" in page
    assert settings == f"{kind}.toml"


def test_the_installer_of_the_boards_is_the_packages():
    assert (ROOT / "devices/install.sh").resolve() == ROOT / "edgeasync/ops/service/install.sh"


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


def test_the_page_shows_the_inventory_as_it_is():
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/devices/twenty.md").read_text("utf-8"), re.DOTALL)
    example = (ROOT / "devices/ansible/inventory.example.yml").read_text("utf-8")
    assert shown == re.sub(r"^#.*\n", "", example, flags=re.MULTILINE)
