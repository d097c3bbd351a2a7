"""What two hostile keys of ten do to a fleet, by what they send and what they say of it.

Run as `python -m benchmarks.security_poison`. Simulated fleets learn digits in virtual time; all runs are drawn
from seeds. The bars: the robust setting of docs/policies.md loses at most 2 points against a fleet without hostile
keys, the default at most 5 and is never under 85 %; no honest device is put in quarantine, no model goes back, and
at most 2 % of honest updates are refused.
"""

import argparse
import statistics
from dataclasses import dataclass

from benchmarks.report import Form, Results, enforce_targets, make_parser, show_results
from benchmarks.security_poison_fleet import ATTACKS, CLAIMS, POLICIES, UPDATES, Case, Outcome, measure_all

POINTS_LOST_MAX = {"default": 5.0, "robust": 2.0}
ACCURACY_MIN = 85.0
"""Of the default, in every run."""

REFUSED_MAX = 0.02
NAMES = 50
"""Names of each hostile key, where it has many."""


@dataclass(frozen=True)
class Effort:
    """Which attacks and claims, with which seeds, for how many updates."""

    attacks: tuple[str, ...]
    claims: tuple[str, ...]
    seeds: tuple[int, ...]
    updates: int


EFFORTS = {
    Form.FULL: Effort(tuple(ATTACKS), tuple(CLAIMS), (1, 2, 3, 4, 5), UPDATES),
    Form.SHORT: Effort(tuple(ATTACKS), ("true", "good"), (1,), 400),
    Form.QUICK: Effort(("flip",), ("good",), (1,), 20),
}


def mean_accuracy(outcomes: list[Outcome]) -> float:
    """Return the mean accuracy of some runs, in percent."""
    return 100.0 * statistics.fmean([outcome.accuracy for outcome in outcomes])


def note(title: str, row: str, clean: float, outcomes: list[Outcome], results: Results) -> None:
    """Add a row of figures."""
    columns = {
        "accuracy, %": mean_accuracy(outcomes),
        "worst, %": 100.0 * min(outcome.accuracy for outcome in outcomes),
        "lost, points": clean - mean_accuracy(outcomes),
        "honest updates refused, %": 100.0 * max(outcome.refused for outcome in outcomes),
        "honest in quarantine": float(sum(outcome.quarantined for outcome in outcomes)),
        "rollbacks": float(sum(outcome.rollbacks for outcome in outcomes)),
        "hostile in quarantine": statistics.fmean([outcome.caught for outcome in outcomes]),
    }
    results.add(title, row, {name: round(value, 3) for name, value in columns.items()})


def judge(name: str, effort: Effort, results: Results) -> None:
    """Measure a policy without hostile keys and under every attack, and hold it to its bars."""
    policy = POLICIES[name]
    rows = {
        f"{attack}, says {claims}": (attack, claims, 1) for attack in effort.attacks for claims in effort.claims
    }
    rows |= {
        f"{attack}, {NAMES} names": (attack, "true", NAMES)
        for attack in ("flip", "x7")
        if attack in effort.attacks
    }
    cases = [Case(policy, seed, updates=effort.updates) for seed in effort.seeds]
    cases += [
        Case(policy, seed, attack, claims, names=names, updates=effort.updates)
        for attack, claims, names in rows.values()
        for seed in effort.seeds
    ]
    outcomes = iter(measure_all(cases, name))
    clean = [next(outcomes) for _ in effort.seeds]
    note(name, "without hostile keys", mean_accuracy(clean), clean, results)
    all_runs = list(clean)
    lost: dict[str, float] = {}
    for row in rows:
        found = [next(outcomes) for _ in effort.seeds]
        note(name, row, mean_accuracy(clean), found, results)
        lost[row] = mean_accuracy(clean) - mean_accuracy(found)
        all_runs += found
    worst = max(lost, key=lambda row: lost[row])
    results.bound(f"{name}: points lost at worst ({worst})", max(lost[worst], 0.01), POINTS_LOST_MAX[name])
    results.bound(f"{name}: honest updates refused", max(0.001, *[run.refused for run in all_runs]), REFUSED_MAX)
    results.ratios[f"{name}: runs without an honest device in quarantine and without a rollback"] = sum(
        not run.quarantined and not run.rollbacks for run in all_runs
    ) / len(all_runs)
    results.targets[f"{name}: runs without an honest device in quarantine and without a rollback"] = 1.0
    if name == "default":
        results.ratios["default: lowest accuracy over 85 %"] = round(
            100.0 * min(run.accuracy for run in all_runs) / ACCURACY_MIN, 3
        )
        results.targets["default: lowest accuracy over 85 %"] = 1.0


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = make_parser("What hostile keys do to a fleet.")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    return parser.parse_args()


def main() -> None:
    """Judge the policies."""
    arguments = parse()
    results = Results()
    for name in arguments.policy:
        judge(name, EFFORTS[arguments.form], results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
