"""Writing a history while the disk fails or the file is damaged."""

import msgspec
import pytest

from edgeasync.durable.history import FILE_HEADER, HISTORY_FILE, read_rows, scan
from edgeasync.durable.history_file import ASIDE_FILE, HistoryFile
from edgeasync.durable.history_writer import WAITING_MAX, HistoryWriter
from tests.support.parts.failing_disk import FailingDisk
from tests.support.parts.histories import numbers, update, updates


def wait(writer, row):
    """Let a row wait to be written."""
    writer._gather((row.entry, msgspec.structs.astuple(row)))


@pytest.mark.parametrize("for_good", [False, True])
def test_a_disk_that_fails_at_any_operation_costs_no_row_and_doubles_none(for_good):
    """Not while the hub lives; a later write brings what waited."""
    calm = _write_some(FailingDisk(), HistoryWriter)
    for operation in range(calm.operations):
        disk = FailingDisk()
        disk.fail(operation, for_good=for_good)
        writer = _write_some(disk, HistoryWriter).writer
        disk.fail_at = None
        writer.flush(sync=True)
        assert writer.trouble == ""
        found = numbers(disk)
        assert found[-50:] == list(range(found[-1] - 49, found[-1] + 1)), operation
        assert found[-1] == 300
        left = disk.after_crash(power_cut=True)
        assert numbers(left) == found, operation


def _write_some(disk, kind):
    """Write 300 rows, thinned on the way, with some syncs; return the disk with its writer."""
    disk.writer = writer = kind(disk, 200)
    for first in range(1, 301, 30):
        for row in updates(first, first + 29):
            wait(writer, row)
        writer.flush(sync=first % 60 == 1)
    return disk


def test_a_full_disk_costs_the_oldest_rows_that_wait(disk):
    writer = HistoryWriter(disk, 1 << 20)
    disk.fail(0, for_good=True)
    for row in range(1, WAITING_MAX + 11):
        wait(writer, update(row))
        if row % 1000 == 0:
            writer.flush()
    writer.flush()
    disk.fail_at = None
    writer.flush()
    assert writer.lost == 10
    assert numbers(disk)[0] == 11
    assert numbers(disk)[-1] == WAITING_MAX + 10


def test_a_history_that_was_removed_is_not_written_to_and_harms_nobody(disk):
    writer = HistoryWriter(disk, 100)
    for row in (1, 2):
        wait(writer, update(row))
        writer.flush()
        disk.files.pop(HISTORY_FILE, None)
    assert writer.trouble == "No such file or directory"
    assert disk.files == {}


def test_a_damaged_history_is_put_aside(disk):
    file = HistoryFile(disk, 100)
    for first in (1, 11, 21):
        file.append(updates(first, first + 9))
        file.sync()
    disk.files[HISTORY_FILE].live[100] ^= 1
    rows = read_rows(disk)
    assert (rows.updates, rows.trouble) == ([], f"damaged at byte {len(FILE_HEADER)}")
    writer = HistoryWriter(disk, 100)
    (remark,) = writer.resume(99, 0.0)
    assert (
        remark == f"history: damaged at byte {len(FILE_HEADER)}; renamed it to {ASIDE_FILE} and started a new one"
    )
    wait(writer, update(1))
    writer.flush()
    assert numbers(disk) == [1]
    assert ASIDE_FILE in disk.files


@pytest.mark.parametrize("block", [-1, 0, 1, 2])
def test_a_history_that_is_damaged_while_a_hub_writes_it_is_put_aside(disk, block):
    writer = HistoryWriter(disk, 100)
    for row in updates(1, 90):
        wait(writer, row)
        if row.row % 30 == 0:
            writer.flush(sync=True)
    content = disk.files[HISTORY_FILE].live
    place = 0 if block < 0 else scan(bytes(content)).places[block].end - 1
    content[place] ^= 1
    for row in updates(91, 120):
        wait(writer, row)
    writer.flush()
    assert writer.trouble.endswith(f"; renamed it to {ASIDE_FILE} and started a new one")
    assert ASIDE_FILE in disk.files
    writer.flush(sync=True)
    assert (writer.trouble, writer.lost) == ("", 0)
    assert numbers(disk) == list(range(91, 121))
