"""What bad links cost: a model each way at 20 Mbit/s, with cuts in mid-transfer, and a cap on traffic.

Run as `python -m benchmarks.link`. Hub and agent are real processes; between them is a TCP proxy in user space
with a rate, small socket buffers and cuts at given byte counts. It needs Linux, for the peak of memory.
"""

import asyncio
import itertools
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.children import Children
from benchmarks.link_processes import Noted, run_agent, run_hub
from benchmarks.link_proxy import Proxy, Way
from benchmarks.report import Form, Results, make_parser, show_progress, show_results

MBIT_20 = 20e6 / 8
CAP_BYTES_PER_S = 1_000_000
CAP_LENGTH = 2_500_000
PATIENCE_S = 600.0

BYTES_ALLOWED = 1.1
"""The most bytes of a transfer, over all connections, as a multiple of its model."""

HEARTBEAT_ALLOWED_S = 0.2
MEMORY_ALLOWED = 1.1
"""The most memory of an agent beyond training's vectors, in models: one encoded payload, and a tenth."""


@dataclass(frozen=True)
class Effort:
    """How much to measure: a model's length, cuts each way, seconds under a cap and of the windows in them."""

    length: int
    cuts: int
    capped_s: float
    window_s: float


EFFORTS = {
    Form.FULL: Effort(25_000_000, 5, 90.0, 10.0),
    Form.SHORT: Effort(2_500_000, 5, 25.0, 10.0),
    Form.QUICK: Effort(1_000_000, 1, 2.5, 0.5),
}


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    up: Way
    down: Way
    connections: int
    noted: Noted
    seconds: float


async def run_once(
    length: int, *, rate: float | None, cap: int | None, cuts: int, updates: int | None, seconds: float | None
) -> Run:
    """Let an agent train through the proxy, for a number of updates or of seconds."""
    speaking = asyncio.Event()
    proxy = Proxy(rate, speaking.set)
    with tempfile.TemporaryDirectory() as folder, Children("benchmarks.link_processes") as children:
        try:
            hub = children.start(run_hub, length, updates, folder)
            host, _, port = str(await asyncio.to_thread(hub.hear)).removeprefix("tcp://").rpartition(":")
            await proxy.start((host, int(port)))
            for way in (proxy.down, proxy.up):
                way.cuts += [4 * length * part // (cuts + 1) for part in range(1, cuts + 1)]
            begin_s = time.monotonic()
            agent = children.start(run_agent, length, proxy.address, cap)
            if seconds is not None:
                await asyncio.wait_for(speaking.wait(), PATIENCE_S)
                await asyncio.sleep(seconds)
                agent.pipe.send(None)
            noted = await asyncio.to_thread(agent.hear, PATIENCE_S)
            return Run(proxy.up, proxy.down, proxy.connections, noted, time.monotonic() - begin_s)
        finally:
            await proxy.stop()


def bytes_in_windows(run: Run, window_s: float) -> list[int]:
    """Return the bytes, both ways, of every window that begins with some and ends within the run."""
    passed = sorted((*run.up.passed, *run.down.passed))
    times = np.array([moment_s for moment_s, _ in passed])
    total = np.array([0, *itertools.accumulate(size for _, size in passed)])
    ends = np.searchsorted(times, times + window_s)
    return [
        int(total[end] - total[first])
        for first, end in enumerate(ends)
        if times[first] + window_s <= times[-1] - 1.0  # the goodbye ends the last second early
    ]


def measure_cuts(length: int, cuts: int, results: Results) -> None:
    """Move a model down and up through cuts; compare bytes, heartbeats and memory with their bounds."""
    nbytes = 4 * length
    show_progress(
        f"{nbytes / 1e6:g} MB each way at 20 Mbit/s, {cuts} cuts each: about {2.1 * nbytes / MBIT_20:.0f} s"
    )
    run = asyncio.run(run_once(length, rate=MBIT_20, cap=None, cuts=cuts, updates=1, seconds=None))
    noted, milliseconds = run.noted, 1e3 * np.array(run.noted.round_trips_s)
    beyond = noted.peak_bytes - noted.before_bytes - 2 * nbytes
    title = f"20 Mbit/s, cuts each way: {cuts}"
    found = {
        "model, MB": nbytes / 1e6,
        "down, MB": run.down.total / 1e6,
        "up, MB": run.up.total / 1e6,
        "connections": run.connections,
        "models resumed": noted.fetches_on,
        "pushes resumed": noted.pushes - 1,
        "seconds": run.seconds,
        "pings": len(milliseconds),
        "heartbeat p50, ms": float(np.percentile(milliseconds, 50)),
        "heartbeat p99, ms": float(np.percentile(milliseconds, 99)),
        "heartbeat max, ms": float(milliseconds.max()),
        "agent before, MB": noted.before_bytes / 1e6,
        "agent peak, MB": noted.peak_bytes / 1e6,
        "beyond training's vectors, MB": beyond / 1e6,
    }
    for name, value in found.items():
        results.add(title, name, {"": round(value, 2)})
    for name, ratio in {
        "1.1 models over bytes down": BYTES_ALLOWED * nbytes / run.down.total,
        "1.1 models over bytes up": BYTES_ALLOWED * nbytes / run.up.total,
        "200 ms over the slowest heartbeat": 1e3 * HEARTBEAT_ALLOWED_S / float(milliseconds.max()),
        "1.1 models over memory beyond training": MEMORY_ALLOWED * nbytes / max(beyond, 1),
    }.items():
        results.ratios[name] = round(ratio, 3)
        results.targets[name] = 1.0


def measure_cap(seconds: float, window_s: float, results: Results) -> None:
    """Let a capped agent exchange a model of 10 MB as fast as it may; compare every window with the cap."""
    show_progress(f"a cap of 1 MB/s: {seconds:g} s")
    run = asyncio.run(run_once(CAP_LENGTH, rate=None, cap=CAP_BYTES_PER_S, cuts=0, updates=None, seconds=seconds))
    windows = bytes_in_windows(run, window_s)
    allowed = window_s * CAP_BYTES_PER_S
    title = f"a cap of 1 MB/s, in any {window_s:g} s"
    for name, value in {"least": min(windows), "median": float(np.median(windows)), "most": max(windows)}.items():
        results.add(title, f"{name}, MB", {"": round(value / 1e6, 3)})
    results.ratios["1.05 caps over the most"] = round(1.05 * allowed / max(windows), 3)
    results.ratios["the least over 0.95 caps"] = round(min(windows) / (0.95 * allowed), 3)
    results.targets |= {"1.05 caps over the most": 1.0, "the least over 0.95 caps": 1.0}


def main() -> None:
    """Measure cuts, then the cap."""
    parser = make_parser("Bytes, heartbeats and memory over bad links.")
    arguments = parser.parse_args()
    results = Results()
    effort = EFFORTS[arguments.form]
    measure_cuts(effort.length, effort.cuts, results)
    measure_cap(effort.capped_s, effort.window_s, results)
    show_results(results, arguments)


if __name__ == "__main__":
    main()
