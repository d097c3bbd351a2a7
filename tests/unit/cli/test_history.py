"""`edgeasync history`: plots in a terminal, and CSV, of a run that was trained in this process."""

import math

import numpy as np
import pytest

from edgeasync import Policy, Stop, train
from edgeasync.cli.history import LABEL, ROWS, plot, print_history
from edgeasync.cli.output import Printer
from edgeasync.errors import StorageError
from edgeasync.training.numpy_models import SoftmaxModel

DATA = np.eye(4), np.arange(4)


def dots(lines):
    """The row of the dot in each column of a plot; its axis begins after the labels."""
    found = {}
    for row, line in enumerate(lines[1 : 1 + ROWS]):
        for column, sign in enumerate(line[LABEL + 2 :]):
            if sign == "•":
                assert column not in found
                found[column] = row
    return found


def test_a_falling_loss_is_a_falling_curve():
    lines = plot("loss", [(float(x), 10.0 - x) for x in range(10)], width=60)
    assert lines[0] == "loss, last 1"
    assert [lines[1].split()[0], lines[ROWS].split()[0]] == ["10", "1"]
    assert list(dots(lines).values()) == list(range(ROWS))
    assert lines[-1].split() == ["0", "9", "s"]
    assert max(map(len, lines)) <= 60


def test_losses_of_several_magnitudes_have_a_logarithmic_axis():
    lines = plot("loss", [(float(x), math.exp(-x)) for x in range(10)], width=60)
    assert lines[0].endswith("(logarithmic)")
    assert list(dots(lines).values()) == list(range(ROWS))


def test_a_column_shows_the_median_of_its_part_of_the_time():
    points = [(float(x), 100.0 if x % 3 == 0 else 1.0) for x in range(3000)]
    assert set(dots(plot("loss", points, width=40)).values()) == {ROWS // 2 - 1}, "all medians are equal"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "run"
    train(SoftmaxModel(inputs=4, classes=4), DATA, workers=1, run=folder, policy=Policy(), until=Stop(updates=30))
    return folder


def test_a_run_is_plotted_or_printed_as_csv(run, capsys):
    print_history(run, Printer(json=False), csv=False, evaluations=False)
    assert capsys.readouterr().out.startswith("median loss of updates, last ")
    print_history(run, Printer(json=False), csv=True, evaluations=False)
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("time,version,update,device,outcome,loss")
    assert len(rows) >= 30
    print_history(run, Printer(json=False), csv=True, evaluations=True)
    assert capsys.readouterr().out.splitlines()[0] == "time,version,loss,accuracy"


def test_a_folder_without_a_history_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"nothing"):
        print_history(tmp_path / "nothing", Printer(json=False), csv=False, evaluations=False)
