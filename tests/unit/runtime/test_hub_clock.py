"""The hub's own time continues from where the last start left it, and never goes back."""

import random
from types import SimpleNamespace

import numpy as np

from edgeasync import Parameter, ParameterSpec, Policy
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.runtime import hub as hub_module
from edgeasync.runtime.hub import Hub


def test_a_hub_that_goes_on_never_begins_before_it_stopped(tmp_path, monkeypatch):
    hub = Hub(
        spec=ParameterSpec((Parameter("weights", (3,)),)),
        initial=lambda: np.zeros(3, np.float32),
        policy=Policy(),
        bind="tcp://127.0.0.1:*",
        run=tmp_path,
        settings=HubCoreSettings(),
        durability="checkpoint",
    )
    monkeypatch.setattr(hub_module, "HubEngine", lambda *_, **__: None)
    generator = random.Random(0)
    for _ in range(100):
        stopped_s, machine_s = generator.uniform(0.0, 10.0), generator.uniform(0.0, 1e6)
        monkeypatch.setattr(hub_module.time, "monotonic", lambda machine_s=machine_s: machine_s)
        hub._run = SimpleNamespace(
            now_s=stopped_s, core=None, sessions=None, model=None, publisher=None, history=None
        )
        hub._make_engine()
        assert hub._now_s() == stopped_s
