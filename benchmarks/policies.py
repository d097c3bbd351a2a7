"""Measure how soon and with how many bytes a fleet learns under several policies.

Run as `python -m benchmarks.policies`. Twenty simulated devices with their own cores and real
encoded frames train a small network on the handwritten digits, in virtual time. Every baseline uses
the best setting of its grid, tuned on other seeds than those for judging. The default has one
setting.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.policies_fleet import (
    ONE_PLACE_EPOCHS,
    TARGET,
    Case,
    Outcome,
    Scenario,
    compare,
    measure,
    measure_one_place,
)
from benchmarks.policies_rules import (
    ASYNCHRONOUS,
    DEFAULT,
    EVEN_RULES,
    RULES,
    SYNC_ALL,
    SYNC_FIRST,
    Grid,
)
from benchmarks.processes import measure_groups
from benchmarks.report import Form, Results, benchmark, make_parser, show_progress
from edgeasync.core.hub.settings import FLOAT32, CodecSettings
from edgeasync.policies.policy import Policy
from simulation.population import FleetProfile

UNEQUAL = FleetProfile(step_s=0.02)
EVEN = FleetProfile(
    step_s=0.02, spread=1.0, stragglers=0.0, mbit_per_s=(7.0, 7.0), delay_s=(0.0175, 0.0175), churn=None
)
PARTITIONS = {"IID": None, "Dirichlet 0.3": 0.3}
CODECS = {
    "float32": FLOAT32,
    "float16": CodecSettings(push="float16", model="float16", delta="off"),
    "int8": CodecSettings(push="int8", model="float16", delta="int8"),
}

ACCURACY_LOST_MAX = {"IID": 0.5, "Dirichlet 0.3": 2.0}
"""Points by which the default's final accuracy may be below that of one place."""


@dataclass(frozen=True)
class Effort:
    """Codecs, seeds for tuning and judging, and when a run ends.

    Without tuning seeds, each grid's first setting is used.
    """

    codecs: tuple[str, ...]
    tuning: tuple[int, ...]
    judging: tuple[int, ...]
    horizon_s: float
    limit_s: float
    one_place_epochs: int = ONE_PLACE_EPOCHS


EFFORTS = {
    Form.FULL: Effort(tuple(CODECS), (101, 102, 103), tuple(range(1, 16)), 40.0, 120.0),
    Form.SHORT: Effort(("float32",), (), (1, 2, 3), 20.0, 120.0),
    Form.QUICK: Effort(("float32",), (), (1,), 0.2, 0.2, 1),
}


def tune(rules: Mapping[str, Grid], scenario: Scenario, effort: Effort) -> dict[str, tuple[str, Policy]]:
    """Return each rule's best label and policy, by median time and then by accuracy."""
    chosen = {name: next(iter(grid.items())) for name, grid in rules.items()}
    if not effort.tuning:
        return chosen
    cases = {
        (name, label): [Case(policy, scenario, seed, only_to_target=True) for seed in effort.tuning]
        for name, grid in rules.items()
        for label, policy in grid.items()
        if len(grid) > 1
    }
    best: dict[str, tuple[float, float]] = {}
    for (name, label), found in measure_groups(measure, cases, f"tuning, {scenario.name}").items():
        standing = (
            statistics.median([outcome.reached_s for outcome in found]),
            -statistics.fmean([outcome.accuracy for outcome in found]),
        )
        if name not in best or standing < best[name]:
            best[name] = standing
            chosen[name] = (label, rules[name][label])
    return chosen


def judge(
    chosen: Mapping[str, tuple[str, Policy]], scenario: Scenario, effort: Effort, results: Results
) -> dict[str, list[Outcome]]:
    """Run the chosen policies on fresh seeds and add their figures; return outcomes by rule."""
    found = compare({name: policy for name, (_, policy) in chosen.items()}, scenario, effort.judging)
    for name, runs in found.items():
        label, _ = chosen[name]
        times_s = reached_s(runs, scenario.limit_s)
        columns = {
            "s": statistics.median(times_s),
            "worst s": max(times_s),
            "MB": statistics.median([run.reached_mb for run in runs]),
            "final accuracy, %": 100.0 * statistics.median([run.accuracy for run in runs]),
        }
        row = f"{name} ({label})" if label else name
        results.add(scenario.name, row, columns)
    return found


def reached_s(runs: list[Outcome], limit_s: float) -> list[float]:
    """Return the times to the target; a run that missed it counts with the time limit."""
    return [min(run.reached_s, limit_s) for run in runs]


def best_of(rules: tuple[str, ...], found: Mapping[str, list[Outcome]], limit_s: float) -> list[Outcome]:
    """Return the outcomes of the rule with the lowest median time to the target."""
    return min([found[rule] for rule in rules], key=lambda runs: statistics.median(reached_s(runs, limit_s)))


def note_ratio(
    results: Results, name: str, *, ours: list[Outcome], theirs: list[Outcome], limit_s: float, target: float
) -> None:
    """Add the rule's time over ours: the median of the ratios of each seed."""
    times = zip(reached_s(theirs, limit_s), reached_s(ours, limit_s), strict=True)
    results.ratio(name, statistics.median([other / own for other, own in times]), target)


def compare_unequal(partition: str, codec: str, effort: Effort, one_place: list[float], results: Results) -> None:
    """Compare all rules on the unequal fleet."""
    name = f"unequal fleet, {partition}, {codec}"
    alpha = PARTITIONS[partition]
    scenario = Scenario(name, UNEQUAL, alpha, CODECS[codec], horizon_s=effort.horizon_s, limit_s=effort.limit_s)
    found = judge(tune(RULES, scenario, effort), scenario, effort, results)
    ours = found[DEFAULT]
    at = f"{partition}, {codec}:"
    for rule, theirs, target in (
        (SYNC_ALL, found[SYNC_ALL], 10.0),
        (SYNC_FIRST, found[SYNC_FIRST], 1.3),
        ("best asynchronous", best_of(ASYNCHRONOUS, found, scenario.limit_s), 0.91),
    ):
        title = f"{at} {rule} / default"
        note_ratio(results, title, ours=ours, theirs=theirs, limit_s=scenario.limit_s, target=target)
    differences = [100.0 * (run.accuracy - alone) for run, alone in zip(ours, one_place, strict=True)]
    title = f"{at} final accuracy - one place's, points"
    results.ratio(title, statistics.median(differences), -ACCURACY_LOST_MAX[partition])


def compare_even(partition: str, codec: str, effort: Effort, results: Results) -> None:
    """Compare the default with synchronous rounds on equal devices that never fail."""
    name = f"equal fleet, {partition}, {codec}"
    scenario = Scenario(
        name, EVEN, PARTITIONS[partition], CODECS[codec], horizon_s=effort.horizon_s / 2, limit_s=effort.limit_s
    )
    found = judge(tune(EVEN_RULES, scenario, effort), scenario, effort, results)
    title = f"{partition}, {codec}: equal devices, {SYNC_ALL} / default"
    note_ratio(results, title, ours=found[DEFAULT], theirs=found[SYNC_ALL], limit_s=scenario.limit_s, target=0.91)


PARSER = make_parser("Time, bytes and accuracy of update policies on a simulated fleet.")
PARSER.add_argument("--codec", nargs="+", choices=CODECS, help="codec of updates and models, for all rules")


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Compare the rules in every scenario."""
    effort = EFFORTS[arguments.form]
    show_progress(f"the target is {TARGET:.0%} accuracy on held-out digits; all times are virtual")
    one_place = [measure_one_place(seed, effort.one_place_epochs) for seed in effort.judging]
    results.add("one place", "plain SGD", {"final accuracy, %": 100.0 * statistics.median(one_place)})
    for codec in arguments.codec or effort.codecs:
        for partition in PARTITIONS:
            compare_unequal(partition, codec, effort, one_place, results)
            compare_even(partition, codec, effort, results)


if __name__ == "__main__":
    main()
