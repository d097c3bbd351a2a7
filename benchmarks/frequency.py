"""Whether the adaptive frequency adapts: real processes, one agent slowed down tenfold and one link in mid-run.

Run as `python -m benchmarks.frequency`. A real hub and six real agents exchange a small network. In mid-run the
local steps of `device-1` take ten times as long and the link of `device-2` carries 1 Mbit/s each way; later both
are undone. The agents note their assignments; the hub's status gives communication times and reasons.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from ctypes import c_double
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.children import Child, Children
from benchmarks.frequency_processes import Assigned, run_agent, run_link
from benchmarks.report import Form, Results, make_parser, show_progress, show_results
from edgeasync.data import load_digits
from edgeasync.data.partition import iid
from edgeasync.net.status import fetch_status
from edgeasync.policies.frequency import AdaptiveFrequency

DEVICES = 6
SLOWDOWN = 10.0
SLOW_BYTES_PER_S = 125_000.0
"""1 Mbit/s each way: a model of 19 kB and its update take 0.31 s, a little under half of a period."""

FREQUENCY = AdaptiveFrequency(metric="none", period_steps_min=32, epochs_max=1000.0)
"""Without a metric the period depends on the devices alone, not on how far the model has come meanwhile."""

LEARNING_RATE = 0.01
"""Low, so that training stays calm under every aggregator: remedies against divergence change intervals too."""

AGGREGATORS = ("quorum", "buffered", "immediate")
SETTINGS = """
[hub]
bind = "tcp://127.0.0.1:*"
run = "{run}"
[model]
kind = "mlp"
inputs = 64
hidden = [64]
classes = 10
[local]
optimizer = [{{ kind = "sgd", learning_rate = {learning_rate} }}]
[policy]
aggregate = {{ kind = "{aggregate}" }}
[policy.frequency]
kind = "adaptive"
metric = "{frequency.metric}"
period_steps_min = {frequency.period_steps_min}
epochs_max = {frequency.epochs_max}
"""

PHASES = {"calm": 8.0, "throttled": 38.0, "undone": 14.0}
"""Seconds of each phase, long enough for three long assignments of a slow device."""

EXCHANGES_MIN = 5
"""A phase lasts until every device has had this number of assignments in it."""

LOOK_S = 0.04
START_S = 30.0

SETTLED_SHARE = 0.2
"""How far a settled interval may be from the last one, as a share of it; a single step is always allowed."""

EXCHANGES_MAX = 10
PERIOD_RATIO_MAX = 1.5
RETURNED_MIN = 0.8


@dataclass(frozen=True)
class Effort:
    """Which aggregators to run, the seconds of each phase, and of a local step of a device that is not slowed."""

    aggregators: tuple[str, ...]
    phases: Mapping[str, float]
    step_s: float


EFFORTS = {
    Form.FULL: Effort(AGGREGATORS, PHASES, 0.02),
    Form.SHORT: Effort(AGGREGATORS[:1], PHASES, 0.02),
    Form.QUICK: Effort(AGGREGATORS[:1], dict.fromkeys(PHASES, 0.5), 0.001),
}


@dataclass(frozen=True)
class Seen:
    """A device as the hub describes it at a time."""

    at_s: float
    talk_share: float
    communication_s: float
    step_s: float
    why: str


@dataclass
class Device:
    """A device's assignments, and its descriptions in the hub's statuses."""

    assigned: list[Assigned] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """How a device came through a phase; period and share since its interval settled, `why` in the end."""

    local_steps: float
    settled_after: int
    period_s: float
    share: float
    share_max: float
    communication_s: float
    step_s: float
    why: str


class Hub:
    """A real `edgeasync hub`, its events, and its status."""

    def __init__(self, aggregate: str, folder: Path) -> None:
        settings = folder / "hub.toml"
        table = SETTINGS.format(
            run=folder / "run", aggregate=aggregate, frequency=FREQUENCY, learning_rate=LEARNING_RATE
        )
        settings.write_text(table)
        self.alarms: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgeasync", "hub", str(settings), "--json"], stdout=subprocess.PIPE, text=True
        )
        self.address = str(self._next_event()["detail"])
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def look(self) -> tuple[float, dict[str, Any]]:
        """Return the time and the hub's status."""
        status = fetch_status(self.address, START_S)
        return time.monotonic(), status

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def _next_event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the hub ended by itself")
        return dict(json.loads(line))

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "alarm":
                self.alarms.append(f"{event['device']} {event['detail']}".strip())


class Bench(Children):
    """The processes of one run."""

    def __init__(self, aggregate: str, effort: Effort, folder: str) -> None:
        super().__init__("benchmarks.frequency")  # every process imports it as its main module
        self._aggregate = aggregate
        self._effort = effort
        self._folder = Path(folder)
        self._agents: list[Child] = []
        self._step_s: list[c_double] = []
        self.devices = {f"device-{number}": Device() for number in range(1, DEVICES + 1)}

    def __enter__(self) -> Self:
        self.hub = Hub(self._aggregate, self._folder)
        host, _, port = self.hub.address.removeprefix("tcp://").partition(":")
        self._bytes_per_s = multiprocessing.RawValue(c_double, math.inf)
        link = self.start(run_link, host, int(port), self._bytes_per_s)
        for number, part in enumerate(iid(load_digits(), DEVICES, 0), start=1):
            address = f"tcp://127.0.0.1:{link.hear()}" if number == 2 else self.hub.address
            step_s = multiprocessing.RawValue(c_double, self._effort.step_s)
            self._agents.append(self.start(run_agent, address, number, part, step_s))
            self._step_s.append(step_s)
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.hub.close()

    def run(self) -> dict[str, tuple[float, float]]:
        """Let all phases pass; return when each began and ended."""
        for name, agent in zip(self.devices, self._agents, strict=True):
            if not agent.pipe.poll(START_S):
                raise TimeoutError(f"{name} was given nothing to do")
        phases = {}
        for name, seconds in self._effort.phases.items():
            throttled = name == "throttled"
            self._step_s[0].value = self._effort.step_s * (SLOWDOWN if throttled else 1.0)
            self._bytes_per_s.value = SLOW_BYTES_PER_S if throttled else math.inf
            begun_s = time.monotonic()
            while (at_s := self._look()) < begun_s + seconds or self._fewest(begun_s, at_s) < EXCHANGES_MIN:
                if at_s > begun_s + seconds + START_S:
                    raise TimeoutError(f"{name}: a device has fewer than {EXCHANGES_MIN} exchanges")
                time.sleep(LOOK_S)
            phases[name] = (begun_s, at_s)
        return phases

    def _fewest(self, begun_s: float, ended_s: float) -> int:
        """Return how many assignments the device with the fewest had."""
        return min(
            sum(begun_s <= entry.at_s < ended_s for entry in device.assigned) for device in self.devices.values()
        )

    def _look(self) -> float:
        """Note what hub and agents report; return the time of the hub's status."""
        at_s, status = self.hub.look()
        for device in status["devices"]:
            seen = Seen(at_s, device["talk_share"], device["talk_s"], device["step_s"], device["why"])
            self.devices[device["id"]].seen.append(seen)
        for device, agent in zip(self.devices.values(), self._agents, strict=True):
            while agent.pipe.poll():
                device.assigned.append(agent.pipe.recv())
        return at_s


def assess(device: Device, begun_s: float, ended_s: float) -> Phase:
    """Say how a device came through a phase."""
    assigned = [entry for entry in device.assigned if begun_s <= entry.at_s < ended_s]
    last_half = assigned[-(len(assigned) // 2) :]
    usual = statistics.median([entry.local_steps for entry in last_half])

    def apart(entry: Assigned) -> bool:
        return abs(entry.local_steps - usual) > max(1.0, SETTLED_SHARE * usual)

    settled_after = max((number for number, entry in enumerate(assigned, start=1) if apart(entry)), default=0)
    settled_after += settled_after > 0  # the next one is as it stays
    settled = assigned[max(0, settled_after - 1) :]
    if len(settled) < 3:  # it never did
        settled = last_half
    periods_s = [after.at_s - before.at_s for before, after in itertools.pairwise(settled)]
    seen = [entry for entry in device.seen if settled[0].at_s <= entry.at_s <= ended_s]
    return Phase(
        local_steps=usual,
        settled_after=settled_after,
        period_s=statistics.median(periods_s),
        share=statistics.fmean([entry.talk_share for entry in seen]),
        share_max=max(entry.talk_share for entry in seen),
        communication_s=statistics.median([entry.communication_s for entry in seen]),
        step_s=statistics.median([entry.step_s for entry in seen]),
        why=seen[-1].why,
    )


def judge(aggregate: str, phases: dict[str, dict[str, Phase]], results: Results) -> None:
    """Note the figures of a run, and how they compare with what they should be."""
    widest = 1.0
    for name, devices in phases.items():
        usual_s = statistics.median([phase.period_s for phase in devices.values()])
        for device, phase in devices.items():
            over_usual = phase.period_s / usual_s
            widest = max(widest, over_usual, 1.0 / over_usual)
            columns = {
                "step, ms": 1e3 * phase.step_s,
                "talking, ms": 1e3 * phase.communication_s,
                "local steps": phase.local_steps,
                "settled after": phase.settled_after,
                "period, s": phase.period_s,
                "period / median": over_usual,
                "talk share, %": 100.0 * phase.share,
                "at most, %": 100.0 * phase.share_max,
            }
            row = f"{device}: {phase.why}"
            results.add(f"{aggregate}, {name}", row, {key: round(value, 3) for key, value in columns.items()})
    found = [phase for devices in phases.values() for phase in devices.values()]
    returned = [
        phase.local_steps / phases["undone"][device].local_steps for device, phase in phases["calm"].items()
    ]
    for title, ratio, target in (
        ("exchanges until settled", EXCHANGES_MAX / max(1, *(phase.settled_after for phase in found)), 1.0),
        ("period over the median", PERIOD_RATIO_MAX / widest, 1.0),
        ("talk share", FREQUENCY.communication_share_max / max(phase.share for phase in found), 1.0),
        ("interval undone over calm", min(min(ratio, 1.0 / ratio) for ratio in returned), RETURNED_MIN),
    ):
        bound = "" if title.startswith("interval") else "bound over worst "
        results.ratios[f"{aggregate}: {bound}{title}"] = round(ratio, 3)
        results.targets[f"{aggregate}: {bound}{title}"] = target


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = make_parser("How the adaptive frequency follows a slowed down agent and a throttled link.")
    parser.add_argument(
        "--aggregate",
        nargs="+",
        choices=AGGREGATORS,
        help="only these [default: all; the first with --short and --quick]",
    )
    return parser.parse_args()


def main() -> None:
    """Let a fleet run under every aggregator."""
    arguments = parse()
    effort = EFFORTS[arguments.form]
    results = Results()
    for aggregate in arguments.aggregate or effort.aggregators:
        show_progress(f"{aggregate}: {sum(effort.phases.values()):g} s at least")
        with tempfile.TemporaryDirectory() as folder, Bench(aggregate, effort, folder) as bench:
            spans = bench.run()
        phases = {
            name: {device: assess(found, *span) for device, found in bench.devices.items()}
            for name, span in spans.items()
        }
        judge(aggregate, phases, results)
        for alarm in bench.hub.alarms:
            show_progress(f"{aggregate}: alarm: {alarm}")
    show_results(results, arguments)


if __name__ == "__main__":
    main()
