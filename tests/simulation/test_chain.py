"""Hub and devices hold the same bits, under every codec and policy, on links that break and devices that die.

Or a device holds a model beside the chain, which the hub knows, and which is nearly the same.
"""

import numpy as np
import pytest

from edgeasync.core.arrays.off_chain_models import ERROR_MAX
from edgeasync.core.hub.settings import FLOAT32, CodecSettings, HubCoreSettings, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, ModelAverageAggregator, QuorumAggregator
from edgeasync.policies.monitor import Monitor
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.population import Churn, switch_off_and_on
from tests.support.parts.small_runs import plain
from tests.support.simulation.hubs import simulated_hub
from tests.support.simulation.whims import LossLost

SMALL = ParameterSpec((Parameter("w", (3000,)), Parameter("running_mean", (5,), "statistic")))
LARGE = ParameterSpec((Parameter("w", (600_000,)),))  # folded in the background, sent in pieces
CODECS = ["auto", "identity", "float16", "int8", "int4(stochastic)", "top_k(0.1)+int8", "sign"]


class Noisy:
    """Moves the parameters at random; now and then it diverges."""

    def __init__(self, spec, seed, diverges=0):
        self.spec = spec
        self.diverges = diverges
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.steps = 0

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        self.steps += 1
        self.parameters += self.generator.standard_normal(len(self.parameters), np.float32) * np.float32(0.01)
        diverged = self.diverges and self.steps % self.diverges == 0
        if diverged and self.steps // self.diverges % 2:
            self.parameters[0] = np.nan
        return StepResult(np.nan if diverged else 1.0, 8)


class World:
    """A hub and three devices on bad links, whose models are compared with the hub's whenever they are told."""

    def __init__(self, spec, codec, policy, *, diverges=0, seed=0, churn=True):
        self.clock = VirtualClock()
        self.hub = simulated_hub(
            self.clock,
            spec,
            policy,
            settings=HubCoreSettings(codec=codec, liveness=Liveness(heartbeat_s=0.5, lease_s=2.0)),
            seed=seed,
        )
        link = LinkProfile(2e6, 2e6, 0.02)
        self.devices = []
        for number in range(3):
            device = SimulatedDevice(
                self.hub,
                f"pi-{number}",
                Noisy(spec, number, diverges),
                step_s=0.05,
                link=link,
                seed=seed,
            )
            device.start()
            if churn:
                switch_off_and_on(self.clock, device, Churn(3.0, 0.5), f"{seed}/{number}")
            self.devices.append(device)
        self.compared = self.off_chain = 0
        self.published = {}

    def run(self, until_s):
        self.clock.run(self.look, until_s)
        self.hub.core.check()

    def look(self):
        """Compare what devices hold, to the bit, with what was published under that number."""
        published = self.hub.engine._deliveries.publisher.published
        self.published.setdefault(published.number, published.vector.copy())
        for device in self.devices:
            core, model = device.engine.core, device.engine._model
            holds = (
                device.running
                and core.work.state in ("training", "pushing")
                and core.work.held.version is not None
            )
            if holds and core.work.held.version.number in self.published:
                published = self.published[core.work.held.version.number]
                if not np.array_equal(model.base, published):
                    off_chain = np.linalg.norm(model.base - published)
                    assert 0 < off_chain <= ERROR_MAX * np.linalg.norm(published)
                    self.off_chain += 1
                self.compared += 1
        return False


def policy(aggregate, **parts):
    return plain(4, aggregate, **parts)


POLICIES = {
    "immediate": policy(ImmediateAggregator()),
    "quorum": policy(QuorumAggregator()),
    "quorum, ahead": policy(QuorumAggregator(), overlap_steps_max=3),
    "models": policy(ModelAverageAggregator()),
    "rollbacks": policy(ImmediateAggregator(), monitor=Monitor(detectors=(LossLost(),))),
}


FOR_MODELS = ("auto", "identity", "float16")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in CODECS for kind in POLICIES if kind != "models" or name in FOR_MODELS],
)
def test_devices_hold_what_the_hub_published(name, kind):
    policy = POLICIES[kind]
    delta = "int8" if name == "auto" else name
    codec = CodecSettings(push=name, model="float16", delta=delta)
    world = World(SMALL, codec, policy, diverges=37 if kind == "rollbacks" else 0)
    world.run(20.0)
    assert world.compared > 100
    assert (world.hub.core.policy_engine.state.divergence.rollbacks > 3) == (kind == "rollbacks")
    assert world.hub.core.updates_applied > 20
    assert not [report for device in world.devices for _, report in device.told if "hub's model" in report.detail]


@pytest.mark.parametrize("name", ["identity", "int8", "top_k(0.1)+int8"])
def test_large_models_in_pieces(name):
    world = World(LARGE, CodecSettings(push=name, delta=name), POLICIES["quorum, ahead"], churn=name != "identity")
    world.run(8.0)
    assert world.compared > 10
    assert world.hub.core.updates_applied > 2


def test_a_diverged_update_is_forgotten_though_training_went_on():
    world = World(SMALL, CodecSettings(), POLICIES["quorum, ahead"], diverges=23, churn=False)
    world.run(20.0)
    assert world.hub.core.updates_rejected > 3
    assert world.hub.core.updates_applied > 50


@pytest.mark.parametrize("name", ["no_such", "top_k(9)", "int8+int8", ""])
def test_a_codec_that_the_device_does_not_know_is_not_used(name):
    world = World(SMALL, CodecSettings(), POLICIES["immediate"], churn=False)
    device = world.devices[0]
    world.clock.run(lambda: device.engine.core.work.state == "training", 5.0)
    device.engine.core.work.push_codec = name
    world.clock.run(lambda: device.engine.core.work.state == "pushing", 5.0)
    assert device.engine._codec.name == "identity"


@pytest.mark.parametrize("up", [12_500, 2e6])
def test_a_link_so_slow_that_a_window_takes_longer_than_a_lease(up):
    """100 kbit/s, and payloads of 200 kB: in one message nothing else would be heard for 16 s."""
    clock = VirtualClock()
    spec = ParameterSpec((Parameter("w", (50_000,)),))
    hub = simulated_hub(clock, spec, POLICIES["immediate"], settings=HubCoreSettings(codec=FLOAT32))
    down = 12_500 if up > 12_500 else 2e6
    device = SimulatedDevice(hub, "pi", Noisy(spec, 0), step_s=0.1, link=LinkProfile(up, down, 0.02), seed=0)
    device.start()
    clock.run(lambda: hub.core.updates_applied >= 3, 120.0)
    assert hub.core.updates_applied >= 3
    assert [report.event for _, report in device.told].count("disconnected") == 0


def test_a_whole_model_that_outgrows_float16_is_sent_as_it_is():
    world = World(SMALL, CodecSettings(push="float16"), POLICIES["models"], churn=False)
    for device in world.devices:
        device.training.trainer.begin = lambda parameters, trainer=device.training.trainer: grow(
            trainer, parameters
        )
    world.run(5.0)
    assert world.hub.core.updates_applied > 10
    assert world.hub.core.updates_rejected == 0
    assert world.hub.model[7] > 65_504


def grow(trainer, parameters):
    trainer.parameters = parameters
    parameters[7] = 1e5
