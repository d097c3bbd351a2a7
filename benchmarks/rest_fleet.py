"""A simulated fleet that trains for hours, quiet or at full pace.

It records bytes, accuracy and when the fleet wakes. A run has one seed. Local steps are long and
devices few, so that an hour at full pace costs a minute of computing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from benchmarks import smartwatch
from benchmarks.virtual_fleet import BATCH, DIGITS, LEARNING_RATES, Member, VirtualFleet, split_digits
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.settings import HubCoreSettings, Limits
from edgeasync.data.dataset import Batch, Dataset, batches
from edgeasync.data.partition import iid
from edgeasync.parameters import Vector
from edgeasync.training.evaluation import NumpyEvaluator
from edgeasync.training.numpy_models import Array, Labels, MlpModel
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile

SPEEDS = (1.0, 1.0, 1.0, 1.0, 1.0, 3.0)
STEP_S = 0.4
"""Local step of the fastest devices; a period at full pace is five of them plus the exchange."""

TARGETS = {"digits": 0.95, "smartwatch": 0.84}
SAMPLE_S = 5.0
HOUR_S = 3600.0
CHANGE_S = 5400.0
"""Time at which labels drift or a person joins. The fleet is idle by then."""

PAUSE_S = (15.0, 400.0)
"""Between these times all learning rates are 0.

The model does not improve for over five minutes, and then does.
"""

MODEL_BYTES = 970_000.0
"""Size of a reference model. Links are scaled, so that a model here takes as long."""

LINKS = {"LAN": 12.5e6, "2 Mbit/s": 250e3}

Change = Literal["nothing", "pause", "slowest", "drift", "joins"]


@dataclass(frozen=True)
class Case:
    """One run: the data, the link, whether the hub is quiet, and what changes."""

    seed: int
    data: str = "digits"
    link: str = "LAN"
    quiet: bool = True
    held_out: bool = False
    change: Change = "nothing"
    hours: float = 2.0


@dataclass
class Outcome:
    """The outcome of a run.

    At each sample, `bytes_at` has the bytes on all links, and `accuracies` the model's accuracy.
    """

    accuracies: list[float] = field(default_factory=list)
    bytes_at: list[int] = field(default_factory=list)
    reached_s: float = math.inf
    woke_s: float = math.inf
    period_s: float = 0.0
    """When the fleet was back at full pace after the change, and the period at that time."""

    def best(self, until_s: float = HOUR_S) -> float:
        """Return the best accuracy up to a time."""
        return max(self.accuracies[: round(until_s / SAMPLE_S)])

    def sent(self, from_s: float, until_s: float) -> float:
        """Return the bytes on all links between two times."""
        return self.bytes_at[round(until_s / SAMPLE_S) - 1] - self.bytes_at[round(from_s / SAMPLE_S) - 1]


class EvaluatingHub(SimulatedHub):
    """A simulated hub with held-out data."""

    evaluator: NumpyEvaluator

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate without delay."""
        found = self.evaluator(snapshot.vector)
        self.after(0.0, lambda: then(Evaluated(snapshot.number, found.loss, found.accuracy)))


class _Person:
    """A device's data and gradients, both of which may change while it trains."""

    def __init__(self, model: MlpModel, data: Dataset, seed: int) -> None:
        self._model = model
        self.labels: Labels | None = None
        self.factor = 1.0
        self._stream = batches(data, BATCH, seed)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches with the labels that apply now."""
        for x, y in self._stream:
            yield x, y if self.labels is None else self.labels[y]

    def gradient(self, parameters: Vector, x: Array, y: Labels, out: Vector) -> float:
        """Write the gradient, times the factor on the learning rate, to `out`; return the loss."""
        loss = self._model.gradient(parameters, x, y, out)
        out *= np.float32(self.factor)
        return loss


class _Run(VirtualFleet):
    """A fleet, and the changes made to it."""

    hub: EvaluatingHub

    def __init__(self, case: Case) -> None:
        self.case, self.outcome = case, Outcome()
        self.people: list[_Person] = []
        model, parts, self._newcomer, self.held_out = _data(case)
        settings = HubCoreSettings(
            limits=Limits(updates_held_max=64, snapshots_max=64), held_out=case.held_out, quiet=case.quiet
        )
        super().__init__(model, case.seed, settings=settings, make_hub=EvaluatingHub)
        self.hub.evaluator = NumpyEvaluator(model, self.held_out)
        for part, speed in zip(parts, SPEEDS, strict=True):
            self._join(part, speed)

    @property
    def resting(self) -> bool:
        """Whether the fleet is idle."""
        return self.hub.core.policy_engine.pacing.rest.state.resting

    def _join(self, part: Dataset, speed: float) -> None:
        case = self.case
        person = _Person(self.model, part, 1000 * case.seed + len(self.people))
        rate = LINKS[case.link] * 4 * self.model.spec.length / MODEL_BYTES
        self.people.append(person)
        self.add(
            Member(
                data=part,
                learning_rate=LEARNING_RATES[case.data],
                step_s=speed * STEP_S,
                link=LinkProfile(rate, rate, 0.005),
                stream=person,
                gradient=person.gradient,
            )
        )

    def plan(self) -> None:
        """Schedule the changes."""
        if self.case.change == "pause":
            for time_s, factor in zip(PAUSE_S, (0.0, 1.0), strict=True):
                self.clock.at(time_s, partial(self._set_rates, factor))
        elif self.case.change in ("drift", "joins"):
            self.clock.at(CHANGE_S, self._change_data)

    def _set_rates(self, factor: float) -> None:
        for person in self.people:
            person.factor = factor

    def _change_data(self) -> None:
        self.outcome.period_s = self.hub.core.policy_engine.describe()["cadence"].rest_period_s
        if self.case.change == "joins":
            self._join(self._newcomer, 1.0)
            return
        for person in self.people:
            person.labels = np.roll(np.arange(self.model.classes), 1)

    def sample(self, now_s: float) -> None:
        """Record the fleet's bytes and accuracy."""
        outcome = self.outcome
        outcome.accuracies.append(self.accuracy(self.held_out))
        outcome.bytes_at.append(self.bytes_sent)
        if outcome.accuracies[-1] >= TARGETS[self.case.data]:
            outcome.reached_s = min(outcome.reached_s, now_s)
        if now_s > CHANGE_S and not self.resting:
            outcome.woke_s = min(outcome.woke_s, now_s - CHANGE_S)


def measure(case: Case) -> Outcome:
    """Make one run."""
    run = _Run(case)
    run.plan()
    for number in range(1, round(case.hours * HOUR_S / SAMPLE_S) + 1):
        run.run(number * SAMPLE_S)
        run.sample(number * SAMPLE_S)
    run.hub.core.check()
    return run.outcome


def _data(case: Case) -> tuple[MlpModel, list[Dataset], Dataset, Dataset]:
    """Return the model, the devices' data, a newcomer's data, and held-out data."""
    count = len(SPEEDS)
    if case.data == "smartwatch":
        people, held_out = smartwatch.split_by_person()
        order = np.random.default_rng(case.seed).permutation(len(people))[: count + 1]
        parts = [people[person] for person in order]
        return smartwatch.MODEL, parts[:count], parts[count], held_out
    training, held_out = split_digits()
    if case.change not in ("joins", "slowest"):
        return DIGITS, iid(training, count, case.seed), training, held_out
    rare = np.flatnonzero(training.y == case.seed % 10)
    others = iid(training.take(np.flatnonzero(training.y != case.seed % 10)), count + 1, case.seed)
    share, alone = others.pop(), training.take(rare)
    own = Dataset(np.concatenate([share.x, alone.x]), np.concatenate([share.y, alone.y]))
    if case.change == "joins":
        return DIGITS, others, own, held_out
    return DIGITS, [*others[:-1], own], own, held_out
