"""A run's model and a device's identity on disk."""

import fcntl
import json

import numpy as np
import pytest
import safetensors.numpy

from edgeasync.durable import files
from edgeasync.durable.files import FolderLock, is_locked, replace_file
from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import ModelMismatchError, StorageError
from edgeasync.graphs.model_file import load_model, save_model
from edgeasync.parameters import Parameter, ParameterSpec

SPEC = ParameterSpec((Parameter("w", (2, 3)), Parameter("b", (3,))))
VECTOR = np.arange(9, dtype=np.float32)


def test_a_model_comes_back_to_the_bit_and_any_tool_can_read_it(tmp_path):
    path = tmp_path / "run" / "model.safetensors"
    save_model(path, SPEC, VECTOR, lineage="0" * 16, version=7)
    vector, version = load_model(path, SPEC)
    assert (vector.tobytes(), version) == (VECTOR.tobytes(), 7)
    arrays = safetensors.numpy.load_file(path)
    assert {name: array.shape for name, array in arrays.items()} == {"w": (2, 3), "b": (3,)}
    assert list(path.parent.iterdir()) == [path]


def test_a_model_of_another_maker_begins_at_version_0(tmp_path):
    safetensors.numpy.save_file(dict(SPEC.views(VECTOR)), tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors", SPEC)[1] == 0


def test_another_model_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, SPEC, VECTOR, lineage="0" * 16, version=7)
    other = ParameterSpec((Parameter("w", (3, 2)), Parameter("b", (3,))))
    with pytest.raises(ModelMismatchError, match=r"'w' has shape \(2, 3\), not \(3, 2\)"):
        load_model(path, other)


def test_values_of_another_type_are_named(tmp_path):
    arrays = {name: array.astype(np.float64) for name, array in SPEC.views(VECTOR).items()}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(ModelMismatchError, match="float64"):
        load_model(tmp_path / "model.safetensors", SPEC)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"{}"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(path, SPEC)


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


def test_an_identity_keeps_its_state_id_and_counts_its_starts(tmp_path):
    starts = []
    for _ in range(3):
        folder = DeviceFolder(tmp_path / "state")
        starts.append(folder.open("pi"))
        folder.close()
    assert [identity.incarnation for identity in starts] == [1, 2, 3]
    assert len({identity.state_id for identity in starts}) == 1


def test_another_name_in_the_folder_is_another_device(tmp_path):
    folder = DeviceFolder(tmp_path)
    first = folder.open("pi")
    folder.close()
    second = folder.open("jetson")
    folder.close()
    assert second.incarnation == 1
    assert second.state_id != first.state_id


def test_a_folder_serves_one_agent_at_a_time(tmp_path):
    first = DeviceFolder(tmp_path)
    first.open("pi")
    with pytest.raises(StorageError, match="another agent runs as 'pi' here"):
        DeviceFolder(tmp_path).open("pi")
    first.close()
    DeviceFolder(tmp_path).open("pi")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        json.dumps({"device_id": "pi", "state_id": "x", "start": 1}).encode(),
        json.dumps({"device_id": "pi", "state_id": "0" * 32, "start": 2**63 - 1}).encode(),
    ],
)
def test_a_damaged_identity_is_named(tmp_path, content):
    (tmp_path / "identity.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"identity\.json: damaged"):
        DeviceFolder(tmp_path).open("pi")
