"""Measure training under a daily quota: traffic, time to target and accuracy per byte.

Run as `python -m benchmarks.budget`. Eight simulated devices learn the handwritten digits with
skewed labels in virtual time. One is three times and one ten times slower. Each may transfer 20 MB
a day. The same fleet also runs at full pace and with a fixed interval of 16 local steps, until it
has used as many bytes.
"""

import argparse
import math
import statistics
from dataclasses import dataclass

from benchmarks.policies_fleet import TARGET
from benchmarks.processes import measure_groups
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.virtual_fleet import EXAMPLES_MIN, STEP_S, Member, VirtualFleet, split_digits
from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import CodecSettings, HubCoreSettings, Limits
from edgeasync.data.partition import dirichlet
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy, PolicySet
from edgeasync.protocol.messages import DAY_S
from edgeasync.training.numpy_models import MlpModel
from simulation.link import LinkProfile

MODEL = MlpModel(inputs=64, hidden=(512, 64), classes=10)
SPEEDS = (1, 1, 1, 1, 1, 1, 3, 10)
MBIT_20 = LinkProfile(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.02)
ALPHA = 0.3
LEARNING_RATE = 0.05
CONSECUTIVE = 3
"""How many consecutive evaluations must reach the target."""


@dataclass(frozen=True)
class Case:
    """One run, evaluated every `evaluate_s`. It ends after `seconds` or `bytes_max` per device."""

    policy: PolicySet
    seed: int
    limits: Limits
    evaluate_s: float
    seconds: float
    bytes_max: float = math.inf


@dataclass(frozen=True)
class Moment:
    """An evaluation: the accuracy at this time, and all devices' bytes until then."""

    now_s: float
    nbytes: int
    accuracy: float


@dataclass(frozen=True)
class Spent:
    """A run's evaluations, and each device's bytes on each whole day."""

    moments: tuple[Moment, ...]
    days: tuple[tuple[int, ...], ...]

    def reached(self, target: float) -> Moment | None:
        """Return the first of the consecutive evaluations that reach the target."""
        good = [moment.accuracy >= target for moment in self.moments]
        for first in range(len(good) - CONSECUTIVE + 1):
            if all(good[first : first + CONSECUTIVE]):
                return self.moments[first]
        return None

    def accuracy_at(self, nbytes: float) -> float:
        """Return the accuracy once the devices had transferred `nbytes`."""
        return [moment.accuracy for moment in self.moments if moment.nbytes <= nbytes][-1]


def spend(case: Case) -> Spent:
    """Train a fleet; the seed determines its data and the model's initial values."""
    training, held_out = split_digits()
    settings = HubCoreSettings(limits=case.limits, codec=CodecSettings())
    fleet = VirtualFleet(MODEL, case.seed, policy=case.policy, settings=settings)
    parts = dirichlet(training, len(SPEEDS), ALPHA, case.seed, examples_min=EXAMPLES_MIN)
    for speed, part in zip(SPEEDS, parts, strict=True):
        fleet.add(Member(data=part, learning_rate=LEARNING_RATE, step_s=speed * STEP_S, link=MBIT_20))
    clock, core = fleet.clock, fleet.hub.core
    moments = [Moment(0.0, 0, fleet.accuracy(held_out))]
    days: list[tuple[int, ...]] = []
    sent = before = (0,) * len(SPEEDS)
    version = core.version
    while clock.now_s < case.seconds and sum(sent) < case.bytes_max * len(SPEEDS):
        fleet.run(case.evaluate_s * len(moments))
        sent = tuple([device.up.bytes_sent + device.down.bytes_sent for device in fleet.devices])
        accuracy = moments[-1].accuracy
        if core.version != version:
            version, accuracy = core.version, fleet.accuracy(held_out)
        moments.append(Moment(clock.now_s, sum(sent), accuracy))
        if clock.now_s >= DAY_S * (len(days) + 1):
            days.append(tuple([now - then for now, then in zip(sent, before, strict=True)]))
            before = sent
    core.check()
    return Spent(tuple(moments), tuple(days))


BUDGET = 20_000_000
LEVELS = (1e6, 2e6, 5e6, 10e6, 19e6)
"""Bytes per device at which accuracies are compared."""

LIMITED, FULL_PACE, FIXED = "20 MB a day", "full pace", "16 local steps"
KEPT_MIN = 0.98
SEEDS = tuple(range(901, 916))


@dataclass(frozen=True)
class Effort:
    """The seeds, the length of the day, and the time limit of the runs without a quota."""

    seeds: tuple[int, ...]
    watched_s: float
    others_s: float


EFFORTS = {
    Form.FULL: Effort(SEEDS, DAY_S, 1000.0),
    Form.SHORT: Effort(SEEDS[:3], DAY_S, 1000.0),
    Form.QUICK: Effort(SEEDS[:1], 120.0, 1.0),
}


def cases(effort: Effort) -> dict[str, list[Case]]:
    """Return the runs by name."""
    limits = Limits(device_bytes_per_day_max=ByteCount(BUDGET))
    fixed = Policy(frequency=FixedFrequency(local_steps=16))
    return {
        LIMITED: [Case(Policy(), seed, limits, 2.0, effort.watched_s) for seed in effort.seeds],
        FULL_PACE: [Case(Policy(), seed, Limits(), 0.25, effort.others_s, BUDGET) for seed in effort.seeds],
        FIXED: [Case(fixed, seed, Limits(), 0.25, effort.others_s, BUDGET) for seed in effort.seeds],
    }


def row(runs: list[Spent]) -> dict[str, float]:
    """Return the row of a table."""
    reached = [run.reached(TARGET) for run in runs]
    seconds = [math.inf if moment is None else moment.now_s for moment in reached]
    columns = {"reached": float(sum(math.isfinite(one) for one in seconds)), "s": statistics.median(seconds)}
    for level in LEVELS:
        accuracies = [run.accuracy_at(len(SPEEDS) * level) for run in runs]
        columns[f"at {level / 1e6:g} MB"] = statistics.fmean(accuracies)
    return columns


@benchmark("What a daily traffic quota costs.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure all runs."""
    effort = EFFORTS[arguments.form]
    found = measure_groups(spend, cases(effort), "budget")
    show_progress(f"the target is {TARGET:.0%} accuracy on held-out digits; all times are virtual")
    title = f"{len(effort.seeds)} seeds"
    for name, runs in found.items():
        results.add(title, name, {key: value for key, value in row(runs).items() if math.isfinite(value)}, 4)
    days = [nbytes for run in found[LIMITED] for day in run.days for nbytes in day]
    if days:
        results.add(title, LIMITED, {"most MB a day": max(days) / 1e6, "least MB a day": min(days) / 1e6})
        results.bound("the most bytes of a day", max(days), BUDGET)
        results.ratio("the least bytes of a day over the limit", min(days) / BUDGET, KEPT_MIN)
    ours, fixed = (results.figures[title][name] for name in (LIMITED, FIXED))
    results.ratio("seeds that reach the target", ours["reached"] / len(effort.seeds), 1.0)
    for name in (name for name in ours if name.startswith("at ")):
        results.ratio(f"accuracy {name} over that of a fixed interval", ours[name] / fixed[name], 1.0)


if __name__ == "__main__":
    main()
