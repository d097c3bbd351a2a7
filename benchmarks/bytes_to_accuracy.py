"""Measure how many bytes a fleet sends until it reaches the target, by codec.

Run as `python -m benchmarks.bytes_to_accuracy`. Twenty simulated devices with links of 1 to 50
Mbit/s train two networks on the handwritten digits under the default policy, in virtual time.
Updates and the differences of the published chain use the codec. Whole models, for devices that
join or return, travel as float16, or as float32 under `none`. All bytes on a link count, including
headers, heartbeats and lost messages.
"""

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from benchmarks.policies_fleet import TARGET, Case, Outcome, Scenario, measure
from benchmarks.policies_fleet import compare as compare_policies
from benchmarks.policies_rules import RULES
from benchmarks.processes import measure_groups
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.virtual_fleet import DIGITS
from edgeasync.core.hub.settings import FLOAT32, CodecSettings
from edgeasync.policies.policy import Policy, PolicySet
from edgeasync.training.numpy_models import MlpModel
from simulation.population import FleetProfile

MODELS = {
    "4,810 parameters": DIGITS,
    "234,762 parameters": MlpModel(inputs=64, hidden=(448, 448), classes=10),
}
LOSSY = {
    "int8": "int8",
    "int4": "int4",
    "top 10 %": "top_k(0.1)",
    "top 10 %, int8": "top_k(0.1)+int8",
    "top 1 %": "top_k(0.01)",
    "top 1 %, int8": "top_k(0.01)+int8",
    "sign": "sign",
}
PLAIN = "none"
ASGD = "none, asynchronous SGD"
SEEDS = tuple(range(201, 210))
TUNING_SEEDS = (101, 102, 103)


@dataclass(frozen=True)
class Effort:
    """The models to train, and the seeds for tuning and judging.

    A run that misses the target by `limit_s` counts with that time and all its bytes.
    """

    models: Mapping[str, MlpModel]
    tuning: tuple[int, ...]
    judging: tuple[int, ...]
    limit_s: float


EFFORTS = {
    Form.FULL: Effort(MODELS, TUNING_SEEDS, SEEDS, 200.0),
    Form.SHORT: Effort(MODELS, TUNING_SEEDS, SEEDS[:3], 200.0),
    Form.QUICK: Effort({"4,810 parameters": DIGITS}, TUNING_SEEDS[:1], SEEDS[:1], 0.3),
}
BYTES_SAVED_MIN = 6.0
BYTES_SAVED_ON_ASGD_MIN = 25.0
TIME_MIN = 1.0


def codecs() -> dict[str, CodecSettings]:
    """Return the compared codec settings."""
    found = {
        PLAIN: FLOAT32,
        "float16": CodecSettings(push="float16", model="float16", delta="off"),
        "the default": CodecSettings(),
    }
    for title, name in LOSSY.items():
        never = CodecSettings(push=name, model="float16", delta=name, error_feedback="never")
        found[title] = never
        found[f"{title}, feedback"] = msgspec.structs.replace(never, error_feedback="always")
    return found


def tune_asgd(scenario: Scenario, seeds: tuple[int, ...]) -> PolicySet:
    """Return plain asynchronous SGD with an update per step, at the fastest learning rate."""
    grid = RULES["ASGD"]
    found = compare_policies(grid, scenario, seeds, only_to_target=True)
    times = {label: statistics.median([run.reached_s for run in runs]) for label, runs in found.items()}
    return grid[min(times, key=times.__getitem__)]


def compare(title: str, model: MlpModel, effort: Effort, results: Results) -> None:
    """Measure every codec on one model, and record the ratios of the best.

    The best codec needs the fewest bytes and no more time.
    """
    seeds, limit_s = effort.judging, effort.limit_s
    plain = Scenario(title, FleetProfile(), model=model, limit_s=limit_s)
    runs: dict[str, tuple[PolicySet, Scenario]] = {
        name: (Policy(), Scenario(title, FleetProfile(), codec=settings, model=model, limit_s=limit_s))
        for name, settings in codecs().items()
    }
    runs[ASGD] = (tune_asgd(plain, effort.tuning), plain)
    cases = {name: [Case(*run, seed, only_to_target=True) for seed in seeds] for name, run in runs.items()}
    found = measure_groups(measure, cases, title)
    for name, reached in found.items():
        results.add(title, name, columns(reached, found[PLAIN], limit_s))
    table = results.figures[title]
    no_slower = [name for name in found if name != ASGD and table[name]["time of none / this"] >= TIME_MIN]
    best = min(no_slower, key=lambda name: table[name]["MB"])
    row = table[best]
    results.ratio(f"{title}: bytes of none / best ({best})", row["bytes of none / this"], BYTES_SAVED_MIN)
    results.ratio(f"{title}: time of none / best", row["time of none / this"], TIME_MIN)
    saved = table[ASGD]["MB"] / row["MB"]
    results.ratio(f"{title}: bytes of {ASGD} / best", saved, BYTES_SAVED_ON_ASGD_MIN)


def columns(runs: list[Outcome], plain: list[Outcome], limit_s: float) -> dict[str, float]:
    """Return a row of medians, and the medians of the per-seed ratios."""

    def time_of(run: Outcome) -> float:
        return min(run.reached_s, limit_s)

    pairs = list(zip(runs, plain, strict=True))
    return {
        "s": statistics.median([time_of(run) for run in runs]),
        "worst s": max(time_of(run) for run in runs),
        "MB": statistics.median([run.reached_mb for run in runs]),
        "time of none / this": statistics.median([time_of(other) / time_of(run) for run, other in pairs]),
        "bytes of none / this": statistics.median([other.reached_mb / run.reached_mb for run, other in pairs]),
        "reached": sum(math.isfinite(run.reached_s) for run in runs),
    }


@benchmark("Bytes and time until a simulated fleet reaches the target, by codec.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Compare the codecs on both models."""
    show_progress(f"the target is {TARGET:.0%} accuracy on held-out digits; all times are virtual")
    effort = EFFORTS[arguments.form]
    for title, model in effort.models.items():
        compare(title, model, effort, results)


if __name__ == "__main__":
    main()
