"""What two hostile keys of ten do to a fleet, by what they send and what they say of it.

Run as `python -m benchmarks.security_poison`. Simulated fleets learn digits in virtual time; all runs are drawn
from seeds. The bars: a hub that has `admitted` its devices loses at most 6 points against a fleet without hostile
keys and never ends under 85 %, one that is `open` loses at most 3. Of the attacks that are long, not finite, or on
labels that mean nothing, each hostile device is warned of before any honest one and within 30 of its own
exchanges, in 14 of 15 runs. An operator who excludes whom the hub warns of ends within 1 point of the fleet
without hostile keys. Without keys, hostile machines with many names are held to no bar.

The two attacks that cost most also run on real processes, alone and beside two busy loops, by the bars of
`admitted`.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import real_fleet
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.security_poison_fleet import (
    ATTACKS,
    CLAIMS,
    NEVER,
    POLICIES,
    SHUFFLED,
    UPDATES,
    Case,
    Outcome,
    measure_all,
)
from benchmarks.security_poison_processes import HARDEST, measure_attack

POINTS_LOST_MAX = {"admitted": 6.0, "open": 3.0}
POINTS_LOST_OBEYED_MAX = 1.0
ACCURACY_MIN = 85.0
"""Of `admitted`, in every run."""

WARNED_OF = ("x7", "x100", "x1e6", "random", "NaN", "grows", SHUFFLED)
WARNED_WITHIN = 30
RUNS_MIN = 14 / 15
NAMES = 50
"""Names of each hostile machine, where it has many."""

LEAST = 0.01
CLEAN = "without hostile keys"
PARTS = ("simulated", "processes")


@dataclass(frozen=True)
class Effort:
    """Which attacks and claims, with which seeds, for how many updates."""

    attacks: tuple[str, ...]
    claims: tuple[str, ...]
    seeds: range
    updates: int


EFFORTS = {
    Form.FULL: Effort(tuple(ATTACKS), tuple(CLAIMS), range(1, 16), UPDATES),
    Form.SHORT: Effort(tuple(ATTACKS), ("true", "good"), range(1, 3), UPDATES),
    Form.QUICK: Effort(("flip",), ("true",), range(1, 2), 20),
}


def mean_accuracy(outcomes: list[Outcome]) -> float:
    """Return the mean accuracy of some runs, in percent."""
    return 100.0 * statistics.fmean([outcome.accuracy for outcome in outcomes])


def note(title: str, row: str, clean: float, outcomes: list[Outcome], results: Results) -> None:
    """Add a row of figures."""
    warned = sorted([outcome.warned for outcome in outcomes])
    columns = {
        "accuracy, %": mean_accuracy(outcomes),
        "worst, %": 100.0 * min(outcome.accuracy for outcome in outcomes),
        "lost, points": clean - mean_accuracy(outcomes),
        "honest updates refused, %": 100.0 * max(outcome.refused for outcome in outcomes),
        "runs with all warned of in time": float(sum(map(is_warned, outcomes))),
        "warned of after, median": float(statistics.median(warned)) if statistics.median(warned) < NEVER else -1.0,
        "honest warned of": float(sum(outcome.honest_warned for outcome in outcomes)),
        "rollbacks": float(sum(outcome.rollbacks for outcome in outcomes)),
    }
    results.add(title, row, {name: round(value, 3) for name, value in columns.items()})


def is_warned(outcome: Outcome) -> bool:
    """Return whether each hostile device was warned of soon, and before any honest one."""
    return outcome.first and outcome.warned <= WARNED_WITHIN


def judge(name: str, effort: Effort, results: Results) -> None:
    """Measure a policy without hostile keys and under every attack, and hold it to its bars."""
    policy, updates = POLICIES[name], effort.updates
    rows = {CLEAN: [Case(policy, seed, updates=updates) for seed in effort.seeds]}
    for attack in effort.attacks:
        for claims in effort.claims:
            cases = [Case(policy, seed, attack, claims, updates=updates) for seed in effort.seeds]
            rows[f"{attack}, says {claims}"] = cases
        cases = [Case(policy, seed, attack, obeys=True, updates=updates) for seed in effort.seeds]
        rows[f"{attack}, with the order given"] = cases
        if attack in ("flip", "x7"):
            names = [
                Case(policy, seed, attack, names=NAMES, keyed=False, updates=updates) for seed in effort.seeds
            ]
            rows[f"{attack}, {NAMES} names without keys"] = names
    outcomes = iter(measure_all([case for cases in rows.values() for case in cases], name))
    found = {row: [next(outcomes) for _ in cases] for row, cases in rows.items()}
    note_all(name, name, found, results)


def judge_processes(attacks: Sequence[str], effort: real_fleet.Effort, results: Results) -> None:
    """Measure real processes without hostile devices and under the hardest attacks, by the bars of `admitted`."""
    for loops in effort.loops:
        title = f"processes, {loops} busy loops"
        found = {}
        for attack in ("", *attacks):
            row = f"{attack}, says true" if attack else CLEAN
            found[row] = [
                measure_attack(attack, seed, effort.seconds, loops) for seed in range(1, effort.runs + 1)
            ]
            show_progress(f"{title}: {row}")
        note_all(title, "admitted", found, results)


def note_all(title: str, trust: str, found: Mapping[str, list[Outcome]], results: Results) -> None:
    """Add the rows of a table, and hold them to the bars of a trust."""
    clean = mean_accuracy(found[CLEAN])
    for row, runs in found.items():
        note(title, row, clean, runs, results)
    lost = {row: clean - mean_accuracy(runs) for row, runs in found.items()}
    for what, ending, most in (
        ("points lost", "says", POINTS_LOST_MAX[trust]),
        ("points lost with the order given", "order given", POINTS_LOST_OBEYED_MAX),
    ):
        if of_kind := {row: points for row, points in lost.items() if ending in row}:
            worst = max(of_kind, key=lambda row: of_kind[row])
            results.bound(f"{title}: {what} at worst ({worst})", max(of_kind[worst], LEAST), most)
    if trust == "admitted":
        accuracies = [one.accuracy for row, runs in found.items() if "says" in row for one in runs]
        results.ratios[f"{title}: lowest accuracy over 85 %"] = round(100.0 * min(accuracies) / ACCURACY_MIN, 3)
        results.targets[f"{title}: lowest accuracy over 85 %"] = 1.0
    for attack in WARNED_OF:
        if f"{attack}, says true" in found:
            runs = found[f"{attack}, says true"]
            share = f"{title}, {attack}: runs in which the hostile are warned of in time"
            results.ratios[share] = round(sum(map(is_warned, runs)) / len(runs), 3)
            results.targets[share] = round(RUNS_MIN, 3)


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = make_parser("What hostile keys do to a fleet.")
    parser.add_argument("--trust", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    return parser.parse_args()


def main() -> None:
    """Judge the policies."""
    arguments = parse()
    results = Results()
    if "simulated" in arguments.part:
        for name in arguments.trust:
            judge(name, EFFORTS[arguments.form], results)
    if "processes" in arguments.part:
        attacks = HARDEST[:1] if arguments.form == Form.QUICK else HARDEST
        judge_processes(attacks, real_fleet.EFFORTS[arguments.form], results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
