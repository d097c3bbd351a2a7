"""A device's count of the day's bytes on disk: read as it was written, or refused by name and left alone."""

import pytest

from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.durable.quota_file import QUOTA_FILE, QuotaFile
from edgeasync.errors import StorageError
from edgeasync.protocol.messages import DAY_S


def test_a_count_is_read_as_it_was_written(tmp_path):
    file = QuotaFile(tmp_path)
    assert file.read() == QuotaRecord(0, DAY_S), "the first day is whole"
    file.write(QuotaRecord(12_345, 60.5))
    assert file.read() == QuotaRecord(12_345, 60.5)
    assert [path.name for path in tmp_path.iterdir()] == [QUOTA_FILE]
    assert file.path.stat().st_size < 100


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "damaged .*; delete it to begin a new day"),
        (b"[]", "damaged"),
        (b'{"format":1,"used_bytes":5', "damaged"),
        (b'{"format":1,"used_bytes":5}', "damaged .*remaining_s"),
        (b'{"format":1,"used_bytes":-5,"remaining_s":60.0}', "damaged"),
        (b'{"format":1,"used_bytes":9007199254740993,"remaining_s":60.0}', "damaged"),
        (b'{"format":1,"used_bytes":5,"remaining_s":86401.0}', "damaged"),
        (b'{"format":1,"used_bytes":5,"remaining_s":NaN}', "damaged"),
        (b'{"format":2,"days":[]}', "has format 2, but this edgeasync reads format 1; use the version"),
    ],
)
def test_a_count_that_cannot_be_read_is_refused_by_name_and_kept(tmp_path, content, told):
    (tmp_path / QUOTA_FILE).write_bytes(content)
    with pytest.raises(StorageError, match=rf"quota\.json: .*{told}"):
        QuotaFile(tmp_path).read()
    assert (tmp_path / QUOTA_FILE).read_bytes() == content
