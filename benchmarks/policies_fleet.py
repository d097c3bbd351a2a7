"""Run a simulated fleet under one policy, or many such runs on all cores.

`measure(case)` is one run. To study a variant of a policy, call `compare({"label": Policy(...),
...}, scenario, seeds)`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.processes import measure_groups
from benchmarks.virtual_fleet import (
    BATCH,
    DIGITS,
    EXAMPLES_MIN,
    LIVENESS,
    Member,
    VirtualFleet,
    accuracy_of,
    split_digits,
)
from edgeasync.core.hub.settings import FLOAT32, CodecSettings, HubCoreSettings, Limits
from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.partition import dirichlet, iid
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import PolicySet
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from simulation.population import FleetProfile, draw_fleet, switch_off_and_on

LEARNING_RATE = 0.2
"""Learning rate of the devices' SGD and of training in one place."""

TARGET = 0.95
CONSECUTIVE = 3
"""How many consecutive evaluations must reach the target; the first sets the time."""

EVALUATE_S = 0.05
ONE_PLACE_EPOCHS = 200


@dataclass(frozen=True)
class Scenario:
    """A fleet's data and devices, and how long to run it.

    `alpha` is the skew of the labels; `None` means no skew. The final accuracy is the mean of the
    evaluations in the last `final_s` before `horizon_s`. A run ends at `limit_s` even without
    reaching the target.
    """

    name: str
    fleet: FleetProfile
    alpha: float | None = None
    codec: CodecSettings = FLOAT32
    model: MlpModel = DIGITS
    learning_rate: float = LEARNING_RATE
    target: float = TARGET
    horizon_s: float = 40.0
    final_s: float = 5.0
    limit_s: float = 120.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    If it missed the target, `reached_s` is infinite and `reached_mb` counts all bytes. `accuracy`
    is the final accuracy.
    """

    reached_s: float
    reached_mb: float
    accuracy: float


@dataclass(frozen=True)
class Case:
    """One run; with `only_to_target` it ends when it reaches the target."""

    policy: PolicySet
    scenario: Scenario
    seed: int
    only_to_target: bool = False


class Watch:
    """Evaluates the hub's model at fixed times."""

    def __init__(self, fleet: VirtualFleet, held_out: Dataset, target: float) -> None:
        self.reached_s = math.inf
        self.reached_mb = 0.0
        self.accuracies: list[float] = []
        self._fleet, self._held_out, self._target = fleet, held_out, target
        self._version = -1
        self._run: list[tuple[float, float]] = []
        self._evaluate()

    def has_reached(self) -> bool:
        """Return whether the target was reached."""
        return math.isfinite(self.reached_s)

    def _evaluate(self) -> None:
        fleet = self._fleet
        if self._version != fleet.hub.core.version:
            self._version = fleet.hub.core.version
            accuracy = fleet.accuracy(self._held_out)
        else:
            accuracy = self.accuracies[-1]
        self.accuracies.append(accuracy)
        if not self.has_reached():
            self.reached_mb = fleet.bytes_sent / 1e6
            reached = (fleet.clock.now_s, self.reached_mb)
            self._run = [*self._run, reached] if accuracy >= self._target else []
            if len(self._run) == CONSECUTIVE:
                self.reached_s, self.reached_mb = self._run[0]
        fleet.clock.at(EVALUATE_S * len(self.accuracies), self._evaluate)


def measure(case: Case) -> Outcome:
    """Train a fleet; the seed determines devices, data and the model's initial values."""
    scenario, seed = case.scenario, case.seed
    training, held_out = split_digits()
    profile = scenario.fleet
    if scenario.alpha is None:
        parts = iid(training, profile.devices, seed)
    else:
        parts = dirichlet(training, profile.devices, scenario.alpha, seed, examples_min=EXAMPLES_MIN)
    most = 4 * profile.devices
    settings = HubCoreSettings(
        liveness=LIVENESS, limits=Limits(updates_held_max=most, snapshots_max=most), codec=scenario.codec
    )
    fleet = VirtualFleet(scenario.model, seed, policy=case.policy, settings=settings)
    for drawn, part in zip(draw_fleet(profile, seed), parts, strict=True):
        member = Member(
            data=part,
            learning_rate=scenario.learning_rate,
            step_s=drawn.step_s,
            link=drawn.link,
            name=drawn.device_id,
        )
        device = fleet.add(member)
        if profile.churn is not None:
            switch_off_and_on(fleet.clock, device, profile.churn, f"{seed}/{drawn.device_id}")
    watch = Watch(fleet, held_out, scenario.target)
    last = round(scenario.final_s / EVALUATE_S)
    if case.only_to_target:
        fleet.run(scenario.limit_s, watch.has_reached)
        final = watch.accuracies[-last:]
    else:
        fleet.run(scenario.horizon_s)
        final = watch.accuracies[-last:]
        fleet.run(scenario.limit_s, watch.has_reached)
    fleet.hub.core.check()
    return Outcome(watch.reached_s, watch.reached_mb, statistics.fmean(final))


def measure_one_place(seed: int, epochs: int = ONE_PLACE_EPOCHS) -> float:
    """Return the final accuracy of plain SGD on all data in one place.

    It is the mean over the last 20 epochs.
    """
    training, held_out = split_digits()
    trainer = GradientTrainer(DIGITS.spec, DIGITS.gradient, (SGD(LEARNING_RATE),), batches(training, BATCH, seed))
    parameters = DIGITS.initial(seed)
    trainer.begin(parameters)
    accuracies = []
    for _ in range(epochs):
        for _ in range(math.ceil(len(training) / BATCH)):
            trainer.step()
        accuracies.append(accuracy_of(DIGITS, parameters, held_out))
    return statistics.fmean(accuracies[-20:])


def compare(
    policies: Mapping[str, PolicySet], scenario: Scenario, seeds: Sequence[int], *, only_to_target: bool = False
) -> dict[str, list[Outcome]]:
    """Run policies on the same seeds; return each one's outcomes by label."""
    return measure_groups(
        measure,
        {
            label: [Case(each, scenario, seed, only_to_target) for seed in seeds]
            for label, each in policies.items()
        },
        scenario.name,
    )
