"""Measure how the adaptive frequency reacts to a slow agent and a slow link.

Run as `python -m benchmarks.frequency`. A real hub and six real agents exchange a small network. In
mid-run, local steps of `device-1` take ten times as long, and the link of `device-2` is limited to
1 Mbit/s each way. Later both changes end. The agents record their assignments. The hub's status
gives communication times and reasons.
"""

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from ctypes import c_double
from dataclasses import dataclass, field
from typing import Any

from benchmarks.agent_process import Assigned, Member
from benchmarks.link_proxy import Proxy, proxied
from benchmarks.real_fleet import RealFleet, run_fleet
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.virtual_fleet import DIGITS
from edgeasync.data import load_digits
from edgeasync.data.partition import iid
from edgeasync.policies.frequency import AdaptiveFrequency

DEVICES = 6
SLOWDOWN = 10.0
SLOW_BYTES_PER_S = 125_000.0
"""1 Mbit/s each way: a model of 19 kB and its update take 0.31 s, just under half a period."""

FREQUENCY = AdaptiveFrequency(metric="none", period_steps_min=32, epochs_max=1000.0)
"""Without a metric, the period depends only on the devices, not on training progress."""

LEARNING_RATE = 0.01
"""Low, so that no aggregator triggers remedies against divergence, which change intervals."""

AGGREGATORS = ("quorum", "buffered", "immediate")
SETTINGS = """
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
"""A phase also lasts until every device has had this many assignments."""

LOOK_S = 0.04
START_S = 30.0

SETTLED_SHARE = 0.2
"""How far a settled interval may be from its usual value, as a share of it.

A difference of one step is always allowed.
"""

EXCHANGES_MAX = 10
PERIOD_RATIO_MAX = 1.5
RETURNED_MIN = 0.8


@dataclass(frozen=True)
class Effort:
    """The aggregators, the seconds of each phase, and a usual device's step time."""

    aggregators: tuple[str, ...]
    phases: Mapping[str, float]
    step_s: float


EFFORTS = {
    Form.FULL: Effort(AGGREGATORS, PHASES, 0.02),
    Form.SHORT: Effort(AGGREGATORS[:1], PHASES, 0.02),
    Form.QUICK: Effort(AGGREGATORS[:1], dict.fromkeys(PHASES, 0.5), 0.001),
}


@dataclass
class Device:
    """A device's assignments, and its entries in the hub's statuses by time."""

    assigned: list[Assigned] = field(default_factory=list)
    seen: list[tuple[float, Mapping[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """A device's behaviour in a phase.

    Period and share are measured once the interval has settled. `why` is the last reason.
    """

    local_steps: float
    settled_after: int
    period_s: float
    share: float
    share_max: float
    communication_s: float
    step_s: float
    why: str


class Bench:
    """A fleet with one agent and one link that slow down in mid-run, and its measurements."""

    def __init__(self, fleet: RealFleet, proxy: Proxy, step_s: Sequence[c_double]) -> None:
        self._fleet, self._proxy, self._step_s = fleet, proxy, step_s
        self.devices = {f"device-{number}": Device() for number in range(1, DEVICES + 1)}

    def run(self, effort: Effort) -> dict[str, tuple[float, float]]:
        """Run all phases; return when each began and ended."""
        self._fleet.wait_until_trains()
        phases = {}
        for name, seconds in effort.phases.items():
            throttled = name == "throttled"
            self._step_s[0].value = effort.step_s * (SLOWDOWN if throttled else 1.0)
            for way in (self._proxy.up, self._proxy.down):
                way.bytes_per_s = SLOW_BYTES_PER_S if throttled else None
            begun_s = time.monotonic()
            while (at_s := self._look()) < begun_s + seconds or self._fewest(begun_s, at_s) < EXCHANGES_MIN:
                if at_s > begun_s + seconds + START_S:
                    raise TimeoutError(f"{name}: a device has fewer than {EXCHANGES_MIN} exchanges")
                time.sleep(LOOK_S)
            phases[name] = (begun_s, at_s)
        return phases

    def _fewest(self, begun_s: float, ended_s: float) -> int:
        """Return the lowest number of assignments of any device."""
        return min(
            sum(begun_s <= entry.at_s < ended_s for entry in device.assigned) for device in self.devices.values()
        )

    def _look(self) -> float:
        """Record the reports of hub and agents; return the time of the hub's status."""
        devices, at_s = self._fleet.devices, time.monotonic()
        for device in devices:
            self.devices[device["id"]].seen.append((at_s, device))
        for noted, agent in zip(self.devices.values(), self._fleet.agents, strict=True):
            while agent.pipe.poll():
                noted.assigned.append(agent.pipe.recv())
        return at_s


def run_bench(aggregate: str, effort: Effort) -> dict[str, dict[str, Phase]]:
    """Run a fleet under an aggregator; return each device's behaviour in each phase."""
    step_s = [multiprocessing.RawValue(c_double, effort.step_s) for _ in range(DEVICES)]
    parts = iid(load_digits(), DEVICES, 0)
    settings = SETTINGS.format(aggregate=aggregate, frequency=FREQUENCY)
    with run_fleet(DIGITS, LEARNING_RATE, (), more=settings) as fleet, proxied(fleet.address) as proxy:
        for number, (part, own_s) in enumerate(zip(parts, step_s, strict=True), start=1):
            fleet.start(Member(part, own_s, keys={"hub": proxy.address} if number == 2 else {}))
        bench = Bench(fleet, proxy, step_s)
        spans = bench.run(effort)
        for event in fleet.events:
            if event["event"] == "alarm":
                show_progress(f"{aggregate}: alarm: {event['device']} {event['detail']}")
    return {
        name: {device: assess(found, *span) for device, found in bench.devices.items()}
        for name, span in spans.items()
    }


def assess(device: Device, begun_s: float, ended_s: float) -> Phase:
    """Return how a device behaved in a phase."""
    assigned = [entry for entry in device.assigned if begun_s <= entry.at_s < ended_s]
    last_half = assigned[-(len(assigned) // 2) :]
    usual = statistics.median([entry.local_steps for entry in last_half])

    def apart(entry: Assigned) -> bool:
        return abs(entry.local_steps - usual) > max(1.0, SETTLED_SHARE * usual)

    settled_after = max((number for number, entry in enumerate(assigned, start=1) if apart(entry)), default=0)
    settled_after += settled_after > 0  # the next one is the first settled one
    settled = assigned[max(0, settled_after - 1) :]
    if len(settled) < 3:  # it never settled
        settled = last_half
    periods_s = [after.at_s - before.at_s for before, after in itertools.pairwise(settled)]
    seen = [entry for at_s, entry in device.seen if settled[0].at_s <= at_s <= ended_s]
    return Phase(
        local_steps=usual,
        settled_after=settled_after,
        period_s=statistics.median(periods_s),
        share=statistics.fmean([entry["talk_share"] for entry in seen]),
        share_max=max(entry["talk_share"] for entry in seen),
        communication_s=statistics.median([entry["talk_s"] for entry in seen]),
        step_s=statistics.median([entry["step_s"] for entry in seen]),
        why=seen[-1]["why"],
    )


def judge(aggregate: str, phases: dict[str, dict[str, Phase]], results: Results) -> None:
    """Add the figures of a run, and their ratios to the bounds."""
    widest = 1.0
    for name, devices in phases.items():
        usual_s = statistics.median([phase.period_s for phase in devices.values()])
        for device, phase in devices.items():
            over_usual = phase.period_s / usual_s
            widest = max(widest, over_usual, 1.0 / over_usual)
            columns = {
                "step, ms": 1e3 * phase.step_s,
                "communication, ms": 1e3 * phase.communication_s,
                "local steps": phase.local_steps,
                "settled after": phase.settled_after,
                "period, s": phase.period_s,
                "period / median": over_usual,
                "talk share, %": 100.0 * phase.share,
                "at most, %": 100.0 * phase.share_max,
            }
            results.add(f"{aggregate}, {name}", f"{device}: {phase.why}", columns)
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
        results.ratio(f"{aggregate}: {bound}{title}", ratio, target)


@benchmark("How the adaptive frequency reacts to a slow agent and a slow link.", AGGREGATORS)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Run a fleet under every aggregator."""
    effort = EFFORTS[arguments.form]
    for aggregate in (one for one in arguments.part if one in effort.aggregators):
        show_progress(f"{aggregate}: {sum(effort.phases.values()):g} s at least")
        judge(aggregate, run_bench(aggregate, effort), results)


if __name__ == "__main__":
    main()
