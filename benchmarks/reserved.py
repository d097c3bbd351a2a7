"""A share of a link that is reserved for traffic: how exactly it is kept, and what it costs training.

Run as `python -m benchmarks.reserved`. Hub and agent are real processes. Between them is the proxy of `link`, at
20 Mbit/s each way. The agent is told a share of the link, not the link's rate. First it trains without an
exchange. Then it exchanges as often as the share bears, with answers that are used when the next update leaves.
"""

import asyncio
import itertools
import tempfile
from dataclasses import dataclass

import numpy as np

from benchmarks.children import PATIENCE_S, Children
from benchmarks.link_proxy import Proxy
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.reserved_processes import LENGTH, SHARE, run_agent, run_hub

MBIT_20 = 20e6 / 8
EXCHANGE_S = 2 * 4 * LENGTH / (SHARE * MBIT_20)
"""How long two models take."""

FULL = 0.98
"""The part of that in which a device takes its steps: so it waits a little, and uses nearly all of the share."""

SETTLED_S = 45.0
"""The first model comes without a pause, and the first ten updates measure the link."""


@dataclass(frozen=True)
class Effort:
    """Seconds measured, with and without exchanges, and of the windows in them."""

    seconds: float
    window_s: float


EFFORTS = {Form.FULL: Effort(120.0, 10.0), Form.SHORT: Effort(40.0, 10.0), Form.QUICK: Effort(10.0, 1.0)}
SETTLED_QUICKLY_S = 2.0


@dataclass(frozen=True)
class Run:
    """Bytes that passed, with their times, the agent's steps with theirs, and when both had settled."""

    passed: list[tuple[float, int]]
    steps: list[tuple[float, int]]
    since_s: float
    rate: float

    @property
    def step_s(self) -> float:
        """The mean time of a local step, once settled."""
        settled = [(moment_s, steps) for moment_s, steps in self.steps if moment_s >= self.since_s]
        (first_s, first), (last_s, last) = settled[0], settled[-1]
        return (last_s - first_s) / max(1, last - first)

    def windows(self, window_s: float) -> list[float]:
        """Return the bytes a second, both ways, of every window that begins with some and lies in the run."""
        passed = sorted(self.passed)
        times = np.array([moment_s for moment_s, _ in passed])
        total = np.array([0, *itertools.accumulate(size for _, size in passed)])
        ends = np.searchsorted(times, times + window_s)
        return [
            float(total[end] - total[first]) / window_s
            for first, end in enumerate(ends)
            if self.since_s <= times[first] <= self.steps[-1][0] - window_s
        ]


async def run_once(steps: int, settled_s: float, seconds: float) -> Run:
    """Let an agent train through the proxy, with this number of steps between two exchanges."""
    proxy = Proxy(MBIT_20)
    with tempfile.TemporaryDirectory() as folder, Children("benchmarks.reserved_processes") as children:
        try:
            hub = children.start(run_hub, steps, folder)
            host, _, port = str(await asyncio.to_thread(hub.hear)).removeprefix("tcp://").rpartition(":")
            await proxy.start((host, int(port)))
            agent = children.start(run_agent, proxy.address, settled_s + seconds)
            taken, rate = await asyncio.to_thread(agent.hear, settled_s + seconds + PATIENCE_S)
            return Run([*proxy.up.passed, *proxy.down.passed], taken, taken[0][0] + settled_s, rate or 0.0)
        finally:
            await proxy.stop()


def main() -> None:
    """Measure with exchanges, then without."""
    arguments = make_parser("How exactly a reserved share of a link is kept.").parse_args()
    effort, results = EFFORTS[arguments.form], Results()
    show_progress(f"without exchanges: {effort.seconds:g} s")
    alone = asyncio.run(run_once(100_000, SETTLED_QUICKLY_S, effort.seconds / 2))
    steps = round(FULL * EXCHANGE_S / alone.step_s)
    show_progress(f"a fifth of 20 Mbit/s, an exchange every {steps} steps: {effort.seconds:g} s")
    settled_s = SETTLED_QUICKLY_S if arguments.form == Form.QUICK else SETTLED_S
    run = asyncio.run(run_once(steps, settled_s, effort.seconds))
    share, windows = SHARE * MBIT_20, run.windows(effort.window_s)
    title = f"share of the link in any {effort.window_s:g} s, %"
    for name, rate in {"least": min(windows), "median": float(np.median(windows)), "most": max(windows)}.items():
        results.add(title, name, {"": round(100 * rate / MBIT_20, 2)})
    results.add("measured", "rate of the link, Mbit/s", {"": round(run.rate * 8e-6, 3)})
    results.add("measured", "step with exchanges, ms", {"": round(1e3 * run.step_s, 3)})
    results.add("measured", "step without, ms", {"": round(1e3 * alone.step_s, 3)})
    results.bound("most in any window", max(windows) / share, 1.05)
    results.bound("training with exchanges over training without", run.step_s / alone.step_s, 1.05)
    results.ratios["the least over 0.95 shares"] = round(min(windows) / (0.95 * share), 3)
    results.targets["the least over 0.95 shares"] = 1.0
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
