"""A simulated fleet in which some keys are hostile: their updates, claims and outcome.

Ten keys learn in virtual time, with their own cores and real encoded frames. A hostile device
trains like the others and then changes its update, so it knows how long an honest update is. A
spoilt device has meaningless data.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np

from benchmarks import smartwatch
from benchmarks.agent_process import Member as RealMember
from benchmarks.processes import busy_loops
from benchmarks.real_fleet import run_fleet
from benchmarks.virtual_fleet import (
    BATCH,
    DIGITS,
    EXAMPLES_MIN,
    LAST,
    LEARNING_RATES,
    LINK,
    STEP_S,
    Member,
    VirtualFleet,
    accuracy_of,
    split_digits,
)
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.partition import dirichlet, iid
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from edgeasync.protocol.wire import Buffer
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.trainer import StepResult, Trainer
from simulation.fleet import SimulatedDevice
from simulation.population import FleetProfile, draw_fleet

KEYS = 10
BAD = 2
UPDATES = 700
"""Updates of honest devices per run."""

EVALUATE_S = 0.25
LIMIT_S = 300.0
GROWTH = 1.05
GROWS_MAX = 1000
POLICIES = {"admitted": Policy(trust="admitted"), "open": Policy(trust="open")}
NEVER = 10**6

PROFILE = FleetProfile(devices=KEYS, step_s=0.01, spread=3.0, stragglers=0.0, churn=None)

SHUFFLED = "shuffled labels"
FLIPPED = "flipped axis"
"""A fault that only smartwatch data can have."""

ALPHAS = {"digits": None, "digits, Dirichlet 0.1": 0.1}
SMARTWATCH = "smartwatch"
DATA = (*ALPHAS, SMARTWATCH)

Change = Callable[[Vector, np.random.Generator, int], Vector]
"""Turns a hostile device's learned update into the one that it sends in its nth exchange."""


def _times(factor: float) -> Change:
    def change(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
        return update * np.float32(factor)

    return change


def _noise(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
    """Return a new random direction each time, seven times as long as the update."""
    noise = random.standard_normal(update.size).astype(np.float32)
    return noise * np.float32(7.0 * np.linalg.norm(update) / np.linalg.norm(noise))


def _drift(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
    """Return the same direction for all hostile devices, no longer than usual."""
    direction = np.random.default_rng(99).standard_normal(update.size).astype(np.float32)
    return direction * np.float32(0.95 * np.linalg.norm(update) / np.linalg.norm(direction))


def _grows(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
    """Return the opposite of the update, 5 % longer with every exchange, so that none stands out."""
    return update * np.float32(-(GROWTH ** min(exchange, GROWS_MAX)))


ATTACKS: dict[str, Change] = {
    "flip": _times(-1.0),
    "x7": _times(-7.0),
    "x100": _times(-100.0),
    "x1e6": _times(-1e6),
    "random": _noise,
    "NaN": _times(float("nan")),
    "drift": _drift,
    "grows": _grows,
}

Fault = Callable[[Dataset, int, np.random.Generator], Dataset]
"""Creates a spoilt device's data from its data, the number of classes and a generator."""


def _shuffled(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(data.x, random.permutation(data.y))


def _off_by_one(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(data.x, (data.y + 1) % classes)


def _scaled(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(data.x * np.float32(1000.0), data.y)


def _constant(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    return Dataset(np.repeat(data.x[:1], len(data), axis=0), data.y)


def _one_class(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:
    return Dataset(data.x, np.full_like(data.y, random.integers(classes)))


def _flipped_axis(data: Dataset, classes: int, random: np.random.Generator) -> Dataset:  # noqa: ARG001
    x = data.x.copy().reshape(len(data), smartwatch.WINDOW, smartwatch.SENSORS)
    x[:, :, 0] *= -1.0
    return Dataset(x.reshape(data.x.shape), data.y)


FAULTS: dict[str, Fault] = {
    SHUFFLED: _shuffled,
    "labels off by one": _off_by_one,
    "inputs times 1000": _scaled,
    "constant input": _constant,
    "one class": _one_class,
    FLIPPED: _flipped_axis,
}
"""Devices with a fault report honestly what they learned from meaningless data."""

GONE = "gone"
"""Instead of an attack: the fleet runs without these devices."""

CLAIMS: dict[str, dict[str, Any]] = {
    "true": {},
    "good": {"local_steps": 2**31, "examples": 2**53, "loss_mean": 0.0, "loss_variance": 0.0, "score": -1e30},
    "bad": {
        "local_steps": 1,
        "examples": 0,
        "loss_mean": 1e30,
        "loss_variance": 1e60,
        "score": 1e30,
        "step_s": 1e9,
    },
    "alone": {"local_steps": 2**31, "overlap_steps": 2**31, "examples": 2**53, "loss_mean": 0.0, "score": 0.0},
}
"""What hostile devices claim: the truth, good or bad figures, or long training alone."""


class HostileTrainer:
    """Learns like another trainer, but moves the parameters by the attack."""

    def __init__(self, trainer: Trainer, attack: str, seed: int) -> None:
        self._trainer = trainer
        self._change = ATTACKS[attack]
        self._random = np.random.default_rng(seed)
        self._exchange = 0

    @property
    def spec(self) -> ParameterSpec:
        """The model's arrays."""
        return self._trainer.spec

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._exchange += 1
        self._start, self._told, self._learnt = parameters.copy(), parameters, parameters.copy()
        self._trainer.begin(self._learnt)

    def step(self) -> StepResult:
        """Take one local step, and replace the update so far."""
        result = self._trainer.step()
        with np.errstate(invalid="ignore", over="ignore"):
            self._told[:] = self._start + self._change(self._learnt - self._start, self._random, self._exchange)
        return result


class LyingDevice(SimulatedDevice):
    """Claims any figures about its updates."""

    def __init__(self, *arguments: Any, claims: Mapping[str, Any], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._claims = claims

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send over the link; replace the figures of an update."""
        message = wire.decode(header)
        if isinstance(message, Push) and self._claims:
            message = msgspec.structs.replace(message, **self._claims)
            header = wire.encode(message)
        super().send(header, payload)


@dataclass(frozen=True)
class Case:
    """One run: how many keys are hostile, what they send and claim, and under how many names.

    Without `keyed`, the hub knows only names. If the operator `obeys`, each device that the hub
    warns of is excluded a second later. With `data`, all devices are equally fast.
    """

    policy: Policy
    seed: int
    attack: str = ""
    claims: str = "true"
    names: int = 1
    keyed: bool = True
    obeys: bool = False
    updates: int = UPDATES
    data: str = ""
    bad: int = BAD


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    - `refused`: rejected updates of honest devices, as a share of theirs.
    - `warned`: after how many of its own exchanges the last hostile device was first warned of.
    - `first`: whether that was before any honest device.
    """

    accuracy: float
    refused: float
    rollbacks: int
    honest_warned: int
    warned: int
    first: bool

    @classmethod
    def of(
        cls, accuracy: float, refused: float, rollbacks: int, warned: Mapping[str, int], hostile: Sequence[str]
    ) -> Self:
        """Return the outcome of a run.

        `warned` maps names, in order of the warnings, to the number of exchanges before them.
        """
        order = list(warned)
        bad = [name for name in order if name in hostile]
        return cls(
            accuracy=accuracy,
            refused=refused,
            rollbacks=rollbacks,
            honest_warned=len(order) - len(bad),
            warned=max([warned.get(name, NEVER) for name in hostile], default=0),
            first=order[: len(hostile)] == bad and len(bad) == len(hostile),
        )


def measure(case: Case) -> Outcome:
    """Train a fleet; the seed determines everything."""
    model, parts, held_out = _data(case)
    run = Run(case, model)
    rate = LEARNING_RATES[SMARTWATCH if case.data == SMARTWATCH else "digits"]
    for number, (drawn, part) in enumerate(zip(draw_fleet(PROFILE, case.seed), parts, strict=True)):
        hostile = bool(case.attack) and number < case.bad
        if hostile and case.attack == GONE:
            continue
        key, own = number.to_bytes(32, "big"), part
        names = [f"{drawn.device_id}/{name}" for name in range(case.names)] if hostile else [drawn.device_id]
        if hostile and case.attack in FAULTS:
            own = FAULTS[case.attack](part, model.classes, np.random.default_rng([case.seed, number]))
        changes = hostile and case.attack in ATTACKS
        for place, name in enumerate(names):
            seed = 1000 * case.seed + 50 * number + place
            member = Member(
                data=part,
                learning_rate=rate,
                step_s=STEP_S if case.data else drawn.step_s,
                link=LINK if case.data else drawn.link,
                name=name,
                stream=batches(own, BATCH, seed),
                sender=Sender(key, drawn.device_id, "device") if case.keyed else ANYBODY,
                wrap=partial(HostileTrainer, attack=case.attack, seed=seed) if changes else None,
                make=partial(LyingDevice, claims=CLAIMS[case.claims] if hostile else {}),
            )
            (run.hostile if hostile else run.honest).append(name)
            run.add(member)
    return run.train(held_out)


def _data(case: Case) -> tuple[MlpModel, list[Dataset], Dataset]:
    """Return the model, the devices' data and held-out data."""
    if case.data == SMARTWATCH:
        people, held_out = smartwatch.split_by_person()
        order = np.random.default_rng(case.seed).permutation(len(people))[:KEYS]
        return smartwatch.MODEL, [people[person] for person in order], held_out
    training, held_out = split_digits()
    alpha = ALPHAS.get(case.data)
    if alpha is None:
        return DIGITS, iid(training, KEYS, case.seed), held_out
    return DIGITS, dirichlet(training, KEYS, alpha, case.seed, examples_min=EXAMPLES_MIN), held_out


class Run(VirtualFleet):
    """A fleet in training, and an operator who reads the hub's warnings."""

    def __init__(self, case: Case, model: MlpModel) -> None:
        super().__init__(model, case.seed, policy=case.policy)
        self.honest: list[str] = []
        self.hostile: list[str] = []
        self._case = case
        self._read = 0
        self._warned: dict[str, int] = {}
        """After how many of its own updates a device had its first warning, in order of warnings."""

    def train(self, held_out: Dataset) -> Outcome:
        """Train the fleet until the honest devices have sent enough updates."""
        accuracies: list[float] = []
        clock, members = self.clock, self.hub.core.members
        while self._applied < self._case.updates and clock.now_s < LIMIT_S:
            self.run(clock.now_s + EVALUATE_S)
            accuracies = [*accuracies, self.accuracy(held_out)][-LAST:]
            self._read_warnings()
        self.hub.core.check()
        engine = self.hub.core.policy_engine
        sent = sum(members.measurements[name].updates for name in self.honest)
        waiting = sum(one.device_id in self.honest for one in engine.state.gathering.contributions)
        return Outcome.of(
            statistics.fmean(accuracies),
            1.0 - (self._applied + waiting) / sent,
            engine.state.divergence.rollbacks,
            self._warned,
            self.hostile,
        )

    @property
    def _applied(self) -> int:
        members = self.hub.core.members.members
        return sum(members[name].updates_applied for name in self.honest if name in members)

    def _read_warnings(self) -> None:
        reports, self._read = self.hub.reports[self._read :], len(self.hub.reports)
        for name in [report.device_id for _, report in reports if report.event == "alarm" and report.device_id]:
            if name in self._warned:
                continue
            self._warned[name] = self.hub.core.members.measurements[name].updates
            if self._case.obeys:
                self.hub.order(name, "quarantine")


HARDEST = ("x7", "grows", SHUFFLED)


def measure_attack(attack: str, seed: int, seconds: float, loops: int) -> Outcome:
    """Train a fleet beside some busy loops; without an attack all devices are honest."""
    training, held_out = split_digits()
    bad = BAD if attack else 0
    members = []
    for number, part in enumerate(iid(training, KEYS, seed)):
        random, hostile = np.random.default_rng([seed, number]), number < bad
        own = FAULTS[attack](part, DIGITS.classes, random) if hostile and attack in FAULTS else part
        changes = hostile and attack in ATTACKS
        wrap = partial(HostileTrainer, attack=attack, seed=seed + number) if changes else None
        members.append(RealMember(own, STEP_S, wrap))
    with busy_loops(loops), run_fleet(DIGITS, LEARNING_RATES["digits"], members) as fleet:
        story = fleet.train(seconds)
    names = [f"device-{number + 1}" for number in range(bad)]
    honest = [device for device in story.devices if device["id"] not in names]
    lost = sum(sum(device["updates_rejected"].values()) for device in honest)
    applied = sum(device["updates_applied"] for device in honest)
    return Outcome.of(
        statistics.fmean([accuracy_of(DIGITS, model, held_out) for model in story.models]),
        lost / max(1, lost + applied),
        story.rollbacks,
        story.warned,
        names,
    )
