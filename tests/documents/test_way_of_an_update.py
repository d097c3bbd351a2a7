"""The functions that docs/architecture.md names on the path of an update run, in that order."""

import re
import sys
from pathlib import Path

import numpy as np

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload

ROOT = Path(__file__).parents[2]
WAY = (
    (ROOT / "docs/architecture.md")
    .read_text()
    .partition("## The path of an update")[2]
    .partition("If the answer")[0]
)
STEPS = re.findall(r"`([A-Z]\w+\.\w+)`", WAY)


def functions_of_an_update():
    """Return the names of the package's functions that run from the end of training to the next local steps."""
    model, clock = MlpModel(inputs=4, hidden=(8,), classes=3), VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=model.spec,
        initial=model.initial(0),
        policy=Policy(aggregate=ImmediateAggregator()),
        settings=HubCoreSettings(),
        seed=0,
        disk=SimulatedDisk(),
    )
    hub.start()
    random = np.random.default_rng(0)
    data = Dataset.of(random.normal(size=(200, 4)).astype(np.float32), random.integers(0, 3, 200))
    trainer = GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], batches(data, 32, 1))
    device = SimulatedDevice(
        hub, "d", trainer, step_s=0.01, link=LinkProfile(), workload=SimulatedWorkload(examples=200)
    )
    device.start()
    work = device.engine.core.work
    assert clock.run(lambda: work.updates_answered >= 6 and work.state == "training", 100)
    answered, called = work.updates_answered, []
    package = str(ROOT / "edgeasync")

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        assert clock.run(lambda: work.updates_answered > answered and work.state == "training", 100)
    finally:
        sys.setprofile(None)
    return called


def test_the_way_of_an_update_is_as_it_is_told():
    called = functions_of_an_update()
    assert len(STEPS) >= 20
    at = 0
    for step in STEPS:
        assert step in called[at:], f"{step} does not run, or not after the one before it"
        at = called.index(step, at) + 1
