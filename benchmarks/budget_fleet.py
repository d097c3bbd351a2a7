"""A simulated fleet that learns the digits with a limit on each day's bytes. Part of the benchmark `budget`."""

import math
from dataclasses import dataclass

from benchmarks.simulated import accuracy_of, split_digits, start_device
from edgeasync.core.hub.settings import CodecSettings, HubCoreSettings, Limits
from edgeasync.data.partition import dirichlet
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.messages import DAY_S
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile

MODEL = MlpModel(inputs=64, hidden=(512, 64), classes=10)
SPEEDS = (1, 1, 1, 1, 1, 1, 3, 10)
STEP_S = 0.01
MBIT_20 = LinkProfile(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.02)
ALPHA = 0.3
LEARNING_RATE = 0.05
CONSECUTIVE = 3
"""How many evaluations in a row must be at or over the target."""


@dataclass(frozen=True)
class Case:
    """One run, evaluated every `evaluate_s`. It ends after `seconds`, or `bytes_max` of each device."""

    policy: PolicySet
    seed: int
    limits: Limits
    evaluate_s: float
    seconds: float
    bytes_max: float = math.inf


@dataclass(frozen=True)
class Moment:
    """An evaluation: the accuracy, after this time and these bytes of all devices."""

    now_s: float
    nbytes: int
    accuracy: float


@dataclass(frozen=True)
class Spent:
    """What a run did: its evaluations, and each device's bytes of each whole day."""

    moments: tuple[Moment, ...]
    days: tuple[tuple[int, ...], ...]

    def reached(self, target: float) -> Moment | None:
        """Return the first of the evaluations in a row at or over the target."""
        good = [moment.accuracy >= target for moment in self.moments]
        for first in range(len(good) - CONSECUTIVE + 1):
            if all(good[first : first + CONSECUTIVE]):
                return self.moments[first]
        return None

    def accuracy_at(self, nbytes: float) -> float:
        """Return the accuracy when the devices had sent and received that much."""
        return [moment.accuracy for moment in self.moments if moment.nbytes <= nbytes][-1]


def spend(case: Case) -> Spent:
    """Train a fleet; its data and the model's first values are drawn from the seed."""
    training, held_out = split_digits()
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=MODEL.spec,
        initial=MODEL.initial(case.seed),
        policy=case.policy,
        settings=HubCoreSettings(limits=case.limits, codec=CodecSettings()),
        seed=case.seed,
    )
    hub.start()
    devices = []
    for number, part in enumerate(dirichlet(training, len(SPEEDS), ALPHA, case.seed, examples_min=16)):
        device = start_device(
            clock,
            hub,
            MODEL,
            number,
            part,
            learning_rate=LEARNING_RATE,
            step_s=STEP_S * SPEEDS[number],
            link=MBIT_20,
            seed=case.seed,
        )
        devices.append(device)
    moments = [Moment(0.0, 0, accuracy_of(MODEL, hub.model, held_out))]
    days: list[tuple[int, ...]] = []
    sent = before = (0,) * len(devices)
    version = hub.core.version
    while clock.now_s < case.seconds and sum(sent) < case.bytes_max * len(devices):
        clock.run(lambda: False, case.evaluate_s * len(moments))
        sent = tuple([device.up.bytes_sent + device.down.bytes_sent for device in devices])
        accuracy = moments[-1].accuracy
        if hub.core.version != version:
            version, accuracy = hub.core.version, accuracy_of(MODEL, hub.model, held_out)
        moments.append(Moment(clock.now_s, sum(sent), accuracy))
        if clock.now_s >= DAY_S * (len(days) + 1):
            days.append(tuple([now - then for now, then in zip(sent, before, strict=True)]))
            before = sent
    hub.core.check()
    return Spent(tuple(moments), tuple(days))
