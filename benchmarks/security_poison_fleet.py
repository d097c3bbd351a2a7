"""A simulated fleet in which some keys are hostile: what they send, what they say of it, and what becomes of it.

Ten keys learn digits in virtual time, with their own cores and real encoded frames. A hostile device trains as the
others do and then changes its update, so that it knows how long an honest one is.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np

from benchmarks.pool import measure_in_processes
from benchmarks.simulated import BATCH, DIGITS, LIVENESS, accuracy_of, split_digits
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits
from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.partition import iid
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from edgeasync.protocol.wire import Buffer
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.trainer import StepResult, Trainer
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.population import FleetProfile, draw_fleet
from simulation.training import SimulatedWorkload

KEYS = 10
BAD = 2
LEARNING_RATE = 0.1
UPDATES = 700
"""How many updates of honest devices a run has."""

EVALUATE_S = 0.25
LAST = 8
"""The accuracy at the end is the mean of this many evaluations."""

LIMIT_S = 300.0
GROWTH = 1.05
GROWS_MAX = 1000
POLICIES = {"admitted": Policy(trust="admitted"), "open": Policy(trust="open")}
NEVER = 10**6

PROFILE = FleetProfile(devices=KEYS, step_s=0.01, spread=3.0, stragglers=0.0, churn=None)

Change = Callable[[Vector, np.random.Generator, int], Vector]
"""Makes the update that a hostile device sends of the one that it has learnt, for its exchange of this number."""


def _times(factor: float) -> Change:
    def change(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
        return update * np.float32(factor)

    return change


def _noise(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
    """Return a random direction, another one each time, seven times as long as the update."""
    noise = random.standard_normal(update.size).astype(np.float32)
    return noise * np.float32(7.0 * np.linalg.norm(update) / np.linalg.norm(noise))


def _drift(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
    """Return always the same direction for all hostile devices, no longer than is usual."""
    direction = np.random.default_rng(99).standard_normal(update.size).astype(np.float32)
    return direction * np.float32(0.95 * np.linalg.norm(update) / np.linalg.norm(direction))


def _grows(update: Vector, random: np.random.Generator, exchange: int) -> Vector:  # noqa: ARG001
    """Return the opposite of the update, 5 % longer with every exchange: no single one stands out."""
    return update * np.float32(-(GROWTH ** min(exchange, GROWS_MAX)))


SHUFFLED = "shuffled labels"
ATTACKS: dict[str, Change] = {
    "flip": _times(-1.0),
    "x7": _times(-7.0),
    "x100": _times(-100.0),
    "x1e6": _times(-1e6),
    "random": _noise,
    "NaN": _times(float("nan")),
    "drift": _drift,
    "grows": _grows,
    SHUFFLED: _times(1.0),
}
"""The last is honest about what it has learnt, from labels that mean nothing."""

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
"""What hostile devices say: the truth, that all is well, that all is lost, or that they were alone for long."""


class HostileTrainer:
    """Learns as another trainer does, and moves the parameters otherwise."""

    def __init__(self, trainer: Trainer, change: Change, seed: int) -> None:
        self._trainer = trainer
        self._change = change
        self._random = np.random.default_rng(seed)
        self._exchange = 0

    @property
    def spec(self) -> ParameterSpec:
        """The arrays of the model."""
        return self._trainer.spec

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._exchange += 1
        self._start, self._told, self._learnt = parameters.copy(), parameters, parameters.copy()
        self._trainer.begin(self._learnt)

    def step(self) -> StepResult:
        """Take one local step, and change what is learnt so far."""
        result = self._trainer.step()
        with np.errstate(invalid="ignore", over="ignore"):
            self._told[:] = self._start + self._change(self._learnt - self._start, self._random, self._exchange)
        return result


class LyingDevice(SimulatedDevice):
    """Says of its updates what it likes."""

    def __init__(self, *arguments: Any, claims: Mapping[str, Any], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._claims = claims

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send over the link, with other words if it is an update."""
        message = wire.decode(header)
        if isinstance(message, Push) and self._claims:
            message = msgspec.structs.replace(message, **self._claims)
            header = wire.encode(message)
        super().send(header, payload)


@dataclass(frozen=True)
class Case:
    """One run: how many keys are hostile, what they send and say, and under how many names each.

    Without `keyed` a name is all that the hub knows. If the operator `obeys`, each device that the hub warns of is
    excluded a second later.
    """

    policy: Policy
    seed: int
    attack: str = ""
    claims: str = "true"
    names: int = 1
    keyed: bool = True
    obeys: bool = False
    updates: int = UPDATES


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    `refused` is the share of the updates that honest devices sent. `warned` says after how many of its own
    exchanges the last hostile device was first warned of, and `first` whether that was before any honest one.
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
        """Return the outcome of a run by whom the hub warned of, in this order and after how many exchanges."""
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
    """Train a fleet; all is drawn from the seed."""
    training, held_out = split_digits()
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=DIGITS.spec,
        initial=DIGITS.initial(case.seed),
        policy=case.policy,
        settings=HubCoreSettings(
            liveness=LIVENESS, limits=Limits(updates_held_max=256, snapshots_max=256), codec=FLOAT32
        ),
        seed=case.seed,
    )
    hub.start()
    run = Run(case, clock, hub)
    parts = iid(training, KEYS, case.seed)
    for number, (drawn, part) in enumerate(zip(draw_fleet(PROFILE, case.seed), parts, strict=True)):
        hostile = bool(case.attack) and number < BAD
        key = number.to_bytes(32, "big")
        sender = Sender(key, drawn.device_id, "device") if case.keyed else ANYBODY
        names = [f"{drawn.device_id}/{name}" for name in range(case.names)] if hostile else [drawn.device_id]
        own = part
        if hostile and case.attack == SHUFFLED:
            own = Dataset(part.x, np.random.default_rng([case.seed, number]).permutation(part.y))
        for place, name in enumerate(names):
            seed = 1000 * case.seed + 50 * number + place
            optimizer = (SGD(learning_rate=LEARNING_RATE),)
            trainer = GradientTrainer(DIGITS.spec, DIGITS.gradient, optimizer, batches(own, BATCH, seed))
            device = LyingDevice(
                hub,
                name,
                HostileTrainer(trainer, ATTACKS[case.attack], seed) if hostile else trainer,
                step_s=drawn.step_s,
                link=drawn.link,
                workload=SimulatedWorkload(examples=len(part)),
                seed=case.seed,
                claims=CLAIMS[case.claims] if hostile else {},
            )
            device.sender = sender
            (run.hostile if hostile else run.honest).append(name)
            device.start()
    return run.train(lambda: accuracy_of(DIGITS, hub.model, held_out))


class Run:
    """A fleet that trains, and an operator who reads the hub's warnings."""

    def __init__(self, case: Case, clock: VirtualClock, hub: SimulatedHub) -> None:
        self.honest: list[str] = []
        self.hostile: list[str] = []
        self._case = case
        self._clock = clock
        self._hub = hub
        self._read = 0
        self._warned: dict[str, int] = {}
        """After how many of its own updates a device was first warned of; in the order of the warnings."""

    def train(self, accuracy: Callable[[], float]) -> Outcome:
        """Let the fleet train until the honest devices have sent enough."""
        accuracies: list[float] = []
        clock, members = self._clock, self._hub.core.members
        while self._applied < self._case.updates and clock.now_s < LIMIT_S:
            clock.run(lambda: False, clock.now_s + EVALUATE_S)
            accuracies = [*accuracies, accuracy()][-LAST:]
            self._read_warnings()
        self._hub.core.check()
        engine = self._hub.core.policy_engine
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
        members = self._hub.core.members.members
        return sum(members[name].updates_applied for name in self.honest if name in members)

    def _read_warnings(self) -> None:
        reports, self._read = self._hub.reports[self._read :], len(self._hub.reports)
        for name in [report.device_id for _, report in reports if report.event == "alarm" and report.device_id]:
            if name in self._warned:
                continue
            self._warned[name] = self._hub.core.members.measurements[name].updates
            if self._case.obeys:
                self._hub.order(name, "quarantine")


def measure_all(cases: Sequence[Case], what: str) -> list[Outcome]:
    """Make all runs, on all cores; return their outcomes in the same order."""
    return measure_in_processes(measure, cases, what)
