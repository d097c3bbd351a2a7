"""What `train` costs beside the training itself: its time over that of the same local steps in a plain loop.

Run as `python -m benchmarks.train_overhead`. One worker takes steps of about 5 ms, and exchanges a model of
200,000 values after every 16. The time of `train` is all of it: the start of hub and worker, every exchange, and
the end. Plain loop and `train` are measured in turns. It ends with exit code 1 if `train` takes over 1.2 times as
long.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from edgeasync import Parameter, ParameterSpec, Policy, StepResult, Stop, Vector, train
from edgeasync.policies.frequency import FixedFrequency

OVERHEAD_MAX = 1.2
STEPS_BETWEEN = 16
SPEC = ParameterSpec((Parameter("weight", (200_000,)),))
VALUES, TIMES = 1 << 19, 7
"""Of how many values a step computes a function, and how often: about 5 ms where nothing else runs."""


class Steps:
    """A trainer whose steps take about 5 ms, in numpy but without a BLAS: its threads would disturb each other."""

    spec = SPEC

    def __init__(self) -> None:
        self._work = np.linspace(-1.0, 1.0, VALUES, dtype=np.float64)
        self._out = np.empty_like(self._work)

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Compute, and move a little."""
        for _ in range(TIMES):
            np.tanh(self._work, out=self._out)
        self._parameters += 1e-6
        return StepResult(1.0, 1)


@dataclass(frozen=True)
class Effort:
    """How often to measure, and the exchanges of each turn."""

    rounds: int
    exchanges: int


EFFORTS = {Form.FULL: Effort(7, 100), Form.SHORT: Effort(5, 30), Form.QUICK: Effort(1, 3)}


def time_plain(exchanges: int) -> float:
    """Return the seconds of the steps in a plain loop."""
    trainer, parameters = Steps(), np.zeros(SPEC.length, np.float32)
    begun_s = time.perf_counter()
    for _ in range(exchanges):
        trainer.begin(parameters)
        for _ in range(STEPS_BETWEEN):
            trainer.step()
    return time.perf_counter() - begun_s


def time_train(exchanges: int) -> float:
    """Return the seconds of the same steps by `train`."""
    trainer = Steps()
    begun_s = time.perf_counter()
    run = train(
        {"weight": np.zeros(SPEC.length, np.float32)},
        [trainer],
        until=Stop(updates=exchanges),
        policy=Policy(frequency=FixedFrequency(local_steps=STEPS_BETWEEN)),
    )
    seconds = time.perf_counter() - begun_s
    if run.updates != exchanges:
        raise RuntimeError(f"{run.updates} updates instead of {exchanges}")
    return seconds


def main() -> None:
    """Measure in turns."""
    arguments = make_parser("The time of train over that of the same steps in a plain loop.").parse_args()
    effort, results = EFFORTS[arguments.form], Results()
    plain: list[float] = []
    trained: list[float] = []
    for number in range(effort.rounds):
        show_progress(f"round {number + 1} of {effort.rounds}")
        plain.append(time_plain(effort.exchanges))
        trained.append(time_train(effort.exchanges))
    steps = effort.exchanges * STEPS_BETWEEN
    overhead = statistics.median(ours / theirs for ours, theirs in zip(trained, plain, strict=True))
    for name, seconds in (("plain loop", plain), ("train", trained)):
        results.add("ms a step", name, {"median": round(1e3 * statistics.median(seconds) / steps, 3)})
    results.add("train over plain loop", f"{steps:,} steps", {"median": round(overhead, 3)})
    results.bound("train over a plain loop", overhead, OVERHEAD_MAX)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
