"""A device's identity: state id, start counter and lock."""

import json

import pytest

from edgeasync.durable.identity import DeviceFolder
from edgeasync.errors import StorageError


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
    with pytest.raises(StorageError, match="another agent runs as 'pi' with this folder"):
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
