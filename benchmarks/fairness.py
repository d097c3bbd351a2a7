"""Measure what unusual but honest devices lose, and whether the hub warns of them.

Run as `python -m benchmarks.fairness`. Ten devices in virtual time differ in one way. Their data
differ by class, sensor, person, voice or amount, or change over time, or a device is slow or late.
The accuracy of each device on its own held-out data is compared with that of one machine that has
all data and processes as many examples.

The bounds under `trust = "admitted"`: no update is refused, and at most one in twenty is shortened
to less than half of its length. Each device keeps 0.8 of the weight that staleness and shares give
it, clipping included. All devices together lose at most 1 point and no device more than 3, averaged
over the seeds. Under "open" these bounds are 2 and 5 points.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks import real_fleet
from benchmarks.agent_process import Member as RealMember
from benchmarks.fairness_data import MAKERS, Data, Part
from benchmarks.processes import busy_loops, measure_groups
from benchmarks.real_fleet import run_fleet
from benchmarks.report import Form, Results, benchmark, make_parser, show_progress
from benchmarks.virtual_fleet import BATCH, LAST, SETTINGS, STEP_S, Member, VirtualFleet, accuracy_of
from edgeasync.data.dataset import Batch, Dataset, batches
from edgeasync.parameters import Vector
from edgeasync.policies.policy import Policy
from edgeasync.training.local_parameters import LocalParameters
from simulation.clock import VirtualClock

TRUSTS = {"admitted": Policy(trust="admitted"), "open": Policy(trust="open")}


@dataclass(frozen=True)
class Fleet:
    """Honest devices that differ: the kind of data, and how slow and late each device is.

    `slow` has factors and `late` has seconds, by device number. `killed` kills the hub half-way.
    """

    data: str
    slow: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    killed: bool = False
    local: tuple[str, ...] = ()
    """Arrays with separate values on each device."""


SHARED = "smartwatch by person, two slow"
HEADS = "smartwatch by person, personal heads"
FLEETS = {
    "label skew, Dirichlet 0.1": Fleet("Dirichlet 0.1"),
    "one class each": Fleet("one class each"),
    "gain": Fleet("gain"),
    "offset": Fleet("offset"),
    "one mirrored": Fleet("mirrored"),
    "one with another sensor": Fleet("other sensor"),
    SHARED: Fleet("smartwatch", {0: 3.0, 1: 10.0}),
    HEADS: Fleet("smartwatch", {0: 3.0, 1: 10.0}, local=("layer1.*",)),
    "smartwatch by person, hub killed": Fleet("smartwatch", {0: 3.0, 1: 10.0}, killed=True),
    "speech by voice": Fleet("speech"),
    "one with ten times the data": Fleet("ten times the data"),
    "one with twenty examples": Fleet("twenty examples"),
    "one slow by ten": Fleet("even", {0: 10.0}),
    "one late by two minutes": Fleet("even", late={0: 120.0}),
    "one whose data change": Fleet("changing data"),
}


@dataclass(frozen=True)
class Case:
    """One run: a fleet, a seed, the hub's `trust`, and its seconds once all devices have joined."""

    fleet: str
    seed: int
    trust: str = "admitted"
    until_s: float = 120.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: accuracies by device, of the fleet's model and of one machine.

    - `weights`: the share of its weight that each device kept after clipping.
    - `shortened`: the share of updates that were clipped to less than half of their length.
    - `warned`: the number of warnings of each kind.
    """

    accuracies: list[float]
    alone: list[float]
    weights: list[float]
    refused: int
    shortened: float
    warned: Mapping[str, int]

    @classmethod
    def of(
        cls,
        devices: Sequence[Mapping[str, Any]],
        accuracies: list[float],
        alone: list[float],
        warned: Mapping[str, int],
    ) -> Self:
        """Return the outcome from the devices' entries in a status."""
        rejected = [sum(device["updates_rejected"].values()) for device in devices]
        sent = [device["updates_applied"] + lost for device, lost in zip(devices, rejected, strict=True)]
        weights = [
            (device["weight_kept"] or 0.0) * device["updates_applied"] / max(1, count)
            for device, count in zip(devices, sent, strict=True)
        ]
        shortened = sum(device["updates_shortened"] for device in devices) / max(1, sum(sent))
        return cls(accuracies, alone, weights, sum(rejected), shortened, warned)


def measure(case: Case) -> Outcome:
    """Train the fleet, and one machine with all data on as many examples."""
    fleet = FLEETS[case.fleet]
    data = MAKERS[fleet.data](case.seed)
    until_s = max(fleet.late.values(), default=0.0) + case.until_s
    settings = msgspec.structs.replace(SETTINGS, quiet=True)
    run = VirtualFleet(data.model, case.seed, policy=TRUSTS[case.trust], settings=settings, durable=fleet.killed)
    clock, hub = run.clock, run.hub
    local = [LocalParameters(fleet.local) for _ in data.parts]
    for number, part in enumerate(data.parts):
        member = Member(
            data=part.training,
            stream=_stream(part, 1000 * case.seed + number, clock, until_s / 2.0),
            learning_rate=data.learning_rate,
            step_s=fleet.slow.get(number, 1.0) * STEP_S,
            start_s=fleet.late.get(number, 0.0),
            keeps=fleet.killed,
            local=local[number],
        )
        run.add(member)
    if fleet.killed:
        clock.at(until_s / 2.0, hub.crash)
        clock.at(until_s / 2.0 + 1.0, hub.start)
    found: list[list[float]] = []
    while clock.now_s < until_s:
        run.run(min(until_s, clock.now_s + 1.0))
        if clock.now_s > until_s - LAST:
            found.append([own_accuracy(run, *own) for own in zip(data.parts, local, strict=True)])
    hub.core.check()
    alarms = [report for _, report in hub.reports if report.event == "alarm"]
    return Outcome.of(
        hub.core.status(clock.now_s)["devices"],
        means(found),
        train_alone(data, sum(device.steps_total for device in run.devices), case.seed),
        Counter(kind_of(report.device_id, report.figures) for report in alarms),
    )


def own_accuracy(fleet: VirtualFleet, part: Part, local: LocalParameters) -> float:
    """Return the accuracy of the hub's model with a device's own arrays on its own data."""
    vector = fleet.hub.model.copy()
    local.overlay(vector)
    return accuracy_of(fleet.model, vector, part.held_out)


def kind_of(device_id: str, figures: Mapping[str, float]) -> str:
    """Return the kind of a warning, from its device and figures."""
    if not device_id:
        return "fleet"
    kinds = {"times_usual": "length", "fleet_loss": "fit"}
    return next((kind for figure, kind in kinds.items() if figure in figures), "other")


def _stream(part: Part, seed: int, clock: VirtualClock, later_s: float) -> Iterator[Batch]:
    """Yield batches of a device's data, and of its `later` data from a time on."""
    now = batches(part.training, BATCH, seed)
    while part.later is None or clock.now_s < later_s:
        yield next(now)
    yield from batches(part.later, BATCH, seed)


def train_alone(data: Data, steps: int, seed: int) -> list[float]:
    """Train one machine on all data for as many steps; return its accuracies at the end."""
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


HARDEST = ("one class each", "one mirrored", SHARED)


def measure_fleet(name: str, seed: int, seconds: float, loops: int) -> Outcome:
    """Train a fleet beside some busy loops, then one machine on as many examples."""
    fleet = FLEETS[name]
    data = MAKERS[fleet.data](seed)
    members = [
        RealMember(part.training, fleet.slow.get(number, 1.0) * STEP_S) for number, part in enumerate(data.parts)
    ]
    with busy_loops(loops), run_fleet(data.model, data.learning_rate, members) as real:
        story = real.train(seconds)
    with threadpool_limits(1):
        return Outcome.of(
            story.devices,
            means(
                [[accuracy_of(data.model, model, part.held_out) for part in data.parts] for model in story.models]
            ),
            train_alone(data, story.steps, seed),
            Counter(kind_of(alarm.device, alarm.figures) for alarm in story.alarms),
        )


LOST_MAX = {"admitted": (1.0, 3.0), "open": (2.0, 5.0)}
"""Bounds of the points lost by all devices together, and by a single device."""

PARTS = ("simulated", "processes")
WEIGHT_MIN = 0.8
GAIN_MIN = 1.01
SHORTENED_MAX = 0.05
LEAST = 0.01


@dataclass(frozen=True)
class Effort:
    """The fleets, the seeds, and the virtual seconds."""

    fleets: tuple[str, ...]
    seeds: range
    until_s: float


EFFORTS = {
    Form.FULL: Effort(tuple(FLEETS), range(1, 16), 120.0),
    Form.SHORT: Effort(tuple(FLEETS), range(1, 3), 120.0),
    Form.QUICK: Effort(("one slow by ten",), range(1, 2), 2.0),
}


def judge(trust: str, effort: Effort, results: Results) -> None:
    """Measure every fleet under one trust, and compare it with the bounds."""
    cases = {fleet: [Case(fleet, seed, trust, effort.until_s) for seed in effort.seeds] for fleet in effort.fleets}
    found = measure_groups(measure, cases, trust)
    for fleet, runs in found.items():
        note(trust, fleet, runs, results, trust)
    if HEADS in found:
        means = [
            statistics.fmean(statistics.fmean(one.accuracies) for one in found[name]) for name in (HEADS, SHARED)
        ]
        results.ratio(f"{trust}: accuracy with personal heads over that without", means[0] / means[1], GAIN_MIN)


def judge_processes(fleets: Sequence[str], effort: real_fleet.Effort, results: Results) -> None:
    """Measure fleets of real processes, whose hub uses its default trust."""
    for loops in effort.loops:
        title = f"processes, {loops} busy loops"
        for fleet in fleets:
            found = [measure_fleet(fleet, seed, effort.seconds, loops) for seed in range(1, effort.runs + 1)]
            note(title, fleet, found, results, "admitted")
            show_progress(f"{title}: {fleet}")


def note(title: str, fleet: str, found: Sequence[Outcome], results: Results, trust: str) -> None:
    """Add a row of figures and its ratios to the bounds of this trust."""
    lost = [
        100.0 * statistics.fmean(alone - own for alone, own in zip(*pair, strict=True))
        for pair in zip(
            zip(*[one.alone for one in found], strict=True),
            zip(*[one.accuracies for one in found], strict=True),
            strict=True,
        )
    ]
    warned: Counter[str] = Counter()
    for one in found:
        warned.update(one.warned)
    weight, refused = min(min(one.weights) for one in found), sum(one.refused for one in found)
    shortened = max(one.shortened for one in found)
    columns = {
        "accuracy, %": 100.0 * statistics.fmean([statistics.fmean(one.accuracies) for one in found]),
        "one machine, %": 100.0 * statistics.fmean([statistics.fmean(one.alone) for one in found]),
        "lost, points": statistics.fmean(lost),
        "lost by the worst device": max(lost),
        "least weight": weight,
        "updates refused": refused,
        "shortened at worst, %": 100.0 * shortened,
        **{f"warned, {kind}": warned[kind] for kind in ("length", "fit", "other", "fleet")},
    }
    results.add(title, fleet, columns)
    lost_max, worst_max = LOST_MAX[trust]
    results.bound(f"{title}, {fleet}: points lost", max(LEAST, statistics.fmean(lost)), lost_max)
    results.bound(f"{title}, {fleet}: points lost by the worst device", max(LEAST, *lost), worst_max)
    if trust == "admitted":
        results.bound(f"{title}, {fleet}: updates refused", refused + 1.0, 1.0)
        results.bound(f"{title}, {fleet}: updates shortened", max(1e-4, shortened), SHORTENED_MAX)
        results.ratio(f"{title}, {fleet}: least weight of a device", weight, WEIGHT_MIN)


PARSER = make_parser("What honest devices lose if they differ from the others.", PARTS)
PARSER.add_argument("--trust", nargs="+", choices=TRUSTS, default=list(TRUSTS))


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure how the hub treats honest devices."""
    if "simulated" in arguments.part:
        for trust in arguments.trust:
            judge(trust, EFFORTS[arguments.form], results)
    if "processes" in arguments.part:
        fleets = HARDEST[:1] if arguments.form == Form.QUICK else HARDEST
        judge_processes(fleets, real_fleet.EFFORTS[arguments.form], results)


if __name__ == "__main__":
    main()
