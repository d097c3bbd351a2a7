"""A folder as the disk of a run."""

from pathlib import Path

from edgeasync.durable.disk import FolderSnapshot


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
