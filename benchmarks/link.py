"""Measure what bad links cost: cuts, a traffic cap, a link share and slow neighbours.

Run as `python -m benchmarks.link` on Linux, which reports peak memory. Hub and agent are real
processes. Between them is a TCP proxy in user space with a rate, small socket buffers and cuts at
given byte counts. Fleets with one slow link run in virtual time and then as real processes.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.agent_process import Member as RealMember
from benchmarks.agent_process import Noted, run_noting_agent
from benchmarks.hub_process import ADDRESS, make_settings, serve_hub
from benchmarks.link_proxy import Proxy, Way
from benchmarks.processes import Children, measure_groups
from benchmarks.real_fleet import run_fleet
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.virtual_fleet import Member, VirtualFleet, split_digits
from edgeasync.core.hub.settings import HubCoreSettings, Liveness, StopCondition
from edgeasync.data.partition import iid
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.training.numpy_models import MlpModel
from simulation.link import LinkProfile

MBIT_20 = 20e6 / 8
CAP_BYTES_PER_S = 1_000_000
CAP_LENGTH = 2_500_000
SHARE_LENGTH = 1 << 18
SHARE = 0.2
STEP_S = 0.02
EXCHANGE_S = 2 * 4 * SHARE_LENGTH / (SHARE * MBIT_20)
"""Time that two models need at the rate of the share."""

FULL = 0.98
"""Local steps take this fraction of `EXCHANGE_S`, so that the device uses almost all of its share."""

PATIENCE_S = 600.0

BYTES_ALLOWED = 1.1
"""Most bytes of a transfer over all connections, as a multiple of its model."""

HEARTBEAT_ALLOWED_S = 0.2
MEMORY_ALLOWED = 1.1
"""Most memory of an agent beyond training's vectors, in models.

It allows one encoded payload plus a tenth.
"""

WINDOW_OFF_MAX = 0.05
"""How far a window's bytes may be from a cap or share."""

STEP_OFF_MAX = 1.05


@dataclass(frozen=True)
class Effort:
    """How much to measure: model length, cuts each way, and seconds under a cap and a share.

    The share's first `settled_s` do not count: the first model arrives without a pause, and the
    first ten updates measure the link. `window_s` is the length of a window. The rest describes
    fleets with one slow link: seeds, virtual seconds, hidden units, and real seconds (0 for none).
    """

    length: int
    cuts: int
    capped_s: float
    share_s: float
    settled_s: float
    window_s: float
    seeds: int
    virtual_s: float
    hidden: int
    real_s: float


EFFORTS = {
    Form.FULL: Effort(25_000_000, 5, 90.0, 120.0, 45.0, 10.0, 15, 60.0, 256, 60.0),
    Form.SHORT: Effort(2_500_000, 5, 25.0, 40.0, 45.0, 10.0, 2, 60.0, 256, 30.0),
    Form.QUICK: Effort(1_000_000, 1, 2.5, 10.0, 2.0, 0.5, 1, 10.0, 64, 0.0),
}


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    up: Way
    down: Way
    connections: int
    noted: Noted

    def windows(self, window_s: float, since_s: float = 0.0) -> list[int]:
        """Return the bytes in both directions of every window that starts with traffic."""
        passed = sorted((*self.up.passed, *self.down.passed))
        times = np.array([moment_s for moment_s, _ in passed])
        total = np.array([0, *itertools.accumulate(size for _, size in passed)])
        ends = np.searchsorted(times, times + window_s)
        last_s = min(times[-1], self.noted.steps[-1][0]) - 1.0  # the goodbye ends the last second early
        return [
            int(total[end] - total[first])
            for first, end in enumerate(ends)
            if since_s <= times[first] <= last_s - window_s
        ]


def settings(local_steps: int, *, updates: int | None = None, **policy: Any) -> RunSettings:
    """Return the settings of a hub whose devices exchange after `local_steps`."""
    return make_settings(
        HubSection(bind=ADDRESS, stop=StopCondition(updates=updates)),
        policy=Policy(
            aggregate=ImmediateAggregator(),
            optimizer=(SGD(),),
            frequency=FixedFrequency(local_steps=local_steps),
            monitor=Monitor(detectors=()),
            **policy,
        ),
        liveness=Liveness(heartbeat_s=0.5, lease_s=15.0),
    )


async def run_once(
    length: int,
    hub_settings: RunSettings,
    seconds: float | None = None,
    *,
    rate: float | None = MBIT_20,
    cuts: int = 0,
    keys: Mapping[str, Any] = {},
) -> Run:
    """Let an agent train through the proxy for some seconds, or until the hub has finished."""
    proxy = Proxy(rate)
    with tempfile.TemporaryDirectory() as folder, Children("benchmarks.agent_process") as children:
        try:
            hub = children.start(partial(serve_hub, settings=hub_settings), length, folder)
            await proxy.start(await asyncio.to_thread(hub.hear))
            for way in (proxy.down, proxy.up):
                way.cuts += [4 * length * part // (cuts + 1) for part in range(1, cuts + 1)]
            agent = children.start(run_noting_agent, length, {"hub": proxy.address, **keys}, seconds)
            noted = await asyncio.to_thread(agent.hear, PATIENCE_S)
            return Run(proxy.up, proxy.down, proxy.connections, noted)
        finally:
            await proxy.stop()


def measure_cuts(effort: Effort, results: Results) -> None:
    """Transfer a model down and up through cuts; compare bytes, pings and memory with bounds."""
    nbytes, cuts = 4 * effort.length, effort.cuts
    show_progress(f"{nbytes / 1e6:g} MB each way, {cuts} cuts each: about {2.1 * nbytes / MBIT_20:.0f} s")
    run = asyncio.run(run_once(effort.length, settings(1, updates=1), cuts=cuts))
    noted, milliseconds = run.noted, 1e3 * np.array(run.noted.round_trips_s)
    beyond = noted.peak_bytes - noted.before_bytes - 2 * nbytes
    found = {
        "model, MB": nbytes / 1e6,
        "down, MB": run.down.total / 1e6,
        "up, MB": run.up.total / 1e6,
        "connections": run.connections,
        "models resumed": noted.fetches_on,
        "pushes resumed": noted.pushes - 1,
        "seconds": noted.steps[-1][0] - noted.steps[0][0],
        "pings": len(milliseconds),
        "heartbeat p50, ms": float(np.percentile(milliseconds, 50)),
        "heartbeat p99, ms": float(np.percentile(milliseconds, 99)),
        "heartbeat max, ms": float(milliseconds.max()),
        "agent before, MB": noted.before_bytes / 1e6,
        "agent peak, MB": noted.peak_bytes / 1e6,
        "beyond training's vectors, MB": beyond / 1e6,
    }
    for name, value in found.items():
        results.add(f"20 Mbit/s, cuts each way: {cuts}", name, {"": value}, 2)
    results.ratio("1.1 models over bytes down", BYTES_ALLOWED * nbytes / run.down.total, 1.0)
    results.ratio("1.1 models over bytes up", BYTES_ALLOWED * nbytes / run.up.total, 1.0)
    slowest_ms = float(milliseconds.max())
    results.ratio("200 ms over the slowest heartbeat", 1e3 * HEARTBEAT_ALLOWED_S / slowest_ms, 1.0)
    results.ratio("1.1 models over memory beyond training", MEMORY_ALLOWED * nbytes / max(beyond, 1), 1.0)


def judge_windows(what: str, windows: list[int], allowed: float, title: str, results: Results) -> None:
    """Compare every window with its allowed bytes."""
    for name, value in {"least": min(windows), "median": float(np.median(windows)), "most": max(windows)}.items():
        results.add(title, f"{name}, MB", {"": value / 1e6})
    results.ratio(f"1.05 {what}s over the most bytes", (1.0 + WINDOW_OFF_MAX) * allowed / max(windows), 1.0)
    results.ratio(f"least bytes over 0.95 {what}s", min(windows) / ((1.0 - WINDOW_OFF_MAX) * allowed), 1.0)


def measure_cap(effort: Effort, results: Results) -> None:
    """Let a capped agent exchange a 10 MB model as fast as it may; compare windows with the cap."""
    show_progress(f"a cap of 1 MB/s: {effort.capped_s:g} s")
    keys = {"bandwidth_bytes_per_s_max": CAP_BYTES_PER_S}
    run = asyncio.run(run_once(CAP_LENGTH, settings(1), effort.capped_s, rate=None, keys=keys))
    allowed = effort.window_s * CAP_BYTES_PER_S
    title = f"a cap of 1 MB/s, in any {effort.window_s:g} s"
    judge_windows("cap", run.windows(effort.window_s), allowed, title, results)


def step_s(run: Run, settled_s: float) -> float:
    """Return the mean time of a local step, once settled."""
    steps = run.noted.steps
    settled = [one for one in steps if one[0] >= steps[0][0] + settled_s]
    (first_s, first), (last_s, last) = settled[0], settled[-1]
    return (last_s - first_s) / max(1, last - first)


def measure_share(effort: Effort, results: Results) -> None:
    """Train without exchanges, then with delayed answers and as many exchanges as the share allows."""
    show_progress(f"without exchanges: {effort.share_s / 2:g} s")
    keys = {"step_s_min": STEP_S, "link_share": SHARE}
    alone = asyncio.run(run_once(SHARE_LENGTH, settings(100_000), 2.0 + effort.share_s / 2, keys=keys))
    alone_s = step_s(alone, 2.0)
    steps = round(FULL * EXCHANGE_S / alone_s)
    seconds = effort.settled_s + effort.share_s
    show_progress(f"a fifth of 20 Mbit/s, an exchange every {steps} steps: {seconds:g} s")
    run = asyncio.run(run_once(SHARE_LENGTH, settings(steps, delay_steps=steps), seconds, keys=keys))
    windows = run.windows(effort.window_s, run.noted.steps[0][0] + effort.settled_s)
    allowed = effort.window_s * SHARE * MBIT_20
    judge_windows("share", windows, allowed, f"a fifth of 20 Mbit/s, in any {effort.window_s:g} s", results)
    shared_s = step_s(run, effort.settled_s)
    results.add("a fifth of 20 Mbit/s", "rate of the link, Mbit/s", {"": run.noted.rate * 8e-6})
    results.add("a fifth of 20 Mbit/s", "step with exchanges, ms", {"": 1e3 * shared_s})
    results.add("a fifth of 20 Mbit/s", "step without, ms", {"": 1e3 * alone_s})
    results.bound("training with exchanges over training without", shared_s / alone_s, STEP_OFF_MAX)


FREE = LinkProfile(6.25e6, 6.25e6, 0.005)
SLOW_BYTES_PER_S = 16 << 10
CAPPED = LinkProfile(SLOW_BYTES_PER_S, SLOW_BYTES_PER_S, 0.005)
FLEETS: dict[str, tuple[LinkProfile, ...]] = {
    "alone": (FREE,),
    "beside an equal one": (FREE, FREE),
    "beside a capped one": (FREE, CAPPED),
    "beside two capped ones": (FREE, CAPPED, CAPPED),
    "two beside a capped one": (FREE, FREE, CAPPED),
}
KEPT_MIN = 0.8
"""Least share of the exchanges made alone that a device must keep beside a capped one."""

FLEET_STEP_S = 0.05
LEARNING_RATE = 0.2
REAL_MODEL = MlpModel(inputs=64, hidden=(1024,), classes=10)


Case = tuple[tuple[LinkProfile, ...], int, Effort]
"""A run in virtual time: the links, the seed and the effort."""


def simulate(case: Case) -> dict[str, float]:
    """Train two or three devices in virtual time; return the first device's figures."""
    links, seed, effort = case
    model = MlpModel(inputs=64, hidden=(effort.hidden,), classes=10)
    fleet = VirtualFleet(model, seed, settings=HubCoreSettings())
    for link, part in zip(links, iid(split_digits()[0], len(links), seed), strict=True):
        fleet.add(Member(data=part, learning_rate=LEARNING_RATE, step_s=FLEET_STEP_S, link=link))
    fleet.run(effort.virtual_s)
    core = fleet.hub.core
    exchanges = core.members.members["device-1"].measurements.updates
    return {
        "exchanges": exchanges,
        "versions": core.version,
        "period kept, s": effort.virtual_s / exchanges,
        "period shown, s": core.status(fleet.clock.now_s)["cadence"]["period_s"],
    }


def measure_virtual(effort: Effort, results: Results) -> None:
    """Compare the fleets over the seeds."""
    seeds = range(1, effort.seeds + 1)
    cases = {name: [(links, seed, effort) for seed in seeds] for name, links in FLEETS.items()}
    seen = measure_groups(simulate, cases, "a slow link beside others")
    for name, runs in seen.items():
        means = {column: statistics.fmean(run[column] for run in runs) for column in runs[0]}
        results.add("in virtual time, the first device", name, means)
        if "capped" in name:
            pairs = zip(runs, seen["alone"], strict=True)
            kept = min(beside["exchanges"] / alone["exchanges"] for beside, alone in pairs)
            results.ratio(f"exchanges {name}, least of {effort.seeds} seeds", kept, KEPT_MIN)


def measure_real(seconds: float, results: Results) -> None:
    """Compare a device alone with the same device beside a capped one, as real processes."""
    exchanges = {}
    training = split_digits()[0]
    capped = RealMember(training, FLEET_STEP_S, keys={"bandwidth_bytes_per_s_max": SLOW_BYTES_PER_S})
    for name, others in (("alone", []), ("beside a capped one", [capped])):
        show_progress(f"real processes: {name}")
        with run_fleet(REAL_MODEL, LEARNING_RATE, [RealMember(training, FLEET_STEP_S), *others]) as fleet:
            fleet.wait_until_trains()
            before = fleet.updates_of("device-1")
            time.sleep(seconds)
            exchanges[name] = fleet.updates_of("device-1") - before
        results.add("real processes", name, {"exchanges": exchanges[name], "seconds": seconds})
    kept = exchanges["beside a capped one"] / exchanges["alone"]
    results.ratio("real exchanges beside a capped one", kept, KEPT_MIN)


def measure_beside(effort: Effort, results: Results) -> None:
    """Measure fleets with one slow link in virtual time, then with real processes."""
    measure_virtual(effort, results)
    if effort.real_s:
        measure_real(effort.real_s, results)


PARTS = {"cuts": measure_cuts, "cap": measure_cap, "share": measure_share, "beside": measure_beside}


@benchmark("Bytes, heartbeats, memory and pace over bad links.", PARTS)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the requested parts."""
    for part, measure in PARTS.items():
        if part in arguments.part:
            measure(EFFORTS[arguments.form], results)


if __name__ == "__main__":
    main()
