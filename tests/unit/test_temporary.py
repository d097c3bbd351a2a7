"""Temporary folders: gone with their program, or at the start of the next one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from edgeasync.temporary import OWNER, TemporaryFolder, remove_leftovers

MAKE = """
import sys, time
from edgeasync.temporary import TemporaryFolder
folder = TemporaryFolder("run-")
(folder.path / "secret").write_text("a model")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def program(folder):
    """Run a program that makes a folder; yield it, and its folder."""
    command = [sys.executable, "-c", MAKE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(folder)}
    ) as it:
        try:
            yield it, folder / it.stdout.readline().strip().rpartition("/")[2]
        finally:
            it.kill()


def test_what_a_killed_program_left_is_removed_by_the_next_one(temporary):
    with program(temporary) as (killed, left), program(temporary) as (_, kept):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "secret").exists()
        own = TemporaryFolder()
        assert {path.name for path in temporary.iterdir()} == {kept.name, own.path.name}
        assert (kept / "secret").exists(), "its program lives"
        own.remove()
        own.remove()
        assert [path.name for path in temporary.iterdir()] == [kept.name]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX warns of it, if a test before has imported it
def test_a_forked_child_does_not_keep_what_its_parent_left(temporary):
    folder = TemporaryFolder()
    begun, begins = os.pipe()
    ending, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.write(begins, b".")
        os.read(ending, 1)  # until the parent has looked
        os._exit(0)
    os.close(ending)
    os.read(begun, 1)
    left, folder.path = folder.path, temporary / "none"
    folder.remove()  # the lock alone, as if the parent were gone
    remove_leftovers()
    assert not left.exists()
    for descriptor in (ends, begun, begins):
        os.close(descriptor)
    os.waitpid(child, 0)


def test_only_folders_of_our_own_with_a_lock_are_removed(temporary):
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / OWNER).touch()
    (temporary / "edgeasync-link").symlink_to(temporary / "elsewhere")
    (temporary / "edgeasync-bare").mkdir()  # made a moment ago, or by an older version
    (temporary / "edgeasync-file").touch()
    (temporary / "edgeasync-fifo").mkdir()
    os.mkfifo(temporary / "edgeasync-fifo" / OWNER)
    (temporary / "edgeasync-linked").mkdir()
    (temporary / "edgeasync-linked" / OWNER).symlink_to(temporary / "elsewhere" / OWNER)
    before = sorted(temporary.rglob("*"))
    remove_leftovers()
    left = sorted(path for path in before if "fifo" not in path.name and "fifo" not in path.parent.name)
    assert [path for path in sorted(temporary.rglob("*")) if path in left] == left
