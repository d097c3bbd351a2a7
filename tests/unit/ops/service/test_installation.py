"""Installing, finding and removing a service, without touching others."""

import os
import stat
from pathlib import Path

import pytest

from edgeasync.errors import ConfigError
from edgeasync.ops.service.installation import (
    InstallPlace,
    activate,
    check_program,
    find_others,
    find_program,
    find_unit,
    install,
    remove,
)
from tests.support.parts.services import AGENT, PROGRAM, Manager


def tree(folder):
    """Return every path below a folder: its mode, time and content or target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        held = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_mtime_ns if held is not None else 0, held)
    return found


@pytest.fixture(params=["of the machine", "of a user"])
def place(request, tmp_path):
    root = tmp_path / "root"
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "var/lib").mkdir(parents=True)
    home = Path("/home/pi") if request.param == "of a user" else None
    (root / "home/pi/.config/systemd/user").mkdir(parents=True)
    (root / "home/pi/.local/share").mkdir(parents=True)
    return InstallPlace(root, home)


@pytest.fixture
def settings():
    return b'[agent]\nhub = "tcp://hub:5555"\nenrol = "edgeasync1_secret"\n'


def test_installing_twice_changes_no_file_and_removing_leaves_none(place, settings):
    before = tree(place.root)
    units = [find_unit(kind, place, name) for kind, name in (("agent", None), ("agent", "second"), ("hub", None))]
    for unit in units:
        assert install(unit, place, settings)
    installed = tree(place.root)
    for unit in units:
        assert install(unit, place, settings) == []
        assert install(unit, place, None) == []
    assert tree(place.root) == installed
    for unit in units:
        assert stat.S_IMODE(place.under(unit.settings).stat().st_mode) == 0o600  # a token may be in it
        assert remove(unit, place, purge=True)
        assert remove(unit, place, purge=True) == []
    assert tree(place.root) == before


def test_what_a_device_is_stays_unless_it_is_purged(place, settings):
    unit = find_unit("agent", place, None)
    install(unit, place, settings)
    identity = place.under(unit.folder) / "state/identity.json"
    identity.parent.mkdir()
    identity.write_text("{}")
    assert {path.suffix for path in remove(unit, place, purge=False)} == {".service"}
    assert identity.exists()
    assert place.under(unit.settings).exists()
    install(unit, place, None)
    remove(unit, place, purge=True)
    assert not place.under(unit.folder).exists()


def test_an_install_without_settings_says_so_and_writes_nothing(place):
    before = tree(place.root)
    with pytest.raises(ConfigError, match=r"agent\.toml: no such file; pass the settings"):
        install(find_unit("agent", place, None), place, None)
    assert tree(place.root) == before


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "a b", "%i", "x" * 65, "-now", "küche"])
def test_a_name_that_is_none(name, tmp_path):
    with pytest.raises(ConfigError, match="--name"):
        find_unit("agent", InstallPlace(tmp_path), name)


@pytest.mark.parametrize("folder", ["units", "packaged"])
def test_another_programs_unit_is_neither_replaced_nor_removed(place, folder):
    file = place.root / str(getattr(place, folder)).removeprefix(str(place.root)).lstrip("/") / "ssh.service"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[Unit]\nDescription=OpenBSD Secure Shell server\n")
    with pytest.raises(ConfigError, match=r"ssh\.service: this unit belongs to another program; choose"):
        find_unit("agent", place, "ssh")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("agent", "agent", "--name agent: agent.toml belongs to another service; choose another name"),
        ("agent", "hub", "--name hub: hub.toml belongs"),
        ("hub", "agent", "--name agent: agent.toml belongs"),
        ("hub", "edgeasync-agent", "--name edgeasync-agent is already used by the agent service"),
        ("agent", "edgeasync-hub", "--name edgeasync-hub is already used by the hub service; choose another name"),
        (
            "agent",
            "second",
            "second.service: this unit belongs to the hub service; choose another --name, or pass hub",
        ),
    ],
)
def test_the_settings_and_units_of_another_service_are_left_alone(place, settings, kind, name, words):
    install(find_unit("hub", place, "second"), place, settings)
    with pytest.raises(ConfigError, match=words):
        find_unit(kind, place, name)


def test_the_usual_name_means_the_usual_unit(place):
    for kind in ("agent", "hub"):
        assert find_unit(kind, place, f"edgeasync-{kind}") == find_unit(kind, place, None)


def test_a_program_that_the_services_user_may_not_run_is_refused(tmp_path):
    check_program(PROGRAM)
    program = tmp_path / "edgeasync"  # only its owner may look into this folder, as into a home
    program.touch(0o755)
    tmp_path.chmod(0o700)
    with pytest.raises(
        ConfigError, match="the user edgeasync has no permission to run it, because of the mode of /"
    ):
        check_program(program)


def test_the_others_are_the_units_of_ours_alone(place, settings):
    units = [find_unit(kind, place, name) for kind, name in (("agent", None), ("agent", "second"), ("hub", None))]
    for unit in units:
        install(unit, place, settings)
    (place.units / "ssh.service").write_text("[Unit]\nDescription=OpenBSD Secure Shell server\n")
    found = {file.name for file in find_others(units[0], place)}
    assert found == {"second.service", "edgeasync-hub.service"}


def test_settings_are_not_given_away_through_a_link(place, settings, monkeypatch, tmp_path):
    """A user whose folder root writes to may put a link in a file's place at any moment."""
    unit, other = find_unit("agent", place, None), tmp_path / "shadow"
    other.touch()
    install(unit, place, settings)
    given = []

    def chown(path, uid, gid, *, follow_symlinks=True):
        path.unlink()
        path.symlink_to(other)
        given.append(follow_symlinks)

    monkeypatch.setattr(os, "chown", chown)
    install(unit, place, b"[agent]\n")
    assert given == [False]


def test_the_unit_names_the_link_if_there_is_one(environments):
    assert find_program(environments.home / "env-2") == environments.home / "current/bin/edgeasync"
    assert find_program(environments.home / "env-1") == environments.home / "env-1/bin/edgeasync"


def test_a_service_that_runs_as_installed_is_not_started_again(tmp_path):
    manager = Manager(lambda: Path("env-1"), {})
    place = InstallPlace(tmp_path, Path("/home/pi"))
    activate(AGENT, place, manager, [], start=True)
    assert (manager.starts, manager.asked) == ([], [])
    activate(AGENT, place, manager, [Path("unit")], start=True)
    assert (manager.starts, manager.asked) == (["env-1"], ["reload"])
