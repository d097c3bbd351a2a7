"""Every JSON file is read by one reader: whatever is in it, what is wrong is one sentence."""

import os
import re

import pytest

from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceFolder
from edgeasync.durable.json_file import read_json
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.errors import StorageError
from edgeasync.ops.doctor.state import examine_state
from edgeasync.ops.runs import list_checkpoints
from edgeasync.ops.trained import local_patterns
from edgeasync.runtime.hub_record import read_record

DAMAGED = {
    "not UTF-8": b'{"device_id": "\xff\xfe"}',
    "deep": b'{"device_id": ' + b"[" * 100_000,
    "deep and whole": b'{"device_id": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "a surrogate": b'{"device_id": "\\ud800"}',
    "a long number": b'{"start": ' + b"9" * 5_000 + b"}",
    "cut": b'{"device_id": "pi"',
    "another type": b"[]",
    "empty": b"",
    "NUL": b"\0" * 100,
}


def open_identity(folder):
    DeviceFolder(folder).open("pi")


def read_day(folder):
    QuotaFile(folder).read()


def read_hub(folder):
    DeviceKeys(folder).hub()


READERS = {
    "identity.json": open_identity,
    "quota.json": read_day,
    "keys/hub.json": read_hub,
    "hub.json": read_record,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_one_sentence(tmp_path, name, content):
    path = tmp_path / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "checkpoint-0000000000-0.json").write_bytes(b"{}")
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StorageError, match=rf"^{re.escape(str(path))}: damaged \(.*\); [^;\n]+$") as told:
        READERS[name](tmp_path)
    assert told.value.exit_code == 9
    assert path.read_bytes() == content, "a damaged file is left for a person"


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_who_only_looks_says_so(tmp_path, content):
    for name in ("identity.json", "hub.json", "checkpoint-0000000001-1.json"):
        (tmp_path / name).write_bytes(content)
    assert examine_state(tmp_path, "pi", "").level == "fail"
    assert local_patterns(tmp_path) == []
    (found,) = list_checkpoints(tmp_path)
    assert found.trouble.startswith("checkpoint-0000000001-1.json: damaged (")


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StorageError, match=r"cannot be read: (Not a regular file|Is a directory); delete it$"):
            read_json(place, dict, remedy="delete it")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing", dict, remedy="delete it")
