"""What a hub and a device write is for their owner alone, and never goes where a link of somebody else leads."""

import asyncio
import errno
import os
import shutil
import stat

import numpy as np
import pytest

from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.files import FolderLock, replace_file
from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import StorageError
from edgeasync.graphs.graph_cache import GraphCache
from edgeasync.graphs.model_file import save_model
from edgeasync.protocol.graph import fingerprint_of
from edgeasync.runtime.hub_record import read_record
from edgeasync.runtime.hub_start import make_hub
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.formats.write_formats import FOLDER
from tests.support.programs.processes import Commands

SPEC = SoftmaxModel(inputs=4, classes=2).spec


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    """Return the modes below a folder, and its own, by path."""
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in [folder, *sorted(folder.rglob("*"))]}


def assert_private(folder):
    for path, mode in modes(folder).items():
        assert oct(mode) == (oct(0o700) if path.is_dir() else oct(0o600)), path


# -- modes -----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_run_and_a_devices_state_are_their_owners_alone(tmp_path, no_umask):
    data = '[evaluation]\ndata = "held-out.npz"\nevery = "5 updates"\n[checkpoint]\nevery = "10 updates"\n'
    with Commands(tmp_path) as commands:
        commands.data("held-out.npz")
        hub, address = commands.hub(commands.settings(hub="stop = { updates = 30 }", more=data))
        agent = commands.agent(address, "pi", "--spool", "full")
        assert (hub.wait(), agent.wait()) == (0, 0)
    names = {path.name for path in (tmp_path / "run-hub").iterdir()}
    assert names >= {"lock", "hub.json", "model.safetensors", "best.safetensors", "journal-00000001"}
    assert any(name.startswith("checkpoint-") for name in names)
    assert_private(tmp_path / "run-hub")
    kept = {path.name for path in (tmp_path / "pi").iterdir()}
    assert kept == {"lock", "identity.json", "spool.safetensors", "model.safetensors"}
    assert_private(tmp_path / "pi")


def test_whatever_the_umask(tmp_path, umask):
    lock = FolderLock(tmp_path / "run", "--run")
    lock.take("taken")
    replace_file(tmp_path / "run" / "file", b"content")
    FolderDisk(tmp_path / "run").create("journal.part").close()
    graphs = GraphCache(tmp_path / "run" / "graphs")
    graphs.keep(fingerprint_of(b"graph"), b"graph", pytest.fail)
    lock.close()
    assert lock.remarks == []
    assert_private(tmp_path / "run")


def test_a_file_for_others_has_the_mode_that_its_owner_gives_all_files(tmp_path, no_umask):
    os.umask(0o022)
    replace_file(tmp_path / "exports" / "trained.onnx", b"content", private=False)
    save_model(
        tmp_path / "then.safetensors",
        SPEC,
        np.zeros(SPEC.length, np.float32),
        lineage="",
        version=1,
        private=False,
    )
    found = modes(tmp_path)
    assert found[tmp_path / "exports"] == 0o755
    assert found[tmp_path / "exports" / "trained.onnx"] == found[tmp_path / "then.safetensors"] == 0o644


@pytest.fixture
def wide(tmp_path):
    """A run and a device's state, for everybody to read."""
    for name, source in (("run", "run"), ("state", "device")):
        shutil.copytree(FOLDER / source, tmp_path / name)
        (tmp_path / name / "graphs").mkdir()
        (tmp_path / name / "graphs" / "a.onnx").touch()
        for path in (tmp_path / name).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "other").write_text("somebody's")
    (tmp_path / "other").chmod(0o644)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    return tmp_path


def run_hub(folder):
    """Run a hub until it has resumed; return its reports."""
    reports = []

    def on_report(report):
        reports.append(report)
        if report.event == "resumed":
            asyncio.get_running_loop().call_soon(hub.request_stop)

    hub = make_hub(read_record(folder), on_report)
    assert asyncio.run(hub.run()) == "stopping"
    return reports


def warnings(reports):
    return [report.detail for report in reports if report.event == "warning"]


def test_a_run_that_others_could_read_is_narrowed_with_a_warning(wide):
    (warning,) = warnings(run_hub(wide / "run"))
    assert str(wide / "run") in warning
    assert "only its owner" in warning
    (wide / "run" / "link").unlink()
    shutil.rmtree(wide / "run" / "graphs")  # which nobody reaches any more
    assert_private(wide / "run")
    assert stat.S_IMODE((wide / "other").stat().st_mode) == 0o644, "a link leads elsewhere"
    assert warnings(run_hub(wide / "run")) == []


def test_so_is_a_devices_state(wide):
    folder = DeviceFolder(wide / "state")
    folder.open("device-1")
    (remark,) = folder.remarks
    folder.close()
    assert "only its owner" in remark
    shutil.rmtree(wide / "state" / "graphs")
    assert_private(wide / "state")


@pytest.mark.process
def test_the_agent_says_so(wide):
    with Commands(wide) as commands:
        agent = commands.start(
            "agent", "--hub", "tcp://127.0.0.1:9", "--data", commands.data("d.npz"), "--state", "state", "--json"
        )
        assert "only its owner" in agent.wait_for("warning")["detail"]


def test_a_file_that_may_be_run_stays_so(wide):
    script = wide / "run" / "start.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    run_hub(wide / "run")
    assert stat.S_IMODE(script.stat().st_mode) == 0o700


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.EROFS])
def test_a_file_system_without_modes_costs_a_warning(wide, monkeypatch, error):
    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    (warning,) = warnings(run_hub(wide / "run"))
    assert "other users may read it" in warning
    assert os.strerror(error) in warning


def test_a_file_system_that_ignores_modes_costs_a_warning(wide, monkeypatch):
    monkeypatch.setattr(os, "chmod", lambda *_, **__: None)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    (warning,) = warnings(run_hub(wide / "run"))
    assert "other users may read it" in warning


def test_a_folder_that_all_share_is_left_as_it_is(tmp_path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "other").touch(0o644)
    lock = FolderLock(shared, "--run")
    lock.take("taken")
    lock.close()
    assert "all users share this folder" in lock.remarks[0]
    assert modes(shared)[shared] == 0o1777
    assert modes(shared)[shared / "other"] == 0o644


# -- links -----------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("precious")
    path.chmod(0o644)
    yield path
    assert path.read_text() == "precious"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_no_temporary_file_follows_a_link(tmp_path, victim, there):
    folder = tmp_path / "run"
    folder.mkdir()
    target = victim if there else tmp_path / "nothing"
    for name in ("model.safetensors.part", "journal.part"):
        (folder / name).symlink_to(target)
    with pytest.raises(StorageError, match=r"model\.safetensors\.part is a link .*remove it"):
        replace_file(folder / "model.safetensors", b"content")
    with pytest.raises(OSError, match=r"journal\.part is a link .*remove it") as raised:
        FolderDisk(folder).create("journal.part")
    assert "remove it" in raised.value.strerror
    assert all((folder / name).is_symlink() for name in ("model.safetensors.part", "journal.part"))
    assert not (tmp_path / "nothing").exists()


def test_no_lock_follows_a_link(tmp_path, victim):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(victim)
    with pytest.raises(StorageError, match=r"lock is a link .*remove it"):
        FolderLock(tmp_path / "run", "--run").take("taken")


def test_no_file_is_cut_through_a_link(tmp_path, victim):
    (tmp_path / "journal-00000001").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        FolderDisk(tmp_path).truncate("journal-00000001", 0)


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path, victim):
    (tmp_path / "model.safetensors").symlink_to(victim)
    replace_file(tmp_path / "model.safetensors", b"content")
    assert not (tmp_path / "model.safetensors").is_symlink()


def test_what_a_crash_left_makes_way(tmp_path):
    (tmp_path / "file.part").write_bytes(b"half")
    (tmp_path / "file.part").chmod(0o444)
    replace_file(tmp_path / "file", b"whole")
    (tmp_path / "journal.part").write_bytes(b"half")
    file = FolderDisk(tmp_path).create("journal.part")
    file.write([b"whole"])
    file.close()
    assert (tmp_path / "file").read_bytes() == (tmp_path / "journal.part").read_bytes() == b"whole"
    assert not (tmp_path / "file.part").exists()


@pytest.mark.process
@pytest.mark.parametrize("name", ["lock", "model.safetensors.part", "checkpoint-0000000000-0.json.part"])
def test_a_hub_says_which_link_is_in_the_way(tmp_path, victim, name):
    (tmp_path / "run-hub").mkdir()
    (tmp_path / "run-hub" / name).symlink_to(victim)
    with Commands(tmp_path) as commands:
        told = commands.run("hub", commands.settings())
    assert told.returncode == StorageError.exit_code
    assert f"{name} is a link" in told.stderr
    assert "remove it" in told.stderr
