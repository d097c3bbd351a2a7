"""No call into the engine does more than a bounded part of long work: messages are read between the parts."""

import pytest

from edgeasync.core.engine.fold_queue import BROADCAST_AT_A_TIME, INLINE_BYTES_MAX, SLICE_BYTES
from edgeasync.protocol.messages import Assignment, Goodbye, Refuse, Wake
from tests.support.parts.garbage import no_garbage
from tests.support.parts.turns import Bench


@pytest.mark.parametrize(("length", "each"), [(10, 32), (SLICE_BYTES // 4, 1)])
def test_a_flush_is_answered_in_slices(length, each):
    bench = Bench(48, length=length)
    bench.push_all()
    counts = bench.counts(Assignment)
    assert sum(counts) == 48
    assert max(counts) <= each
    assert sorted(bench.to(Assignment)) == bench.peers


@pytest.mark.parametrize("length", [10, SLICE_BYTES // 4, INLINE_BYTES_MAX // 4])
def test_updates_and_what_answers_them_are_freed_at_once(length):
    bench = Bench(3, length=length)
    with no_garbage():
        bench.push_all()
        assert sum(bench.counts(Assignment)) == 3


def test_the_end_of_a_fleet_leaves_nothing_for_the_garbage_collector():
    bench = Bench(2 * BROADCAST_AT_A_TIME)
    with no_garbage():
        bench.engine.request_stop(0.0)
        bench.counts(Goodbye)


def test_many_updates_of_a_middling_model_are_folded_in_the_background():
    bench = Bench(8, length=INLINE_BYTES_MAX // 4)
    bench.push_all()
    assert bench.shell.in_background == 1
    bench.counts(Assignment)
    assert bench.engine.model.current.number == 1
    assert sorted(bench.to(Assignment)) == bench.peers


def test_a_fleet_is_woken_in_slices_and_in_order():
    devices = 3 * BROADCAST_AT_A_TIME + 1
    bench = Bench(devices)
    for member in bench.engine.core.members.members.values():
        member.rest_until_s = 100.0
    bench.engine.core.policy_engine.pacing.rest.state.resting = True
    bench.say(b"operator", Wake())
    assert bench.counts(Refuse) == [BROADCAST_AT_A_TIME] * 3 + [1]
    assert bench.to(Refuse) == bench.peers


def test_all_are_told_of_the_end_before_the_hub_ends():
    bench = Bench(2 * BROADCAST_AT_A_TIME)
    bench.engine.request_stop(0.0)
    assert not bench.shell.stopped
    assert max(bench.counts(Goodbye)) <= BROADCAST_AT_A_TIME
    assert bench.to(Goodbye) == bench.peers
    assert bench.shell.stopped == "stopping"
