"""Devices that begin with parameters of their own, in virtual time."""

import numpy as np
import pytest

from benchmarks.virtual_fleet import split_digits
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings
from edgeasync.data.partition import iid
from edgeasync.policies.aggregation import SynchronousAggregator
from edgeasync.policies.optimizers import SGD
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.plan import LocalTraining
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.parts.small_runs import in_full
from tests.support.simulation.hubs import simulated_hub

LINK = LinkProfile(1e6, 1e6, 0.005)
DEVICES = 4
MODEL = MlpModel(inputs=64, hidden=(32,), classes=10)
PLAIN = in_full(5, SynchronousAggregator())


class Still:
    """A trainer that changes nothing."""

    spec = MODEL.spec

    def begin(self, parameters):
        self.parameters = parameters.copy()

    def step(self):
        return StepResult(None, 1)


def start(trainers, initials, policy=PLAIN):
    clock = VirtualClock()
    hub = simulated_hub(clock, MODEL, policy, settings=HubCoreSettings(codec=FLOAT32))
    pairs = enumerate(zip(trainers, initials, strict=True))
    devices = [
        SimulatedDevice(
            hub, f"pi-{n}", trainer, step_s=0.02, link=LINK, seed=n, workload=SimulatedWorkload(initial=initial)
        )
        for n, (trainer, initial) in pairs
    ]
    for device in devices:
        device.start()
    return clock, hub, devices


def test_the_first_version_is_the_mean_of_the_starts():
    initials = [MODEL.initial(seed) for seed in range(1, 5)]
    trainers = [Still() for _ in initials]
    clock, hub, _ = start(trainers, initials)
    assert clock.run(lambda: hub.core.version >= 3, 60.0)
    np.testing.assert_allclose(hub.model, np.mean(initials, axis=0), atol=1e-6)
    for trainer in trainers:
        np.testing.assert_array_equal(trainer.parameters, hub.model), "all continue from the hub's model"


def test_a_device_that_starts_again_begins_with_its_own_only_until_it_has_been_answered():
    own = MODEL.initial(5)
    trainer = Still()
    clock, hub, (device,) = start([trainer], [own])
    assert clock.run(lambda: device.engine.core.work.state == "training", 60.0)
    device.cut_power()
    device.start()
    assert clock.run(lambda: hub.core.version >= 1, 60.0)
    np.testing.assert_allclose(hub.model, own, atol=1e-6)
    device.cut_power()
    device.start()
    assert clock.run(lambda: hub.core.version >= 4, 60.0)
    np.testing.assert_array_equal(trainer.parameters, hub.model)


def accuracy(own, seed):
    training, held_out = split_digits()
    local = LocalTraining(optimizer=(SGD(learning_rate=0.2),), batch_size=32)
    parts = iid(training, DEVICES, seed)
    trainers = [local.make_trainer(MODEL.spec, MODEL.gradient, part, n) for n, part in enumerate(parts)]
    initials = [MODEL.initial(100 * seed + n) if own else None for n in range(DEVICES)]
    clock, hub, _ = start(trainers, initials)
    assert clock.run(lambda: hub.core.updates_applied >= 4 * 150, 1000.0)
    return float((MODEL.scores(hub.model, held_out.x).argmax(1) == held_out.y).mean())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_different_starts_end_within_one_point_of_equal_ones(seed):
    assert accuracy(own=True, seed=seed) > accuracy(own=False, seed=seed) - 0.01
