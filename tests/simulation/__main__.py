"""Long runs: `python -m tests.simulation --seeds N`. What fails is cut down and printed; the exit code is 1.

With `--peers` the seeds are of peers that average without a hub. With `--hostile` one of these peers is hostile.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from simulation.faults import FaultPlan
from tests.support.simulation.harness import run, shrink
from tests.support.simulation.hostile_mutants import HOSTILE_MUTANTS
from tests.support.simulation.hostile_peers import run_hostile
from tests.support.simulation.mutants import MUTANTS
from tests.support.simulation.peer_harness import run_peers
from tests.support.simulation.peer_mutants import PEER_MUTANTS
from tests.support.simulation.planting import Mutants

FAILURES_SHOWN = 3
"""Failing seeds that are cut down and printed; the others are only counted."""

TOTALS = ("hub_crashes", "device_crashes", "updates", "virtual_s")

PEER_TOTALS = ("means_applied", "rounds_given_up", "virtual_s")

HOSTILE_TOTALS = ("means_applied", "virtual_s")


class Simulator(NamedTuple):
    """One of the worlds to simulate, with the bugs to plant in it, and what to tell the extremes of."""

    run: Callable
    totals: tuple
    kind: str
    mutants: Mutants
    least: str = ""
    most: str = ""


HUB = Simulator(run, TOTALS, "policy", MUTANTS)
PEERS = Simulator(run_peers, PEER_TOTALS, "topology", PEER_MUTANTS)
HOSTILE = Simulator(
    run_hostile,
    HOSTILE_TOTALS,
    "hostility",
    HOSTILE_MUTANTS,
    least="least_steps_share",
    most="most_rounds_sent",
)


def commit():
    """Return the commit that is tested, with a plus if there is more than is committed."""
    folder = Path(__file__).parent

    def git(*arguments):
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = "+" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


def describe(simulator, result):
    """Return what is needed to see a failure again."""
    plan = shrink(result.seed, result.plan, simulator.run)
    again = simulator.run(result.seed, plan)
    left_out = len(result.plan.faults) - len(plan.faults)
    kind = getattr(result, simulator.kind)
    return (
        f"seed {result.seed} ({kind}) of commit {commit()}: {result.failure}\n"
        f"# its plan without {left_out} faults, for --first {result.seed} --seeds 1 --plan FILE\n"
        f"{plan.write()}# which fails with: {again.failure}\n{again.where}"
    )


def find_planted(simulator):
    """Write down the first seed that notices each planted bug; return 1 if there is none for one of them."""
    found, mutants = {}, simulator.mutants
    for name in mutants.changes:
        with mutants.planted(name):
            seeds = range(mutants.seeds_max)
            found[name] = next((seed for seed in seeds if simulator.run(seed).failure), None)
        print(f"{found[name]!s:>4} {name}", flush=True)
    mutants.seeds_file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return int(None in found.values())


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--peers", action="store_true", help="simulate peers without a hub")
    parser.add_argument("--hostile", action="store_true", help="simulate peers with a hostile member")
    parser.add_argument("--plan", type=Path, help="a plan of faults for all of them, instead of their own")
    parser.add_argument(
        "--planted", action="store_true", help="look for a seed that notices each planted bug, and write them down"
    )
    arguments = parser.parse_args()
    simulator = HOSTILE if arguments.hostile else PEERS if arguments.peers else HUB
    if simulator is not HUB and arguments.plan:
        parser.error("--plan is for simulations with a hub")
    if arguments.planted:
        return find_planted(simulator)
    plan = FaultPlan.read(arguments.plan.read_text("utf-8")) if arguments.plan else None
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    began_s = time.perf_counter()
    failed, totals, kinds, least, most = [], Counter(), Counter(), math.inf, 0.0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = map(simulator.run, seeds, [plan] * len(seeds))
        if arguments.jobs > 1:
            results = pool.map(simulator.run, seeds, [plan] * len(seeds), chunksize=16)
        for count, result in enumerate(results, start=1):
            kinds[getattr(result, simulator.kind)] += 1
            totals.update({name: getattr(result, name) for name in simulator.totals})
            if simulator.least:
                least = min(least, getattr(result, simulator.least))
                most = max(most, getattr(result, simulator.most))
            if result.failure:
                failed.append(result)
                print(f"seed {result.seed}: {result.failure}", flush=True)
            if count % 200 == 0:
                print(f"{count} seeds, {count / (time.perf_counter() - began_s):.1f} a second", flush=True)
    elapsed_s = time.perf_counter() - began_s
    print(f"{len(seeds)} seeds in {elapsed_s:.1f} s: {len(failed)} failed")
    print(", ".join(f"{totals[name]:.0f} {name.replace('_', ' ')}" for name in simulator.totals))
    print(", ".join(f"{name}: {count}" for name, count in kinds.most_common()))
    if simulator.least:
        print(f"{simulator.least}: {least:.2f}, {simulator.most}: {most:.2f}")
    for result in failed[:FAILURES_SHOWN]:
        print(f"\n{describe(simulator, result)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
