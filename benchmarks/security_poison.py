"""Measure what two hostile keys of ten, or spoilt data, do to a fleet, and the warnings.

Run as `python -m benchmarks.security_poison`. Simulated fleets learn in virtual time, and seeds
determine all runs. The bounds are:

- With `admitted`, a fleet loses at most 6 points, compared with one without hostile keys, and never
  ends below 85 %. With `open`, it loses at most 3.
- Of attacks with long updates, values that are not finite, or meaningless labels, the hub warns in
  14 of 15 runs. It warns of each hostile device within 30 of its exchanges, and before any honest
  one.
- If an operator excludes every device that the hub warns of, the fleet ends within 1 point of one
  without hostile keys.

Runs without keys, in which hostile machines have many names, have no bound.

Spoilt devices report honestly on meaningless data: shuffled labels, labels off by one, inputs a
thousand times too large, a constant input, or a single label, on one or two of ten devices. In 14
of 15 runs, the hub must warn of each within 30 of its exchanges. If it is then excluded, the fleet
must end within 2 points of one without it. A flipped axis of a smartwatch has no bound, because all
people wore the watch on both arms, which mirrors that axis. On clean data, the hub may warn of at
most one device in all runs of 200 exchanges.

The two attacks that cost most, and shuffled labels, also run on real processes, alone and beside
two busy loops, with the bounds of `admitted`.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import real_fleet
from benchmarks.processes import measure_groups
from benchmarks.report import Form, Results, benchmark, make_parser, show_progress
from benchmarks.security_poison_fleet import (
    ATTACKS,
    BAD,
    CLAIMS,
    DATA,
    FAULTS,
    FLIPPED,
    GONE,
    HARDEST,
    NEVER,
    POLICIES,
    SHUFFLED,
    SMARTWATCH,
    UPDATES,
    Case,
    Outcome,
    measure,
    measure_attack,
)

POINTS_LOST_MAX = {"admitted": 6.0, "open": 3.0}
POINTS_LOST_OBEYED_MAX = 1.0
ACCURACY_MIN = 85.0
"""For `admitted`, in every run."""

WARNED_OF = ("x7", "x100", "x1e6", "random", "NaN", "grows", SHUFFLED)
WARNED_WITHIN = 30
RUNS_MIN = 14 / 15
NAMES = 50
"""Names of each hostile machine in runs with many names."""

LEAST = 0.01
CLEAN = "without hostile keys"
PARTS = ("simulated", "processes", "clean", "spoilt")
UNBOUND = "digits, Dirichlet 0.1"
"""With these data, a spoilt device may have only one class, so that some faults change nothing.

Their figures are printed without a bound.
"""

SPOILT_POINTS_MAX = 2.0
WARNED_CLEAN_MAX = 1


@dataclass(frozen=True)
class Effort:
    """The attacks, claims, data and faults, the seeds, and how long to train.

    `updates` counts those of honest devices under attack, beside spoilt devices, and on clean data.
    """

    attacks: tuple[str, ...]
    claims: tuple[str, ...]
    data: tuple[str, ...]
    faults: tuple[str, ...]
    seeds: range
    updates: tuple[int, int, int]


UNDER_ATTACK = (*ATTACKS, SHUFFLED)
LONG = (UPDATES, 1500, 2000)
EFFORTS = {
    Form.FULL: Effort(UNDER_ATTACK, tuple(CLAIMS), DATA, tuple(FAULTS), range(1, 16), LONG),
    Form.SHORT: Effort(UNDER_ATTACK, ("true", "good"), ("digits", SMARTWATCH), tuple(FAULTS), range(1, 3), LONG),
    Form.QUICK: Effort(("flip",), ("true",), ("digits",), ("one class",), range(1, 2), (20, 20, 20)),
}


def mean_accuracy(outcomes: list[Outcome]) -> float:
    """Return the mean accuracy of some runs in percent."""
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
        "exchanges until alarm": float(statistics.median(warned)) if statistics.median(warned) < NEVER else -1.0,
        "honest devices warned of": float(sum(outcome.honest_warned for outcome in outcomes)),
        "rollbacks": float(sum(outcome.rollbacks for outcome in outcomes)),
    }
    results.add(title, row, columns)


def is_warned(outcome: Outcome) -> bool:
    """Return whether the hub warned of each hostile device soon, and before any honest one."""
    return outcome.first and outcome.warned <= WARNED_WITHIN


def judge(name: str, effort: Effort, results: Results) -> None:
    """Run a policy without hostile keys and under every attack; compare it with its bounds."""
    policy, updates = POLICIES[name], effort.updates[0]
    rows = {CLEAN: [Case(policy, seed, updates=updates) for seed in effort.seeds]}
    for attack in effort.attacks:
        for claims in effort.claims:
            cases = [Case(policy, seed, attack, claims, updates=updates) for seed in effort.seeds]
            rows[f"{attack}, says {claims}"] = cases
        cases = [Case(policy, seed, attack, obeys=True, updates=updates) for seed in effort.seeds]
        rows[f"{attack}, with exclusion"] = cases
        if attack in ("flip", "x7"):
            names = [
                Case(policy, seed, attack, names=NAMES, keyed=False, updates=updates) for seed in effort.seeds
            ]
            rows[f"{attack}, {NAMES} names without keys"] = names
    note_all(name, name, measure_groups(measure, rows, name), results)


def judge_processes(attacks: Sequence[str], effort: real_fleet.Effort, results: Results) -> None:
    """Run real processes without hostile devices and under the hardest attacks.

    The bounds are those of `admitted`.
    """
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
    """Add the rows of a table, and compare them with the bounds of a trust."""
    clean = mean_accuracy(found[CLEAN])
    for row, runs in found.items():
        note(title, row, clean, runs, results)
    lost = {row: clean - mean_accuracy(runs) for row, runs in found.items()}
    for what, ending, most in (
        ("points lost", "says", POINTS_LOST_MAX[trust]),
        ("points lost with exclusion", "exclusion", POINTS_LOST_OBEYED_MAX),
    ):
        if of_kind := {row: points for row, points in lost.items() if ending in row}:
            worst = max(of_kind, key=lambda row: of_kind[row])
            results.bound(f"{title}: {what} at worst ({worst})", max(of_kind[worst], LEAST), most)
    if trust == "admitted":
        accuracies = [one.accuracy for row, runs in found.items() if "says" in row for one in runs]
        results.ratio(f"{title}: lowest accuracy over 85 %", 100.0 * min(accuracies) / ACCURACY_MIN, 1.0)
    for attack in WARNED_OF:
        if f"{attack}, says true" in found:
            runs = found[f"{attack}, says true"]
            share = f"{title}, {attack}: runs in which the hostile are warned of in time"
            results.ratio(share, sum(map(is_warned, runs)) / len(runs), round(RUNS_MIN, 3))


def judge_clean(effort: Effort, results: Results) -> None:
    """Count the devices that the hub warns of on clean data."""
    policy, updates, count = POLICIES["admitted"], effort.updates[2], 0
    cases = {
        data: [Case(policy, seed, data=data, updates=updates) for seed in effort.seeds] for data in effort.data
    }
    for data, found in measure_groups(measure, cases, "clean").items():
        warned = sum(one.honest_warned for one in found)
        results.add("clean", data, {"accuracy, %": mean_accuracy(found), "devices warned of": warned})
        count += warned
    results.bound("clean: devices warned of in all runs", max(1, count), WARNED_CLEAN_MAX)


def judge_spoilt(effort: Effort, results: Results) -> None:
    """Measure equal devices of which one or two of ten are spoilt, against fleets without them."""
    rows = [
        (data, bad, fault)
        for data in effort.data
        for bad in (1, BAD)
        for fault in (GONE, *effort.faults)
        if fault != FLIPPED or data == SMARTWATCH
    ]
    policy, updates = POLICIES["admitted"], effort.updates[1]
    cases = {
        (*row, obeys): [
            Case(policy, seed, row[2], data=row[0], bad=row[1], obeys=obeys, updates=updates)
            for seed in effort.seeds
        ]
        for row in rows
        for obeys in (False, True)
    }
    outcomes = measure_groups(measure, cases, "spoilt devices")
    for data, bad, fault in rows:
        found, obeyed = (outcomes[data, bad, fault, obeys] for obeys in (False, True))
        if fault == GONE:
            without = mean_accuracy(found)
            continue
        row, lost_obeyed = f"{data}, {fault}, {bad}", without - mean_accuracy(obeyed)
        columns = {
            "exchanges until alarm": statistics.median(one.warned for one in found),
            "at worst": max(one.warned for one in found),
            "honest devices warned of": sum(one.honest_warned for one in found),
            "lost, points": without - mean_accuracy(found),
            "lost with exclusion": lost_obeyed,
        }
        results.add("spoilt", row, columns)
        if data != UNBOUND and fault != FLIPPED:
            soon = [one.warned <= WARNED_WITHIN for one in found]
            results.ratio(f"{row}: runs in which it is warned of soon", sum(soon) / len(soon), RUNS_MIN)
            results.bound(f"{row}: points lost with exclusion", max(LEAST, lost_obeyed), SPOILT_POINTS_MAX)


PARSER = make_parser("What hostile keys and spoilt data do to a fleet.", PARTS)
PARSER.add_argument("--trust", nargs="+", choices=POLICIES, default=list(POLICIES))


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the policies."""
    if "simulated" in arguments.part:
        for name in arguments.trust:
            judge(name, EFFORTS[arguments.form], results)
    if "processes" in arguments.part:
        attacks = HARDEST[:1] if arguments.form == Form.QUICK else HARDEST
        judge_processes(attacks, real_fleet.EFFORTS[arguments.form], results)
    if "clean" in arguments.part:
        judge_clean(EFFORTS[arguments.form], results)
    if "spoilt" in arguments.part:
        judge_spoilt(EFFORTS[arguments.form], results)


if __name__ == "__main__":
    main()
