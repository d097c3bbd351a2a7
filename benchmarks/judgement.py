"""What the hub decides about its devices: honest ones count, and spoilt ones are named.

Run as `python -m benchmarks.judgement`. Simulated fleets in virtual time; all runs are drawn from seeds.

Honest fleets: digits at Dirichlet 0.1 and the smartwatch data, one person a device, at the speeds 1 (six times), 3
and 10, with and without a kill of the hub, and switched on one after the other. At most 1 % of the updates are
refused, at most 5 % count with less than half of their length, and no device has less than 0.8 of the weight that
staleness and shares give it.

Spoilt devices: one or two of ten, by shuffled labels, labels off by one, inputs a thousand times too large, a
constant input, or one label for all. Each is named within 30 exchanges of its own in 14 of 15 runs. If it is
excluded then, as the hub proposes, the fleet ends within 2 points of one without it. A flipped axis of a
smartwatch is held to no bar: everybody wore the watch on both arms, which mirrors that axis. On clean data at most
one device is named in all runs of 200 exchanges.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from benchmarks import smartwatch
from benchmarks.judgement_fleet import FAULTS, FLIPPED, LEARNING_RATES, SPEEDS, STEP_S, Case, Fleet, build
from benchmarks.pool import measure_in_processes
from benchmarks.real_fleet import Member, run_fleet
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.simulated import DIGITS, split_digits
from edgeasync.data.partition import iid
from simulation.link import LinkProfile

One = TypeVar("One")

FLEETS = {
    "digits": Case(0),
    "digits, Dirichlet 0.1": Case(0, alpha=0.1),
    "smartwatch": Case(0, data="smartwatch"),
    "smartwatch, one after the other": Case(
        0, data="smartwatch", link=LinkProfile(125e6, 125e6, 0.0005), apart_s=2.0, quiet=True
    ),
}
UNBOUND = ("digits, Dirichlet 0.1",)
"""There a spoilt device may have only one class, and then some faults are none: its figures are printed."""

ALIKE = (1.0,) * 10
"""The speeds of the ten devices among which some are spoilt."""

PARTS = ("honest", "processes", "clean", "spoilt")
SPOILT = ((0,), (0, 1))
"""The numbers of the devices that have a fault: one, and two of ten."""

NAMED_WITHIN = 30
NAMED_CLEAN_MAX = 1
NEVER = 10**6
LEAST = 1e-4
LAST = 8
"""The accuracy at the end is the mean of this many evaluations, a second apart."""

REFUSED_MAX = 0.01
SHORTENED_MAX = 0.05
WEIGHT_MIN = 0.8
POINTS_LOST_MAX = 2.0
RUNS_MIN = 14 / 15


@dataclass(frozen=True)
class Effort:
    """Which fleets and faults, with which seeds, and for how long."""

    unequal: tuple[str, ...]
    fleets: tuple[str, ...]
    faults: tuple[str, ...]
    seeds: tuple[int, ...]
    honest_s: float
    spoilt_s: float
    exchanges: int
    runs: int
    processes_s: float


UNEQUAL = ("digits, Dirichlet 0.1", "smartwatch", "smartwatch, one after the other")
ALIKE_FLEETS = ("digits", "digits, Dirichlet 0.1", "smartwatch")
EFFORTS = {
    Form.FULL: Effort(UNEQUAL, ALIKE_FLEETS, tuple(FAULTS), tuple(range(1, 16)), 40.0, 30.0, 200, 3, 60.0),
    Form.SHORT: Effort(UNEQUAL, ("digits", "smartwatch"), tuple(FAULTS), (1, 2), 40.0, 30.0, 200, 1, 40.0),
    Form.QUICK: Effort(("smartwatch",), ("digits",), ("one class",), (1,), 2.0, 2.0, 5, 1, 3.0),
}


@dataclass(frozen=True)
class Run:
    """One run: the fleet, until when, and whether the hub is killed in the middle."""

    case: Case
    until_s: float
    killed: bool = False
    exchanges: int = 0
    """The run ends only when each device has sent this many updates."""

    obeys: bool = False
    """Whether an operator excludes whom the hub warns of."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run. Shares are of all updates; `weight` is the least that a device kept.

    `named` says after how many of its own updates a device was named first.
    """

    accuracy: float
    refused: float
    shortened: float
    weight: float
    named: Mapping[str, int]
    updates: int


def measure(run: Run) -> Outcome:
    """Train a fleet, and ask the hub's status in the end."""
    fleet = build(run.case, durable=run.killed)
    named: dict[str, int] = {}
    accuracies: list[float] = []
    killed = not run.killed
    while fleet.clock.now_s < run.until_s or _behind(fleet, run.exchanges):
        for _ in range(5):
            fleet.run(fleet.clock.now_s + 0.2)
            _note_named(fleet, named, obeys=run.obeys)
        accuracies = [*accuracies, fleet.accuracy][-LAST:]
        if not killed and fleet.clock.now_s >= run.until_s / 2.0:
            killed = True
            fleet.hub.crash()
            fleet.run(fleet.clock.now_s + 1.0)
            fleet.hub.start()
    fleet.hub.core.check()
    devices = fleet.hub.core.status(fleet.clock.now_s)["devices"]
    return judged(devices, statistics.fmean(accuracies), named)


def judged(devices: Sequence[Mapping[str, Any]], accuracy: float, named: Mapping[str, int]) -> Outcome:
    """Return what the devices' parts of a status say."""
    rejected = [sum(device["updates_rejected"].values()) for device in devices]
    applied = [device["updates_applied"] for device in devices]
    kept = [
        (device["weight_kept"] or 0.0) * counted / max(1, counted + lost)
        for device, counted, lost in zip(devices, applied, rejected, strict=True)
    ]
    total = max(1, sum(applied) + sum(rejected))
    return Outcome(
        accuracy=accuracy,
        refused=sum(rejected) / total,
        shortened=sum(device["updates_shortened"] for device in devices) / total,
        weight=min(kept),
        named=named,
        updates=total,
    )


def _behind(fleet: Fleet, exchanges: int) -> bool:
    return min(one.updates for one in fleet.hub.core.members.measurements.values()) < exchanges


def _note_named(fleet: Fleet, named: dict[str, int], *, obeys: bool) -> None:
    warned = [report.device_id for _, report in fleet.hub.reports if report.event == "alarm" and report.device_id]
    for name in warned:
        if name not in named:
            named[name] = fleet.hub.core.members.measurements[name].updates
            if obeys:
                fleet.hub.order(name, "quarantine")


def judge_honest(fleets: Sequence[str], seeds: Sequence[int], until_s: float, results: Results) -> None:
    """Measure honest fleets of unequal devices, with and without a kill."""
    kinds = [(fleet, killed) for fleet in fleets for killed in (False, True)]
    runs = [Run(_case(fleet, seed, SPEEDS), until_s, killed) for fleet, killed in kinds for seed in seeds]
    outcomes = measure_in_processes(measure, runs, "honest fleets")
    for (fleet, killed), found in zip(kinds, batched(outcomes, len(seeds)), strict=True):
        results.add("honest", f"{fleet}, {'killed' if killed else 'no kill'}", _figures(found))
    _bound_fairness("honest", outcomes, results)


def judge_processes(runs: int, seconds: float, results: Results) -> None:
    """Measure real processes: unequal ones on the smartwatch data, and equal ones of which one is spoilt."""
    people, _ = smartwatch.split_by_person()
    outcomes = []
    for seed in range(runs):
        members = [
            Member(people[(number + seed) % len(people)], speed * STEP_S) for number, speed in enumerate(SPEEDS)
        ]
        with run_fleet(smartwatch.MODEL, LEARNING_RATES["smartwatch"], members) as fleet:
            story = fleet.train(seconds)
        outcomes.append(judged(story.devices, math.nan, story.warned))
        show_progress(f"processes: {seed + 1} of {runs} runs")
    figures = _figures(outcomes)
    del figures["accuracy, %"]
    results.add("processes", f"smartwatch, {runs} runs", figures)
    _bound_fairness("processes", outcomes, results)


def _bound_fairness(what: str, outcomes: Sequence[Outcome], results: Results) -> None:
    results.bound(f"{what}: updates refused", max(LEAST, *[one.refused for one in outcomes]), REFUSED_MAX)
    results.bound(f"{what}: updates shortened", max(LEAST, *[one.shortened for one in outcomes]), SHORTENED_MAX)
    results.ratios[f"{what}: least weight of a device"] = round(min(one.weight for one in outcomes), 3)
    results.targets[f"{what}: least weight of a device"] = WEIGHT_MIN


def judge_spoilt_processes(fault: str, seconds: float, results: Results) -> None:
    """Let eight equal real devices learn digits, of which the first has a fault."""
    training, _ = split_digits()
    parts = iid(training, len(SPEEDS), 0)
    parts[0] = FAULTS[fault](parts[0], DIGITS.classes, np.random.default_rng(0))
    with run_fleet(DIGITS, LEARNING_RATES["digits"], [Member(part, STEP_S) for part in parts]) as fleet:
        named = dict(fleet.train(seconds).warned)
    at = named.pop("device-1", NEVER)
    results.add("processes", f"digits, {fault}, 1", {"named within": float(at), "others named": float(len(named))})
    results.bound(f"processes: exchanges until {fault} is named", at, NAMED_WITHIN)


def judge_clean(fleets: Sequence[str], seeds: Sequence[int], exchanges: int, results: Results) -> None:
    """Count the devices that are named on clean data."""
    count = 0
    for fleet in fleets:
        runs = [Run(_case(fleet, seed, ALIKE), 1.0, exchanges=exchanges) for seed in seeds]
        outcomes = measure_in_processes(measure, runs, f"clean, {fleet}")
        results.add("clean", fleet, _figures(outcomes))
        count += sum(len(one.named) for one in outcomes)
    results.bound("clean: devices named in all runs", max(1, count), NAMED_CLEAN_MAX)


def judge_spoilt(
    fleets: Sequence[str], faults: Sequence[str], seeds: Sequence[int], until_s: float, results: Results
) -> None:
    """Measure fleets with one and two spoilt devices of ten, against the same fleets without those."""
    rows = [
        (fleet, spoilt, fault)
        for fleet in fleets
        for spoilt in SPOILT
        for fault in ("", *faults)
        if fault != FLIPPED or FLEETS[fleet].data == "smartwatch"
    ]
    runs = [
        Run(_spoil(_case(fleet, seed, ALIKE), spoilt, fault), until_s, obeys=obeys)
        for obeys in (False, True)
        for fleet, spoilt, fault in rows
        for seed in seeds
    ]
    both = list(batched(measure_in_processes(measure, runs, "spoilt devices"), len(seeds)))
    for (fleet, spoilt, fault), found, obeyed in zip(rows, both[: len(rows)], both[len(rows) :], strict=True):
        if not fault:
            accuracy_without = _accuracy(found)
            continue
        row = f"{fleet}, {fault}, {len(spoilt)}"
        lost = accuracy_without - _accuracy(found)
        bad = [f"device-{number + 1}" for number in spoilt]
        named = [max(one.named.get(name, NEVER) for name in bad) for one in found]
        columns = {
            "named within, exchanges": float(statistics.median(named)),
            "at worst": float(max(named)),
            "others named": float(sum(len(one.named.keys() - set(bad)) for one in found)),
            "lost, points": round(lost, 2),
            "lost with the order given": round(accuracy_without - _accuracy(obeyed), 2),
        }
        results.add("spoilt", row, columns)
        if fleet not in UNBOUND and fault != FLIPPED:
            _count(f"{row}: runs in which it is named soon", [at <= NAMED_WITHIN for at in named], results)
            lost_obeyed = max(0.01, accuracy_without - _accuracy(obeyed))
            results.bound(f"{row}: points lost with the order given", lost_obeyed, POINTS_LOST_MAX)


def _spoil(case: Case, numbers: tuple[int, ...], fault: str) -> Case:
    """Return a case in which these devices have a fault; without one, in which they are not there."""
    return replace(case, spoilt=dict.fromkeys(numbers, fault)) if fault else replace(case, left_out=numbers)


def batched(values: Sequence[One], count: int) -> Iterator[Sequence[One]]:
    """Yield the values, `count` at a time."""
    return (values[start : start + count] for start in range(0, len(values), count))


def _case(fleet: str, seed: int, speeds: tuple[float, ...]) -> Case:
    return replace(FLEETS[fleet], seed=seed, speeds=speeds)


def _accuracy(outcomes: Sequence[Outcome]) -> float:
    return 100.0 * statistics.fmean([one.accuracy for one in outcomes])


def _count(what: str, good: Sequence[bool], results: Results) -> None:
    results.ratios[what] = round(sum(good) / len(good), 3)
    results.targets[what] = round(RUNS_MIN, 3)


def _figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        "accuracy, %": round(_accuracy(outcomes), 2),
        "refused at worst, %": round(100.0 * max(one.refused for one in outcomes), 2),
        "shortened at worst, %": round(100.0 * max(one.shortened for one in outcomes), 2),
        "least weight": round(min(one.weight for one in outcomes), 3),
        "devices named": float(sum(len(one.named) for one in outcomes)),
    }


def main() -> None:
    """Judge the hub's judgement."""
    parser = make_parser("Honest devices count, and spoilt ones are named.")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    effort, results = EFFORTS[arguments.form], Results()
    if "honest" in arguments.part:
        judge_honest(effort.unequal, effort.seeds, effort.honest_s, results)
    if "processes" in arguments.part:
        judge_processes(effort.runs, effort.processes_s, results)
        judge_spoilt_processes(effort.faults[0], effort.processes_s, results)
    if "clean" in arguments.part:
        judge_clean(effort.fleets, effort.seeds, effort.exchanges, results)
    if "spoilt" in arguments.part:
        judge_spoilt(effort.fleets, effort.faults, effort.seeds, effort.spoilt_s, results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
