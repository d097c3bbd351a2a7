"""docs/reference/files.md names the formats that the code writes."""

import re
import shutil
from pathlib import Path

import pytest

from edgeasync.core.arrays import state_codec
from edgeasync.durable import checkpoint, history, journal, spool_file
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.history_file import HistoryFile
from edgeasync.durable.local_file import LOCAL_FORMAT
from edgeasync.durable.quota_file import QUOTA_FORMAT
from edgeasync.durable.run_folder import RunFolder
from edgeasync.protocol.messages import PROTOCOL_VERSION
from edgeasync.runtime.hub_record import RECORD_FORMAT

PAGE = (Path(__file__).parents[2] / "docs/reference/files.md").read_text("utf-8")
WRITTEN = {
    "journal": journal._FORMAT,
    "checkpoint": checkpoint.FORMAT,
    "state in a checkpoint": state_codec.FORMAT,
    "`hub.json` of a run": RECORD_FORMAT,
    "`history` of a run": history.FORMAT,
    "`spool.safetensors`": spool_file.SPOOL_FORMAT.removeprefix("edgeasync-spool-"),
    "`quota.json` of a device": QUOTA_FORMAT,
    "`local.safetensors` of a device": LOCAL_FORMAT.removeprefix("edgeasync-local-"),
    "messages": PROTOCOL_VERSION,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_row_has_the_format_that_is_written(name):
    (number,) = re.search(rf"^\| {re.escape(name)} \| .+? \| (.+?) \|$", PAGE, re.MULTILINE).groups()
    assert number.rpartition(", ")[2] == str(WRITTEN[name])


@pytest.mark.parametrize("corrected", [False, True])
def test_the_reader_of_a_history_on_the_page_reads_one(tmp_path, corrected):
    names = {}
    exec(re.search(r"^```python\n(import struct.+?)^```", PAGE, re.MULTILINE | re.DOTALL)[1], names)
    run = Path(__file__).parents[1] / "fixtures/formats/run"
    if corrected:
        shutil.copy(run / history.HISTORY_FILE, run := tmp_path)
        file = HistoryFile(FolderDisk(run), 1000)
        file.resume(2**40, 0.0)
        file.append([history.Correction(3, 2**40, 0.0, "rolled_back")])
    rows = RunFolder(run).history()
    assert corrected == ("rolled_back" in [row.outcome for row in rows.updates])
    found = list(names["read"](run / history.HISTORY_FILE))
    assert len(found) == len(rows.updates) > 10
    for fields, row in zip(found, rows.updates, strict=True):
        assert (fields[0], *fields[5:8]) == (row.row, row.device, row.number, row.outcome)
