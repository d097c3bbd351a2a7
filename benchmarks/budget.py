"""What a limit on a day's bytes buys: whether it is kept, when the target is reached, and accuracy at equal bytes.

Run as `python -m benchmarks.budget`. Eight simulated devices, one three times and one ten times slower, learn the
handwritten digits with skewed labels in virtual time. Each may move 20 MB a day. The same fleet runs at full
pace, too, and with a fixed interval of 16 local steps, until it has spent as many bytes.
"""

import math
import statistics
from dataclasses import dataclass

from benchmarks.budget_fleet import SPEEDS, Case, Spent, spend
from benchmarks.policies_fleet import TARGET
from benchmarks.pool import measure_in_processes
from benchmarks.report import Form, Results, make_parser, show_progress, show_results
from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import Limits
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy
from edgeasync.protocol.messages import DAY_S

BUDGET = 20_000_000
LEVELS = (1e6, 2e6, 5e6, 10e6, 19e6)
"""Bytes of a device at which accuracies are compared."""

LIMITED, FULL_PACE, FIXED = "20 MB a day", "full pace", "16 local steps"
KEPT_MIN = 0.98
SEEDS = tuple(range(901, 916))


@dataclass(frozen=True)
class Effort:
    """How many seeds, how long a day is watched, and how long the others may take to spend their bytes."""

    seeds: tuple[int, ...]
    watched_s: float
    others_s: float


EFFORTS = {
    Form.FULL: Effort(SEEDS, DAY_S, 1000.0),
    Form.SHORT: Effort(SEEDS[:3], DAY_S, 1000.0),
    Form.QUICK: Effort(SEEDS[:1], 120.0, 1.0),
}


def cases(effort: Effort) -> dict[str, list[Case]]:
    """Return the runs by name."""
    limits = Limits(device_bytes_per_day_max=ByteCount(BUDGET))
    fixed = Policy(frequency=FixedFrequency(local_steps=16))
    return {
        LIMITED: [Case(Policy(), seed, limits, 2.0, effort.watched_s) for seed in effort.seeds],
        FULL_PACE: [Case(Policy(), seed, Limits(), 0.25, effort.others_s, BUDGET) for seed in effort.seeds],
        FIXED: [Case(fixed, seed, Limits(), 0.25, effort.others_s, BUDGET) for seed in effort.seeds],
    }


def row(runs: list[Spent]) -> dict[str, float]:
    """Return the row of a table."""
    reached = [run.reached(TARGET) for run in runs]
    seconds = [math.inf if moment is None else moment.now_s for moment in reached]
    columns = {"reached": float(sum(math.isfinite(one) for one in seconds)), "s": statistics.median(seconds)}
    for level in LEVELS:
        accuracies = [run.accuracy_at(len(SPEEDS) * level) for run in runs]
        columns[f"at {level / 1e6:g} MB"] = round(statistics.fmean(accuracies), 4)
    return columns


def main() -> None:
    """Measure all runs."""
    arguments = make_parser("What a limit on a day's bytes buys.").parse_args()
    results, effort = Results(), EFFORTS[arguments.form]
    wanted = cases(effort)
    outcomes = iter(measure_in_processes(spend, [case for runs in wanted.values() for case in runs], "budget"))
    found = {name: [next(outcomes) for _ in runs] for name, runs in wanted.items()}
    show_progress(f"{TARGET:.0%} of the digits held out is the target; all times are virtual")
    title = f"{len(effort.seeds)} seeds"
    for name, runs in found.items():
        results.add(title, name, {key: value for key, value in row(runs).items() if math.isfinite(value)})
    days = [nbytes for run in found[LIMITED] for day in run.days for nbytes in day]
    if days:
        results.add(title, LIMITED, {"most MB a day": max(days) / 1e6, "least MB a day": min(days) / 1e6})
        results.bound("the most bytes of a day", max(days), BUDGET)
        results.ratios["the least bytes of a day over the limit"] = round(min(days) / BUDGET, 4)
        results.targets["the least bytes of a day over the limit"] = KEPT_MIN
    results.ratios["seeds that reach the target"] = results.figures[title][LIMITED]["reached"] / len(effort.seeds)
    results.targets["seeds that reach the target"] = 1.0
    for level in LEVELS:
        name = f"at {level / 1e6:g} MB"
        ratio = f"accuracy {name} over that of a fixed interval"
        results.ratios[ratio] = round(
            results.figures[title][LIMITED][name] / results.figures[title][FIXED][name], 4
        )
        results.targets[ratio] = 1.0
    show_results(results, arguments)


if __name__ == "__main__":
    main()
