"""A run's history: what is written is read, whatever the disk does, and it stays within its bounds."""

import itertools

import pytest

from edgeasync.core.hub.events import HubStopRequested, PushArrived, Revoked, Ticked
from edgeasync.durable.history import Correction, EvaluationRow, read_rows
from edgeasync.durable.history_file import HistoryFile
from edgeasync.durable.history_writer import HistoryWriter
from edgeasync.policies.aggregation import BufferedAggregator
from edgeasync.policies.policy import Policy
from tests.support.parts.histories import numbers, update, updates
from tests.support.parts.hub_bench import HubBench


def test_what_is_written_is_read(disk):
    file = HistoryFile(disk, 1000)
    evaluation = EvaluationRow(1, 8, 2.5, 4, 0.25, None)
    written = [update(1), update(2, {"accuracy": 0.5}), update(3), update(4), evaluation]
    file.append(written[:3])
    file.append(written[3:])
    rows = read_rows(disk)
    assert rows.updates == written[:4]
    assert rows.evaluations == [evaluation]
    assert rows.trouble == ""
    again = HistoryFile(disk, 1000)
    again.resume(99, 0.0)
    assert (again.updates, again.evaluations) == (4, 1)


def test_a_hub_that_resumes_cuts_back_to_its_checkpoint(disk):
    before = HistoryFile(disk, 1000)
    before.append(updates(1, 10))
    before.append(updates(11, 20))
    after = HistoryFile(disk, 1000)
    again, remark = after.resume(entry=26, time_s=0.0)
    assert (again, remark) == (updates(11, 13), "")
    after.append([*again, *updates(14, 15)])
    assert read_rows(disk).updates == updates(1, 15)
    assert (after.updates, after.evaluations) == (13, 0)


def test_rows_without_an_entry_are_cut_by_their_time(disk):
    HistoryFile(disk, 1000).append([update(row, entry=0) for row in range(1, 11)])
    again, _ = HistoryFile(disk, 1000).resume(entry=99, time_s=3.2)
    assert [row.row for row in again] == [1, 2, 3, 4, 5, 6]


# -- what became of updates that waited ------------------------------------------------------------------------


def waiting(row):
    return update(row, outcome="buffered")


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
    "applied": lambda hub: hub.give(HubStopRequested()),
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
        self.note(Ticked(), self.core.policy_engine._roll_back("alarm"))


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
    after.writer.resume(999, 1e9, before.core.policy_engine.state.gathering.contributions)
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
    assert found.updates == [update(row.row) for row in found.updates]
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
