"""Nodes whose training has gone wrong begin again from the hub's model, in virtual time."""

import numpy as np
import pytest

from edgeasync.core.hub.settings import FLOAT32, CodecSettings, HubCoreSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, SynchronousAggregator
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.parts.small_runs import in_full
from tests.support.simulation.hubs import simulated_hub

SPEC = ParameterSpec((Parameter("w", (64,)),))
LINK = LinkProfile(1e6, 1e6, 0.005)
TARGET = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
DEVICES = 4
INT8 = CodecSettings(push="int8", error_feedback="always", model="identity", delta="off")


def loss_of(parameters):
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(parameters - TARGET).mean()) + 0.1


class Heavy:
    """Descends to the target with a momentum that outlives exchanges."""

    spec = SPEC

    def __init__(self):
        self.velocity = np.zeros(64, np.float32)
        self.given = []

    def begin(self, parameters):
        self.given.append(parameters.copy())
        self._parameters = parameters

    def step(self):
        with np.errstate(over="ignore", invalid="ignore"):
            self.velocity = 0.95 * self.velocity + 0.002 * (TARGET - self._parameters)
            self._parameters += self.velocity
        return StepResult(None, 1)

    def reset(self):
        self.velocity = np.zeros(64, np.float32)


def fleet(*, preempt, aggregate, codec=FLOAT32, delay=0, take="all", initials=(None,) * DEVICES):
    clock = VirtualClock()
    hub = simulated_hub(
        clock,
        SPEC,
        in_full(5, aggregate, delay_steps=delay, take=take, behind_max=3.0, preempt=preempt),
        settings=HubCoreSettings(codec=codec),
    )
    trainers = [Heavy() for _ in range(DEVICES)]
    for number, (trainer, initial) in enumerate(zip(trainers, initials, strict=True)):
        work = SimulatedWorkload(initial=initial, validate=loss_of)
        SimulatedDevice(hub, f"pi-{number}", trainer, step_s=0.02, link=LINK, seed=number, workload=work).start()
    return clock, hub, trainers


def run_until(clock, member, updates):
    assert clock.run(lambda: member.seq_last >= updates, 1000.0)


@pytest.mark.parametrize(
    "aggregate", [ImmediateAggregator(), SynchronousAggregator()], ids=["immediate", "rounds"]
)
@pytest.mark.parametrize("codec", [FLOAT32, INT8], ids=["f32", "int8"])
@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("velocity", [1e5, np.nan], ids=["far", "nan"])
def test_a_node_that_diverges_is_brought_back(aggregate, codec, delay, velocity):
    clock, hub, trainers = fleet(preempt=True, aggregate=aggregate, codec=codec, delay=delay)
    member = hub.core.members.members
    run_until(clock, _Lazy(member, "pi-3"), 5)
    trainers[3].velocity[:] = velocity
    run_until(clock, member["pi-3"], 40)
    assert sum(member["pi-3"].updates_rejected.values()) == 1, "its updates count again at once"
    assert member["pi-3"].measurements.counted
    assert member["pi-3"].measurements.score < 3 * hub.core.policy_engine.state.fleet.score
    assert loss_of(hub.model) < 0.2


@pytest.mark.parametrize("velocity", [1e5, np.nan], ids=["far", "nan"])
def test_without_preemption_it_stays_behind(velocity):
    clock, hub, trainers = fleet(preempt=False, aggregate=ImmediateAggregator())
    member = hub.core.members.members
    run_until(clock, _Lazy(member, "pi-3"), 5)
    trainers[3].velocity[:] = velocity
    run_until(clock, member["pi-3"], 40)
    assert sum(member["pi-3"].updates_rejected.values()) >= 30


def test_under_best_it_takes_the_best_nodes_parameters():
    """Nodes that begin far from one another: the version is the best one's model, which the others take."""
    initials = [
        TARGET + offset for offset in (np.float32(0.1), np.float32(1.0), np.float32(30.0), np.float32(2.0))
    ]
    clock, hub, trainers = fleet(preempt=True, aggregate=SynchronousAggregator(), take="best", initials=initials)
    assert clock.run(lambda: all(len(trainer.given) >= 2 for trainer in trainers), 100.0)
    rejected = {name: dict(one.updates_rejected) for name, one in hub.core.members.members.items()}
    assert rejected["pi-2"] == {"behind": 1}
    best = initials[0].copy()
    velocity = np.zeros(64, np.float32)
    for _ in range(5):
        velocity = 0.95 * velocity + 0.002 * (TARGET - best)
        best += velocity
    np.testing.assert_allclose(trainers[2].given[1], best, atol=1e-6)


class _Lazy:
    """A member that may not have joined yet."""

    def __init__(self, members, name):
        self._members, self._name = members, name

    @property
    def seq_last(self):
        member = self._members.get(self._name)
        return member.seq_last if member else 0
