"""A simulated fleet in which some keys are hostile: what they send, what they say of it, and what becomes of it.

Ten keys learn digits in virtual time, with their own cores and real encoded frames. A hostile device trains as the
others do and then changes its update, so that it knows how long an honest one is.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from benchmarks.pool import measure_in_processes
from benchmarks.simulated import BATCH, DIGITS, EXAMPLES_MIN, LIVENESS, accuracy_of, split_digits
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits
from edgeasync.data.dataset import batches
from edgeasync.data.partition import dirichlet, iid
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.policies.combining import CentredClipCombiner
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from edgeasync.protocol.wire import Buffer
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.population import FleetProfile, draw_fleet
from edgeasync.training.trainer import GradientTrainer, StepResult

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
POLICIES = {
    "default": Policy(),
    "robust": Policy(combine=CentredClipCombiner(), optimizer=(SGD(),)),
}
"""The default, and the robust setting of docs/policies.md."""

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

    def __init__(self, trainer: GradientTrainer, change: Change, seed: int) -> None:
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
    """One run: how many keys are hostile, what they send and say, and under how many names each."""

    policy: Policy
    seed: int
    attack: str = ""
    claims: str = "true"
    bad: int = BAD
    names: int = 1
    alpha: float | None = None
    updates: int = UPDATES


@dataclass(frozen=True)
class Outcome:
    """What became of a run. Shares are of the updates that honest devices sent."""

    accuracy: float
    refused: float
    quarantined: int
    rollbacks: int
    caught: int
    seconds: float


def measure(case: Case) -> Outcome:
    """Train a fleet; all is drawn from the seed."""
    training, held_out = split_digits()
    parts = (
        iid(training, KEYS, case.seed)
        if case.alpha is None
        else dirichlet(training, KEYS, case.alpha, case.seed, examples_min=EXAMPLES_MIN)
    )
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
    bad = case.bad if case.attack else 0
    honest: set[str] = set()
    for number, (drawn, part) in enumerate(zip(draw_fleet(PROFILE, case.seed), parts, strict=True)):
        hostile = number < bad
        sender = Sender(number.to_bytes(32, "big"), drawn.device_id, "device")
        names = [f"{drawn.device_id}/{name}" for name in range(case.names)] if hostile else [drawn.device_id]
        for place, name in enumerate(names):
            seed = 1000 * case.seed + 50 * number + place
            optimizer = (SGD(learning_rate=LEARNING_RATE),)
            trainer = GradientTrainer(DIGITS.spec, DIGITS.gradient, optimizer, batches(part, BATCH, seed))
            device = LyingDevice(
                clock,
                hub,
                name,
                HostileTrainer(trainer, ATTACKS[case.attack], seed) if hostile else trainer,
                step_s=drawn.step_s,
                link=drawn.link,
                examples=len(part),
                seed=case.seed,
                sender=sender,
                claims=CLAIMS[case.claims] if hostile else {},
            )
            if not hostile:
                honest.add(name)
            device.start()
    return _train(case, clock, hub, honest, lambda: accuracy_of(DIGITS, hub.model, held_out))


def _train(
    case: Case, clock: VirtualClock, hub: SimulatedHub, honest: set[str], accuracy: Callable[[], float]
) -> Outcome:
    members = hub.core.members
    accuracies: list[float] = []

    def applied() -> int:
        return sum(members.members[name].updates_applied for name in honest if name in members.members)

    while applied() < case.updates and clock.now_s < LIMIT_S:
        clock.run(lambda: False, clock.now_s + EVALUATE_S)
        accuracies = [*accuracies, accuracy()][-LAST:]
    hub.core.check()
    sent = sum(members.histories[name].updates for name in honest)
    waiting = sum(one.device_id in honest for one in hub.core.policy_engine.state.contributions)
    alarmed = {report.device_id for _, report in hub.reports if report.event == "alarm" and report.device_id}
    return Outcome(
        accuracy=statistics.fmean(accuracies),
        refused=1.0 - (applied() + waiting) / sent,
        quarantined=len(alarmed & honest),
        rollbacks=hub.core.policy_engine.state.divergence.rollbacks,
        caught=len(alarmed - honest),
        seconds=clock.now_s,
    )


def measure_all(cases: Sequence[Case], what: str) -> list[Outcome]:
    """Make all runs, on all cores; return their outcomes in the same order."""
    return measure_in_processes(measure, cases, what)
