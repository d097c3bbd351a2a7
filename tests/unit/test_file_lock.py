"""Locks end with the process that took them, whatever it forked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import edgeasync
from edgeasync.durable.files import FolderLock, is_locked
from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import StorageError
from edgeasync.file_lock import FileLock

LOCKS = {
    "run": "from edgeasync.durable.files import FolderLock; FolderLock(folder, '--run').take('taken')",
    "state": "from edgeasync.durable.identity import DeviceFolder; DeviceFolder(folder).open('pi')",
    "keys": "from edgeasync.durable.secret_files import locked; held = locked(folder); held.__enter__()",
    "a look": (
        "import edgeasync.durable.files as files\n"
        "files.FileLock.close = lambda lock: fork()\n"
        "files.is_locked(folder)"
    ),
}
"""Programs that take each kind of lock."""

WAYS = {
    "os.fork": "if not os.fork(): wait()",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=wait).start()",
    "subprocess": "subprocess.Popen([sys.executable, '-c', BEGIN], close_fds=False)",
    "preexec_fn": "subprocess.Popen([sys.executable, '-c', BEGIN], close_fds=False, preexec_fn=lambda: None)",
}
"""Programs that start a child, which outlives them."""

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys
from pathlib import Path
folder = Path({folder!r})
BEGIN = "print('begun', flush=True); input()"
stdin = os.dup(0)  # multiprocessing closes the other
def wait():
    print("begun", flush=True)
    os.read(stdin, 1)  # up to the test's end
    os._exit(0)
def fork():
    {way}
    signal.pause()
{lock}
fork()
"""


@pytest.fixture
def killed(tmp_path):
    """Run a program that dies and leaves a child; the child lives until the test ends."""
    (tmp_path / "lock").touch(0o600)
    running = []

    def run(lock, way):
        text = PROGRAM.format(folder=str(tmp_path), way=WAYS[way], lock=LOCKS[lock])
        command = [sys.executable, "-c", text]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert running[-1].stdout.readline() == b"begun\n"  # by the child
        running[-1].kill()
        running[-1].wait()
        return tmp_path

    yield run
    for process in running:
        process.stdin.close()
        process.stdout.read()  # up to the child's end
        process.stdout.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lock", LOCKS)
def test_a_child_that_outlives_its_parent_holds_no_lock(killed, lock, way):
    folder = killed(lock, way)
    assert not is_locked(folder)
    FolderLock(folder, "--run").take("taken")


def test_there_is_no_other_lock():
    package = Path(edgeasync.__file__).parent
    named = {"flock(", "lockf(", "F_SETLK", "F_OFD_SETLK"}
    found = {path.name for path in package.rglob("*.py") if any(name in path.read_text() for name in named)}
    assert found == {"file_lock.py"}


@pytest.mark.parametrize("take", ["run", "state"])
def test_a_holder_that_is_not_the_owner_is_named(tmp_path, take):
    text = (
        f"import os, subprocess; from pathlib import Path; folder = Path({str(tmp_path)!r})\n{LOCKS[take]}\n"
        "from edgeasync import file_lock; (lock,) = file_lock._open\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[lock.descriptor], **quiet)\n"
        "print(child.pid, flush=True); os._exit(0)\n"
    )
    orphan = int(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)
    try:
        with pytest.raises(
            StorageError,
            match=rf"process {orphan} \(sleep\) still holds the lock of a process that has ended; stop it",
        ):
            DeviceFolder(tmp_path).open("pi")
    finally:
        os.kill(orphan, signal.SIGTERM)


def test_a_lock_of_this_process_is_told_apart(tmp_path):
    first = DeviceFolder(tmp_path)
    first.open("pi")
    with pytest.raises(StorageError, match=r"another agent runs as 'pi' with this folder.* it runs in this"):
        DeviceFolder(tmp_path).open("pi")
    first.close()


def test_a_lock_can_be_closed_twice(tmp_path):
    lock = FileLock(tmp_path / "lock", 0o102)
    lock.close()
    lock.close()
