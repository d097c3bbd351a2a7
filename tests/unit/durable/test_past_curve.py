"""The learning curve before a hub's start: medians of losses, evaluations, and nothing from damaged files."""

import math

from edgeasync.durable.history import FILE_HEADER, HISTORY_FILE, EvaluationRow, write_blocks
from edgeasync.durable.past_curve import POINTS_MAX, read_past_curve
from simulation.disk import SimulatedDisk
from tests.support.parts.histories import update, updates


def disk_with(rows, more=b""):
    disk = SimulatedDisk(0)
    file = disk.create(HISTORY_FILE)
    file.write([FILE_HEADER, *write_blocks(rows, 0), more])
    return disk


def test_points_are_the_medians_of_consecutive_updates():
    points = read_past_curve(disk_with(updates(1, 4 * POINTS_MAX)))
    assert len(points) == POINTS_MAX
    assert (points[0].time, points[0].version, points[0].updates) == (2.0, 4, 4)
    assert points[0].loss == (1 / 2 + 1 / 3) / 2
    assert points[-1].updates == 4 * POINTS_MAX


def test_an_evaluation_is_a_point_of_its_own():
    rows = [update(1), EvaluationRow(1, 3, 0.75, 1, 0.25, 0.5), update(2, loss=math.nan)]
    points = read_past_curve(disk_with(rows))
    assert [(one.time, one.loss, one.evaluation_loss, one.evaluation_accuracy) for one in points] == [
        (0.5, 1.0, None, None), (0.75, None, 0.25, 0.5), (1.0, None, None, None),
    ]  # fmt: skip


def test_many_evaluations_are_thinned():
    rows = [EvaluationRow(row, row, float(row), row, 1.0, None) for row in range(1, 3 * POINTS_MAX)]
    assert POINTS_MAX / 2 < len(read_past_curve(disk_with(rows))) <= POINTS_MAX


def test_a_history_that_is_missing_or_damaged_has_no_points():
    assert read_past_curve(SimulatedDisk(0)) == []
    for content in (b"", b"nonsense" * 10):
        disk = SimulatedDisk(0)
        disk.create(HISTORY_FILE).write([content])
        assert read_past_curve(disk) == []
    assert len(read_past_curve(disk_with(updates(1, 3), b"torn"))) == 3
