"""What the soak benchmark makes of logs and counts: it must notice an update that is lost or counts twice."""

import logging

import pytest

from benchmarks.soak_counts import Answers, Counted, find_miscounts
from edgeasync.net.frame_log import FRAMES, log_frame
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Assignment,
    Buffered,
    Duplicate,
    ModelVersion,
    Push,
    Rejected,
)

BASE = ModelVersion("0" * 16, 7)


def log(caplog, *messages):
    """Return the lines that an agent logs of these messages, but for the time."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, FRAMES.name):
        for message in messages:
            log_frame("out" if isinstance(message, Push) else "in", b"", wire.encode(message), b"")
    return [f"{record.name} {record.getMessage()}" for record in caplog.records]


def push(seq):
    return Push(bytes(16), seq, BASE, 8, 256, 0.5, 0.25, 0.01, "identity", 2**64 - 1, 4000, 0)


def assignment(ack):
    return Assignment(BASE, 8, "top_k(0.25)+int8", 2**64 - 1, 10**6, 10**6, ack)


def answers(caplog, *starts, keeps=False):
    """Return what a device tells that sent and heard these messages in each of its starts."""
    told = Answers(keeps)
    for messages in starts:
        told.begin()
        for line in log(caplog, *messages):
            told.read(line)
    return told


def counted(last, applied, rejected=0, **details):
    """Return the counts of a hub with one device."""
    return Counted({"a": (last, applied)}, applied, rejected, 0, 0, **details)


def test_a_log_is_read_as_an_agent_writes_it(caplog):
    told = answers(
        caplog,
        [push(1), Ack(1, Buffered(1)), push(2), assignment(Ack(2, Applied(7))), push(3)],
        [push(3), Ack(3, Duplicate(Rejected("stale"))), push(4)],
    )
    assert told.outcomes == {1: "Buffered", 2: "Applied", 3: "Rejected"}
    assert (told.duplicates, told.unanswered(4)) == (1, [4])


@pytest.mark.parametrize("keeps", [False, True])
def test_an_answer_that_a_kill_cut_off_is_excused_where_the_device_keeps_no_update(keeps, caplog):
    told = answers(caplog, [push(1)], [push(2), Ack(2, Applied(7)), push(3), Ack(3, Applied(8))], keeps=keeps)
    expected = ["a: update 1 counts, and its answer never came"] if keeps else []
    assert find_miscounts({"a": told}, counted(3, 3)) == expected


@pytest.mark.parametrize(
    ("found", "miscounts"),
    [
        (counted(2, 2), []),
        (counted(2, 3), ["the hub has counted 3 updates, and the devices' last numbers make 2"]),
        (counted(2, 1), ["the hub has counted 1 updates, and the devices' last numbers make 2"]),
        (counted(2, 1, 1), ["a: 0 updates were answered as rejected, and 1 of 2 are not in the model"]),
        (counted(1, 1), ["a: update 2 was answered, and the hub knows only 1"]),
        (counted(4, 4), ["a: update 3 counts, and its answer never came"]),
        (
            counted(2, 2, outcomes={("a", 2): "Rejected"}),
            ["a: update 2 was answered Applied, and the journal says"],
        ),
        (counted(2, 2, twice=(("a", 1),)), ["a: update 1 ended twice"]),
        (counted(2, 2, same_model=False), ["the journal leads to another model"]),
    ],
)
def test_an_update_that_is_lost_or_counts_twice_is_noticed(found, miscounts, caplog):
    told = answers(caplog, [push(1), Ack(1, Buffered(1)), push(2), assignment(Ack(2, Applied(7)))])
    sentences = find_miscounts({"a": told}, found)
    assert all(any(sentence.startswith(begun) for sentence in sentences) for begun in miscounts)
    assert bool(sentences) == bool(miscounts)
