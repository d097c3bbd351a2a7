"""Saving the best model, however soon the saver's thread gets to it."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgeasync import Parameter, ParameterSpec, Policy
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.graphs.model_file import load_model
from edgeasync.runtime.hub import Hub

SPEC = ParameterSpec((Parameter("weights", (3,)),))


class Saver:
    """A worker that does what it is given at once, or when it is told to."""

    def __init__(self, at_once):
        self.at_once = at_once
        self.waiting = []

    def submit(self, work):
        self.waiting.append(work)
        if self.at_once:
            self.run()

    def run(self):
        while self.waiting:
            self.waiting.pop(0)()


@pytest.mark.parametrize("at_once", [True, False])
def test_the_newest_of_the_best_is_written(tmp_path, at_once):
    hub = Hub(
        spec=SPEC,
        initial=lambda: np.zeros(3, np.float32),
        policy=Policy(),
        bind="tcp://127.0.0.1:*",
        run=tmp_path,
        settings=HubCoreSettings(),
    )
    hub._engine, hub._opened = SimpleNamespace(core=SimpleNamespace(lineage="0" * 16)), True
    saver = Saver(at_once)
    hub._workers = {"save": saver}
    hub._folder.take("")
    for number in (1, 2, 3):
        hub.save_best(Snapshot(number, np.full(3, number, np.float32)), 1.0 / number, None)
    saver.run()
    vector, version = load_model(hub.best_file, SPEC)
    hub._folder.close()
    assert (vector.tolist(), version) == ([3.0, 3.0, 3.0], 3)
