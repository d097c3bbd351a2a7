"""The progress of training over time, in a limited number of points. Part of `HubEngine`."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import replace

from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.policy_engine import describe_evaluation, json_number
from edgeasync.protocol.feed import HISTORY_MAX, HistoryPoint

POINT_S = 1.0
"""Minimum seconds between two points. It doubles whenever the points are thinned."""


class Numbered(NamedTuple):
    """A point and its number. Numbers increase, but thinning leaves gaps."""

    number: int
    point: HistoryPoint


class LearningCurve:
    """Adds a point after a new version or evaluation, at most one a second.

    If there are too many points, every second one is dropped, and later points are farther apart.
    """

    def __init__(self, core: HubCore, wall_s: Callable[[], float]) -> None:
        self._core = core
        self._wall_s = wall_s
        self._due_s = 0.0
        self._every_s = POINT_S
        self._version = -1
        self._evaluated = core.policy_engine.state.evaluations.last
        self.points: list[Numbered] = []
        self.last = 0
        """The number of the newest point."""

    def load(self, points: Iterable[HistoryPoint], now_s: float) -> None:
        """Begin with points from before the hub's start; their times are those of the core's clock.

        This clock does not advance while the hub is down, so these points have no gaps.
        """
        zero_s = self._wall_s() - now_s
        for point in points:
            self.last += 1
            self.points.append(Numbered(self.last, replace(point, time=round(zero_s + point.time, 3))))

    def observe(self, now_s: float) -> None:
        """Add a point if one is due; call this after every event."""
        if now_s < self._due_s:
            return
        core, last = self._core, self._core.policy_engine.state.evaluations.last
        if core.version == self._version and last is self._evaluated:
            return
        evaluation = None if last is self._evaluated else describe_evaluation(last)
        self._due_s, self._version, self._evaluated = now_s + self._every_s, core.version, last
        point = HistoryPoint(
            time=round(self._wall_s(), 3),
            version=core.version,
            updates=core.updates_applied,
            loss=json_number(core.policy_engine.state.fleet.loss),
            evaluation_loss=None if evaluation is None else evaluation.loss,
            evaluation_accuracy=None if evaluation is None else evaluation.accuracy,
        )
        self.last += 1
        self.points.append(Numbered(self.last, point))
        if len(self.points) > HISTORY_MAX:
            self._thin()

    def _thin(self) -> None:
        """Drop every second point, but not the newest one."""
        *older, newest = self.points
        self.points = [*map(_merged, older[::2], older[1::2]), newest]
        self._every_s *= 2.0

    def since(self, number: int, through: int) -> list[HistoryPoint]:
        """Return the points after a number, up to the number `through`."""
        begin = bisect_right(self.points, number, key=itemgetter(0))
        return [one.point for one in self.points[begin:] if one.number <= through]


def _merged(dropped: Numbered, kept: Numbered) -> Numbered:
    """Return the second point, with the evaluation of the first one unless it has its own."""
    point = dropped.point
    if kept.point.evaluation_loss is not None or point.evaluation_loss is None:
        return kept
    loss, accuracy = point.evaluation_loss, point.evaluation_accuracy
    return kept._replace(point=replace(kept.point, evaluation_loss=loss, evaluation_accuracy=accuracy))
