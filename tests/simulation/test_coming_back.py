"""What a device is sent that was away and restarted: a difference where it can be, else a coarse model."""

import msgspec
import numpy as np
import pytest

from edgeasync.core.hub.settings import CodecSettings, HubCoreSettings
from edgeasync.policies.aggregation import BufferedAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.simulation.hubs import simulated_hub

MODEL = MlpModel(inputs=64, hidden=(64,), classes=10)
HEADERS = 0.05
"""What headers and scales take at most, of a whole model."""


class Noisy:
    def __init__(self, seed):
        self.spec = MODEL.spec
        self._random = np.random.Generator(np.random.PCG64(seed))

    def begin(self, parameters):
        self._parameters = parameters

    def step(self):
        self._parameters += self._random.standard_normal(self.spec.length, np.float32) * np.float32(0.01)
        return StepResult(1.0, 8)


class World:
    """Two devices, each of whose updates makes a version; one of them goes."""

    def __init__(self, *, keeps, delta="int8"):
        self.clock = VirtualClock()
        self.hub = simulated_hub(
            self.clock,
            MODEL,
            Policy(aggregate=BufferedAggregator(count=1), frequency=FixedFrequency(local_steps=4)),
            settings=HubCoreSettings(codec=CodecSettings(push="int8", delta=delta, publish_s=1e-6)),
        )
        link = LinkProfile(1e6, 1e6)
        self.stays, self.goes = [
            SimulatedDevice(self.hub, name, Noisy(seed), step_s=0.1, link=link, keeps=keeps)
            for seed, name in enumerate(("stays", "goes"))
        ]
        self.stays.start()
        self.goes.start()
        self.versions(8)

    def versions(self, more):
        last = self.hub.core.version + more
        assert self.clock.run(lambda: self.hub.core.version >= last, self.clock.now_s + 60.0)

    def go(self, *, away, newest=True):
        """Cut the device's power while the other makes versions; return what it is sent, in whole models."""
        held = self.goes.engine.held_model()
        if newest and self.goes.store.held is not None:  # it is kept now and then: let it be this one
            self.goes.store.held = msgspec.structs.replace(held, values=held.values.copy())
        self.goes.cut_power()
        if away:
            self.versions(away)
        self.stays.suspend()
        self.clock.run(lambda: False, self.clock.now_s + 1.0)
        before = self.goes.down.bytes_sent
        self.goes.start()
        self.trains_again()
        return (self.goes.down.bytes_sent - before) / MODEL.spec.nbytes

    def trains_again(self):
        work = self.goes.engine.core.work
        assert self.clock.run(lambda: work.state == "training", self.clock.now_s + 5.0)


@pytest.mark.parametrize("away", [1, 10])
@pytest.mark.parametrize("keeps", [False, True])
def test_who_was_away_takes_a_quarter_of_a_model(keeps, away):
    world = World(keeps=keeps)
    assert world.go(away=away) < 0.25 + HEADERS
    assert not [report for _, report in world.goes.told if report.event == "warning"]
    world.stays.resume()
    world.versions(4)


def test_who_still_holds_the_newest_version_is_sent_nothing():
    world = World(keeps=True)
    world.stays.cut_power()
    world.versions(1)
    world.trains_again()
    world.goes.store.spool = None  # it was killed in training: the update that was kept has its answer
    assert world.go(away=0) < HEADERS
    assert world.goes.engine.held_model().checksum == world.goes.store.held.checksum


def test_short_differences_lead_on_from_what_was_kept():
    kept, lost = [World(keeps=keeps, delta="top_k(0.02)+int8").go(away=5) for keeps in (True, False)]
    assert kept < 0.2
    assert lost > 0.5


def test_a_model_that_was_kept_for_another_hub_is_of_no_use():
    world = World(keeps=True)
    world.goes.store.spool = None
    key = msgspec.structs.replace(world.goes.store.held.model, fingerprint="f" * 32)
    world.goes.store.held = msgspec.structs.replace(world.goes.store.held, model=key)
    assert world.go(away=2, newest=False) < 0.25 + HEADERS
    assert not [report for _, report in world.goes.told if report.event == "warning"]


@pytest.mark.parametrize("change", ["other values", "fewer values"])
def test_a_model_that_is_not_what_it_says_costs_a_whole_one(change):
    world = World(keeps=True)
    held = world.goes.engine.held_model()
    values = held.values[1:] if change == "fewer values" else held.values + np.float32(1.0)
    world.goes.store.held, world.goes.store.spool = msgspec.structs.replace(held, values=values.copy()), None
    assert world.go(away=1, newest=False) < 1.0
    assert world.goes.engine.held_model().version.number == world.hub.core.publish_schedule.state.number
