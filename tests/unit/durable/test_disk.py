"""A folder as the disk of a run."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.durable import direct_file
from edgeasync.durable.direct_file import BLOCK_BYTES
from edgeasync.durable.disk import FolderDisk, FolderSnapshot

LENGTHS = st.sampled_from([0, 1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5])
needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct writes")


def test_a_snapshot_stays_as_it_was(tmp_path):
    path = tmp_path / "one"
    path.write_bytes(b"before")
    snapshot = FolderSnapshot(tmp_path, ["one", "gone"])
    with path.open("ab") as file:
        file.write(b" and after")
    assert bytes(snapshot.read("one")) == b"before"
    path.unlink()
    assert (snapshot.names(), snapshot.size("one")) == (["one"], 6)
    assert bytes(snapshot.read("one", 4, 100)) == b"re"
    assert bytes(snapshot.read("one", 100)) == b""
    count = len(list(Path("/proc/self/fd").iterdir()))
    snapshot.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == count - 1


@needs_direct
@given(st.lists(st.lists(LENGTHS, max_size=4), max_size=5))
def test_a_padded_file_holds_what_was_appended_and_zeros_up_to_a_block(tmp_path_factory, writes):
    path = tmp_path_factory.mktemp("padded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_file, "STAGED_BYTES", 2 * BLOCK_BYTES)
        file = FolderDisk(path).create("file", padded=True)
        expected = b""
        for lengths in writes:
            parts = [os.urandom(length) for length in lengths]
            file.write(parts)
            file.sync()
            expected += b"".join(parts)
            found = (path / "file").read_bytes()
            assert found == expected + bytes(-len(expected) % BLOCK_BYTES)
    file.close()
    file.close()
    assert (path / "file").read_bytes() == expected


def failing_pwritev(monkeypatch, number, *, after=0):
    """Let writes with `O_DIRECT` fail, but for the first ones; return what is called, in order."""
    calls, pwritev, fdatasync = [], os.pwritev, os.fdatasync

    def fail(descriptor, parts, offset, flags):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        calls.append((direct, offset, sum(map(len, parts)), bool(flags)))
        if direct and len(calls) > after:
            raise OSError(number, os.strerror(number))
        return pwritev(descriptor, parts, offset, flags)

    def sync(descriptor):
        calls.append("fdatasync")
        fdatasync(descriptor)

    monkeypatch.setattr(direct_file.os, "pwritev", fail)
    monkeypatch.setattr(direct_file.os, "fdatasync", sync)
    return calls


@needs_direct
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_padded_file_is_buffered_and_synced_where_direct_writes_fail(tmp_path, monkeypatch, number):
    calls = failing_pwritev(monkeypatch, number)
    file = FolderDisk(tmp_path).create("file", padded=True)
    file.write([b"one", b"two"])
    file.sync()
    file.write([b"three"])
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"onetwothree"
    assert calls == [
        (True, 0, BLOCK_BYTES, True), (False, 0, BLOCK_BYTES, False), "fdatasync",
        (False, 0, BLOCK_BYTES, False), "fdatasync",
    ]  # fmt: skip


@needs_direct
def test_a_long_write_is_synced_once_and_wholly(tmp_path, monkeypatch):
    calls = failing_pwritev(monkeypatch, errno.EIO, after=9)
    monkeypatch.setattr(direct_file, "STAGED_BYTES", 2 * BLOCK_BYTES)
    file = FolderDisk(tmp_path).create("file", padded=True)
    for length in (5 * BLOCK_BYTES, 1):
        file.write([bytes(length)])
        file.sync()
    assert calls == [
        (True, 0, 2 * BLOCK_BYTES, False), (True, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES, False),
        (True, 4 * BLOCK_BYTES, BLOCK_BYTES, False), "fdatasync", (True, 5 * BLOCK_BYTES, BLOCK_BYTES, True),
    ]  # fmt: skip
    file.close()


@needs_direct
def test_a_failed_direct_write_is_an_error_and_leaves_what_was_synced(tmp_path, monkeypatch):
    failing_pwritev(monkeypatch, errno.ENOSPC, after=1)
    file = FolderDisk(tmp_path).create("file", padded=True)
    file.write([b"whole"])
    file.sync()
    file.write([bytes(2 * BLOCK_BYTES)])
    with pytest.raises(OSError, match="No space"):
        file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_file_system_without_direct_writes_is_written_as_any_other(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(direct_file.fcntl, "fcntl", refuse)
    file = FolderDisk(tmp_path).create("file", padded=True)
    file.write([b"one"])
    file.sync()
    assert (tmp_path / "file").read_bytes() == b"one"
    file.close()
