"""Local steps while an update is in flight, and while the hub is unreachable."""

import math

import pytest

from edgeasync.core.device.effects import Connect, SendPush, Train
from edgeasync.core.device.events import Kept, ModelInstalled, OverlapTrained, Trained
from edgeasync.protocol.messages import Ack, Applied, Buffered, Duplicate, Fetch, Goodbye, Refuse, Rejected
from tests.support.parts.device_bench import DeviceBench, assignment, offline_bench, overlap_steps


def overlap_bench(steps):
    """A device that trains, and may train on while it waits."""
    return DeviceBench().welcome(overlap_steps_max=steps).assigned(0).give(ModelInstalled(assignment(0)))


def test_overlap_steps_count_among_the_next():
    device = overlap_bench(4)
    device.trained()
    assert device.effects[-1] == Train(4, overlap=True)
    answer = assignment(1, Ack(1, Applied(1)))
    device.hears(answer)
    device.give(OverlapTrained(Trained(3, 24, 1.0, 0.5, 0.25)))
    device.give(ModelInstalled(answer))
    assert device.effects == [Train(5)]
    device.give(Trained(5, 40, 0.5, 0.25, 0.125))
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert (push.local_steps, push.overlap_steps, push.examples) == (8, 3, 64)
    assert push.loss_mean == pytest.approx((3 * 1.0 + 5 * 0.5) / 8)
    assert push.step_s == pytest.approx((3 * 0.25 + 5 * 0.125) / 8)
    # The variance of all eight losses: within each part, and between the two means.
    assert push.loss_variance == pytest.approx((3 * 0.5 + 5 * 0.25) / 8 + (3 / 8) * (5 / 8) * 0.25)


@pytest.mark.parametrize(
    "outcome",
    [Rejected("not_finite"), Rejected("behind", preempted=True), Duplicate(Rejected("behind", preempted=True))],
)
def test_steps_that_went_on_from_a_diverged_update_do_not_count(outcome):
    device = overlap_bench(4)
    device.trained()
    answer = assignment(1, Ack(1, outcome))
    device.hears(answer)
    device.give(OverlapTrained(Trained(3, 24, math.nan, math.nan, 0.25)))
    device.give(ModelInstalled(answer))
    assert device.effects == [Train(8)]
    device.trained()
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert (push.local_steps, push.overlap_steps) == (8, 0)


def test_a_device_that_is_cut_off_trains_on_to_its_limit_and_merges_when_it_is_back():
    device = offline_bench(20)
    assert device.core.work.overlap.is_allowed
    device.hears(Goodbye("stopping"))
    assert overlap_steps(device) == [], "the assigned steps are not done yet"
    device.trained()
    assert device.told == ["alone"]
    assert overlap_steps(device) == [20]
    for _ in range(3):
        device.until(Connect)
        assert overlap_steps(device) == []
    device.give(OverlapTrained(Trained(20, 160, 0.5, 0.25, 0.125)))
    assert device.effects == [], "that was all"
    device.welcome(overlap_steps_max=0)
    assert device.pushed == [1]
    answer = assignment(9, Ack(1, Applied(9)))
    device.hears(answer).give(ModelInstalled(answer))
    assert device.effects == [Train(1)]
    device.give(Trained(1, 8, 0.5, 0.25, 0.125))
    (push,) = [effect.push for effect in device.effects if isinstance(effect, SendPush)]
    assert (push.seq, push.local_steps, push.overlap_steps) == (2, 21, 20)


@pytest.mark.parametrize("work", ["pushing", "answered"])
def test_a_device_goes_alone_when_the_hub_goes_after_its_update(work):
    device = offline_bench(20).trained()
    assert overlap_steps(device) == []
    if work == "answered":
        device.hears(Ack(1, Buffered(1)))
    device.hears(Goodbye("stopping"))
    assert device.told == ["disconnected", "alone"]
    assert overlap_steps(device) == [20]
    device.until(Connect)
    device.welcome()
    device.hears(Goodbye("stopping"))
    assert overlap_steps(device) == [], "they are not done yet"


def test_a_busy_hub_leaves_a_device_alone():
    device = offline_bench(20).trained()
    device.hears(Refuse("busy", "later", 0.5))
    assert (device.told, overlap_steps(device)) == (["alone"], [20])
    device.hears(Refuse("busy", "later", 0.5))
    assert device.effects == []


def test_steps_that_were_not_taken_are_allowed_later():
    device = offline_bench(20)
    device.hears(Goodbye("stopping"))
    device.trained()
    assert overlap_steps(device) == [20]
    device.give(OverlapTrained(Trained(7, 56, 0.5, 0.25, 0.125)))
    assert overlap_steps(device) == [13]
    device.give(Kept(1))
    assert overlap_steps(device) == [13], "paused before its first step"
    device.give(OverlapTrained(Trained(13, 104, 0.5, 0.25, 0.125)))
    assert overlap_steps(device) == []


@pytest.mark.parametrize(("trains_at_rest", "steps"), [(False, []), (True, [20])])
def test_a_device_that_trains_at_rest_takes_its_steps_alone(trains_at_rest, steps):
    device = DeviceBench(alone_steps_max=20, trains_at_rest=trains_at_rest).welcome()
    device.assigned(0).give(ModelInstalled(assignment(0))).trained()
    device.hears(Ack(1, Applied(1)))
    device.hears(Refuse("busy", "wait 60 s: training has plateaued", 60.0, rest=True))
    assert overlap_steps(device) == steps
    assert device.told[0] == "resting"
    since_s = device.now_s
    assert device.until(Fetch).session == device.session
    assert device.now_s == since_s + 60.0, "it asks when the rest is over, and not before"


@pytest.mark.parametrize(("alone", "more"), [(20, [16]), (4, []), (3, []), (0, [])])
def test_alone_the_larger_limit_holds_and_one_call_at_a_time(alone, more):
    device = offline_bench(alone, overlap=4).trained()
    assert overlap_steps(device) == [4]
    device.hears(Goodbye("stopping"))
    assert overlap_steps(device) == [], "the first four are not done yet"
    device.give(OverlapTrained(Trained(4, 32, 0.5, 0.25, 0.125)))
    assert overlap_steps(device) == more
    assert ("alone" in device.told) == bool(more)


def test_a_device_does_not_go_on_from_what_diverged():
    device = offline_bench(20).trained()
    device.hears(Ack(1, Rejected("not_finite")))
    device.hears(Goodbye("stopping"))
    assert overlap_steps(device) == []


def test_a_device_without_a_model_does_not_go_alone():
    device = DeviceBench(alone_steps_max=20).welcome()
    device.hears(Goodbye("stopping"))
    assert overlap_steps(device) == []
    device.until(Connect)
    device.welcome().assigned(0).hears(Goodbye("stopping"))
    assert overlap_steps(device) == []
