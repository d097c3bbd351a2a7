"""The journal: what was appended is read, in order and once, whatever a crash or a bad disk did to its end."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import (
    WINDOW_BYTES,
    JournalReading,
    JournalWriter,
    Segment,
    TornTail,
    remove_torn_headers,
)
from edgeasync.errors import StorageError
from edgeasync.protocol.wire import checksum
from simulation.disk import SimulatedDisk
from tests.support.parts.failing_disk import FailingDisk

HEADER = 28
RECORD = 40
BATCHES = st.lists(
    st.lists(st.tuples(st.binary(max_size=40), st.none() | st.binary(max_size=200)), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)
CHANCE = st.fixed_dictionaries(
    {
        "torn": st.sampled_from([0, 7, 40, 10**6]),
        "zeroed": st.booleans(),
        "names_kept": st.sampled_from([None, "", "1"]),
    }
)


def records(disk, after=0):
    return [(r.number, bytes(r.entry), bytes(r.payload)) for r in JournalReading(disk, after).records()]


def numbered(batches, first=1):
    flat = [(entry, payload or b"") for batch in batches for entry, payload in batch]
    return [(number, *record) for number, record in enumerate(flat, first)]


def written(batches, segment_bytes_max=300):
    disk = FailingDisk()
    writer = JournalWriter(disk, 1, segment_bytes_max=segment_bytes_max)
    for batch in batches:
        writer.append(batch)
    return disk, writer


def whole(disk, after=0):
    reading = JournalReading(disk, after)
    return list(reading.records()), reading


def go_on(disk, reading):
    writer = JournalWriter(disk, reading.last + 1, reading.segments)
    writer.secure(reading.unsynced)
    return writer


def test_an_empty_folder_is_an_empty_journal():
    found, reading = whole(FailingDisk(), after=7)
    assert (found, reading.last, reading.segments, reading.torn) == ([], 7, [], [])
    remove_torn_headers(FailingDisk(), reading)


@given(BATCHES, st.data())
def test_what_is_appended_is_read_from_any_number_on(batches, data):
    disk, writer = written(batches)
    expected = numbered(batches)
    after = data.draw(st.integers(0, len(expected)))
    assert records(disk, after) == expected[after:]
    _, reading = whole(disk, after)
    assert reading.last == len(expected) == writer.next_number - 1
    assert sum(segment.nbytes for segment in reading.segments) == sum(
        len(file.live) for file in disk.files.values()
    )
    assert all(file.synced == file.live for file in disk.files.values())
    assert disk.synced_names == disk.files


@given(BATCHES, st.sampled_from(["truncate", "flip", "zero"]), st.data())
def test_a_damaged_last_segment_yields_a_prefix_or_an_error(batches, how, data):
    disk, _ = written(batches)
    last = disk.files[max(disk.files)].live
    position = data.draw(st.integers(0, len(last) - 1))
    if how == "truncate":
        del last[position:]
    elif how == "flip":
        last[position] ^= data.draw(st.integers(1, 255))
    else:
        last[position:] = bytes(len(last) - position)
    expected = numbered(batches)
    try:
        found = records(disk)
    except StorageError:
        assert how != "truncate"
        assert position < HEADER or how == "flip"  # what follows says that it was synced
        return
    assert found == expected[: len(found)]
    _, reading = whole(disk)
    remove_torn_headers(disk, reading)
    go_on(disk, reading).append([(b"new", None)])
    assert whole(disk)[1].torn == []
    assert records(disk) == [*found, (len(found) + 1, b"new", b"")]


@given(BATCHES, st.integers(0, 40), st.booleans(), CHANCE)
def test_a_batch_that_failed_and_is_appended_again_is_read_once(batches, failing, power_cut, chance):
    disk = FailingDisk()
    writer = JournalWriter(disk, 1, segment_bytes_max=300)
    disk.fail(failing)
    for batch in batches:
        try:
            writer.append(batch)
        except OSError:
            writer.append(batch)
    assert records(disk.after_crash(power_cut=power_cut, **chance)) == numbered(batches)


@given(BATCHES, st.integers(0, 40), CHANCE)
def test_a_crash_anywhere_costs_only_what_was_not_appended(batches, failing, chance):
    disk = FailingDisk()
    writer = JournalWriter(disk, 1, segment_bytes_max=300)
    disk.fail(failing, for_good=True)
    appended = 0
    for batch in batches:
        try:
            writer.append(batch)
        except OSError:
            break
        appended += len(batch)
    expected = numbered(batches)
    for power_cut in (True, False):
        found = records(disk.after_crash(power_cut=power_cut, **chance))
        assert appended <= len(found) <= len(expected)
        assert found == expected[: len(found)]


@pytest.mark.parametrize("failing", range(7))
def test_a_segment_is_there_with_its_first_batch_or_not_at_all(failing):
    disk = FailingDisk()
    disk.fail(failing, for_good=True)
    with contextlib.suppress(OSError):
        JournalWriter(disk, 1).append([(b"a" * 100, None)])
    for found in (
        disk.after_crash(power_cut=False),
        disk.after_crash(power_cut=True, torn=100, zeroed=True, names_kept=""),
    ):
        assert (found.names() == ["journal-00000001"]) == (len(records(found)) == 1) == (failing >= 5)


def test_zeros_where_the_first_records_were_to_be_are_a_torn_tail():
    disk, _ = written([[(b"a" * 100, None)]])
    content = disk.files["journal-00000001"].live
    content[HEADER:] = bytes(len(content) - HEADER)
    found, reading = whole(disk)
    assert (found, reading.torn) == ([], [TornTail("journal-00000001", HEADER, RECORD + 100)])


@pytest.mark.parametrize("there", [0, 1, 2, 4000])
def test_zeros_that_fill_up_the_last_block_are_not_torn(there):
    disk, _ = written([[(b"a" * 100, None), (b"b" * there, None)]])
    content = disk.files["journal-00000001"].live
    nbytes = len(content)
    content += bytes(-nbytes % 4096)
    found, reading = whole(disk)
    assert (len(found), reading.torn, reading.segments[0].nbytes) == (2, [], nbytes)
    content[-1] = 1
    assert whole(disk)[1].torn == [TornTail("journal-00000001", nbytes, len(content) - nbytes)]


def test_a_disk_that_cannot_read_the_last_block_is_a_storage_error():
    disk, _ = written([[(b"a", None)]])
    content = disk.files["journal-00000001"].live
    content += bytes(-len(content) % 4096)
    disk.fail(4)
    with pytest.raises(StorageError, match="Input/output"):
        whole(disk)


def killed_before_the_sync():
    """Return a disk with what a process wrote that was killed before it could sync the last of it."""
    disk, writer = written([[(b"a", None)]])
    disk.fail(1, for_good=True)
    with pytest.raises(OSError, match="Input/output"):
        writer.append([(b"b", b"payload"), (b"c", None)])
    disk.fail_at = None
    return disk


def test_what_a_killed_process_did_not_sync_is_written_again_once_it_was_read():
    disk = killed_before_the_sync()
    found, reading = whole(disk)
    assert [bytes(record.entry) for record in found] == [b"a", b"b", b"c"]
    assert reading.unsynced == [(b"b", b"payload"), (b"c", b"")]
    writer = go_on(disk, reading)
    assert writer.next_number == 4
    assert [segment.first for segment in whole(disk)[1].segments] == [1, 2]
    after_power_cut = disk.after_crash(power_cut=True)
    assert bytes(after_power_cut.files["journal-00000001"].live).endswith(b"a")
    assert [record[1:] for record in records(after_power_cut)] == [(b"a", b""), (b"b", b"payload"), (b"c", b"")]
    assert whole(disk, after=3)[1].unsynced == [(b"b", b"payload"), (b"c", b"")]
    assert whole(disk, after=4)[1].unsynced == [], "a checkpoint goes further"
    writer.append([(b"d", None)])
    assert whole(disk)[1].unsynced == [(b"d", b"")]


@pytest.mark.parametrize("failing", range(6))
def test_records_that_are_written_again_count_where_they_were_until_they_are_synced(failing):
    disk = killed_before_the_sync()
    _, reading = whole(disk)
    disk.fail(failing)
    with pytest.raises(OSError, match="Input/output"):
        go_on(disk, reading)
    found, reading = whole(disk)
    assert [bytes(record.entry) for record in found] == [b"a", b"b", b"c"]
    go_on(disk, reading)
    assert [entry for _, entry, _ in records(disk.after_crash(power_cut=True))] == [b"a", b"b", b"c"]


def test_what_a_failed_sync_leaves_in_doubt_is_not_trusted_by_the_next_process():
    for seed in range(50):
        disk = SimulatedDisk(seed)
        writer = JournalWriter(disk, 1)
        writer.append([(b"a", None)])
        disk.die_at(disk.operations + 2, lambda: None, power=False)  # written, and not synced
        writer.append([(b"b" * 600, None)])
        disk.crash()
        disk.failing_syncs = 1
        for trouble in (pytest.raises(OSError, match="Input/output"), contextlib.nullcontext()):
            found, reading = whole(disk)
            assert len(found) == 2
            with trouble:
                go_on(disk, reading)
        disk.crash()
        assert records(disk) == [(1, b"a", b""), (2, b"b" * 600, b"")]


def test_a_power_cut_while_records_are_written_again_costs_none_that_was_synced():
    for seed in range(20):
        for operation in range(1, 8):
            disk = SimulatedDisk(seed)
            writer = JournalWriter(disk, 1)
            for entry in (b"a", b"b" * 600):
                writer.append([(entry, None)])
            disk.die_at(disk.operations + operation, lambda: None, power=True)
            found, reading = whole(disk)
            remove_torn_headers(disk, reading)
            go_on(disk, reading).append([(b"c", None)])
            disk.crash()
            assert [entry for _, entry, _ in records(disk)][:2] == [bytes(r.entry) for r in found], operation


def test_attempts_on_a_full_disk_leave_nothing_behind():
    disk, writer = written([[(b"a", None)]])
    for operation in (0, 2, 3, 4) * 3:
        disk.fail(operation)
        with pytest.raises(OSError, match="Input/output"):
            writer.append([(b"b", None)])
    assert [segment.nbytes for segment in whole(disk)[1].segments] == [len(f.live) for f in disk.files.values()]
    assert len(disk.files) == 1


@given(BATCHES, st.data())
def test_dropping_never_costs_a_needed_record(batches, data):
    disk, writer = written(batches)
    expected = numbered(batches)
    number = data.draw(st.integers(0, len(expected)))
    if data.draw(st.booleans()):
        writer.close()
    disk.fail(data.draw(st.integers(0, 12)), for_good=True)
    try:
        writer.drop_through(number)
    except OSError:
        assert records(disk.after_crash(power_cut=False), number) == expected[number:]
    disk.fail_at = None
    assert records(disk.after_crash(power_cut=True), number) == expected[number:]
    writer.drop_through(number)
    assert records(disk, number) == expected[number:]
    writer.append([(b"new", None)])
    assert records(disk, number) == [*expected[number:], (len(expected) + 1, b"new", b"")]


def test_what_was_dropped_stays_so_after_a_power_cut():
    disk, writer = written([[(b"a" * 400, None)], [(b"b", None)]])
    writer.drop_through(1)
    assert disk.after_crash(power_cut=True).names() == ["journal-00000002"]


def test_a_record_missing_in_the_middle_ends_the_last_segment():
    disk, _ = written([[(b"a", None), (b"b", None), (b"c", None)]])
    del disk.files["journal-00000001"].live[HEADER + RECORD + 1 : HEADER + 2 * RECORD + 2]
    _, reading = whole(disk)
    assert (reading.last, reading.torn) == (1, [TornTail("journal-00000001", HEADER + RECORD + 1, RECORD + 1)])


@pytest.mark.parametrize("how", ["flip", "remove"])
def test_a_record_that_was_synced_before_another_was_written_is_damage(how):
    disk, _ = written([[(b"a", None), (b"b", None)], [(b"c", None)]])
    content = disk.files["journal-00000001"].live
    if how == "flip":
        content[HEADER + RECORD] ^= 1
    else:
        del content[HEADER : HEADER + RECORD + 1]
    with pytest.raises(StorageError, match="record 1 was synced but cannot be read"):
        records(disk)


class BehindDisk:
    """A disk whose first reads of records return `before`, as if a hub wrote while somebody reads."""

    def __init__(self, disk, before):
        self._disk, self._before, self.names, self.size = disk, before, disk.names, disk.size

    def read(self, name, offset, nbytes=None):
        if offset and self._before is not None:
            content, self._before = self._before, None
            return content[offset:]
        return self._disk.read(name, offset, nbytes)


def test_a_record_that_a_hub_writes_while_it_is_read_is_read_again():
    disk, writer = written([[(b"a", None)]])
    before = bytes(disk.files["journal-00000001"].live).ljust(4096, b"\0")
    for entry in (b"b", b"c"):
        writer.append([(entry, None)])
    assert records(BehindDisk(disk, before)) == [(1, b"a", b""), (2, b"b", b""), (3, b"c", b"")]


def test_a_torn_header_with_nothing_behind_it_is_cut():
    disk, _ = written([[(b"a" * 400, None)], [(b"b", None)]])
    last = disk.files["journal-00000002"].live
    del last[HEADER:]
    last[-1] ^= 1
    found, reading = whole(disk)
    assert (len(found), reading.torn) == (1, [TornTail("journal-00000002", 0, HEADER)])
    remove_torn_headers(disk, reading)
    assert disk.names() == ["journal-00000001"]


def test_the_segment_being_written_is_not_dropped():
    disk, writer = written([[(b"a", None)]])
    writer.drop_through(1)
    assert list(disk.files) == ["journal-00000001"]
    writer.close()
    writer.drop_through(1)
    assert not disk.files
    writer.append([(b"b", None)])
    assert list(disk.files) == ["journal-00000002"]


def test_a_writer_drops_the_segments_of_earlier_ones():
    disk, _ = written([[(b"a" * 400, None)], [(b"b", None)]])
    _, reading = whole(disk)
    assert [(segment.name, segment.first) for segment in reading.segments] == [
        ("journal-00000001", 1),
        ("journal-00000002", 2),
    ]
    writer = JournalWriter(disk, 3, reading.segments)
    writer.append([(b"c", None)])
    writer.drop_through(1)
    assert list(disk.files) == ["journal-00000002", "journal-00000003"]
    writer.drop_through(2)
    assert list(disk.files) == ["journal-00000003"]


def test_a_segment_that_begins_at_an_earlier_number_wins():
    disk, _ = written([[(b"a", None), (b"abandoned", None), (b"abandoned", None)]])
    JournalWriter(disk, 2).append([(b"b", None)])
    assert [entry for _, entry, _ in records(disk)] == [b"a", b"b"]


def test_a_lost_segment_is_named():
    batches = [[(b"x" * 400, None)]] * 3
    disk, _ = written(batches)
    del disk.files["journal-00000002"]
    with pytest.raises(StorageError, match=r"journal-00000003: .* record 2 is missing; restore the journal"):
        records(disk)
    assert records(disk, after=2) == numbered(batches)[2:]


def test_damage_before_the_last_segment_is_named_unless_a_checkpoint_covers_it():
    batches = [[(b"x" * 400, None)], [(b"y", None)]]
    disk, _ = written(batches)
    disk.files["journal-00000001"].live[100] ^= 1
    with pytest.raises(
        StorageError, match=r"journal-00000002: .* record 1 is missing \(journal-00000001 is damaged at byte 28"
    ):
        records(disk)
    assert records(disk, after=1) == numbered(batches)[1:]


def test_a_damaged_header_is_named_unless_nothing_of_its_segment_counts():
    batches = [[(b"x" * 400, None)]] * 3
    disk, _ = written(batches)
    disk.files["journal-00000002"].live[3] ^= 1
    with pytest.raises(StorageError, match=r"journal-00000003: .*\(journal-00000002 has an invalid header\)"):
        records(disk)
    assert records(disk, after=2) == numbered(batches)[2:]
    disk.files["journal-00000003"].live[3] ^= 1
    with pytest.raises(StorageError, match=r"journal-00000002: invalid header"):
        records(disk, after=2)


@pytest.mark.parametrize("operation", range(4))
def test_a_disk_that_cannot_be_read_is_a_storage_error(operation):
    disk, _ = written([[(b"a", None)]])
    disk.fail(operation)
    with pytest.raises(StorageError, match="Input/output"):
        whole(disk)


def test_a_torn_header_that_cannot_be_removed_is_a_storage_error():
    disk, _ = written([[(b"a", None)]])
    del disk.files["journal-00000001"].live[HEADER - 1 :]
    _, reading = whole(disk)
    disk.fail(0)
    with pytest.raises(StorageError, match=r"clean up the journal: .*Input/output"):
        remove_torn_headers(disk, reading)


def test_a_record_may_be_longer_than_a_segment_and_than_the_window(tmp_path: Path):
    disk = FolderDisk(tmp_path)
    payload = np.arange(3 * WINDOW_BYTES // 4, dtype=np.float32)
    writer = JournalWriter(disk, 1, segment_bytes_max=1000)
    writer.append([(b"small", None), (b"large", memoryview(payload)), (b"between", memoryview(b"x" * 900_000))])
    writer.append([(b"next", memoryview(payload[:10]))])
    writer.close()
    found, reading = whole(disk)
    assert [bytes(record.entry) for record in found] == [b"small", b"large", b"between", b"next"]
    assert np.array_equal(np.frombuffer(found[1].payload, np.float32), payload)
    assert [segment.first for segment in reading.segments] == [1, 4]
    assert sum(segment.nbytes for segment in reading.segments) == sum(disk.size(name) for name in disk.names())


def test_a_known_checksum_is_stored_and_checked():
    disk = FailingDisk()
    writer = JournalWriter(disk, 1)
    writer.append([(b"a", b"payload", checksum(b"payload")), (b"b", b"payload", None), (b"c", b"payload")])
    assert [payload for _, _, payload in records(disk)] == [b"payload"] * 3
    assert bytes(disk.files["journal-00000001"].live).count(checksum(b"payload").to_bytes(8, "little")) == 3
    writer.append([(b"d", None, 5), (b"e", b"", 5), (b"f", b"changed", checksum(b"payload"))])
    assert [entry for _, entry, _ in records(disk)] == [b"a", b"b", b"c", b"d", b"e"]


def test_an_empty_batch_writes_nothing():
    disk = FailingDisk()
    JournalWriter(disk, 1, [Segment("journal-00000001", 1, 100)]).append([])
    assert not disk.operations
