"""Measure how soon a fleet recovers after its hub or its devices are killed.

Run as `python -m benchmarks.comeback`. It also restarts a hub with thousands of devices, and
measures the traffic of a device that returns after an absence. The processes are real, and the
checks of the tests apply: no acknowledged update is lost, and none counts twice. The exit code is 1
if a figure exceeds its bound.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.report import Form, Results, benchmark, show_progress
from tests.support.programs.crowds import churn, joins
from tests.support.programs.kills import EXACT, OFTEN, SELDOM, kill_hubs
from tests.support.programs.processes import Commands
from tests.support.programs.returns import returns

GOES_ON_S = 5.0
"""Seconds from a restart until every agent has its next answer."""

BACK_S = 5.0
"""Seconds until the hub notices a killed device, and until a restarted one has an answer."""

WELCOMED_S = 10.0
"""Seconds from a hub's restart until thousands of devices are members again."""

TAKEN_MAX = 0.3
"""Traffic of a device that returns after ten versions, relative to a float32 model."""

AWAY_VERSIONS = 10

LARGE_INPUTS = 300_000
"""A model of 3.6 MB, which travels in pieces and is folded by a worker."""

QUANTILES = ("p50", "p99", "longest")
SEED = 1


Measure = Callable[[Commands, Results], None]


@dataclass(frozen=True)
class Kills:
    """How often to kill the hub together with an agent, with which settings and fleet."""

    name: str
    kills: int
    policy: str = EXACT
    checkpoint: str = SELDOM
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """The amount of work.

    For churn, each of `processes` runs `devices`, and each of `turns` kills a tenth of them.
    `returns` is how often a device leaves and returns.
    """

    cases: tuple[str, ...]
    kills: tuple[Kills, ...]
    processes: int
    devices: int
    turns: int
    joining: int
    returns: int


CASES = ("kills", "churn", "joins", "returns")
LARGE = {"inputs": LARGE_INPUTS, "processes": 4, "step_s": 0.1}
EFFORTS = {
    Form.FULL: Effort(
        CASES,
        (
            Kills("few checkpoints", 50),
            Kills("checkpoints at any time", 20, checkpoint=OFTEN),
            Kills("default policy", 20, policy=""),
            Kills("3.6 MB, checkpoints at any time", 10, checkpoint=OFTEN, options=LARGE),
        ),
        20, 10, 20, 5000, 10,
    ),
    Form.SHORT: Effort(CASES, (Kills("few checkpoints", 10),), 8, 5, 4, 500, 3),
    Form.QUICK: Effort(
        ("kills", "joins", "returns"),
        (Kills("few checkpoints", 1, options={"processes": 2}),),
        2, 1, 1, 20, 1,
    ),
}  # fmt: skip


def measure_kills(case: Kills, commands: Commands, results: Results) -> None:
    """Kill the hub again and again."""
    seen = kill_hubs(
        commands, case.kills, seed=SEED, policy=case.policy, checkpoint=case.checkpoint, **case.options
    )
    add_quantiles(results, f"{case.name}: hub listens", seen["listens_s"])
    add_quantiles(results, f"{case.name}: first answer", seen["first_answer_s"])
    add_quantiles(results, f"{case.name}: all have answers", seen["all_answered_s"])
    results.bound(f"{case.name}: all have answers", seen["all_answered_s"][-1], GOES_ON_S)
    counts = ("kills", "updates_acknowledged", "updates_unanswered", "hashes_checked", "entries_replayed")
    results.add("kills of the hub", case.name, {name.replace("_", " "): seen[name] for name in counts})


def measure_churn(effort: Effort, commands: Commands, results: Results) -> None:
    """Kill devices and restart them."""
    seen = churn(commands, processes=effort.processes, devices=effort.devices, turns=effort.turns, seed=SEED)
    name = f"{seen['devices']:,} devices"
    for what, key in (
        ("hub notices a killed device", "missed_s"),
        ("restarted device has an answer", "answered_again_s"),
    ):
        add_quantiles(results, f"{name}: {what}", seen[key])
        results.bound(f"{name}: {what}", seen[key][-1], BACK_S)
    counts = ("times_a_device_was_killed", "updates_acknowledged", "hashes_checked")
    results.add("kills of devices", name, {count.replace("_", " "): seen[count] for count in counts})


def measure_joins(count: int, commands: Commands, results: Results) -> None:
    """Kill a hub with thousands of members and restart it."""
    seen = joins(commands, count=count)
    ((listens_s, first_s, p50_s, p99_s, last_s),) = seen["listens_then_joined_first_p50_p99_last_s"]
    name = f"{count:,} devices: members again"
    results.add("seconds", f"{count:,} devices: hub listens", {"longest": listens_s})
    results.add("seconds", name, {"first": first_s, "p50": p50_s, "p99": p99_s, "longest": last_s})
    results.bound(name, last_s, WELCOMED_S)
    counts = ("updates_answered", "hellos_a_device", "hub_cpu_s")
    results.add("restart", f"{count:,} devices", {key.replace("_", " "): seen[key] for key in counts})


def measure_returns(count: int, commands: Commands, results: Results) -> None:
    """Repeatedly stop or kill a device, and restart it after ten versions."""
    for name, spool in (("with its saved model", "full"), ("without a saved model", "identity")):
        taken = returns(commands, count, versions=AWAY_VERSIONS, spool=spool)
        row = f"away for {AWAY_VERSIONS} versions, {name}"
        results.add("bytes until it trains, per float32 model", row, {"mean": fmean(taken), "most": max(taken)})
        results.bound(row, max(taken), TAKEN_MAX)


def add_quantiles(results: Results, name: str, quantiles: list[float]) -> None:
    """Add a row of seconds."""
    results.add("seconds", name, dict(zip(QUANTILES, quantiles, strict=True)))


@benchmark("How soon a fleet recovers after kills and restarts.", CASES)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the requested parts."""
    effort = EFFORTS[arguments.form]
    work: dict[str, list[tuple[str, Measure]]] = {
        "kills": [(kills.name, partial(measure_kills, kills)) for kills in effort.kills],
        "churn": [("kills of devices", partial(measure_churn, effort))],
        "joins": [(f"{effort.joining:,} devices at once", partial(measure_joins, effort.joining))],
        "returns": [("a device that leaves and returns", partial(measure_returns, effort.returns))],
    }
    for case in (case for case in arguments.part if case in effort.cases):
        for name, measure in work[case]:
            show_progress(f"{case}: {name}")
            with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
                measure(commands, results)


if __name__ == "__main__":
    main()
