"""Unit files."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edgeasync.ops.service.unit import Unit
from tests.support.parts.services import FOLDER, PROGRAM

UNITS = [
    Unit(kind, PROGRAM, folder, user, name)
    for kind in ("agent", "hub", "peer")
    for folder, user, name in (
        (FOLDER, "edgeasync", ""),
        (FOLDER, "edgeasync", "edgeasync-second"),
        (Path("/srv/100%/edge async"), "edgeasync", ""),
        (Path("/home/pi/.local/share/edgeasync"), None, ""),
    )
]

every_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit.kind} {unit.folder} {unit.user}")


@pytest.mark.gate  # needs systemd-analyze
@every_unit
def test_systemd_has_nothing_to_say_about_a_unit(unit, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    file = tmp_path / unit.file
    file.write_text(unit.text())
    of_user = ["--user"] if unit.user is None else []
    told = subprocess.run(
        ["systemd-analyze", *of_user, "verify", str(file)], capture_output=True, text=True, check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (told.returncode, told.stdout + told.stderr) == (0, "")


@pytest.mark.gate  # needs systemd-analyze
@pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if unit.user], ids=lambda unit: f"{unit.kind} {unit.folder}"
)
def test_a_unit_of_the_machine_gives_up_what_it_does_not_need(unit, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    file = tmp_path / unit.file
    file.write_text(unit.text())
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(file)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_peer_waits_for_no_next_run():
    agent, peer = (set(Unit(kind, PROGRAM, FOLDER).text().splitlines()) for kind in ("agent", "peer"))
    assert peer - agent == {
        "Description=edgeasync peer", f"ExecStart={PROGRAM} peer peer.toml", "Restart=on-failure",
    }  # fmt: skip
