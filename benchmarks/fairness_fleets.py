"""Simulated fleets of honest devices that differ, and one machine that has all their data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from benchmarks.fairness_data import MAKERS, Data, Part
from benchmarks.simulated import BATCH, LIVENESS, accuracy_of
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits
from edgeasync.data.dataset import Batch, Dataset, batches
from edgeasync.parameters import Vector
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.trainer import GradientTrainer

STEP_S = 0.01
LINK = LinkProfile(5e6, 5e6, 0.005)
LAST = 8
"""The accuracy at the end is the mean of this many evaluations, a second apart."""


@dataclass(frozen=True)
class Fleet:
    """What is honest, and unequal: the kind of data, how slow some devices are, and which come late."""

    data: str
    slow: dict[int, float] = field(default_factory=dict)
    late_s: float = 0.0
    until_s: float = 60.0


FLEETS = {
    "Dirichlet 0.1": Fleet("Dirichlet 0.1"),
    "one class each": Fleet("one class each"),
    "gain": Fleet("gain"),
    "offset": Fleet("offset"),
    "mirrored": Fleet("mirrored"),
    "other sensor": Fleet("other sensor"),
    "smartwatch": Fleet("smartwatch", {0: 3.0, 1: 10.0}),
    "speech": Fleet("speech"),
    "ten times the data": Fleet("ten times the data"),
    "twenty examples": Fleet("twenty examples"),
    "slow by ten": Fleet("even", {0: 10.0}),
    "late by two minutes": Fleet("even", late_s=120.0, until_s=180.0),
    "changing data": Fleet("changing data"),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    fleet: str
    seed: int
    policy: Policy = field(default_factory=Policy)
    until_s: float | None = None
    quiet: bool = True


@dataclass(frozen=True)
class Outcome:
    """Accuracies of each device's held-out data, with the fleet's model and with that of one machine."""

    accuracies: list[float]
    alone: list[float]
    weights: list[float]
    refused: int
    warned: dict[str, int]
    updates: int
    loss: float = 0.0
    loss_alone: float = 0.0
    events: list[str] = field(default_factory=list)


def measure(case: Case) -> Outcome:
    """Train the fleet, and one machine with all data and as many examples."""
    fleet = FLEETS[case.fleet]
    data = MAKERS[fleet.data](case.seed)
    until_s = case.until_s or fleet.until_s
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=data.model.spec,
        initial=data.model.initial(case.seed),
        policy=case.policy,
        settings=HubCoreSettings(
            liveness=LIVENESS,
            limits=Limits(updates_held_max=256, snapshots_max=256),
            codec=FLOAT32,
            quiet=case.quiet,
        ),
        seed=case.seed,
    )
    devices = []
    for number, part in enumerate(data.parts):
        device = SimulatedDevice(
            clock,
            hub,
            f"device-{number + 1}",
            GradientTrainer(
                data.model.spec,
                data.model.gradient,
                (SGD(learning_rate=data.learning_rate),),
                _stream(part, 1000 * case.seed + number, clock, until_s / 2.0),
            ),
            step_s=fleet.slow.get(number, 1.0) * STEP_S,
            link=LINK,
            examples=len(part.training),
            seed=case.seed,
        )
        devices.append(device)
        if number == 0 and fleet.late_s:
            clock.at(fleet.late_s, device.start)
        else:
            device.start()
    found: list[list[float]] = []
    while clock.now_s < until_s:
        clock.run(lambda: False, min(until_s, clock.now_s + 1.0))
        if clock.now_s > until_s - LAST:
            found.append([accuracy_of(data.model, hub.model, part.held_out) for part in data.parts])
    steps = sum(device.steps_total for device in devices)
    hub.core.check()
    status = {one["id"]: one for one in hub.core.status(clock.now_s)["devices"]}
    kept, refused, warned = [], 0, {}
    for device in devices:
        one = status[device.device_id]
        lost = sum(one["updates_rejected"].values())
        refused += lost
        counted = one["updates_applied"]
        kept.append((one["weight_kept"] or 0.0) * counted / max(1, counted + lost))
    for _, report in hub.reports:
        if report.event == "alarm":
            warned[report.device_id] = warned.get(report.device_id, 0) + 1
    alone, loss_alone = _alone(data, steps, case.seed)
    return Outcome(
        list(np.mean(found, axis=0)),
        alone,
        kept,
        refused,
        warned,
        hub.core.updates_applied,
        loss_of(data, hub.model),
        loss_alone,
        [f"{at:.1f} {r.event} {r.device_id} {r.detail}" for at, r in hub.reports if r.event in ("alarm", "calm", "resting", "awake")],
    )


def loss_of(data: Data, vector: Vector) -> float:
    """Return the mean loss on all held-out data."""
    out = np.empty_like(vector)
    return float(np.mean([data.model.gradient(vector, p.held_out.x, p.held_out.y, out) for p in data.parts]))


def _stream(part: Part, seed: int, clock: VirtualClock, later_s: float) -> Iterator[Batch]:
    """Yield batches of a device's data, from a time on of its later ones."""
    now = batches(part.training, BATCH, seed)
    later = None if part.later is None else batches(part.later, BATCH, seed)
    while later is None or clock.now_s < later_s:
        yield next(now)
    yield from later


@lru_cache(maxsize=256)
def _machine(data: str, seed: int, steps: int) -> tuple[list[float], float]:
    return _alone_of(MAKERS[data](seed), steps, seed)


def _alone(data: Data, steps: int, seed: int) -> tuple[list[float], float]:
    return _alone_of(data, steps, seed)


def _alone_of(data: Data, steps: int, seed: int) -> tuple[list[float], float]:
    """Let one machine take as many steps with all data; return the mean accuracies of the end."""
    sets = [each for part in data.parts for each in (part.training, part.later) if each is not None]
    everything = Dataset(np.concatenate([one.x for one in sets]), np.concatenate([one.y for one in sets]))
    vector, gradient = data.model.initial(seed), np.empty(data.model.spec.length, np.float32)
    stream, rate = batches(everything, BATCH, seed), np.float32(data.learning_rate)
    found = []
    for step in range(1, steps + 1):
        x, y = next(stream)
        data.model.gradient(vector, x, y, gradient)
        vector -= rate * gradient
        if steps - step < 100 * LAST and (steps - step) % 100 == 0:
            found.append([accuracy_of(data.model, vector, part.held_out) for part in data.parts])
    return list(np.mean(found, axis=0)), loss_of(data, vector)
