"""Fleets of honest devices that differ: what each of them loses, and what the hub says of them.

Run as `python -m benchmarks.fairness`. Ten devices in virtual time whose data differ by class, sensor, person or
voice, in number or over time, or of which one is slow or late. The accuracy of each device on its own held-out
data is compared with that of one machine which has all data and processes as many examples.

The bars under `trust = "admitted"`: no update is refused; each device keeps 0.8 of the weight that staleness and
shares give it, the clip included; all together lose at most 1 point, and no device more than 3 (differences are
averaged over the seeds). Under "open" 2 and 5 points.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import real_fleet
from benchmarks.fairness_fleets import FLEETS, TRUSTS, Case, Outcome, measure
from benchmarks.fairness_processes import HARDEST, measure_fleet
from benchmarks.pool import measure_in_processes
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results

LOST_MAX = {"admitted": (1.0, 3.0), "open": (2.0, 5.0)}
"""Points lost by all together, and by a single device."""

PARTS = ("simulated", "processes")
WEIGHT_MIN = 0.8
LEAST = 0.01


@dataclass(frozen=True)
class Effort:
    """Which fleets, with which seeds, for how many virtual seconds."""

    fleets: tuple[str, ...]
    seeds: range
    until_s: float


EFFORTS = {
    Form.FULL: Effort(tuple(FLEETS), range(1, 16), 120.0),
    Form.SHORT: Effort(tuple(FLEETS), range(1, 3), 120.0),
    Form.QUICK: Effort(("one slow by ten",), range(1, 2), 2.0),
}


def judge(trust: str, effort: Effort, results: Results) -> None:
    """Measure every fleet under one trust, and hold it to the bars."""
    cases = [Case(fleet, seed, trust, effort.until_s) for fleet in effort.fleets for seed in effort.seeds]
    outcomes = iter(measure_in_processes(measure, cases, trust))
    for fleet in effort.fleets:
        note(trust, fleet, [next(outcomes) for _ in effort.seeds], results, trust)


def judge_processes(fleets: Sequence[str], effort: real_fleet.Effort, results: Results) -> None:
    """Measure fleets of real processes, whose hub trusts them as it does by default."""
    for loops in effort.loops:
        title = f"processes, {loops} busy loops"
        for fleet in fleets:
            found = [measure_fleet(fleet, seed, effort.seconds, loops) for seed in range(1, effort.runs + 1)]
            note(title, fleet, found, results, "admitted")
            show_progress(f"{title}: {fleet}")


def note(title: str, fleet: str, found: Sequence[Outcome], results: Results, trust: str) -> None:
    """Add a row of figures, and the bars under this trust."""
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
    weight = min(min(one.weights) for one in found)
    columns = {
        "accuracy, %": 100.0 * statistics.fmean([statistics.fmean(one.accuracies) for one in found]),
        "one machine, %": 100.0 * statistics.fmean([statistics.fmean(one.alone) for one in found]),
        "lost, points": statistics.fmean(lost),
        "lost by the worst device": max(lost),
        "least weight": weight,
        "updates refused": float(sum(one.refused for one in found)),
        **{f"warned of {kind}": float(warned[kind]) for kind in ("length", "fit", "other", "fleet")},
    }
    results.add(title, fleet, {name: round(value, 3) for name, value in columns.items()})
    lost_max, worst_max = LOST_MAX[trust]
    results.bound(f"{title}, {fleet}: points lost", max(LEAST, statistics.fmean(lost)), lost_max)
    results.bound(f"{title}, {fleet}: points lost by the worst device", max(LEAST, *lost), worst_max)
    if trust == "admitted":
        results.bound(f"{title}, {fleet}: updates refused", sum(one.refused for one in found) + 1.0, 1.0)
        results.ratios[f"{title}, {fleet}: least weight of a device"] = round(weight, 3)
        results.targets[f"{title}, {fleet}: least weight of a device"] = WEIGHT_MIN


def main() -> None:
    """Judge how the hub treats honest devices."""
    parser = make_parser("What devices lose that differ from the others.")
    parser.add_argument("--trust", nargs="+", choices=TRUSTS, default=list(TRUSTS))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    results = Results()
    if "simulated" in arguments.part:
        for trust in arguments.trust:
            judge(trust, EFFORTS[arguments.form], results)
    if "processes" in arguments.part:
        fleets = HARDEST[:1] if arguments.form == Form.QUICK else HARDEST
        judge_processes(fleets, real_fleet.EFFORTS[arguments.form], results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
