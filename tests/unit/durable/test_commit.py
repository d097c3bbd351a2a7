"""Entries are synced together and in order, and nothing counts as durable before the disk has said so."""

import errno
import os

import pytest

from edgeasync.durable.commit import LAZY_BYTES_MAX, RETRY_S, GroupCommit


class FakeWriter:
    """Notes batches with the number each began with; fails while told to."""

    def __init__(self, next_number=1):
        self.next_number = next_number
        self.attempts = []
        self.dropped = []
        self.trouble = None
        self.closed = False

    def close(self):
        self.closed = True

    def append(self, records):
        self.attempts.append((self.next_number, [entry for entry, *_ in records]))
        if self.trouble is not None:
            raise self.trouble
        self.next_number += len(records)

    def drop_through(self, number):
        self.dropped.append(number)
        if self.trouble is not None:
            raise self.trouble


class FakeShell:
    """A thread and a loop that do something only when the test says so."""

    def __init__(self):
        self.works = []
        self.actions = []

    def write_in_background(self, work, then):
        self.works.append((work, then))

    def after(self, delay_s, action):
        self.actions.append((delay_s, action))

    def idle(self):
        """Let the loop do what it was asked to do at once."""
        due, self.actions = self.actions, [later for later in self.actions if later[0]]
        for delay_s, action in due:
            if not delay_s:
                action()

    def wait(self):
        """Let time pass until all that was delayed has been done."""
        due, self.actions = self.actions, []
        for _, action in due:
            action()

    def write(self):
        """Let the thread do its next work, and return what tells the loop."""
        work, then = self.works.pop(0)
        result = work()
        return lambda: then(result)


class World:
    def __init__(self, next_number=1):
        self.writer, self.shell = FakeWriter(next_number), FakeShell()
        self.durable, self.failing = [], []
        self.log = GroupCommit(
            self.writer,
            self.shell,
            on_durable=lambda: self.durable.append(self.log.durable),
            on_failing=self.failing.append,
        )

    def append(self, *entries):
        for entry in entries:
            self.log.append(entry, None)

    def commit(self, *entries):
        self.append(*entries)
        self.log.commit()

    def settle(self):
        """Let loop and thread run until there is nothing more to do at once."""
        self.shell.idle()
        while self.shell.works:
            self.shell.write()()
            self.shell.idle()


@pytest.fixture
def world():
    return World()


def full_disk():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_numbers_go_on_from_what_the_writer_has():
    world = World(next_number=8)
    assert (world.log.last, world.log.durable) == (7, 7)
    world.append(b"a")
    assert (world.log.last, world.log.durable) == (8, 7)


def test_what_is_appended_before_the_loop_is_idle_is_one_batch(world):
    world.commit(b"a")
    world.commit(b"b")
    assert world.shell.works == []
    world.settle()
    assert world.writer.attempts == [(1, [b"a", b"b"])]
    assert world.durable == [2]
    assert world.log.batches == 1


def test_what_comes_during_a_write_is_the_next_batch(world):
    world.commit(b"a")
    world.shell.idle()
    world.commit(b"b", b"c")
    world.shell.idle()
    assert len(world.shell.works) == 1  # one at a time
    world.settle()
    assert world.writer.attempts == [(1, [b"a"]), (2, [b"b", b"c"])]
    assert world.durable == [1, 3]


def test_nothing_is_durable_before_the_loop_hears_that_it_was_written(world):
    world.commit(b"a")
    world.shell.idle()
    assert world.log.durable == 0
    tell = world.shell.write()
    assert (world.log.durable, world.durable) == (0, [])
    tell()
    assert (world.log.durable, world.durable) == (1, [1])


def test_bytes_are_counted_with_their_payload(world):
    world.log.append(b"entry", b"payload")
    assert (world.log.bytes_appended, world.log.bytes_waiting) == (12, 12)
    world.log.commit()
    world.settle()
    assert (world.log.bytes_appended, world.log.bytes_waiting) == (12, 0)


def test_lazy_entries_are_written_with_others(world):
    world.append(b"lazy")
    world.settle()
    assert world.writer.attempts == []
    world.commit(b"wanted")
    world.append(b"lazy too")
    world.settle()
    assert world.writer.attempts == [(1, [b"lazy", b"wanted", b"lazy too"])]


def test_lazy_entries_that_come_during_a_write_wait_for_others(world):
    world.commit(b"wanted")
    world.shell.idle()
    world.append(b"lazy")
    world.settle()
    assert world.writer.attempts == [(1, [b"wanted"])]


def test_many_lazy_entries_are_written_without_others(world):
    world.append(bytes(LAZY_BYTES_MAX))
    world.settle()
    assert world.writer.attempts == []
    world.append(b"one more")
    world.settle()
    assert [len(batch) for _, batch in world.writer.attempts] == [2]
    assert world.durable == [2]


def test_what_cannot_be_written_is_written_again_under_the_same_numbers_with_what_came_since(world):
    world.commit(b"a", b"b")
    world.shell.idle()
    world.commit(b"c")
    world.writer.trouble = full_disk()
    world.settle()
    assert world.failing == ["No space left on device"]
    assert (world.log.failing, world.log.durable, world.durable) == ("No space left on device", 0, [])
    assert world.log.bytes_waiting == 3
    assert [delay_s for delay_s, _ in world.shell.actions] == [RETRY_S]

    world.commit(b"d")
    world.settle()
    assert len(world.writer.attempts) == 1  # the disk is left alone for a while

    world.writer.trouble = None
    world.shell.wait()
    world.settle()
    assert world.writer.attempts == [(1, [b"a", b"b"]), (1, [b"a", b"b", b"c", b"d"])]
    assert (world.log.failing, world.durable, world.log.bytes_waiting) == ("", [4], 0)


def test_a_disk_that_goes_on_failing_is_told_of_once(world):
    world.commit(b"a")
    world.writer.trouble = full_disk()
    world.settle()
    for _ in range(3):
        world.shell.wait()
        world.settle()
    assert len(world.writer.attempts) == 4
    assert world.failing == ["No space left on device"]
    world.writer.trouble = None
    world.shell.wait()
    world.settle()
    assert world.durable == [1]
    world.commit(b"b")
    world.writer.trouble = full_disk()
    world.settle()
    assert len(world.failing) == 2  # it had been well in between


def test_an_answer_to_what_became_durable_may_append_and_commit(world):
    world.log._on_durable = lambda: world.log.last < 3 and (world.append(b"more"), world.log.commit())
    world.commit(b"a")
    world.settle()
    assert world.writer.attempts == [(1, [b"a"]), (2, [b"more"]), (3, [b"more"])]
    assert world.log.durable == 3


def test_an_error_that_is_not_the_disks_is_not_taken_for_one(world):
    world.commit(b"a")
    world.shell.idle()
    world.writer.trouble = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        world.shell.write()
    assert world.log.durable == 0


def test_the_journal_is_dropped_behind_what_is_being_written_and_failing_matters_not(world):
    world.commit(b"a")
    world.shell.idle()
    world.log.drop_through(7)
    assert world.writer.dropped == []
    world.settle()
    world.writer.trouble = full_disk()
    world.log.drop_through(9)
    world.settle()
    assert world.writer.dropped == [7, 9]
    assert (world.failing, world.log.durable) == ([], 1)


@pytest.mark.parametrize("fails", [False, True])
def test_after_closing_nothing_more_is_begun(world, fails):
    world.commit(b"a")
    world.shell.idle()
    world.commit(b"b")
    world.log.close()
    world.writer.trouble = full_disk() if fails else None
    world.settle()
    world.shell.wait()
    world.settle()
    assert world.writer.attempts == [(1, [b"a"])]
    assert world.log.durable == (0 if fails else 1)
    assert world.writer.closed
