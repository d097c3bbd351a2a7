"""The best version is the same in the status, in `edgeasync runs`, in the run's files and in `export --best`."""

import itertools

import numpy as np
import pytest

from edgeasync import Agent, Hub, Run, Stop, train
from edgeasync.core.hub.evaluation_tracker import goodness, is_better
from edgeasync.core.hub.events import Evaluated
from edgeasync.durable.run_folder import BEST_FILE
from edgeasync.graphs.model_file import read_header
from edgeasync.ops.runs import list_checkpoints, list_runs
from edgeasync.ops.trained import best_model
from edgeasync.training.numpy_models import SoftmaxModel

X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
MODEL = SoftmaxModel(inputs=4, classes=2)
DATA = X, (X[:, 0] + 0.5 * np.random.default_rng(1).normal(size=200) > 0).astype(int)


def worth(found):
    return found and (found["version"], found["loss"], found["accuracy"])


def told(run):
    """Return what is best by the list of runs, the run's file, and its story, each as version, loss, accuracy."""
    (listed,) = list_runs(run.parent)
    kept, exported = read_header(run / BEST_FILE).evaluation, best_model(run).evaluation
    ways = [(one.number, one.loss, one.accuracy) for one in (kept, exported)]
    return [(listed.best.version, listed.best.loss, listed.best.accuracy), *ways]


def hub_of(run, evaluate, **checkpoint):
    settings = {"evaluation": {"every": "3 updates"}, "checkpoint": {"every": "20 updates", **checkpoint}}
    return Hub(MODEL, run=run, bind="tcp://127.0.0.1:*", evaluate=evaluate, settings=settings)


@pytest.mark.parametrize("evaluate", [DATA, None], ids=["held out", "losses of devices"])
def test_the_best_version_is_one(tmp_path, evaluate):
    run = tmp_path / "runs" / "a"
    with hub_of(run, evaluate) as hub:
        with Agent(hub.address, DATA, batch_size=1):
            while hub.status()["updates_applied"] < 100:
                pass
        status = worth(hub.status()["best"])
    assert status is not None
    for version, loss, accuracy in told(run):
        assert (version, accuracy) == (status[0], status[2])
        assert float(f"{loss:.6g}") == status[1]
    assert Run.open(run, best=True).version == status[0]


ONCE = {"evaluation": {"every": "1000000 updates"}}
"""Nothing is evaluated before the end."""


def by_train(run, evaluate, updates, best):
    """Train, and return the loss that the call has told."""
    how = {"evaluate": evaluate, "callbacks": [best], "settings": ONCE, "until": Stop(updates=updates)}
    return train(MODEL, DATA, workers=2, run=run, **how).loss


def by_hub(run, evaluate, updates, best, **until):
    how = {"evaluate": evaluate, "callbacks": [best], "settings": ONCE} | until
    with Hub(MODEL, run=run, bind="tcp://127.0.0.1:*", **how) as hub, Agent(hub.address, DATA):
        if not until:
            while hub.status()["updates_applied"] < updates:
                pass
            hub.finish()
        hub.wait()
    return Run.open(run).loss


def by_stop(run, evaluate, updates, best):
    return by_hub(run, evaluate, updates, best, until=Stop(updates=updates))


class Best:
    """Notes the losses that callbacks are told of as the best."""

    def __init__(self):
        self.losses = []

    def on_best(self, event):
        self.losses.append(event.loss)


@pytest.mark.parametrize("go", [by_train, by_stop, by_hub])
def test_the_last_version_may_be_the_best(tmp_path, go):
    """Red before: the evaluation at the end was in the history alone, and without `train` there was none."""
    run, losses, best = tmp_path / "runs" / "a", iter((9.0, 0.5, 9.0, 0.25, 9.0, 0.75)), Best()
    for number, (last, least) in enumerate(((0.5, 0.5), (0.25, 0.25), (0.75, 0.25)), 1):
        loss = go(run, lambda _: next(losses), 20 * number, best)  # the first call looks for mistakes
        found, newest = Run.open(run, best=True), Run.open(run)
        assert (loss, newest.loss, found.loss) == (last, last, least)
        assert (found.version == newest.version) == (last == least)
        assert told(run) == [(found.version, least, None)] * 3
        assert newest.events[-1].loss == last
    assert best.losses == [0.5, 0.25]


def test_a_run_that_went_back_has_another_best_version(tmp_path):
    run, calls = tmp_path / "runs" / "a", itertools.count(1)

    def ever_better(_):
        return 1.0 / next(calls)

    with hub_of(run, ever_better) as hub, Agent(hub.address, DATA):
        while hub.status()["updates_applied"] < 60:
            pass
    kept = read_header(run / BEST_FILE)
    oldest = min(list_checkpoints(run), key=lambda one: one.version)
    assert kept.version > oldest.version
    with hub_of(run, ever_better, recovery=oldest.checkpoint) as hub:
        status = hub.status()["best"]
    assert status is None or status["version"] <= oldest.version
    assert not (run / BEST_FILE).exists()
    assert read_header(run / f"{BEST_FILE}.aside") == kept
    (listed,) = list_runs(run.parent)
    assert listed.best is None


GOOD_TO_BAD = [
    (0.9, 0.9),
    (0.9, 1.0),
    (0.9, float("nan")),
    (0.5, 0.1),
    (None, 0.1),
    (None, 0.2),
    (None, float("nan")),
]


def test_evaluations_have_one_order():
    found = [Evaluated(1, loss, accuracy) for accuracy, loss in GOOD_TO_BAD]
    assert sorted(found, key=lambda one: goodness(one.loss, one.accuracy), reverse=True) == found
    for place, one in enumerate(found):
        assert [is_better(one, other) for other in found] == [False] * (place + 1) + [True] * (
            len(found) - place - 1
        )
