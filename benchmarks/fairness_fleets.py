"""Simulated fleets of honest devices that differ, and one machine that has all their data."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.fairness_data import MAKERS, Data, Part
from benchmarks.simulated import BATCH, LIVENESS, accuracy_of, start_device
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits
from edgeasync.data.dataset import Batch, Dataset, batches
from edgeasync.parameters import Vector
from edgeasync.policies.policy import Policy
from simulation.clock import VirtualClock
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile

STEP_S = 0.01
LINK = LinkProfile(5e6, 5e6, 0.005)
LAST = 8
"""The accuracy at the end is the mean of this many evaluations, a second apart."""

TRUSTS = {"admitted": Policy(trust="admitted"), "open": Policy(trust="open")}


@dataclass(frozen=True)
class Fleet:
    """Honest, unequal devices: the kind of their data, how slow some are, how late the first comes."""

    data: str
    slow: Mapping[int, float] = field(default_factory=dict)
    late_s: float = 0.0


FLEETS = {
    "label skew, Dirichlet 0.1": Fleet("Dirichlet 0.1"),
    "one class each": Fleet("one class each"),
    "gain": Fleet("gain"),
    "offset": Fleet("offset"),
    "one mirrored": Fleet("mirrored"),
    "one with another sensor": Fleet("other sensor"),
    "smartwatch by person, two slow": Fleet("smartwatch", {0: 3.0, 1: 10.0}),
    "speech by voice": Fleet("speech"),
    "one with ten times the data": Fleet("ten times the data"),
    "one with twenty examples": Fleet("twenty examples"),
    "one slow by ten": Fleet("even", {0: 10.0}),
    "one late by two minutes": Fleet("even", late_s=120.0),
    "one whose data change": Fleet("changing data"),
}


@dataclass(frozen=True)
class Case:
    """One run: its fleet and seed, whom the hub trusts, and how long it lasts after the last device has come."""

    fleet: str
    seed: int
    trust: str = "admitted"
    until_s: float = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of a run: accuracies by device, with the fleet's model and with that of one machine.

    `weights` has the share of its weight that each device kept, and `warned` how many warnings there were of each
    kind.
    """

    accuracies: list[float]
    alone: list[float]
    weights: list[float]
    refused: int
    warned: Mapping[str, int]


def measure(case: Case) -> Outcome:
    """Train the fleet, and one machine with all data and as many examples."""
    fleet = FLEETS[case.fleet]
    data = MAKERS[fleet.data](case.seed)
    until_s = fleet.late_s + case.until_s
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=data.model.spec,
        initial=data.model.initial(case.seed),
        policy=TRUSTS[case.trust],
        settings=HubCoreSettings(
            liveness=LIVENESS,
            limits=Limits(updates_held_max=256, snapshots_max=256),
            codec=FLOAT32,
            quiet=True,
        ),
        seed=case.seed,
    )
    hub.start()
    devices = [
        start_device(
            clock,
            hub,
            data.model,
            number,
            part.training,
            stream=_stream(part, 1000 * case.seed + number, clock, until_s / 2.0),
            learning_rate=data.learning_rate,
            step_s=fleet.slow.get(number, 1.0) * STEP_S,
            link=LINK,
            seed=case.seed,
            start_s=0.0 if number else fleet.late_s,
        )
        for number, part in enumerate(data.parts)
    ]
    found: list[list[float]] = []
    while clock.now_s < until_s:
        clock.run(lambda: False, min(until_s, clock.now_s + 1.0))
        if clock.now_s > until_s - LAST:
            found.append([accuracy_of(data.model, hub.model, part.held_out) for part in data.parts])
    hub.core.check()
    rows = hub.core.status(clock.now_s)["devices"]
    return Outcome(
        accuracies=means(found),
        alone=train_alone(data, sum(device.steps_total for device in devices), case.seed),
        weights=[weight_of(row) for row in rows],
        refused=sum(sum(row["updates_rejected"].values()) for row in rows),
        warned=Counter(
            kind_of(report.device_id, report.figures) for _, report in hub.reports if report.event == "alarm"
        ),
    )


def weight_of(device: Mapping[str, Any]) -> float:
    """Return the part of its weight by staleness and shares that a device kept, by its part of a status."""
    rejected, applied = sum(device["updates_rejected"].values()), device["updates_applied"]
    return float((device["weight_kept"] or 0.0) * applied / max(1, applied + rejected))


def kind_of(device_id: str, figures: Mapping[str, float]) -> str:
    """Return what a warning is about, by its device and its figures."""
    if not device_id:
        return "fleet"
    kinds = {"times_usual": "length", "fleet_loss": "fit"}
    return next((kind for figure, kind in kinds.items() if figure in figures), "other")


def _stream(part: Part, seed: int, clock: VirtualClock, later_s: float) -> Iterator[Batch]:
    """Yield batches of a device's data, from a time on of its later ones."""
    now = batches(part.training, BATCH, seed)
    while part.later is None or clock.now_s < later_s:
        yield next(now)
    yield from batches(part.later, BATCH, seed)


def train_alone(data: Data, steps: int, seed: int) -> list[float]:
    """Let one machine take as many steps with all data; return the accuracies at the end."""
    sets = [each for part in data.parts for each in (part.training, part.later) if each is not None]
    everything = Dataset(np.concatenate([one.x for one in sets]), np.concatenate([one.y for one in sets]))
    vector: Vector = data.model.initial(seed)
    gradient = np.empty_like(vector)
    stream, rate = batches(everything, BATCH, seed), np.float32(data.learning_rate)
    found = []
    for left in range(steps - 1, -1, -1):
        x, y = next(stream)
        data.model.gradient(vector, x, y, gradient)  # type: ignore[arg-type]
        vector -= rate * gradient
        if left < 100 * LAST and not left % 100:
            found.append([accuracy_of(data.model, vector, part.held_out) for part in data.parts])
    return means(found)


def means(found: list[list[float]]) -> list[float]:
    """Return the mean of each column."""
    return [statistics.fmean(column) for column in zip(*found, strict=True)]
