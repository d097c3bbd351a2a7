"""The learning curve: a point a second at most, and fewer when there are many."""

import pytest

from edgeasync.core.engine.learning_curve import LearningCurve
from edgeasync.core.hub.events import Evaluated
from edgeasync.protocol.feed import HISTORY_MAX, HistoryPoint
from tests.support.parts.statuses import empty_core


@pytest.fixture
def core():
    return empty_core()


def test_a_point_is_added_for_a_version_or_an_evaluation_at_most_once_a_second(core):
    curve, state = LearningCurve(core, lambda: 5.0), core.policy_engine.state
    curve.observe(0.0)
    for now_s in (0.5, 2.0):
        curve.observe(now_s)
    assert curve.last == 1, "nothing was new"
    state.version = 1
    curve.observe(2.1)
    state.version = 2
    curve.observe(2.9)
    state.evaluations.last = Evaluated(2, 0.25, 0.5)
    curve.observe(3.2)
    points = curve.since(0, curve.last)
    assert [(point.version, point.evaluation_loss, point.evaluation_accuracy) for point in points] == [
        (0, None, None), (1, None, None), (2, 0.25, 0.5),
    ]  # fmt: skip
    assert curve.since(2, 3) == points[2:]
    assert curve.since(0, 2) == points[:2]


def test_many_points_are_thinned_but_no_evaluation_is_lost(core):
    curve, state = LearningCurve(core, lambda: 0.0), core.policy_engine.state
    now_s, evaluations = 0.0, 0
    for version in range(4 * HISTORY_MAX):
        state.version = version
        if version % 1000 == 7:
            state.evaluations.last = Evaluated(version, float(version), None)
            evaluations += 1
        curve.observe(now_s)
        now_s += 1.0
    points = curve.since(0, curve.last)
    assert HISTORY_MAX / 2 <= len(points) <= HISTORY_MAX
    assert points[-1].version > 4 * HISTORY_MAX - 10
    assert sum(point.evaluation_loss is not None for point in points) == evaluations
    numbers = [one.number for one in curve.points]
    assert numbers == sorted(numbers)


def test_points_from_before_the_start_come_first_and_end_at_the_start(core):
    curve = LearningCurve(core, lambda: 1e9)
    curve.load([HistoryPoint(time_s, 1, 1, 0.5, None, None) for time_s in (40.0, 100.0)], 100.0)
    curve.observe(101.0)
    assert [point.time for point in curve.since(0, curve.last)] == [1e9 - 60.0, 1e9, 1e9]
