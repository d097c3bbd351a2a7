"""The demo's own settings and devices in virtual time: what it promises must not depend on luck."""

import tomllib

import pytest

from edgeasync.cli.demo import SETTINGS, SLOWNESS, STEP_S, split_digits
from edgeasync.config import convert
from edgeasync.core.settings import HubCoreSettings
from edgeasync.runtime.settings import HubSettings
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice, SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.plan import TrainingPlan

TRAINED_S = 13.0
"""What starting the processes leaves of the demo's 15 seconds, at the least."""


@pytest.mark.parametrize("seed", range(10))
def test_the_demo_reaches_its_accuracy(seed):
    settings = convert(tomllib.loads(SETTINGS.format(run='"unused"', seed=seed)), HubSettings, where="the demo")
    parts, held_out = split_digits(len(SLOWNESS), seed)
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=settings.model.spec,
        initial=settings.model.initial(seed),
        judgement=settings.policy,
        settings=HubCoreSettings(),
        seed=seed,
    )
    plan = TrainingPlan(model=settings.model, local=settings.local)
    for number, (part, slowness) in enumerate(zip(parts, SLOWNESS, strict=True), start=1):
        trainer = plan.make_trainer(part, seed=0)
        device = SimulatedDevice(
            clock, hub, f"device-{number}", trainer, step_s=STEP_S * slowness, link=LinkProfile(delay_s=0.001)
        )
        device.start()
    clock.run(lambda: False, TRAINED_S)
    predicted = settings.model.predict(hub.model, held_out.x)
    assert float((predicted == held_out.y).mean()) >= 0.95
