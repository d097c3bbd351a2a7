"""Atomic writes and file locks."""

import fcntl

import pytest

from edgeasync.durable import files
from edgeasync.durable.files import FolderLock, is_locked, replace_file
from edgeasync.errors import StorageError


def test_a_lock_is_seen_while_it_is_held(tmp_path):
    assert not is_locked(tmp_path)
    lock = FolderLock(tmp_path, "run (--run)")
    lock.take("taken")
    assert is_locked(tmp_path)
    lock.close()
    assert not is_locked(tmp_path)


def test_who_only_looks_at_a_lock_keeps_nobody_from_taking_it(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        waits = iter([lambda: None, looking.close])
        monkeypatch.setattr(files.time, "sleep", lambda _: next(waits)())
        lock = FolderLock(tmp_path, "run (--run)")
        lock.take("taken")
    assert list(waits) == []
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    with pytest.raises(StorageError, match="taken"):
        FolderLock(tmp_path, "run (--run)").take("taken")
    lock.close()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    (tmp_path / "file.part").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(StorageError, match="cannot be written"):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
