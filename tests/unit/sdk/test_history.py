"""`History.plot`, with what stands in for matplotlib, which the tests do without."""

import sys
from types import ModuleType

import numpy as np
import pytest

from edgeasync.durable.history import EvaluationRow, Rows, UpdateRow
from edgeasync.sdk.history import History


class Axes:
    def __init__(self):
        self.curves, self.limits, self.legends, self.right = [], None, [], None

    def plot(self, x, y, *_, label="", **__):
        self.curves.append((label, x, y))
        return [label]

    def twinx(self):
        self.right = Axes()
        return self.right

    def set_ylim(self, low, high):
        self.limits = (low, high)

    def legend(self, handles):
        self.legends.append(handles)

    def set_xlabel(self, _):
        pass

    set_ylabel = set_xlabel


class Figure:
    def __init__(self, **_):
        self.axes = Axes()

    def subplots(self):
        return self.axes


@pytest.fixture(autouse=True)
def _matplotlib(monkeypatch):
    module = ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)


def history(losses, evaluated=(), accuracy=None):
    updates = [
        UpdateRow(row, row, float(row), row, row, "pi", row, "applied", loss, 0, 1, 1, 1)
        for row, loss in enumerate(losses, start=1)
    ]
    evaluations = [
        EvaluationRow(row, row, float(row), row, loss, accuracy) for row, loss in enumerate(evaluated, 1)
    ]
    return History(Rows(updates, evaluations))


CURVE = list(2.0 * 0.97 ** np.arange(150) + 0.1)


@pytest.mark.parametrize("odd", [[1e30], [1e6, 1e9], [-1e6], [float("inf")], [None], [float("nan")]], ids=str)
@pytest.mark.parametrize("evaluated", [[], [2.0, 1.0, 0.5]], ids=["", "evaluated"])
def test_outliers_do_not_stretch_the_axis_and_the_curve_is_whole(odd, evaluated):
    low, high = history([*CURVE[:75], *odd, *CURVE[75:]], evaluated).plot().axes.limits
    assert -0.2 < low <= 0.12
    assert 1.9 <= high < 2.5


@pytest.mark.parametrize("losses", [[], [None, None], [0.5], [0.5, 0.5]], ids=str)
def test_losses_without_a_range_leave_the_axis_to_matplotlib(losses):
    assert history(losses).plot().axes.limits is None


@pytest.mark.parametrize(
    ("evaluated", "accuracy", "labels"),
    [
        ([], None, ["loss of updates"]),
        ([1.0, 0.5], None, ["loss of updates", "loss of evaluations"]),
        ([1.0, 0.5], 0.9, ["loss of updates", "loss of evaluations", "accuracy"]),
    ],
)
def test_one_legend_names_every_curve(evaluated, accuracy, labels):
    axes = history(CURVE, evaluated, accuracy).plot().axes
    assert axes.legends == [labels]
    drawn = axes.curves + (axes.right.curves if axes.right else [])
    assert [label for label, *_ in drawn] == labels
