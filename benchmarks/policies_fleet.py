"""One training run of a simulated fleet under one policy, and many of them on all cores.

`measure(policy, scenario, seed)` is one run; `measure_all` makes many runs in processes. To study a variant of a
policy, call `compare({"label": Policy(...), ...}, scenario, seeds)`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pool import measure_in_processes
from benchmarks.simulated import BATCH, DIGITS, EXAMPLES_MIN, LIVENESS, accuracy_of, split_digits, start_device
from edgeasync.core.hub.settings import FLOAT32, CodecSettings, HubCoreSettings, Limits
from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.partition import dirichlet, iid
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import PolicySet
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.population import FleetProfile, draw_fleet, switch_off_and_on

LEARNING_RATE = 0.2
"""Of the devices' own SGD, and of the one place's."""

TARGET = 0.95
CONSECUTIVE = 3
"""How many evaluations in a row must be at or over the target; the first of them is when it was reached."""

EVALUATE_S = 0.05
ONE_PLACE_EPOCHS = 200


@dataclass(frozen=True)
class Scenario:
    """The data and the devices of a fleet, and how long it is watched.

    `alpha` is the skew of the labels, `None` without skew. The accuracy at the end is the mean of the evaluations
    in the last `final_s` before `horizon_s`. A run ends at `limit_s` even if it has not reached the target.
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
    """The outcome of a run. If it missed the target, `reached_s` is infinite and `reached_mb` counts all bytes.

    `accuracy` is the one at the end. Updates and versions are the hub's counts when the run was over.
    """

    reached_s: float
    reached_mb: float
    accuracy: float
    updates: int
    rejected: int
    versions: int


@dataclass(frozen=True)
class Case:
    """One run."""

    policy: PolicySet
    scenario: Scenario
    seed: int
    only_to_target: bool = False


class Watch:
    """Evaluates the hub's model at fixed times."""

    def __init__(
        self,
        clock: VirtualClock,
        hub: SimulatedHub,
        devices: list[SimulatedDevice],
        held_out: Dataset,
        scenario: Scenario,
    ) -> None:
        self.reached_s = math.inf
        self.reached_mb = 0.0
        self.accuracies: list[float] = []
        self._clock = clock
        self._hub = hub
        self._devices = devices
        self._held_out = held_out
        self._target = scenario.target
        self._model = scenario.model
        self._version = -1
        self._run: list[tuple[float, float]] = []
        self._evaluate()

    def _evaluate(self) -> None:
        if self._version != self._hub.core.version:
            self._version = self._hub.core.version
            accuracy = accuracy_of(self._model, self._hub.model, self._held_out)
        else:
            accuracy = self.accuracies[-1]
        self.accuracies.append(accuracy)
        if math.isinf(self.reached_s):
            sent = sum(device.up.bytes_sent + device.down.bytes_sent for device in self._devices)
            self.reached_mb = sent / 1e6
            self._run = [*self._run, (self._clock.now_s, self.reached_mb)] if accuracy >= self._target else []
            if len(self._run) == CONSECUTIVE:
                self.reached_s, self.reached_mb = self._run[0]
        self._clock.at(EVALUATE_S * len(self.accuracies), self._evaluate)


def measure(policy: PolicySet, scenario: Scenario, seed: int, *, only_to_target: bool = False) -> Outcome:
    """Train a fleet; devices, their data, the model's first values and all else are drawn from the seed.

    `only_to_target` ends the run when the target is reached.
    """
    training, held_out = split_digits()
    profile = scenario.fleet
    if scenario.alpha is None:
        parts = iid(training, profile.devices, seed)
    else:
        parts = dirichlet(training, profile.devices, scenario.alpha, seed, examples_min=EXAMPLES_MIN)
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=scenario.model.spec,
        initial=scenario.model.initial(seed),
        policy=policy,
        settings=HubCoreSettings(
            liveness=LIVENESS,
            limits=Limits(updates_held_max=4 * profile.devices, snapshots_max=4 * profile.devices),
            codec=scenario.codec,
        ),
        seed=seed,
    )
    hub.start()
    devices = []
    for number, (drawn, part) in enumerate(zip(draw_fleet(profile, seed), parts, strict=True)):
        device = start_device(
            clock,
            hub,
            scenario.model,
            number,
            part,
            learning_rate=scenario.learning_rate,
            step_s=drawn.step_s,
            link=drawn.link,
            seed=seed,
            name=drawn.device_id,
        )
        if profile.churn is not None:
            switch_off_and_on(clock, device, profile.churn, f"{seed}/{drawn.device_id}")
        devices.append(device)
    watch = Watch(clock, hub, devices, held_out, scenario)
    last = round(scenario.final_s / EVALUATE_S)
    if only_to_target:
        clock.run(lambda: math.isfinite(watch.reached_s), scenario.limit_s)
        final = watch.accuracies[-last:]
    else:
        clock.run(lambda: False, scenario.horizon_s)
        final = watch.accuracies[-last:]
        clock.run(lambda: math.isfinite(watch.reached_s), scenario.limit_s)
    core = hub.core
    core.check()
    return Outcome(
        reached_s=watch.reached_s,
        reached_mb=watch.reached_mb,
        accuracy=statistics.fmean(final),
        updates=core.updates_applied,
        rejected=core.updates_rejected,
        versions=core.version,
    )


def measure_one_place(seed: int, epochs: int = ONE_PLACE_EPOCHS) -> float:
    """Return the accuracy in the end of plain SGD on all data in one place: the mean of its last 20 epochs."""
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


def measure_all(cases: Sequence[Case], what: str) -> list[Outcome]:
    """Make all runs, on all cores; return their outcomes in the same order."""
    return measure_in_processes(_measure, cases, what)


def compare(
    policies: Mapping[str, PolicySet], scenario: Scenario, seeds: Sequence[int], *, only_to_target: bool = False
) -> dict[str, list[Outcome]]:
    """Measure policies on the same seeds; return each one's outcomes by its label."""
    cases = [Case(policy, scenario, seed, only_to_target) for policy in policies.values() for seed in seeds]
    outcomes = iter(measure_all(cases, scenario.name))
    return {label: [next(outcomes) for _ in seeds] for label in policies}


def _measure(case: Case) -> Outcome:
    return measure(case.policy, case.scenario, case.seed, only_to_target=case.only_to_target)
