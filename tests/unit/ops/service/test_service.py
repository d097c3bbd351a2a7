"""Units, their files, and a new version beside the old one: without systemd, below a folder."""

import json
import os
import shutil
import stat
import subprocess
from importlib.metadata import PathDistribution
from itertools import pairwise
from pathlib import Path

import pytest

from edgeasync.errors import ConfigError, HubUnreachableError, StorageError
from edgeasync.ops.service import bundle
from edgeasync.ops.service.bundle import download_arguments, make_bundle
from edgeasync.ops.service.environments import Environments, extras_of, install_arguments, own_source
from edgeasync.ops.service.installation import (
    Place,
    activate,
    check_program,
    find_others,
    find_program,
    find_unit,
    install,
    remove,
)
from edgeasync.ops.service.unit import Unit
from edgeasync.ops.service.upgrade import upgrade

PROGRAM = Path("/bin/true")
FOLDER = Path("/var/lib/edgeasync")
UNITS = [
    Unit(kind, PROGRAM, folder, user, name)
    for kind in ("agent", "hub")
    for folder, user, name in (
        (FOLDER, "edgeasync", ""),
        (FOLDER, "edgeasync", "edgeasync-second"),
        (Path("/srv/100%/edge async"), "edgeasync", ""),
        (Path("/home/pi/.local/share/edgeasync"), None, ""),
    )
]

UNITS.append(Unit("agent", PROGRAM, FOLDER, has_hub=False))

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


def test_an_agent_without_a_hub_waits_for_no_next_run():
    with_a_hub, without = (Unit("agent", PROGRAM, FOLDER, has_hub=has_hub).text() for has_hub in (True, False))
    changed = set(with_a_hub.splitlines()) - set(without.splitlines())
    assert changed == {f"ExecStart={PROGRAM} agent agent.toml --when-finished wait", "Restart=always"}


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
    return Place(root, home)


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
    with pytest.raises(ConfigError, match=r"agent\.toml: no such file; give the settings"):
        install(find_unit("agent", place, None), place, None)
    assert tree(place.root) == before


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "a b", "%i", "x" * 65, "-now", "küche"])
def test_a_name_that_is_none(name, tmp_path):
    with pytest.raises(ConfigError, match="--name"):
        find_unit("agent", Place(tmp_path), name)


@pytest.mark.parametrize("folder", ["units", "packaged"])
def test_another_programs_unit_is_neither_replaced_nor_removed(place, folder):
    file = place.root / str(getattr(place, folder)).removeprefix(str(place.root)).lstrip("/") / "ssh.service"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[Unit]\nDescription=OpenBSD Secure Shell server\n")
    with pytest.raises(ConfigError, match=r"ssh\.service: is another program's unit; give another --name"):
        find_unit("agent", place, "ssh")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("agent", "agent", "--name agent: another unit has the settings agent.toml; give another"),
        ("agent", "hub", "--name hub: another unit"),
        ("hub", "agent", "--name agent: another unit"),
        ("hub", "edgeasync-agent", "--name edgeasync-agent is that of the agent; give another"),
        ("agent", "edgeasync-hub", "--name edgeasync-hub is that of the hub; give another"),
        ("agent", "second", "second.service: is the hub's unit; give another --name, or say hub"),
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
    with pytest.raises(ConfigError, match="the user edgeasync may not run it, because of /"):
        check_program(program)


class Manager:
    """A systemd that notes what it is asked, and whose service does what `does` says of the environment in use."""

    def __init__(self, current, does):
        self.current, self.does, self.starts, self.asked = current, does, [], []

    def start(self, unit):
        self.starts.append(self.current().name)

    def status(self, unit):
        running = self.starts[-1] if self.starts else "env-1"
        said = self.does.get(running, "joined tcp://hub:5555: as pi-1")
        invocation = f"{running} {len(self.starts)}"
        return {"ActiveState": "active", "StatusText": said, "InvocationID": invocation}

    def reload(self):
        self.asked.append("reload")

    def make_user(self):
        self.asked.append("make_user")


@pytest.fixture
def environments(tmp_path):
    for number in (1, 2):
        (tmp_path / f"env-{number}/bin").mkdir(parents=True)
    (tmp_path / "current").symlink_to("env-2")
    return Environments(tmp_path)


def make_next(environments):
    folder = environments.home / "env-3"
    (folder / "bin").mkdir(parents=True)
    return folder


def at_once(condition, limit_s):
    return condition()


AGENT = Unit("agent", PROGRAM, FOLDER)


def names(environments):
    return sorted(path.name for path in environments.home.iterdir())


def test_an_upgrade_keeps_the_old_environment_alone(environments):
    manager = Manager(lambda: environments.current, {})
    old = upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=at_once)
    assert old.name == "env-2"
    assert environments.current.name == "env-3"
    assert names(environments) == ["current", "env-2", "env-3"]
    assert manager.starts == ["env-3"]


def test_what_else_runs_from_the_environment_is_started_from_the_new_one(environments):
    """Else the next upgrade would delete the environment from which it runs."""
    states = {"edgeasync-hub.service": "active", "second.service": "activating", "third.service": "failed"}

    started = []

    class Several(Manager):
        def start(self, unit):
            super().start(unit)
            started.append((unit, self.current().name))

        def status(self, unit):
            return super().status(unit) | {"ActiveState": states.get(unit, "active")}

    manager = Several(lambda: environments.current, {})
    upgrade(
        environments,
        lambda: make_next(environments),
        AGENT,
        manager,
        others=list(states),
        limit_s=1.0,
        wait=at_once,
    )
    assert started == [
        (AGENT.file, "env-3"), ("edgeasync-hub.service", "env-3"), ("second.service", "env-3"),
    ]  # fmt: skip


def test_an_upgrade_that_is_taken_back_leaves_the_others_alone(environments):
    manager = Manager(lambda: environments.current, {"env-3": ""})
    with pytest.raises(HubUnreachableError):
        upgrade(
            environments, lambda: make_next(environments), AGENT, manager, others=["edgeasync-hub.service"],
            limit_s=1.0, wait=at_once,
        )  # fmt: skip
    assert manager.starts == ["env-3", "env-2"]


@pytest.mark.parametrize(
    ("kind", "packages", "extras"),
    [
        ("agent", (), ""),
        ("agent", ("onnx",), "hub"),
        ("agent", ("onnx", "onnxruntime-gpu"), "hub,gpu"),
        ("hub", (), "hub"),
    ],
)
def test_an_upgrade_keeps_what_the_environment_has(monkeypatch, kind, packages, extras):
    """A hub and an agent of one machine run from one environment."""
    monkeypatch.setattr("edgeasync.ops.service.environments.has_package", packages.__contains__)
    assert extras_of(kind) == extras


def test_the_others_are_the_units_of_ours_alone(place, settings):
    units = [find_unit(kind, place, name) for kind, name in (("agent", None), ("agent", "second"), ("hub", None))]
    for unit in units:
        install(unit, place, settings)
    (place.units / "ssh.service").write_text("[Unit]\nDescription=OpenBSD Secure Shell server\n")
    found = {file.name for file in find_others(units[0], place)}
    assert found == {"second.service", "edgeasync-hub.service"}


def test_an_agent_without_a_hub_is_up_once_it_says_how_it_does(environments):
    manager = Manager(lambda: environments.current, {"env-3": "without a hub: alone"})
    upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=at_once)
    assert environments.current.name == "env-3"


@pytest.mark.parametrize("said", ["", "looks for tcp://hub:5555: waiting", "joined-like words"])
def test_an_agent_that_does_not_join_gets_its_old_version_back(environments, said):
    manager = Manager(lambda: environments.current, {"env-3": said})
    with pytest.raises(HubUnreachableError, match=r"did not join its hub within 1 s .* the old one runs again"):
        upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=at_once)
    assert environments.current.name == "env-2"
    assert names(environments) == ["current", "env-1", "env-2"]
    assert manager.starts == ["env-3", "env-2"]


def test_an_upgrade_that_cannot_be_installed_touches_nothing(environments):
    def fail():
        raise StorageError("no such wheel")

    manager = Manager(lambda: environments.current, {})
    with pytest.raises(StorageError):
        upgrade(environments, fail, AGENT, manager, limit_s=1.0, wait=at_once)
    assert (environments.current.name, manager.starts) == ("env-2", [])


def test_an_upgrade_of_no_service_is_refused_before_anything_is_made(environments):
    class Empty(Manager):
        def status(self, unit):
            return {"LoadState": "not-found", "ActiveState": "inactive"}

    manager = Empty(lambda: environments.current, {})
    with pytest.raises(ConfigError, match="no such service; install it: edgeasync service install agent"):
        upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=at_once)
    assert names(environments) == ["current", "env-1", "env-2"]


def test_a_service_that_cannot_be_started_leaves_nothing_of_the_new_one(environments):
    class Broken(Manager):
        def start(self, unit):
            raise StorageError("systemctl: no such bus")

    manager = Broken(lambda: environments.current, {})
    with pytest.raises(StorageError):
        upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=at_once)
    assert names(environments) == ["current", "env-1", "env-2"]


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


def test_an_interrupted_upgrade_is_taken_back(environments):
    def interrupt(condition, limit_s):
        raise KeyboardInterrupt

    manager = Manager(lambda: environments.current, {})
    with pytest.raises(KeyboardInterrupt):
        upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=interrupt)
    assert (environments.current.name, manager.starts[-1]) == ("env-2", "env-2")


def test_a_status_of_before_the_upgrade_is_not_taken_for_the_new_one(environments):
    class Slow(Manager):
        def status(self, unit):
            return {"ActiveState": "active", "StatusText": "joined tcp://hub:5555", "InvocationID": "the old one"}

    manager = Slow(lambda: environments.current, {})
    with pytest.raises(HubUnreachableError):
        upgrade(environments, lambda: make_next(environments), AGENT, manager, limit_s=1.0, wait=at_once)


@pytest.mark.parametrize("fails", ["venv", "pip", "--version"])
def test_an_environment_that_cannot_be_made_leaves_nothing(environments, monkeypatch, fails):
    def run(command):
        (environments.home / "env-3").mkdir(exist_ok=True)
        if fails in command:
            raise StorageError(fails)

    monkeypatch.setattr("edgeasync.ops.service.environments.run_told", run)
    with pytest.raises(StorageError, match=fails):
        environments.make("edgeasync", "")
    assert names(environments) == ["current", "env-1", "env-2"]


def test_an_upgrade_needs_the_link_that_the_installer_makes(tmp_path):
    with pytest.raises(ConfigError, match=r"current: no such link"):
        _ = Environments(tmp_path).current


def test_the_unit_names_the_link_if_there_is_one(environments):
    assert find_program(environments.home / "env-2") == environments.home / "current/bin/edgeasync"
    assert find_program(environments.home / "env-1") == environments.home / "env-1/bin/edgeasync"


def test_a_service_that_runs_as_installed_is_not_started_again(tmp_path):
    manager = Manager(lambda: Path("env-1"), {})
    place = Place(tmp_path, Path("/home/pi"))
    activate(AGENT, place, manager, [], start=True)
    assert (manager.starts, manager.asked) == ([], [])
    activate(AGENT, place, manager, [Path("unit")], start=True)
    assert (manager.starts, manager.asked) == (["env-1"], ["reload"])


def test_how_pip_is_told_a_source(tmp_path):
    assert install_arguments("edgeasync==0.2", "hub") == ["edgeasync[hub]==0.2"]
    (tmp_path / "edgeasync-0.1.0-py3-none-any.whl").touch()
    assert install_arguments(str(tmp_path), "hub") == [
        "--no-index",
        "--find-links",
        str(tmp_path),
        "edgeasync[hub]",
    ]


@pytest.mark.parametrize(
    ("platform", "newest", "never"), [("pi", 36, "x86_64"), ("jetson", 35, "_2_36"), ("x86", 36, "aarch64")]
)
def test_a_bundle_takes_wheels_of_the_board_alone(platform, newest, never):
    arguments = download_arguments(platform, "3.12")
    tags = [after for word, after in pairwise(arguments) if word == "--platform"]
    assert f"_2_{newest}_" in tags[0]
    assert not [tag for tag in tags if never in tag]
    assert "--only-binary=:all:" in arguments
    assert "cp312" in arguments


def test_a_clone_in_this_folder_is_taken_for_no_name_in_an_index(tmp_path, monkeypatch):
    """pip takes a bare word for a name, and the clone is called as the package is."""
    commands = []

    def run(command):
        commands.append(command)
        if "wheel" in command:
            Path(command[-2], "edgeasync-0.1.0-py3-none-any.whl").touch()
        else:
            Path(command[command.index("--dest") + 1]).mkdir(exist_ok=True)
        return ""

    monkeypatch.setattr(bundle, "run_told", run)
    monkeypatch.chdir(tmp_path)
    make_bundle("edgeasync", "pi", "3.13", Path("from-index"))
    (tmp_path / "edgeasync").mkdir()
    make_bundle("edgeasync", "pi", "3.13", Path("from-clone"))
    assert [command[-1] for command in commands if "wheel" in command] == [
        "edgeasync",
        str(tmp_path / "edgeasync"),
    ]


@pytest.mark.parametrize("noted", [None, "{url}/gone", "https://example.org/edgeasync.whl", "{url}"])
def test_without_a_source_it_is_where_this_edgeasync_was_installed_from(tmp_path, monkeypatch, noted):
    """Never a name in an index: root runs what it brings."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    url = None if noted is None else json.dumps({"url": noted.format(url=clone.as_uri())})
    monkeypatch.setattr(PathDistribution, "read_text", lambda self, name: url)
    if noted == "{url}":
        assert own_source() == str(clone)
    else:
        with pytest.raises(ConfigError, match=r"where does edgeasync come from\? give a folder of wheels"):
            own_source()
