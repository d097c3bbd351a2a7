"""Fixtures of the tests with real processes."""

import os
import shutil
import subprocess

import pytest

from tests.support.boards.disk_faults import SmallDisk
from tests.support.programs.processes import Commands


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path, forks=True) as commands:
        yield commands


@pytest.fixture
def small_disk(tmp_path):
    """Yield a disk of 4 MiB for a hub's run, where this process may mount one."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root may mount a disk to fill")
    try:
        disk = SmallDisk(tmp_path / "run-hub", "4m")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no disk to fill can be mounted here: {error.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        disk.close()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Let temporary folders be in a folder that is empty again at the end, but for runs."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert not [path for path in folder.iterdir() if not path.name.startswith("edgeasync-run-")]
