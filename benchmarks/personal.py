"""Personal heads: how well each person's own device recognises what that person does later.

Run as `python -m benchmarks.personal`. Ten people with a smartwatch, one a device, in virtual time: with one model
for all; with a last layer that each device keeps to itself (`local = ["layer1.*"]`); and each person alone.
"""

import statistics
from dataclasses import dataclass

import numpy as np

from benchmarks import smartwatch
from benchmarks.judgement_fleet import LEARNING_RATES, LINK, STEP_S
from benchmarks.pool import measure_in_processes
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_results
from benchmarks.simulated import BATCH, LIVENESS, accuracy_of, start_device
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings
from edgeasync.data.dataset import batches
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.local_parameters import LocalParameters
from simulation.clock import VirtualClock
from simulation.hub import SimulatedHub

MODEL = smartwatch.MODEL
SPEEDS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 10.0)
"""How many times longer than the fastest device's a local step takes, one for each person."""

HEAD = ("layer1.*",)
KINDS: dict[str, tuple[str, ...] | None] = {"shared model": (), "personal heads": HEAD, "alone": None}
"""Which arrays stay on the devices; `None`: there is no hub."""

GAIN_MIN = 1.01
"""Mean accuracy with personal heads over that of the shared model, at least."""


@dataclass(frozen=True)
class Effort:
    """Which seeds are run, and for how many virtual seconds."""

    seeds: range
    until_s: float


EFFORTS = {
    Form.FULL: Effort(range(5000, 5010), 40.0),
    Form.SHORT: Effort(range(5100, 5103), 40.0),
    Form.QUICK: Effort(range(5200, 5201), 0.5),
}


@dataclass(frozen=True)
class Case:
    """A fleet of one kind: its seed, and how long it trains."""

    seed: int
    kind: str
    until_s: float


def measure(case: Case) -> list[float]:
    """Return the accuracy of each person's model on that person's own later windows."""
    local = KINDS[case.kind]
    people = smartwatch.split_own()
    vectors = _alone(case) if local is None else _together(case, local)
    return [accuracy_of(MODEL, vector, own) for vector, (_, own) in zip(vectors, people, strict=True)]


def _together(case: Case, patterns: tuple[str, ...]) -> list[np.ndarray]:
    """Train with a hub; return its model as each device sees it."""
    clock = VirtualClock()
    hub = SimulatedHub(
        clock,
        spec=MODEL.spec,
        initial=MODEL.initial(case.seed),
        policy=Policy(),
        settings=HubCoreSettings(liveness=LIVENESS, codec=FLOAT32),
        seed=case.seed,
    )
    hub.start()
    found = []
    for number, (speed, (part, _)) in enumerate(zip(_speeds(case.seed), smartwatch.split_own(), strict=True)):
        found.append(LocalParameters(patterns))
        start_device(
            clock,
            hub,
            MODEL,
            number,
            part,
            learning_rate=LEARNING_RATES["smartwatch"],
            step_s=speed * STEP_S,
            link=LINK,
            seed=case.seed,
            local=found[-1],
        )
    clock.run(lambda: False, case.until_s)
    vectors = [np.array(hub.model) for _ in found]
    for local, vector in zip(found, vectors, strict=True):
        local.overlay(vector)
    return vectors


def _alone(case: Case) -> list[np.ndarray]:
    """Train each person's model on that person's data alone, for the same time."""
    vectors = []
    for number, (speed, (part, _)) in enumerate(zip(_speeds(case.seed), smartwatch.split_own(), strict=True)):
        stream = batches(part, BATCH, 1000 * case.seed + number)
        optimizer = (SGD(learning_rate=LEARNING_RATES["smartwatch"]),)
        trainer = GradientTrainer(MODEL.spec, MODEL.gradient, optimizer, stream)
        vector = MODEL.initial(case.seed)
        trainer.begin(vector)
        for _ in range(round(case.until_s / (speed * STEP_S))):
            trainer.step()
        vectors.append(vector)
    return vectors


def _speeds(seed: int) -> list[float]:
    return [SPEEDS[place] for place in np.random.default_rng(seed).permutation(len(SPEEDS))]


def judge(effort: Effort, results: Results) -> None:
    """Compare the kinds of fleets on the same seeds."""
    cases = [Case(seed, kind, effort.until_s) for seed in effort.seeds for kind in KINDS]
    outcomes = dict(zip(cases, measure_in_processes(measure, cases, "smartwatch"), strict=True))
    means: dict[str, float] = {}
    for kind in KINDS:
        runs = [outcomes[Case(seed, kind, effort.until_s)] for seed in effort.seeds]
        of_seeds = [statistics.fmean(run) for run in runs]
        people = [statistics.fmean(of_one) for of_one in zip(*runs, strict=True)]
        means[kind] = statistics.fmean(of_seeds)
        columns = {"mean": means[kind], "least of the seeds": min(of_seeds), "person it serves worst": min(people)}
        results.add("accuracy on each person's own later windows", kind, columns)
    name = "personal heads over the shared model"
    results.ratios[name] = round(means["personal heads"] / means["shared model"], 4)
    results.targets[name] = GAIN_MIN


def main() -> None:
    """Judge personal heads against the shared model."""
    arguments = make_parser(
        "How well each person's own model recognises what that person does later."
    ).parse_args()
    results = Results()
    judge(EFFORTS[arguments.form], results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
