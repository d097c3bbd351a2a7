"""Measure what a quiet hub saves and costs: bytes, time, accuracy and waking.

Run as `python -m benchmarks.rest`. In virtual time, a quiet fleet is compared with the same fleet
at full pace. Then eight real agents learn digits on loopback, at full pace and quiet. Finally
`edgeasync wake` wakes them.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.agent_process import Member
from benchmarks.processes import measure_groups
from benchmarks.real_fleet import RealFleet, run_fleet
from benchmarks.report import Form, Results, benchmark
from benchmarks.rest_fleet import HOUR_S, Case, Change, Outcome, measure
from benchmarks.virtual_fleet import DIGITS, LEARNING_RATES, split_digits
from edgeasync.data.partition import iid

BYTES_SHARE_MAX = {"LAN": 0.01, "2 Mbit/s": 0.03}
SLOWER_MAX = 1.03
POINTS_LOST_MAX = 0.2
PERIODS_MAX = 2.0
POLL_S = 0.1
REAL_DEVICES = 8
REAL_STEP_S = 0.05
LEARNT_S = 60.0
"""Time after which a real fleet has learned its digits."""

PLATEAU_S = (1500.0, 1800.0)
"""Bytes at full pace are measured between these times and scaled to an hour."""


@dataclass(frozen=True)
class Effort:
    """The seeds, the data, the hours at full pace, and the changes."""

    seeds: range
    data: tuple[str, ...] = ("digits", "smartwatch")
    hours: float = 1.0
    changes: tuple[Change, ...] = ("pause", "slowest")
    wakes: tuple[Change, ...] = ("drift", "joins")
    real_s: tuple[float, float] = (60.0, 1200.0)
    """Seconds of trained real fleets: at full pace, and quiet. 0: none."""


EFFORTS = {
    Form.FULL: Effort(range(4000, 4015)),
    Form.SHORT: Effort(range(4100, 4103), real_s=(20.0, 300.0)),
    Form.QUICK: Effort(range(4200, 4201), ("digits",), 0.51, ("pause",), (), (0.0, 0.0)),
}


def judge(data: str, effort: Effort, results: Results) -> None:
    """Compare quiet fleets with fleets at full pace and with the bounds."""
    changes = [change for change in effort.changes if data == "digits" or change != "slowest"]
    pairs: list[tuple[str, Change]] = [(link, "nothing") for link in BYTES_SHARE_MAX] + [
        ("LAN", change) for change in changes
    ]
    long = 2.0 if effort.wakes else effort.hours
    hours = effort.hours
    cases: dict[tuple[str, str, bool], list[Case]] = {
        (link, change, quiet): [
            Case(seed, data, link, quiet, change=change, hours=long if quiet and change == "nothing" else hours)
            for seed in effort.seeds
        ]
        for link, change in pairs
        for quiet in (False, True)
    }
    cases |= {("LAN", one, True): [Case(seed, data, change=one) for seed in effort.seeds] for one in effort.wakes}
    outcomes = measure_groups(measure, cases, data)
    for link, change in pairs:
        found = list(zip(outcomes[link, change, False], outcomes[link, change, True], strict=True))
        name = f"{data}, {link}" if change == "nothing" else f"{data}, {change}"
        compare(name, found, hours * HOUR_S, results)
        if change == "nothing" and effort.wakes:
            share = statistics.fmean(
                quiet.sent(HOUR_S, 2 * HOUR_S) / (full.sent(*PLATEAU_S) * HOUR_S / (PLATEAU_S[1] - PLATEAU_S[0]))
                for full, quiet in found
            )
            results.add("quiet", name, {"second hour's bytes, share": share})
            results.bound(f"{name}: second hour's bytes", share, BYTES_SHARE_MAX[link])
    for change in effort.wakes:
        periods = [run.woke_s / run.period_s for run in outcomes["LAN", change, True]]
        name = f"{data}, {change}"
        results.add("waking", name, {"periods, mean": statistics.fmean(periods), "longest": max(periods)})
        results.bound(f"{name}: periods until full pace", max(periods), PERIODS_MAX)


def compare(name: str, found: Sequence[tuple[Outcome, Outcome]], until_s: float, results: Results) -> None:
    """Add what a quiet fleet loses; each quiet run is paired with one of the same seed."""
    best = [statistics.fmean(run.best(until_s) for run in runs) for runs in zip(*found, strict=True)]
    lost = 100.0 * (best[0] - best[1])
    both = [(full.reached_s, quiet.reached_s) for full, quiet in found if full.reached_s < until_s]
    results.add("quiet", name, {"accuracy at full pace": best[0], "accuracy": best[1], "points lost": lost})
    results.bound(f"{name}: points lost", max(lost, 0.01), POINTS_LOST_MAX)
    if both and not name.endswith("pause"):  # every rest during the pause delays what follows
        slower = statistics.fmean(quiet for _, quiet in both) / statistics.fmean(full for full, _ in both)
        results.add("quiet", name, {"time to target, ratio": slower, "runs that reach it": len(both)})
        results.bound(f"{name}: time to target", slower, SLOWER_MAX)


def judge_processes(full_s: float, quiet_s: float, results: Results) -> None:
    """Compare a quiet real fleet's traffic with that at full pace, then wake it.

    The quiet traffic is that of the last quarter of its time.
    """
    parts = iid(split_digits()[0], REAL_DEVICES, 0)
    members = [Member(part, REAL_STEP_S) for part in parts]
    with run_fleet(DIGITS, LEARNING_RATES["digits"], members, quiet=False) as fleet:
        time.sleep(LEARNT_S)
        pace = _bytes_per_s(fleet, full_s)
    with run_fleet(DIGITS, LEARNING_RATES["digits"], members) as fleet:
        time.sleep(0.75 * quiet_s)
        share = _bytes_per_s(fleet, 0.25 * quiet_s) / pace
        cadence = fleet.status["cadence"]
        period_s = max(cadence["rest_period_s"], cadence["period_s"])
        woke_s = _wake(fleet)
    columns = {
        "kB/s at full pace": pace / 1e3,
        "last bytes, share": share,
        "period, s": period_s,
        "woke after, s": woke_s,
    }
    results.add("real processes", f"{REAL_DEVICES} devices, {quiet_s:.0f} s", columns)
    results.bound("real processes: last quarter's bytes", share, BYTES_SHARE_MAX["LAN"])
    results.bound("real processes: periods until full pace", max(0.01, woke_s / period_s), PERIODS_MAX)


def _bytes_per_s(fleet: RealFleet, seconds: float) -> float:
    before = fleet.status["traffic"]
    time.sleep(seconds)
    after = fleet.status["traffic"]
    return float(sum(after[way] - before[way] for way in ("bytes_up", "bytes_down"))) / seconds


def _wake(fleet: RealFleet) -> float:
    """Run `edgeasync wake`; return seconds until every device has two more updates applied."""
    before = {one["id"]: one["updates_applied"] for one in fleet.devices}
    command = [sys.executable, "-m", "edgeasync", "wake", "--hub", fleet.address]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    begun_s = time.monotonic()
    while any(one["updates_applied"] < before[one["id"]] + 2 for one in fleet.devices):
        time.sleep(POLL_S)
    return time.monotonic() - begun_s


@benchmark("What a quiet hub saves and costs.", ("digits", "smartwatch", "processes"))
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure both data sets, then real processes."""
    effort = EFFORTS[arguments.form]
    for data in (one for one in effort.data if one in arguments.part):
        judge(data, effort, results)
    if effort.real_s[0] and "processes" in arguments.part:
        judge_processes(*effort.real_s, results)


if __name__ == "__main__":
    main()
