"""A device that is much slower than the others does not hold them up: under the defaults, in virtual time."""

from functools import lru_cache

import numpy as np
import pytest

from edgeasync.cli.demo import split_digits
from edgeasync.data.dataset import batches
from edgeasync.policies.optimizers import SGD
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.simulation.hubs import simulated_hub

MODEL = MlpModel(inputs=64, hidden=(64,), classes=10)
FAST_STEP_S = 0.02
ACCURACY = 0.9
EVALUATE_S = 0.1


@lru_cache
def seconds_to_accuracy(steps_s, seed):
    """Return how long devices with these times of a step take, each with its part of the digits of four."""
    parts, held_out = split_digits(4, seed)
    clock = VirtualClock()
    hub = simulated_hub(clock, MODEL, seed=seed, initial=MODEL.initial(seed))
    for number, (step_s, part) in enumerate(zip(steps_s, parts, strict=False)):
        stream = batches(part, 32, 10 * seed + number)
        trainer = GradientTrainer(MODEL.spec, MODEL.gradient, (SGD(learning_rate=0.1),), stream)
        link = LinkProfile(delay_s=0.001)
        device = SimulatedDevice(hub, f"device-{number}", trainer, step_s=step_s, link=link, seed=seed)
        device.start()
    at_s, last = 0.0, [0.0] * 3
    while np.mean(last) < ACCURACY:  # one evaluation goes up and down by some percent
        at_s += EVALUATE_S
        assert at_s < 100.0
        clock.run(lambda: False, at_s)
        last = [*last[1:], np.mean(MODEL.predict(hub.model, held_out.x) == held_out.y)]
    return at_s


@pytest.mark.parametrize("slowness", [2, 10, 100])
def test_three_devices_reach_their_accuracy_as_soon_beside_a_slow_one(slowness):
    for seed in range(3):
        alone_s = seconds_to_accuracy((FAST_STEP_S,) * 3, seed)
        together_s = seconds_to_accuracy((FAST_STEP_S,) * 3 + (slowness * FAST_STEP_S,), seed)
        # Both are whole multiples of the time between evaluations, and may be late by one of them.
        assert together_s - EVALUATE_S <= 1.2 * alone_s
