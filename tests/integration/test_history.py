"""`Run.history`: written by every hub, read while one is at work, and never in its way."""

import csv
import math
import sys
import types

import numpy as np
import pytest

from edgeasync import Agent, Hub, Run, Stop, train
from edgeasync.data import Dataset
from edgeasync.durable.history import HISTORY_FILE
from edgeasync.errors import ConfigError
from edgeasync.sdk import events
from edgeasync.sdk.history import History
from tests.support.parts.small_runs import MODEL
from tests.support.programs.processes import until

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(200, 4))
DATA = Dataset.of(X, X[:, 0] > 0)


def trained(folder, updates, **options):
    """Train until a number of updates; return the run, and the events of its updates."""
    seen = []
    run = train(
        MODEL, DATA, workers=2, run=folder, until=Stop(updates=updates), callbacks=[seen.append], **options
    )
    return run, [event for event in seen if isinstance(event, events.Update)]


def test_there_is_one_row_for_each_update_and_the_last_evaluation(tmp_path):
    run, seen = trained(tmp_path, 60, evaluate=DATA, settings={"evaluation": {"every": "20 updates"}})
    history = run.history
    assert history.reason == ""
    keys = list(zip(history["device"], history["update"], strict=True))
    assert keys == [(event.device, event.number) for event in seen]
    assert len(set(keys)) == len(keys) >= 60
    assert list(history["loss"]) == [event.loss for event in seen]
    assert [event.outcome for event in seen].count("buffered") > 0
    assert set(history["outcome"]) == {"applied"}, "no update waits in the end"
    assert list(history["staleness"]) == [event.staleness for event in seen]
    assert (np.diff(history["time"]) >= 0).all()
    assert (np.diff(history["version"]) >= 0).all()
    assert (history["bytes"] > 0).all()
    assert len(history.evaluations) >= 3
    assert history.evaluations["version"][-1] == run.version
    opened = Run.open(tmp_path)
    assert (opened.loss, opened.accuracy, opened.updates) == (run.loss, run.accuracy, run.updates)
    assert opened.version == run.version
    assert opened.history.columns == history.columns


@pytest.mark.parametrize("durability", ["journal", "checkpoint"])
def test_a_run_that_continues_adds_its_rows(tmp_path, durability):
    settings = {"hub": {"durability": durability}}
    first, before = trained(tmp_path, 20, settings=settings)
    run, after = trained(tmp_path, 40, settings=settings)
    history = run.history
    assert len(first.history) == len(history)  # it is read from the folder
    keys = list(zip(history["device"], history["update"], strict=True))
    assert keys == [(event.device, event.number) for event in before + after]
    assert list(history["row"]) == list(range(1, len(keys) + 1))
    assert history["updates"][-1] <= run.updates


def test_a_history_of_no_rows(tmp_path):
    run, _ = trained(tmp_path, 10, settings={"hub": {"history_rows_max": 0}})
    assert len(run.history) == len(run.history.evaluations) == 0
    assert "history_rows_max" in run.history.reason
    assert not (tmp_path / HISTORY_FILE).exists()


def test_a_hub_at_work_has_a_history_that_grows(tmp_path):
    with (
        Hub(MODEL, run=tmp_path, bind="tcp://127.0.0.1:*") as hub,
        Agent(hub.address, DATA, name="sensor"),
    ):
        until(lambda: len(hub.history) > 10, "rows of a hub at work")
        found = Run.open(tmp_path).history
        assert set(found["device"]) == {"sensor"}
        until(lambda: len(hub.history) > len(found) + 10, "more rows")
    history = Run.open(tmp_path).history
    assert list(history["update"]) == list(range(1, len(history) + 1))


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), 20, evaluate=DATA)[0].history


def test_rows_and_csv_say_the_same(history, tmp_path):
    rows = list(history)
    assert len(rows) == len(history)
    assert type(rows[0]["version"]) is int
    with history.to_csv(tmp_path / "history.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == history.columns
    assert [float(row["loss"]) for row in written] == list(history["loss"])
    history.evaluations.to_csv(tmp_path / "evaluations.csv")
    assert (tmp_path / "evaluations.csv").read_text().startswith("time,version,loss,accuracy\n")


def test_what_is_not_known_is_nan_and_empty(tmp_path):
    from edgeasync.durable.history import Rows, UpdateRow  # noqa: PLC0415

    known = UpdateRow(1, 1, 0.5, 1, 1, "left", 1, "applied", 0.25, 0, 4, 8, 100, {"f1": 0.5})
    unknown = UpdateRow(2, 2, 0.75, 1, 1, "right", 1, "foreign_lineage", None, None, 4, 8, 100)
    history = History(Rows([known, unknown]))
    assert history["metrics.f1"][0] == 0.5
    for name in ("loss", "staleness", "metrics.f1"):
        assert math.isnan(history[name][1])
    history.to_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().splitlines()[2].split(",")[5:7] == ["", ""]
    with pytest.raises(KeyError, match="unknown column; the columns are time, version"):
        history["losses"]


def test_libraries_that_are_there_are_used_and_others_are_named(history, monkeypatch):
    for name in ("pandas", "polars", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for call, name in ((history.to_pandas, "pandas"), (history.to_polars, "polars"), (history.plot, "matplotlib")):
        with pytest.raises(ConfigError, match=rf"^{name} is not installed: .*pip install {name}"):
            call()
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(DataFrame=dict))
    assert tuple(history.to_pandas()) == tuple(history.to_polars()) == history.columns
