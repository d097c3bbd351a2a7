"""`devices/ansible` can be read; at size `nightly` it installs, upgrades and removes a fleet of two hosts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeasync.durable.keys import HubKeys
from tests.support.boards.hosts import Hosts
from tests.support.programs.processes import write_data
from tests.support.size import repetitions

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "devices/ansible"
BOARDS = ("greenhouse-1", "greenhouse-2")
PROGRAM = "/opt/edgeasync/current/bin/edgeasync"
VERSION = ROOT / "edgeasync/version.py"

pytest.importorskip("ansible", reason="ansible-core is missing")


def play(folder, playbook, *flags):
    """Run a playbook by the inventory of a folder; return what it printed, and its code."""
    inventory = folder / "inventory.yml"
    environment = {
        "HOME": str(folder), "PATH": os.environ["PATH"], "ANSIBLE_LOCALHOST_WARNING": "false", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    if path := os.environ.get("PYTHONPATH"):
        environment["PYTHONPATH"] = path
    told = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", inventory, FOLDER / playbook, *flags],
        capture_output=True, text=True, check=False, cwd=folder, env=environment,
    )  # fmt: skip
    return told.stdout + told.stderr, told.returncode


@pytest.mark.parametrize("playbook", ["agents.yml", "remove.yml"])
def test_a_playbook_can_be_read_with_the_inventory_of_the_example(tmp_path, playbook):
    shutil.copy(FOLDER / "inventory.example.yml", tmp_path / "inventory.yml")
    told, code = play(tmp_path, playbook, "--list-hosts")
    assert code == 0, told
    assert set(re.findall(r"greenhouse-\d+", told)) == {f"greenhouse-{number}" for number in range(1, 21)}


def test_nobody_removes_all_boards_by_leaving_out_which(tmp_path):
    (tmp_path / "inventory.yml").write_text(json.dumps({"agents": {"hosts": {"nowhere.invalid": {}}}}))
    told, code = play(tmp_path, "remove.yml")
    assert code != 0
    assert "say which boards by --limit NAME" in told
    assert "unreachable=0" in told


PROGRAM_THAT_FAILS = """#!/bin/sh
echo "$*" >> {folder}/said
case $* in *'service install'*) cat > /dev/null ;; esac # who ends unread breaks Ansible's pipe
case $* in
    --version) echo 'edgeasync 1.0, Python 3.13' ;;
    *'{failing}'*) echo 'edgeasync: what is wrong' >&2; exit 2 ;;
    *) echo '{{"token": "edgeasync1_secret", "changed": []}}' ;;
esac
"""


def play_with_a_program_that_fails(folder, failing, groups, wheel="", agent=None):
    """Run agents.yml for one board, whose program and whose hub's fail at one command."""
    (folder / "bundle").mkdir(exist_ok=True)
    (folder / "bundle/edgeasync-1.0-py3-none-any.whl").write_text(wheel)
    program = folder / "edgeasync"
    program.write_text(PROGRAM_THAT_FAILS.format(failing=failing, folder=folder))
    program.chmod(0o755)
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}
    (folder / "inventory.yml").write_text(json.dumps({group: {"hosts": {f"{group}-1": here}} for group in groups}))
    paths = {
        "edgeasync_program": str(program),
        "edgeasync_at_hub": str(program),
        "edgeasync_bundle_there": str(folder / "there"),
        "edgeasync_mark": str(folder / "mark"),
        "edgeasync_agent": agent or {},
    }
    return play(folder, "agents.yml", "-e", json.dumps(paths))


@pytest.mark.parametrize("failing", ["keys enrol", "service install"])
def test_a_task_that_hides_secrets_still_says_why_it_failed(tmp_path, failing):
    told, code = play_with_a_program_that_fails(tmp_path, failing, ["hub", "agents"])
    assert code != 0
    assert "edgeasync: what is wrong" in told
    assert "edgeasync1_secret" not in told


def test_a_bundle_of_the_same_version_with_other_code_is_an_upgrade(tmp_path):
    upgrades = []
    for wheel in ("code", "code", "other code"):
        (tmp_path / "said").unlink(missing_ok=True)
        play_with_a_program_that_fails(tmp_path, "service install", ["hub", "agents"], wheel)
        upgrades.append((tmp_path / "said").read_text().count("service upgrade agent"))
    assert upgrades == [1, 0, 1]


def test_an_inventory_without_a_hub_is_told_so(tmp_path):
    told, code = play_with_a_program_that_fails(tmp_path, "service install", ["agents"])
    assert code != 0
    assert "has no group hub" in told
    assert "Make a token" not in told


@pytest.mark.parametrize(("insecure", "tokens"), [(False, 1), (True, 0)])
def test_who_is_not_insecure_gets_a_token(tmp_path, insecure, tokens):
    agent = {"hub": "tcp://hub:5555", "insecure": insecure}
    play_with_a_program_that_fails(tmp_path, "service install", ["hub", "agents"], agent=agent)
    assert (tmp_path / "said").read_text().count("keys enrol") == tokens


def test_who_is_not_insecure_needs_a_hub(tmp_path):
    told, code = play_with_a_program_that_fails(tmp_path, "service install", ["agents"], agent={"insecure": False})
    assert code != 0
    assert "has no group hub" in told


def changes(told):
    """Return how many tasks changed something on each board."""
    return {name: int(count) for name, count in re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+)", told, re.MULTILINE)}


if repetitions("fleets that Ansible installs"):

    @pytest.fixture
    def boards(tmp_path):
        if os.geteuid() != 0:
            pytest.skip("hosts on this machine take root")
        hosts = Hosts(tmp_path / "hosts", BOARDS)
        yield hosts
        hosts.close()

    def bundle(commands, clone, name):
        """Make a bundle for the Python of the hosts."""
        python = subprocess.run(
            ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        ).stdout.strip()  # fmt: skip
        told = commands.run("bundle", clone, "--platform", "x86", "--python", python, "--out", name)
        assert told.returncode == 0, told.stderr
        return commands.folder / name

    def other_version(folder, version, *, joins=True):
        """Write a clone of another version, whose agent joins, or never says that it has."""
        folder.mkdir()
        shutil.copytree(ROOT / "edgeasync", folder / "edgeasync", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        file = folder / "edgeasync/version.py"
        file.write_text(
            re.sub(r'^VERSION = ".*?"', f'VERSION = "{version}"', file.read_text(), flags=re.MULTILINE)
        )
        if not joins:
            file = folder / "edgeasync/host/notify.py"
            file.write_text(file.read_text().replace('"joined"', '"stays away"'))
        return folder

    def versions(boards):
        return [boards.run(name, PROGRAM, "--version").partition(",")[0] for name in BOARDS]

    def write_inventory(commands, boards):
        """Write the inventory of a hub on this machine and of the boards; return the hub's address."""
        keys = commands.folder / "keys"
        program = commands.folder / "edgeasync"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edgeasync "$@"\n')
        program.chmod(0o755)
        hub, address = commands.hub(commands.settings(), "--keys", HubKeys.init(keys).folder)
        HubKeys(keys).remember_addresses((address,))
        hub_vars = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        board_vars = {
            "ansible_connection": "ssh", "ansible_ssh_executable": str(boards.ssh), "ansible_user": "root",
            "ansible_ssh_transfer_method": "piped", "ansible_python_interpreter": "python3",
            "edgeasync_agent": {"step_s_min": 0.01}, "edgeasync_throttle": {"temperature_c_max": 90},
            "edgeasync_hub_keys": str(keys), "edgeasync_hub_user": "root", "edgeasync_hub_program": str(program),
        }  # fmt: skip
        inventory = {
            "hub": {"hosts": {"here": hub_vars}},
            "agents": {"hosts": {name: {} for name in BOARDS}, "vars": board_vars},
        }
        (commands.folder / "inventory.yml").write_text(json.dumps(inventory))
        (commands.folder / "data").mkdir()
        for name in BOARDS:
            write_data(commands.folder / f"data/{name}.npz")
        return hub, address

    def test_a_fleet_is_installed_enrolled_upgraded_put_back_and_removed(commands, boards):
        folder = commands.folder
        hub, address = write_inventory(commands, boards)
        bundle(commands, ROOT, "bundle")
        told, code = play(folder, "agents.yml")
        assert code == 0, told + boards.logs()
        assert "edgeasync1_" not in told
        operator = ("--keys", folder / "keys")
        for name in BOARDS:
            text = boards.run(name, "cat", "/var/lib/edgeasync/agent.toml")
            assert f'device_id = "{name}"' in text
            assert "temperature_c_max = 90" in text
        status = json.loads(commands.run("status", "--hub", address, *operator, "--json").stdout)
        assert {device["id"] for device in status["devices"]} == set(BOARDS)

        told, code = play(folder, "agents.yml")
        assert (code, changes(told)) == (0, dict.fromkeys(BOARDS, 0)), told

        bundle(commands, other_version(folder / "newer", "99.0.0"), "newer-bundle")
        told, code = play(folder, "agents.yml", "-e", f"edgeasync_bundle={folder / 'newer-bundle'}")
        assert code == 0, told
        assert versions(boards) == ["edgeasync 99.0.0"] * 2

        bundle(commands, other_version(folder / "broken", "99.1.0", joins=False), "broken-bundle")
        told, code = play(
            folder, "agents.yml", "-e", f"edgeasync_bundle={folder / 'broken-bundle'}",
            "-e", '{"edgeasync_joined_within_s": 6}',
        )  # fmt: skip
        assert code != 0
        assert "did not join its hub within 6 s" in told
        assert set(changes(told)) == {BOARDS[0]}  # the second board was left alone
        assert versions(boards) == ["edgeasync 99.0.0"] * 2

        told, code = play(folder, "agents.yml")  # back to the first bundle
        assert code == 0, told
        version = re.search(r'^VERSION = "(.*?)"', VERSION.read_text(), re.MULTILINE)[1]
        assert versions(boards) == [f"edgeasync {version}"] * 2

        for changed in (True, False):
            told, code = play(folder, "remove.yml", "--limit", BOARDS[1])
            assert code == 0, told
            assert (changes(told)[BOARDS[1]] > 0) == changed
        left = boards.run(BOARDS[1], "find", "/opt", "/var/lib", "/etc", "-name", "*edgeasync*")
        assert left == ""
        roles = {entry.name: entry.role for entry in HubKeys(folder / "keys").allow_list().entries.values()}
        assert (roles[BOARDS[0]], roles[BOARDS[1]]) == ("device", "revoked")
        hub.signal(signal.SIGTERM)
        assert hub.wait() == 0
