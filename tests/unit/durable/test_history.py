"""A run's history: what is written is read, whatever the disk does, and it stays within its bounds."""

import contextlib
import itertools
import struct
import zlib

import msgspec
import pytest

from edgeasync.core.hub.events import PushArrived, Revoked, StopRequested, Ticked
from edgeasync.durable.history import (
    FILE_HEADER,
    HISTORY_FILE,
    Block,
    Correction,
    EvaluationRow,
    Last,
    UpdateRow,
    read_history,
    read_rows,
    scan,
    write_block,
)
from edgeasync.durable.history_file import ASIDE_FILE, HistoryFile
from edgeasync.durable.history_writer import WAITING_MAX, HistoryWriter
from edgeasync.policies.aggregation import BufferedAggregator
from edgeasync.policies.policy import Policy
from edgeasync.simulation.disk import SimulatedDisk
from tests.support.failing_disk import FailingDisk
from tests.support.hub_bench import HubBench
from tests.support.size import repetitions

NAMES = ("left", "right", "middle")


def update(row, metrics=None):
    name = NAMES[row % 3]
    fields = (row, 2 * row, 0.5 * row, row, row, row // 3, "applied", 1.0 / row, 0, 16, 64, 400)
    return name, UpdateRow(*fields, metrics=metrics)


def updates(first, last):
    return [update(row) for row in range(first, last + 1)]


def pairs(rows):
    return list(zip(rows.devices, rows.updates, strict=True))


def numbers(disk):
    rows = read_rows(disk)
    assert not rows.trouble
    return [row.row for row in rows.updates]


def wait(writer, update):
    """Let a row wait to be written."""
    device, row = update
    writer._gather((row.entry, device, msgspec.structs.astuple(row)))


@pytest.fixture
def disk():
    return FailingDisk()


def test_what_is_written_is_read(disk):
    file = HistoryFile(disk, 1000)
    evaluation = EvaluationRow(1, 8, 2.5, 4, 0.25, None)
    written = [update(1), update(2, {"accuracy": 0.5}), update(3), update(4), evaluation]
    file.append(written[:3])
    file.append(written[3:])
    rows = read_rows(disk)
    assert pairs(rows) == written[:4]
    assert rows.evaluations == [evaluation]
    assert rows.trouble == ""
    assert (file.last.updates, file.last.evaluations, file.last.entry) == (4, 1, 8)


def test_a_hub_that_resumes_cuts_back_to_its_checkpoint(disk):
    before = HistoryFile(disk, 1000)
    before.append(updates(1, 10))
    before.append(updates(11, 20))
    after = HistoryFile(disk, 1000)
    again, remark = after.resume(entry=26, time_s=0.0)
    assert (again, remark) == (updates(11, 13), "")
    after.append([*again, *updates(14, 15)])
    assert pairs(read_rows(disk)) == updates(1, 15)


def test_rows_without_an_entry_are_cut_by_their_time(disk):
    def timed(row):
        return "left", msgspec.structs.replace(update(row)[1], entry=0)

    HistoryFile(disk, 1000).append([timed(row) for row in range(1, 11)])
    again, _ = HistoryFile(disk, 1000).resume(entry=99, time_s=3.2)
    assert [row.row for _, row in again] == [1, 2, 3, 4, 5, 6]


# -- what became of updates that waited ------------------------------------------------------------------------


def waiting(row):
    return update(row)[0], msgspec.structs.replace(update(row)[1], outcome="buffered")


def correction(row, outcome="applied", entry=None):
    entry = 2 * row + 1 if entry is None else entry
    return Correction(row, entry, 0.25 * entry, outcome)


def outcomes(disk):
    return [row.outcome for row in read_rows(disk).updates]


def test_a_correction_changes_the_outcome_of_an_earlier_row(disk):
    file = HistoryFile(disk, 1000)
    file.append([waiting(1), waiting(2), correction(1)])
    assert outcomes(disk) == ["applied", "buffered"]
    file.append([waiting(3), correction(2, "rolled_back"), correction(999)])
    assert outcomes(disk) == ["applied", "rolled_back", "buffered"]
    assert file.last.entry == 999 * 2 + 1


def test_rows_that_are_thinned_out_keep_their_outcomes(disk):
    file = HistoryFile(disk, 40)
    for row in range(1, 201):
        file.append([waiting(row)])
        if row > 3:
            file.append([correction(row - 3, "applied" if row % 2 else "rolled_back")])
    found = read_rows(disk).updates
    assert 20 <= len(found) <= 40
    became = {True: "rolled_back", False: "applied"}
    assert all(row.outcome == became[row.row % 2 == 1] for row in found if row.row <= 197)
    assert [row.outcome for row in found if row.row > 197] == ["buffered"] * 3


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("entry", "expected", "waits"), [(6, "bbr", [1, 2, 3]), (7, "aar", [3]), (9, "aar", [3])])
def test_a_hub_that_resumes_cuts_off_later_corrections(disk, blocks, entry, expected, waits):
    rows = [waiting(1), waiting(2), waiting(3)]
    rows += [correction(1, entry=7), correction(2, entry=7), correction(3, entry=10)]
    file, size = HistoryFile(disk, 1000), len(rows) // blocks
    for start in range(0, len(rows), size):
        file.append(rows[start : start + size])
    after = HistoryFile(disk, 1000)
    again, _ = after.resume(entry, 0.0)
    after.append([*again, correction(3, "revoked", entry=11)])
    assert "".join(outcome[0] for outcome in outcomes(disk)) == expected
    assert sorted(row for rows in after.buffered.values() for row in rows) == waits


ENDS = {
    "applied": lambda hub: hub.give(StopRequested()),
    "revoked": lambda hub: hub.give(Revoked(b"a" * 32)),
    "rolled_back": lambda hub: hub.roll_back(),
    "quarantined": lambda hub: hub.order(),
}


class Watched(HubBench):
    """A hub whose updates wait, and the history of what it decides."""

    def __init__(self, disk):
        super().__init__(Policy(aggregate=BufferedAggregator(count=9)))
        self.writer = HistoryWriter(disk, 1000)
        self.keys["a"] = b"a" * 32
        self.join("a")

    def give(self, event, at_s=None):
        super().give(event, at_s)
        self.note(event, self.effects)

    def note(self, event, effects):
        self.writer.note(self.core, self.events, event, effects, self.now_s)

    def push_with_key(self, seq):
        push = self.make_push("a", seq)
        self.give(PushArrived(self.peers["a"], push, next(self.handles), 1.0, True, self.keys["a"]))

    def roll_back(self):
        self.note(Ticked(), self.core.policy_engine._roll_back(self.now_s))


@pytest.mark.parametrize("written_before", [False, True])
@pytest.mark.parametrize("outcome", ENDS)
def test_an_update_that_waited_has_the_outcome_that_it_came_to(disk, outcome, written_before):
    hub = Watched(disk)
    for seq in (1, 2):
        hub.push_with_key(seq)
    if written_before:
        hub.writer.flush()
        assert outcomes(disk) == ["buffered"] * 2
    ENDS[outcome](hub)
    hub.writer.flush()
    assert outcomes(disk) == [outcome] * 2
    assert not hub.writer._buffered


def test_a_hub_that_resumes_knows_which_rows_wait(disk):
    before = Watched(disk)
    for seq in (1, 2):
        before.push_with_key(seq)
    before.writer.flush()
    after = Watched(disk)
    after.writer.resume(999, 1e9, before.core.policy_engine.state.contributions)
    after.note(Ticked(), before.core.policy_engine.fold(1.0)[:1])
    after.writer.flush()
    assert outcomes(disk) == ["applied"] * 2


@pytest.mark.parametrize("rows_max", [40, 100, 1000])
def test_it_stays_bounded_and_the_newest_stay(disk, rows_max):
    file = HistoryFile(disk, rows_max)
    last = 20 * rows_max
    for row in range(1, last + 1, 7):
        file.append(updates(row, min(row + 6, last)))
        if row % 5 == 0:
            file.append([EvaluationRow(row // 5, 2 * row, 0.5 * row, row, 1.0, 0.5)])
    found = read_rows(disk)
    count = len(found.updates) + len(found.evaluations)
    assert rows_max // 2 <= count <= rows_max
    assert pairs(found) == [update(row.row) for row in found.updates], "and every row with its own device"
    kept = [row.row for row in found.updates]
    newest = rows_max // 2 - len(found.evaluations)
    assert kept[-newest:] == list(range(last - newest + 1, last + 1))
    older = [row for row in kept if row <= last - rows_max]
    strides = {later - earlier for earlier, later in itertools.pairwise(older)}
    assert len(strides) == 1, "what is left of the older half lies evenly"
    assert older[0] == strides.pop()
    again = HistoryFile(disk, rows_max)
    again.resume(2 * last, 0.5 * last)
    again.append(updates(last + 1, last + 3))
    assert numbers(disk)[-3:] == [last + 1, last + 2, last + 3]


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


def test_names_of_devices_that_could_not_be_written_are_told_again():
    for operation in range(8):
        disk = FailingDisk()
        HistoryFile(disk, 1000).append(updates(1, 2))
        file = HistoryFile(disk, 1000)
        file.resume(entry=4, time_s=1.0)
        new = [("new", update(3)[1])]
        disk.fail(operation)
        with contextlib.suppress(OSError):
            file.append(new)
            new = []
        disk.fail_at = None
        file.append([*new, ("newer", update(4)[1])])
        assert read_rows(disk).devices == ["right", "middle", "new", "newer"], operation


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
    assert remark == f"history: damaged at byte {len(FILE_HEADER)}; it is now {ASIDE_FILE}, and a new one begins"
    wait(writer, update(1))
    writer.flush()
    assert numbers(disk) == [1]
    assert ASIDE_FILE in disk.files


@pytest.mark.parametrize("block", [-1, 0, 1, 2])
def test_a_history_that_is_damaged_while_a_hub_writes_it_is_put_aside(disk, block):
    writer = HistoryWriter(disk, 100)
    for row in updates(1, 90):
        wait(writer, row)
        if row[1].row % 30 == 0:
            writer.flush(sync=True)
    content = disk.files[HISTORY_FILE].live
    place = 0 if block < 0 else scan(bytes(content)).places[block].end - 1
    content[place] ^= 1
    for row in updates(91, 120):
        wait(writer, row)
    writer.flush()
    assert writer.trouble.endswith(f"; it is now {ASIDE_FILE}, and a new one begins")
    assert ASIDE_FILE in disk.files
    writer.flush(sync=True)
    assert (writer.trouble, writer.lost) == ("", 0)
    assert numbers(disk) == list(range(91, 121))


def test_what_a_power_cut_left_of_later_blocks_alone_is_no_damage(disk):
    file = HistoryFile(disk, 100)
    for first in (1, 11, 21):
        file.append(updates(first, first + 9))
    content = disk.files[HISTORY_FILE].live
    second = scan(bytes(content)).places[1]
    content[second.start : second.end] = bytes(second.end - second.start)
    again = HistoryFile(disk, 100)
    assert again.resume(99, 0.0) == ([], "")
    assert again.last.updates == 10


def test_a_history_of_a_newer_format_is_named(disk):
    HistoryFile(disk, 100).append(updates(1, 2))
    content = disk.files[HISTORY_FILE].live
    content[8:12] = (99).to_bytes(4, "little")
    content[12:20] = zlib.crc32(b"").to_bytes(8, "little")
    assert read_rows(disk).trouble == "damaged at byte 0"
    from edgeasync.protocol.wire import checksum  # noqa: PLC0415

    content[12:20] = checksum(bytes(content[:12])).to_bytes(8, "little")
    assert read_rows(disk).trouble == "it is of format 99, and this edgeasync reads format 2"


def test_a_folder_without_a_history_says_why(tmp_path):
    rows = read_history(tmp_path)
    assert rows.updates == []
    assert rows.trouble.startswith("there is no history in this folder")


HOSTILE = {
    "names that were never told": Block(5, [], [7], [update(1)[1]], []),
    "fewer devices than updates": Block(0, ["one"], [], [update(1)[1]], []),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_block_that_no_hub_has_written_is_refused(disk, name):
    _give(disk, write_block(HOSTILE[name], Last(2, 1.0, 1, 0), 0))
    assert read_rows(disk).trouble.startswith(f"damaged at byte {len(FILE_HEADER)}")


def test_a_block_that_inflates_without_end_is_refused(disk):
    from edgeasync.protocol.wire import checksum  # noqa: PLC0415

    body = zlib.compress(bytes(64 << 20), 9)
    header = struct.pack("<4sIIQQdQQ", b"EAHB", len(body), 1, 0, 1, 0.0, 1, 0)
    _give(disk, header + checksum(header, body).to_bytes(8, "little") + body)
    assert "damaged" in read_rows(disk).trouble


def test_any_bytes_are_read_without_an_error(disk):
    file = HistoryFile(disk, 100)
    for first in (1, 11, 21):
        file.append(updates(first, first + 9))
    whole = bytes(disk.files[HISTORY_FILE].live)
    for place in range(0, len(whole), max(1, len(whole) // repetitions("cases of a reader of bytes"))):
        content = bytearray(whole)
        content[place] ^= 0xFF
        disk.files[HISTORY_FILE].live[:] = content
        found = pairs(read_rows(disk))
        assert found == updates(1, 30)[: len(found)]


def _give(disk, block):
    file = disk.create(HISTORY_FILE)
    file.write([FILE_HEADER, block])
