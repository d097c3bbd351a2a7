"""Reading a history file, damaged ones included."""

import contextlib
import itertools
import struct
import zlib

import pytest

from edgeasync.durable.history import FILE_HEADER, HISTORY_FILE, read_rows, scan, write_blocks
from edgeasync.durable.history_file import HistoryFile
from edgeasync.durable.run_folder import RunFolder
from edgeasync.protocol.wire import checksum
from simulation.disk import SimulatedDisk
from tests.support.parts.failing_disk import FailingDisk
from tests.support.parts.histories import numbers, updates


@pytest.mark.parametrize("power_cut", [False, True])
def test_rows_of_a_checkpoint_outlive_a_hub_that_dies_while_it_cuts_later_ones_off(power_cut):
    """Red before: the hub cut the block off first, and only then rewrote the rows to keep."""
    for operation in itertools.count():
        disk = FailingDisk()
        file = HistoryFile(disk, 1000)
        file.append(updates(1, 10))
        file.sync()
        disk.fail(operation, for_good=True)
        ended = False
        with contextlib.suppress(OSError):
            file = HistoryFile(disk, 1000)
            again, remark = file.resume(entry=12, time_s=3.0)
            assert not remark
            file.append([*again, *updates(7, 8)])
            file.sync()
            ended = True
        left = disk.after_crash(power_cut=power_cut)
        rows = [row for row in numbers(left) if row <= 6]
        assert rows == [1, 2, 3, 4, 5, 6], operation
        if ended:
            assert numbers(left) == list(range(1, 9))
            return


def test_what_a_failed_sync_left_in_doubt_is_written_again():
    for seed in range(20):
        disk = SimulatedDisk(seed)
        file = HistoryFile(disk, 1000)
        for row in range(1, 200):
            file.append(updates(row, row))
        disk.failing_syncs = 1
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
        file.sync()
        file.append(updates(200, 200))
        file.sync()
        disk.crash()
        assert numbers(disk) == list(range(1, 201)), seed


def test_what_an_earlier_process_did_not_sync_is_written_again():
    """Its sync failed, or it was killed before: the file reads well, and a power cut may still take it."""
    for seed, failed in itertools.product(range(20), (False, True)):
        disk = SimulatedDisk(seed)
        file = HistoryFile(disk, 1000)
        for row in range(1, 50):
            file.append(updates(row, row))
        if failed:
            disk.failing_syncs = 1
            with pytest.raises(OSError, match="Input/output error"):
                file.sync()
        file = HistoryFile(disk, 1000)
        assert file.resume(entry=98, time_s=24.5) == ([], "")
        file.sync()
        disk.crash()
        assert numbers(disk) == list(range(1, 50)), (seed, failed)


@pytest.mark.parametrize("cut", [0, 5, len(FILE_HEADER), len(FILE_HEADER) + 3, -1])
def test_an_unfinished_write_is_left_out(disk, cut):
    HistoryFile(disk, 100).append(updates(1, 5))
    content = disk.files[HISTORY_FILE].live
    del content[cut:]
    assert read_rows(disk).updates == []
    file = HistoryFile(disk, 100)
    assert file.resume(99, 0.0) == ([], "")
    file.append(updates(1, 3))
    assert numbers(disk) == [1, 2, 3]


def test_what_a_power_cut_left_of_later_blocks_alone_is_no_damage(disk):
    file = HistoryFile(disk, 100)
    for first in (1, 11, 21):
        file.append(updates(first, first + 9))
    content = disk.files[HISTORY_FILE].live
    second = scan(bytes(content)).places[1]
    content[second.start : second.end] = bytes(second.end - second.start)
    again = HistoryFile(disk, 100)
    assert again.resume(99, 0.0) == ([], "")
    assert again.updates == 10


def test_a_folder_without_a_history_says_why(tmp_path):
    rows = RunFolder(tmp_path).history()
    assert rows.updates == []
    assert rows.trouble.startswith("no history in this folder")


def test_a_block_that_no_hub_has_written_is_refused(disk):
    (block,) = write_blocks(updates(1, 2), 0)
    _give(disk, _block(block[28:], rows=3))
    assert (
        read_rows(disk).trouble
        == f"damaged at byte {len(FILE_HEADER)}: its number of rows differs from its header"
    )


def test_a_block_that_inflates_without_end_is_refused(disk):
    _give(disk, _block(zlib.compress(bytes(64 << 20), 9), rows=1))
    assert "damaged" in read_rows(disk).trouble


def _block(body, rows):
    header = struct.pack("<4sIIQ", b"EAHB", len(body), rows, 0)
    return header + checksum(header, body).to_bytes(8, "little") + body


def _give(disk, block):
    file = disk.create(HISTORY_FILE)
    file.write([FILE_HEADER, block])
