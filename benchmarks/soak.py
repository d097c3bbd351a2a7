"""Kill a hub and eight agents repeatedly for an hour; check growth and counts.

Run as `python -m benchmarks.soak`. Real processes of the ordinary commands learn digits. The exit
code is 1 if memory, descriptors or threads of a process grow, or if an update is lost or counts
twice.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.processes import Used
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.soak_counts import Counted, find_miscounts, read_run
from benchmarks.soak_fleet import Fleet, Process, run_fleet, sleep_until

SEED = 1
LOOKS_MIN = 8
"""Least samples after the warm-up for a process's life to be judged."""

MEMORY_SHARE = 0.05
MEMORY_BYTES = 2 << 20
"""Allowed growth of memory from the first to the last quarter; other measures may grow by 1."""


@dataclass(frozen=True)
class Effort:
    """How long, how many agents, how often to sample, and when to kill.

    `warm_up_s` counts from each start.
    """

    seconds: float
    agents: int
    look_s: float
    warm_up_s: float
    agent_lives_s: float
    """Mean life of the agents that are killed. Every other agent is spared."""

    away_s_max: float


EFFORTS = {
    Form.FULL: Effort(3600.0, 8, 10.0, 600.0, 120.0, 20.0),
    Form.SHORT: Effort(600.0, 8, 10.0, 100.0, 60.0, 20.0),
    Form.QUICK: Effort(10.0, 2, 0.5, 2.0, 2.0, 0.5),
}

HUB_KILLS = (0.04, 0.12, 0.85)
"""Times of the kills as shares of the run, plus or minus 0.01.

The hub's growth is judged between the last two.
"""

Act = tuple[float, Callable[[], None]]


def kills(fleet: Fleet, effort: Effort, random: Random) -> Iterator[Act]:
    """Yield when to kill and restart which process: the hub and half of the agents."""

    def away(process: Process, at_s: float) -> Iterator[Act]:
        back_s = at_s + random.uniform(0.0, effort.away_s_max)
        yield at_s, process.kill
        yield back_s, partial(fleet.start, process)

    for share in HUB_KILLS:
        yield from away(fleet.hub, effort.seconds * (share + random.uniform(-0.01, 0.01)))
    for agent in fleet.agents[: len(fleet.agents) // 2]:
        at_s = random.expovariate(1.0 / effort.agent_lives_s)
        while at_s < effort.seconds - 2.0 * effort.away_s_max:
            yield from away(agent, at_s)
            at_s += effort.away_s_max + 1.0 + random.expovariate(1.0 / effort.agent_lives_s)


def run(fleet: Fleet, effort: Effort) -> None:
    """Train the fleet, kill and sample its processes, and stop it."""
    acts = [*kills(fleet, effort, Random(SEED))]
    acts += [(effort.look_s * number, fleet.look) for number in range(1, int(effort.seconds / effort.look_s) + 1)]
    told = [(share, partial(show_progress, f"{share:.0%} of the time is over")) for share in (0.25, 0.5, 0.75)]
    acts += [(effort.seconds * share, tell) for share, tell in told]
    begun_s = time.monotonic()
    for at_s, act in sorted(acts, key=lambda act: act[0]):
        sleep_until(begun_s + at_s)
        act()
    fleet.stop()


@dataclass(frozen=True)
class Measure:
    """A resource of processes, and how much it may grow from first to last."""

    name: str
    used: Callable[[Used], float]
    more: float
    share: float = 0.0

    def at_first_and_last(self, looks: Sequence[Used]) -> tuple[float, float]:
        """Return the medians of the first quarter and of the last."""
        quarter = max(1, len(looks) // 4)
        values = [self.used(look) for look in looks]
        return statistics.median(values[:quarter]), statistics.median(values[-quarter:])

    def bound(self, first: float) -> float:
        """Return the highest value that does not count as growth."""
        return (1.0 + self.share) * first + self.more


MEASURES = (
    Measure("memory in MiB", lambda look: look.resident_bytes / 2**20, MEMORY_BYTES / 2**20, MEMORY_SHARE),
    Measure("descriptors", lambda look: float(look.descriptors), 1.0),
    Measure("threads", lambda look: float(look.threads), 1.0),
)


def judge_growth(role: str, processes: Sequence[Process], effort: Effort, results: Results) -> None:
    """Compare every life that was long enough with the bounds; the worst of a role counts."""
    warm_up = round(effort.warm_up_s / effort.look_s)
    lives = {
        f"{process.name}, start {number}": life[warm_up:]
        for process in processes
        for number, life in enumerate(process.lives, start=1)
        if len(life) >= warm_up + LOOKS_MIN
    }
    for measure in MEASURES:
        found = {name: measure.at_first_and_last(life) for name, life in lives.items()}
        for name, (first, last) in found.items():
            minutes = len(lives[name]) * effort.look_s / 60.0
            columns = {"minutes": minutes, "at first": first, "at last": last}
            results.add(f"{measure.name}: after the warm-up", name, columns)
        first, last = max(found.values(), key=lambda one: one[1] / measure.bound(one[0]))
        results.bound(f"{role}: {measure.name}", last, measure.bound(first))


def add_written(fleet: Fleet, effort: Effort, results: Results) -> None:
    """Add what was written to disks."""
    groups = {
        "the hub": [fleet.hub],
        "an agent that keeps its update": [each for each in fleet.agents if fleet.answers[each.name].keeps],
        "an agent that keeps who it is": [each for each in fleet.agents if not fleet.answers[each.name].keeps],
    }
    for name, processes in groups.items():
        megabytes = sum(process.written_bytes for process in processes) / 1e6 / len(processes)
        columns = {"MB": megabytes, "MB an hour": megabytes * 3600.0 / effort.seconds}
        results.add("written to disks", name, columns)
    journal = {"at most, MB": fleet.most_journal_bytes / 1e6}
    results.add("written to disks", "the journal's files", journal)


def judge_counts(fleet: Fleet, counted: Counted, results: Results) -> list[str]:
    """Compare the hub's counts with what the devices were told; return the mismatches."""
    miscounts = find_miscounts(fleet.answers, counted)
    numbered = sum(last for last, _ in counted.devices.values())
    columns = {
        "answered": sum(len(told.outcomes) for told in fleet.answers.values()),
        "numbered": numbered,
        "applied": counted.applied,
        "rejected": counted.rejected,
        "waiting": counted.waiting,
        "repeated": counted.duplicates,
        "answer cut off": sum(
            len(fleet.answers[name].unanswered(last)) for name, (last, _) in counted.devices.items()
        ),
        "told by the journal": len(counted.outcomes),
        "kills of the hub": len(fleet.hub.lives) - 1,
        "kills of agents": sum(len(agent.lives) - 1 for agent in fleet.agents),
    }
    results.add("updates", f"{len(fleet.agents)} agents", columns)
    results.ratio("updates that count once, share", 1.0 - len(miscounts) / max(1, numbered), 1.0)
    return miscounts


@benchmark("Growth and miscounts of a hub and its agents, which are killed repeatedly.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Run the fleet, and judge it."""
    effort = EFFORTS[arguments.form]
    show_progress(f"a hub and {effort.agents} agents for {effort.seconds:g} s")
    with tempfile.TemporaryDirectory() as folder, run_fleet(Path(folder), effort.agents) as fleet:
        run(fleet, effort)
        miscounts = judge_counts(fleet, read_run(fleet.run), results)
        judge_growth("hub", [fleet.hub], effort, results)
        judge_growth("agents", fleet.agents, effort, results)
        add_written(fleet, effort, results)
    for sentence in miscounts:
        show_progress(sentence)
    if miscounts and arguments.form == Form.QUICK:
        sys.exit(1)  # a quick run has no bounds, but every update must count once


if __name__ == "__main__":
    main()
